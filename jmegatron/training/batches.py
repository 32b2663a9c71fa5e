"""Global batches: the form that goes to the devices, the form that a step computes with, and the way there.

No communication. What crosses from the host is a CompactBatch, 2 bytes a token where the vocabulary allows it; `expand`
makes tokens, labels and mask of it inside the jitted step. Every process passes the rows that its own devices hold, and
no others; `jax.make_array_from_callback` asks for each device's part. (`jax.device_put` does the same where one process
holds everything, and is slower.) May be called from another thread than the steps.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmegatron.collectives import vary_like
from jmegatron.context_parallel.layout import ContextParallel, own_tokens
from jmegatron.mesh import batch_spec


# ---- forms --------------------------------------------------------------------------------------------------------
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """A global batch, micro-batch major: the layout in which the reference's sampler deals out samples. A pytree."""

    tokens: Any
    """Integer [num_microbatches, batch, seq]. (A pytree's fields also hold specs, shardings and abstract arrays.)"""
    labels: Any
    """Integer [num_microbatches, batch, seq]: the next token of each."""
    loss_mask: Any
    """fp32 [num_microbatches, batch, seq]: 1 where the token's loss counts."""
    sample_ids: Any
    """Unsigned [num_microbatches, batch]: place of each sequence in the run's stream of samples."""
    position_ids: Any = None
    """Integer [num_microbatches, batch, seq]: position of each token; None: its place in the sequence."""
    segment_ids: Any = None
    """Integer [num_microbatches, batch, seq]: tokens see only those of their own segment; None: one segment."""
    padding: Any = None
    """bool [num_microbatches, batch, seq]: tokens that routers leave out, see `with_padding`; None: none."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompactBatch:
    """A global batch as it goes to the devices; `expand` makes a Batch of it. A pytree."""

    text: Any
    """uint16 or int32 [num_microbatches, batch, seq + 1]: the tokens, and the last label; [..., seq] with `labels`."""
    sample_ids: Any
    """As in Batch."""
    labels: Any = None
    """Integer [num_microbatches, batch, seq]; None: the text one place later."""
    loss_mask: Any = None
    """bool (or fp32) [num_microbatches, batch, seq]: where the token's loss counts; None: everywhere."""
    position_ids: Any = None
    """As in Batch."""
    segment_ids: Any = None
    """As in Batch."""


def expand(batch: Batch | CompactBatch) -> Batch:
    """Returns the Batch that a compact one stands for, int32 and fp32; a Batch as it is. To be jitted.

    Communication: none. Sequences are whole on every device, in their true order; `own_part` cuts them over cp.
    """
    if isinstance(batch, Batch):
        return batch
    text = batch.text.astype(jnp.int32)
    tokens, labels = (text[..., :-1], text[..., 1:]) if batch.labels is None else (text, batch.labels.astype(jnp.int32))
    mask = jnp.ones(tokens.shape, jnp.float32) if batch.loss_mask is None else batch.loss_mask.astype(jnp.float32)
    return Batch(tokens, labels, mask, batch.sample_ids, batch.position_ids, batch.segment_ids)


