"""One training step and one evaluation step, each one jitted program over the whole mesh.

Talks on tp inside the layers, once a step on (dp, ep, cp) for the gradients, and with scalars for loss and norm.
Source: Megatron-LM training/training.py (train_step), core/distributed/finalize_model_grads.py.

    shard_map, every axis manual, check_vma=True:
        parameters -> marked varying over the data axes once (and over tp where a replicated parameter's gradient is a
        part), so that autodiff gives local gradients and no reduction sits inside the micro-batch loop
        scan over micro-batches -> sums of losses, fp32 gradients
        one reduction of the gradients over (dp, ep, cp) (and tp for the few parts)
    norm, clip, optax update on global arrays

What is averaged (Megatron-LM pretrain_gpt.py:254-292, schedules.py:333-346): by default the objective is the mean over
(micro-batch, dp, cp) of each rank's own token mean; with `per_token` the sum over all tokens divided by their number.
Both are equal where all have equally many counted tokens. The reported loss is always the token-weighted mean.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from jmegatron import partition
from jmegatron.collectives import axis_size, sum_over, vary
from jmegatron.mesh import BATCH_AXES, DATA_AXES, batch_spec
from jmegatron.models.gpt import GPTSettings, Tokens, gpt_loss, gpt_specs
from jmegatron.models.transformer import TensorParallel
from jmegatron.optimizer.adamw import AdamWSettings, clip_by_norm, global_norm
from jmegatron.partition import Tree
from jmegatron.pipeline.executor import accumulate_gradients
from jmegatron.training.state import TrainState

Metrics = dict[str, Array]


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


def batch_specs(batch: Batch) -> Batch:
    """Returns the Batch of PartitionSpec that belongs to `batch`: batch over (dp, ep), sequence over cp."""

    def spec(name: str) -> PartitionSpec | None:
        if getattr(batch, name) is None:
            return None
        return PartitionSpec(None, BATCH_AXES) if name == "sample_ids" else batch_spec(None)

    return Batch(**{field.name: spec(field.name) for field in dataclasses.fields(Batch)})


def batch_shardings(batch: Batch, mesh: Mesh) -> Batch:
    """Returns the Batch of NamedSharding that belongs to `batch`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), batch_specs(batch))


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What a step needs to know besides the arrays."""

    model: GPTSettings
    parallel: TensorParallel
    optimizer: AdamWSettings
    compute_dtype: Any = jnp.float32
    per_token: bool = False


def _token_weights(mask: Array, per_token: bool, data_ranks: int) -> Array:
    """Returns the weight of each token's loss in the objective, [num_microbatches, batch, seq] of this rank."""
    if per_token:
        return mask / jnp.maximum(sum_over(mask.sum(), DATA_AXES), 1.0)
    counts = jnp.maximum(mask.sum((1, 2), keepdims=True), 1.0)
    return mask / (counts * mask.shape[0] * data_ranks)


def _tokens(batch: Batch, weights: Array) -> Tokens:
    """Returns what the model takes, with the leading dims that the batch has."""
    return Tokens(batch.tokens, batch.labels, weights, batch.sample_ids, batch.position_ids, batch.segment_ids)


def local_gradients(
    settings: StepSettings, specs: Tree, parameters: Tree, batch: Batch, dropout_key: Key[Array, ""] | None
) -> tuple[Tree, Tree]:
    """Returns (loss sum and token count of the global batch, fp32 gradients reduced to the parameters' layout).

    Runs inside shard_map. Communication: tp as in `gpt_loss` per micro-batch; once a step an all-reduce of the fp32
    gradients over (dp, ep, cp), of the partial leaves over tp as well, and of two scalars.
    """
    weights = _token_weights(batch.loss_mask, settings.per_token, axis_size(DATA_AXES))
    tokens = _tokens(batch, weights)
    varying = partition.map_specs(lambda s, p: vary(p, (*DATA_AXES, *s.partial_axes)), specs, parameters)

    def loss(parameters: Tree, one: tuple[Tokens, Array]) -> tuple[Array, Tree]:
        microbatch, mask = one
        objective, losses = gpt_loss(parameters, microbatch, settings.model, settings.parallel, dropout_key=dropout_key)
        return objective, {"loss_sum": (losses * mask).sum(), "num_tokens": mask.sum()}

    report, gradients = accumulate_gradients(loss, varying, (tokens, batch.loss_mask))
    reduced = _reduce_gradients(specs, gradients)
    return sum_over(report, DATA_AXES), reduced


