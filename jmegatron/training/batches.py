"""Global batches from the host's arrays onto the devices (no communication).

Every process passes the rows of the global batch that its own devices hold, and no others;
`jax.make_array_from_callback` asks for each device's part. May be called from another thread than the steps.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jmegatron.training.step import Batch


class BatchPlacer:
    """Puts the rows of a global batch that this process needs onto its devices, micro-batch major.

    Attributes:
        rows: int64 [rows], the rows of the global batch to pass, ascending. Row m * width + i of the global batch is
            row i of micro-batch m, where a micro-batch of all data-parallel ranks is `width` rows wide.

    Args:
        abstract: shapes, dtypes and shardings of the batch, [num_microbatches, width, ...].
        num_microbatches: of a step.
    """

    def __init__(self, abstract: Batch, num_microbatches: int):
        ids = abstract.sample_ids
        self._lead: tuple[int, int] = (num_microbatches, ids.shape[1])
        indices = ids.sharding.addressable_devices_indices_map(ids.shape)
        self.rows = needed_rows([index for index in indices.values() if index is not None], *self._lead)
        # Place of each global row among those passed; -1 where it is not.
        self._places = np.full(self._lead, -1, np.int64)
        self._places.reshape(-1)[self.rows] = np.arange(len(self.rows))
        self._shardings = {
            field.name: leaf.sharding
            for field in dataclasses.fields(Batch)
            if (leaf := getattr(abstract, field.name)) is not None
        }
        self._last: dict[str, tuple[np.ndarray, jax.Array]] = {}

    def __call__(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Returns the batch on the devices.

        An array that is the same object as at the last call and cannot be written to (a loss mask of ones) is not
        copied again.

        Args:
            arrays: [rows, ...] each, of the global rows `rows`.
        """
        return Batch(**{name: self._leaf(name, arrays[name]) for name in self._shardings})

    def _leaf(self, name: str, array: np.ndarray) -> jax.Array:
        last = self._last.get(name)
        if last is not None and last[0] is array:
            return last[1]
        placed = self._placed(array, self._shardings[name])
        if not array.flags.writeable:
            self._last[name] = (array, placed)
        return placed

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