def with_padding(batch: Batch) -> Batch:
    """Returns a batch of packed documents with its padding marked: segments of which no token counts in the loss.

    No other segment sees them, so that nothing but a router could be moved by them. Communication: none; sequences are
    whole.
    """
    if batch.segment_ids is None:
        return batch

    def of_sequence(segments: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.zeros_like(mask).at[segments].max(mask)[segments] == 0

    padding = jax.vmap(jax.vmap(of_sequence))(batch.segment_ids, vary_like(batch.loss_mask, batch.segment_ids))
    return dataclasses.replace(batch, padding=padding)


def batch_specs(batch: Batch) -> Batch:
    """Returns the Batch of PartitionSpec that belongs to `batch`: batch over (dp, ep), sequences whole."""
    return Batch(**_specs(batch))


def batch_shardings(batch: Batch, mesh: Mesh) -> Batch:
    """Returns the Batch of NamedSharding that belongs to `batch`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), batch_specs(batch))


def compact_shardings(batch: CompactBatch, mesh: Mesh) -> CompactBatch:
    """Returns the CompactBatch of NamedSharding that belongs to `batch`, as of a Batch."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), CompactBatch(**_specs(batch)))


def _specs(batch: Batch | CompactBatch) -> dict[str, PartitionSpec | None]:
    """Returns the spec of each field that `batch` has."""
    names = [field.name for field in dataclasses.fields(batch)]
    return {name: None if getattr(batch, name) is None else batch_spec(None) for name in names}


def own_part(batch: Batch, context: ContextParallel) -> Batch:
    """Returns a batch with this cp rank's tokens of each sequence, but whole segment_ids. Inside shard_map.

    Labels belong to their tokens already, so that no rank needs another's. Communication: none.

    Raises:
      ValueError: the sequence cannot be cut.
    """
    cut = lambda x: None if x is None else own_tokens(x, context.axis, 2, context.order)  # noqa: E731
    names = ("tokens", "labels", "loss_mask", "position_ids", "padding")
    return dataclasses.replace(batch, **{name: cut(getattr(batch, name)) for name in names})


# ---- placement ----------------------------------------------------------------------------------------------------
class BatchPlacer:
    """Puts the rows of a global batch that this process needs onto its devices, micro-batch major.

    Attributes:
        rows: int64 [rows], the rows of the global batch to pass, ascending. Row m * width + i of the global batch is
            row i of micro-batch m, where a micro-batch of all data-parallel ranks is `width` rows wide.

    Args:
        shardings: of every field, as `compact_shardings` has them.
        num_microbatches: of a step.
        width: rows of a micro-batch over all data-parallel ranks.
    """

    def __init__(self, shardings: CompactBatch, num_microbatches: int, width: int):
        self._shardings = {field.name: getattr(shardings, field.name) for field in dataclasses.fields(CompactBatch)}
        self._lead = (num_microbatches, width)
        indices = shardings.sample_ids.addressable_devices_indices_map(self._lead)
        self.rows = needed_rows([index for index in indices.values() if index is not None], *self._lead)
        # Place of each global row among those passed; -1 where it is not.
        self._places = np.full(self._lead, -1, np.int64)
        self._places.reshape(-1)[self.rows] = np.arange(len(self.rows))

    def __call__(self, arrays: dict[str, np.ndarray]) -> CompactBatch:
        """Returns the batch on the devices.

        On CPU a device may use the memory of an array itself: do not write to it afterwards.

        Args:
            arrays: [rows, ...] each, of the global rows `rows`, under the names of CompactBatch; samples that have
                `tokens` and `labels` may pass these.

        Raises:
            ValueError: an array has none of these names, or one is missing.
        """
        found = {"text" if name == "tokens" else name: array for name, array in arrays.items()}
        unknown = found.keys() - self._shardings.keys()
        missing = {"text", "sample_ids", *(["labels"] if "tokens" in arrays else [])} - found.keys()
        if unknown or missing or len(found) < len(arrays):
            raise ValueError(
                f"batch arrays: got {', '.join(arrays)}; expected sample_ids, text (or tokens and labels), and of "
                "loss_mask, position_ids, segment_ids what there is"
            )
        return CompactBatch(**{name: self._placed(array, self._shardings[name]) for name, array in found.items()})

    def _placed(self, array: np.ndarray, sharding: Any) -> jax.Array:
        shape = (*self._lead, *array.shape[1:])
        if len(self.rows) == self._places.size:  # everything is here: views instead of copies
            whole = array.reshape(shape)
            return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])
        part = lambda index: array[(self._places[index[:2]], *index[2:])]  # noqa: E731
        return jax.make_array_from_callback(shape, sharding, part)


def needed_rows(indices: list[tuple[slice, ...]], num_microbatches: int, width: int) -> np.ndarray:
    """Returns the global rows that some devices hold: int64 [rows], ascending.

    Args:
        indices: for each device, its slices of [num_microbatches, width].
        num_microbatches: of a step.
        width: rows of a micro-batch over all data-parallel ranks.
    """
    rows = np.arange(num_microbatches * width, dtype=np.int64).reshape(num_microbatches, width)
    return np.unique(np.concatenate([rows[index[:2]].reshape(-1) for index in indices]))