def _reduce_gradients(specs: Tree, gradients: Tree) -> Tree:
    """Sums parts over tp first (few, small), then everything over the data axes in one collective."""
    gradients = partition.map_specs(lambda s, g: sum_over(g, s.partial_axes or None), specs, gradients)
    return sum_over(gradients, DATA_AXES)


def make_gradient_function(
    settings: StepSettings, mesh: Mesh
) -> Callable[[Tree, Batch, Key[Array, ""] | None], tuple[Tree, Tree]]:
    """Returns (parameters, batch, dropout_key) -> (report, gradients) on global arrays; to be jitted."""
    specs = gpt_specs(settings.model, settings.parallel)
    parameter_specs = partition.partition_specs(specs)

    def gradients(parameters: Tree, batch: Batch, dropout_key: Key[Array, ""] | None) -> tuple[Tree, Tree]:
        def body(parameters: Tree, batch: Batch, key: Key[Array, ""] | None) -> tuple[Tree, Tree]:
            return local_gradients(settings, specs, parameters, batch, key)

        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(parameter_specs, batch_specs(batch), PartitionSpec()),
            out_specs=(PartitionSpec(), parameter_specs),
        )
        return mapped(parameters, batch, dropout_key)

    return gradients


def make_train_step(
    settings: StepSettings,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[Array], Array],
) -> Callable[[TrainState, Batch, Key[Array, ""] | None], tuple[TrainState, Metrics]]:
    """Returns the step (state, batch, dropout_key) -> (state, metrics); jit it with the state donated.

    Metrics: loss (token-weighted mean over the global batch), grad_norm (before clipping), num_tokens, lr (of this
    step: `schedule` is the one that the optimizer was built with).
    Communication: see `local_gradients`; the norm adds one all-reduce over tp of a scalar per leaf that tp divides.
    """
    gradient_function = make_gradient_function(settings, mesh)

    def train_step(state: TrainState, batch: Batch, dropout_key: Key[Array, ""] | None) -> tuple[TrainState, Metrics]:
        report, gradients = gradient_function(state.parameters, batch, dropout_key)
        grad_norm = global_norm(gradients)
        gradients = clip_by_norm(gradients, grad_norm, settings.optimizer.clip_grad)
        master = state.parameters if state.master is None else state.master
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, master)
        master = optax.apply_updates(master, updates)
        mixed = state.master is not None
        new_state = TrainState(
            step=state.step + 1,
            parameters=jax.tree.map(lambda p: p.astype(settings.compute_dtype), master) if mixed else master,
            master=master if mixed else None,
            optimizer=optimizer_state,
        )
        return new_state, {
            "loss": report["loss_sum"] / jnp.maximum(report["num_tokens"], 1.0),
            "grad_norm": grad_norm,
            "num_tokens": report["num_tokens"],
            "lr": schedule(state.step),
        }

    return train_step


def make_eval_step(settings: StepSettings, mesh: Mesh) -> Callable[[Tree, Batch], Metrics]:
    """Returns (parameters, batch) -> sums of loss and tokens over the global batch; no dropout, no gradients.

    Communication: the forward part of `gpt_loss` per micro-batch, two scalars over the data axes.
    """
    specs = gpt_specs(settings.model, settings.parallel)

    def body(parameters: Tree, batch: Batch) -> Metrics:
        def microbatch(_: None, one: Batch) -> tuple[None, Metrics]:
            tokens = _tokens(one, one.loss_mask)
            loss_sum, _losses = gpt_loss(parameters, tokens, settings.model, settings.parallel)
            return None, {"loss_sum": loss_sum, "num_tokens": one.loss_mask.sum()}

        _, sums = jax.lax.scan(microbatch, None, batch)
        return sum_over(jax.tree.map(lambda x: x.sum(), sums), DATA_AXES)

    def evaluate(parameters: Tree, batch: Batch) -> Metrics:
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(partition.partition_specs(specs), batch_specs(batch)),
            out_specs=PartitionSpec(),
        )
        return mapped(parameters, batch)

    return evaluate
