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
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Key

from jmegatron import partition
from jmegatron.collectives import axis_size, sum_over, vary
from jmegatron.mesh import DATA_AXES
from jmegatron.models.gpt import GPTSettings, Tokens, gpt_specs
from jmegatron.models.transformer import TensorParallel
from jmegatron.optimizer.adamw import AdamWSettings, clip_by_norm, global_norm
from jmegatron.partition import Tree
from jmegatron.pipeline.executor import run_forward, run_pipeline
from jmegatron.training.batches import Batch, CompactBatch, batch_specs, expand
from jmegatron.training.stages import PipelineSettings, gpt_pipeline_model
from jmegatron.training.state import TrainState

Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What a step needs to know besides the arrays."""

    model: GPTSettings
    parallel: TensorParallel
    optimizer: AdamWSettings
    compute_dtype: Any = jnp.float32
    per_token: bool = False
    pipeline: PipelineSettings = dataclasses.field(default_factory=PipelineSettings)

    @property
    def specs(self) -> Tree:
        """Declarations of every parameter."""
        return gpt_specs(self.model, self.parallel, self.pipeline.parallel)


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

    Runs inside shard_map. Communication: tp and pp as in `run_pipeline` with `gpt_pipeline_model`; once a step an
    all-reduce of the fp32 gradients over (dp, ep, cp), of the partial leaves over tp as well, and of two scalars.
    """
    weights = _token_weights(batch.loss_mask, settings.per_token, axis_size(DATA_AXES))
    varying = partition.map_specs(lambda s, p: vary(p, (*DATA_AXES, *s.partial_axes)), specs, parameters)
    microbatches = (_tokens(batch, weights), batch.loss_mask)
    model = gpt_pipeline_model(settings.model, settings.parallel, settings.pipeline.parallel, dropout_key)
    schedule = settings.pipeline.build(batch.loss_mask.shape[0])
    axis = settings.pipeline.parallel.axis
    report, gradients = run_pipeline(model, schedule, varying, microbatches, axis=axis)
    reduced = _reduce_gradients(specs, gradients)
    return sum_over(report, DATA_AXES), reduced


def _reduce_gradients(specs: Tree, gradients: Tree) -> Tree:
    """Sums parts over tp first (few, small), then everything over the data axes in one collective."""
    gradients = partition.map_specs(lambda s, g: sum_over(g, s.partial_axes or None), specs, gradients)
    return sum_over(gradients, DATA_AXES)


def make_gradient_function(
    settings: StepSettings, mesh: Mesh
) -> Callable[[Tree, Batch | CompactBatch, Key[Array, ""] | None], tuple[Tree, Tree]]:
    """Returns (parameters, batch, dropout_key) -> (report, gradients) on global arrays; to be jitted."""
    specs = settings.specs
    parameter_specs = partition.partition_specs(specs)

    def gradients(
        parameters: Tree, batch: Batch | CompactBatch, dropout_key: Key[Array, ""] | None
    ) -> tuple[Tree, Tree]:
        batch = expand(batch)

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
) -> Callable[[TrainState, Batch | CompactBatch, Key[Array, ""] | None], tuple[TrainState, Metrics]]:
    """Returns the step (state, batch, dropout_key) -> (state, metrics); jit it with the state donated.

    Metrics: loss (token-weighted mean over the global batch), grad_norm (before clipping), num_tokens, lr (of this
    step: `schedule` is the one that the optimizer was built with).
    Communication: see `local_gradients`; the norm adds one all-reduce over tp of a scalar per leaf that tp divides.
    """
    gradient_function = make_gradient_function(settings, mesh)

    def train_step(
        state: TrainState, batch: Batch | CompactBatch, dropout_key: Key[Array, ""] | None
    ) -> tuple[TrainState, Metrics]:
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


def make_eval_step(settings: StepSettings, mesh: Mesh) -> Callable[[Tree, Batch | CompactBatch], Metrics]:
    """Returns (parameters, batch) -> sums of loss and tokens over the global batch; no dropout, no gradients.

    Communication: the forward part of `gpt_loss` per micro-batch, two scalars over the data axes.
    """
    specs = settings.specs

    def body(parameters: Tree, batch: Batch) -> Metrics:
        model = gpt_pipeline_model(settings.model, settings.parallel, settings.pipeline.parallel)
        schedule = settings.pipeline.build(batch.loss_mask.shape[0])
        microbatches = (_tokens(batch, batch.loss_mask), batch.loss_mask)
        sums = run_forward(model, schedule, parameters, microbatches, axis=settings.pipeline.parallel.axis)
        return sum_over(sums, DATA_AXES)

    def evaluate(parameters: Tree, batch: Batch | CompactBatch) -> Metrics:
        batch = expand(batch)
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(partition.partition_specs(specs), batch_specs(batch)),
            out_specs=PartitionSpec(),
        )
        return mapped(parameters, batch)

    return evaluate
