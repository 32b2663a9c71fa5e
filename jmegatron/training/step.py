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
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Key

from jmegatron import partition
from jmegatron.collectives import axis_size, gather_from, gather_sequence, reduce_scatter_to, sum_over, vary, vary_like
from jmegatron.mesh import AXES, BATCH_AXES, DATA_AXES, SEQUENCE_AXIS
from jmegatron.models.gpt import GPTSettings, Tokens, gpt_specs, without_receive_bound
from jmegatron.models.transformer import MOE_FIGURES, LayerParallel
from jmegatron.moe.layer import NUM_FIGURES
from jmegatron.moe.router import updated_bias
from jmegatron.optimizer import loss_scaler
from jmegatron.optimizer.loss_scaler import LossScalerSettings
from jmegatron.optimizer.optimizers import OptimizerSettings, clip_by_norm, num_updates, squared_norms
from jmegatron.partition import Tree
from jmegatron.pipeline.executor import run_forward, run_pipeline
from jmegatron.training.batches import Batch, CompactBatch, batch_specs, expand, own_part, with_padding
from jmegatron.training.stages import PipelineSettings, gpt_pipeline_model
from jmegatron.training.state import TrainState

Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """What a step needs to know besides the arrays."""

    model: GPTSettings
    parallel: LayerParallel
    optimizer: OptimizerSettings
    compute_dtype: Any = jnp.float32
    per_token: bool = False
    pipeline: PipelineSettings = dataclasses.field(default_factory=PipelineSettings)
    distributed_optimizer: bool = False
    """Each data-parallel rank reduces, keeps and updates its part of the optimizer's state (ZeRO-1)."""
    overlap_grad_reduce: bool = False
    """Reduce a layer's gradients inside the backward loop of the last micro-batch."""
    overlap_param_gather: bool = False
    """Between steps each rank holds its part of the parameters, too; a layer's are gathered inside the forward loop of
    the first micro-batch. Needs the distributed optimizer."""
    scaler: LossScalerSettings | None = None
    """How the loss is scaled; a step whose gradients are not finite is skipped then."""
    check_gradients: bool = False
    """Also report which of each rank's own gradients, before any reduction, are finite."""

    @property
    def has_experts(self) -> bool:
        """Whether there are mixtures of experts among the layers."""
        return self.model.layer.moe is not None

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        assert self.model.layer.moe is not None
        return self.model.layer.moe.router.num_experts

    @property
    def moe_lead_dims(self) -> int:
        """Leading dims of stacked layers' parameters."""
        return self.specs["layers"]["moe"]["router"]["kernel"].num_stacked_dims

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


def _auxiliary_weights(mask: Array, per_token: bool) -> Array:
    """Returns the weight in the objective of the routers' losses of each micro-batch, [num_microbatches].

    The mean over micro-batches and replicas. With `per_token` each counts as its tokens do, counted or not, over the
    number of all that count (Megatron-LM router.py:607-639, finalize_model_grads.py:694).
    """
    if per_token:
        tokens = mask[0].size * axis_size(SEQUENCE_AXIS)
        return jnp.full(len(mask), tokens, jnp.float32) / jnp.maximum(sum_over(mask.sum(), DATA_AXES), 1.0)
    return jnp.full(len(mask), 1.0 / (len(mask) * axis_size(BATCH_AXES)), jnp.float32)


def _tokens(batch: Batch, weights: Array, auxiliary_weights: Array | None = None) -> Tokens:
    """Returns what the model takes, with the leading dims that the batch has."""
    return Tokens(
        batch.tokens,
        batch.labels,
        weights,
        batch.sample_ids,
        batch.position_ids,
        batch.segment_ids,
        auxiliary_weights,
        batch.padding,
    )


class GradientLayout:
    """How gradients are reduced over the ranks that hold parts of them, leaf by leaf; and parameters gathered.

    Without the distributed optimizer a gradient ends up like its parameter, by an all-reduce over the data axes. With
    it each rank ends up with its part, by a reduce-scatter, and new parameters are gathered from their parts.

    Args:
      settings: of the step.
      mesh_shape: size of each mesh axis.
    """

    def __init__(self, settings: StepSettings, mesh_shape: Mapping[str, int]):
        self.specs, self._check = settings.specs, settings.check_gradients
        keep = lambda s: (s.spec, None)  # noqa: E731
        divide = lambda s: partition.data_sharded(s, DATA_AXES, mesh_shape)  # noqa: E731
        self._layout = partition.map_specs(divide if settings.distributed_optimizer else keep, self.specs)

    @property
    def partition_specs(self) -> Tree:
        """The PartitionSpec of each reduced gradient."""
        return partition.map_specs(lambda s, layout: layout[0], self.specs, self._layout)

    def reduce(self, gradients: Tree, *, but: str | None = None) -> tuple[Tree, Bool[Array, "1 leaves"] | None]:
        """Returns (reduced gradients, whether each of this rank's own was finite if that is to be checked).

        Communication, inside shard_map: parts are summed over their axes first (few, small), then everything over the
        data axes: one all-reduce of what stays whole, a reduce-scatter of each leaf that is divided.

        Args:
          gradients: like the parameters.
          but: key of a sub-tree that holds what the function of `reduce_layer` has made of it.
        """
        rest = {name: tree for name, tree in gradients.items() if name != but}
        specs, layout = ({name: tree[name] for name in rest} for tree in (self.specs, self._layout))
        reduced, finite = self._checked(rest, lambda own: self._reduce(specs, layout, own, 0))
        if but is not None:
            layers, finite_layers = gradients[but]
            reduced, finite = {**reduced, but: layers}, {**finite, but: finite_layers}
        if not self._check:
            return reduced, None
        return reduced, jnp.stack([vary(flags.all(), AXES) for flags in jax.tree.leaves(finite)])[None]

    def reduce_layer(self, name: str) -> Callable[[Tree], tuple[Tree, Tree]]:
        """Returns the function that makes of one layer of the stacked gradients under `name` (reduced, finite)."""

        def reduce(gradients: Tree) -> tuple[Tree, Tree]:
            specs = self.specs[name]
            dropped = partition.named_specs(specs)[0][1].num_stacked_dims
            return self._checked(gradients, lambda own: self._reduce(specs, self._layout[name], own, dropped))

        return reduce

    def _checked(self, gradients: Tree, reduce: Callable[[Tree], Tree]) -> tuple[Tree, Tree]:
        """Returns (reduce(gradients), whether each gradient is finite before, {} if that is not to be checked)."""
        if not self._check:
            return reduce(gradients), {}
        leaves, treedef = jax.tree.flatten(gradients)
        # Read before their reduction starts, so that it need not leave the unreduced gradients where they are.
        read = [jax.lax.optimization_barrier((g, jnp.isfinite(g).all())) for g in leaves]
        gradients, finite = (jax.tree.unflatten(treedef, each) for each in zip(*read, strict=True))
        return reduce(gradients), finite

    def _reduce(self, specs: Tree, layout: Tree, gradients: Tree, dropped: int) -> Tree:
        parts = partition.map_specs(lambda s, _, g: sum_over(g, s.partial_axes or None), specs, layout, gradients)
        leaves, treedef = jax.tree.flatten(parts)
        dims = [dim for _, dim in jax.tree.leaves(layout, is_leaf=_is_layout)]
        axes = [partition.replica_axes(s, DATA_AXES) for _, s in partition.named_specs(specs)]
        whole: dict[int, Array] = {}
        for group in dict.fromkeys(axes):  # experts are not summed over ep
            members = [i for i, dim in enumerate(dims) if dim is None and axes[i] == group]
            undivided = [leaves[i] if dropped else _rewritten(leaves[i]) for i in members]
            whole |= dict(zip(members, sum_over(undivided, group), strict=True))
        reduced = [
            whole[i] if dim is None else reduce_scatter_to(vary(g, axes[i]), axes[i], dim - dropped)
            for i, (g, dim) in enumerate(zip(leaves, dims, strict=True))
        ]
        return jax.tree.unflatten(treedef, reduced)

    def gather(self, parts: Tree, *, but: str | None = None) -> Tree:
        """Returns whole parameters from each rank's part.

        Communication: an all-gather over the data axes.

        Args:
          parts: like the parameters.
          but: key of a sub-tree that is left as it is.
        """
        axes = lambda s: partition.replica_axes(s, DATA_AXES)  # noqa: E731
        join = lambda s, layout, p: p if layout[1] is None else gather_from(p, axes(s), layout[1])  # noqa: E731
        return {
            name: tree if name == but else partition.map_specs(join, self.specs[name], self._layout[name], tree)
            for name, tree in parts.items()
        }

    def gather_layer(self, name: str) -> Callable[[Tree], Tree]:
        """Returns the function that gathers one layer of the stacked parameters under `name`, marked as varying."""

        def join(s: partition.ParameterSpec, layout: tuple[PartitionSpec, int | None], p: Array) -> Array:
            axes, replicas = (*DATA_AXES, *s.partial_axes), partition.replica_axes(s, DATA_AXES)
            return vary(p if layout[1] is None else gather_sequence(p, replicas, layout[1] - s.num_stacked_dims), axes)

        return lambda parts: partition.map_specs(join, self.specs[name], self._layout[name], parts)


def _rewritten(x: Array) -> Array:
    """Returns x, its first element written once more where it lies.

    XLA reduces in place what the instruction before wrote, and not what comes straight out of a loop: without this an
    all-reduce of a stacked leaf needs a second one of it.
    """
    first = jax.lax.optimization_barrier(x[(slice(1),) * x.ndim])
    return jax.lax.dynamic_update_slice(x, first, (0,) * x.ndim)


def _is_layout(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], PartitionSpec)


def local_gradients(
    settings: StepSettings,
    layout: GradientLayout,
    parameters: Tree,
    batch: Batch,
    dropout_key: Key[Array, ""] | None,
    scale: Array | float = 1.0,
) -> tuple[Tree, Tree]:
    """Returns (report, reduced fp32 gradients of the objective times `scale`).

    The report: loss sum and token count of the global batch, this rank's loss sum, and with `check_gradients` which of
    this rank's own gradients are finite.

    Runs inside shard_map. Communication: tp and pp as in `run_pipeline` with `gpt_pipeline_model`; once a step
    `GradientLayout.reduce`, that of layers inside the backward loop where asked for; two scalars over the data axes.
    """
    weights = _token_weights(batch.loss_mask, settings.per_token, axis_size(DATA_AXES)) * scale
    experts = settings.has_experts
    auxiliary = _auxiliary_weights(batch.loss_mask, settings.per_token) * scale if experts else None
    model = gpt_pipeline_model(settings.model, settings.parallel, settings.pipeline.parallel, dropout_key)
    parts = model.layers if settings.overlap_param_gather else None
    if parts:
        parameters = layout.gather(parameters, but=parts)
    mark = lambda s, p: vary(p, (*DATA_AXES, *s.partial_axes))  # noqa: E731
    varying = {
        name: tree if name == parts else partition.map_specs(mark, layout.specs[name], tree)
        for name, tree in parameters.items()
    }
    axes = (*DATA_AXES, *([settings.parallel.axis] if settings.parallel.axis else []))
    if experts:
        varying[model.layers] = _with_figures(varying[model.layers], settings, axes)
    microbatches = (_tokens(batch, weights, auxiliary), batch.loss_mask)
    schedule = settings.pipeline.build(batch.loss_mask.shape[0])
    overlap = settings.overlap_grad_reduce
    reduce_layer, gather_layer = layout.reduce_layer(model.layers), layout.gather_layer(model.layers)
    if experts:
        reduce_layer, gather_layer = _beside_figures(reduce_layer, gather_layer, axes)
    report, gradients = run_pipeline(
        model,
        schedule,
        varying,
        microbatches,
        axis=settings.pipeline.parallel.axis,
        reduce_layer=reduce_layer if overlap else None,
        gather_layer=gather_layer if parts else None,
    )
    ranks = report["loss_sum"][None]
    report = {**sum_over(report, DATA_AXES), "rank_loss_sums": ranks}
    if experts:
        layers = gradients[model.layers][0] if overlap else gradients[model.layers]
        figures = layers.pop(MOE_FIGURES)
        report[MOE_FIGURES] = figures if overlap else sum_over(figures, axes)
    reduced, finite = layout.reduce(gradients, but=model.layers if overlap else None)
    return report if finite is None else {**report, "finite_gradients": finite}, reduced


def _with_figures(layers: Tree, settings: StepSettings, axes: tuple[str, ...]) -> Tree:
    """Returns stacked layers with the zeros whose gradients become the routers' figures."""
    kernel = layers["moe"]["router"]["kernel"]
    lead = kernel.shape[: settings.moe_lead_dims]
    zeros = jnp.zeros((*lead, settings.num_experts + NUM_FIGURES), jnp.float32)
    return {**layers, MOE_FIGURES: vary(vary_like(zeros, kernel), axes)}


def _beside_figures(
    reduce: Callable[[Tree], tuple[Tree, Tree]], gather: Callable[[Tree], Tree], axes: tuple[str, ...]
) -> tuple[Callable[[Tree], tuple[Tree, Tree]], Callable[[Tree], Tree]]:
    """Returns the functions of `GradientLayout` for a layer that has the figures among its parameters."""

    def without(layer: Tree) -> Tree:
        return {name: tree for name, tree in layer.items() if name != MOE_FIGURES}

    def reduce_layer(gradients: Tree) -> tuple[Tree, Tree]:
        reduced, finite = reduce(without(gradients))
        return {**reduced, MOE_FIGURES: sum_over(gradients[MOE_FIGURES], axes)}, finite

    return reduce_layer, lambda parts: {**gather(without(parts)), MOE_FIGURES: parts[MOE_FIGURES]}


def report_specs(settings: StepSettings) -> dict[str, PartitionSpec]:
    """Returns where the parts of `local_gradients`' report lie."""
    whole, ranks = PartitionSpec(), {"rank_loss_sums": PartitionSpec(DATA_AXES)}
    if settings.check_gradients:
        ranks["finite_gradients"] = PartitionSpec(AXES)
    if settings.has_experts:
        kernel = settings.specs["layers"]["moe"]["router"]["kernel"]
        ranks[MOE_FIGURES] = PartitionSpec(*kernel.spec[: kernel.num_stacked_dims])
    return {"loss_sum": whole, "num_tokens": whole, **ranks}


def make_gradient_function(settings: StepSettings, mesh: Mesh) -> Callable[..., tuple[Tree, Tree]]:
    """Returns (parameters, batch, dropout_key, scale=None) -> (report, gradients) on global arrays; to be jitted.

    The gradients are those of the objective, times `scale` if that is given.

    With the distributed optimizer the gradients are divided over the data axes as well; as global arrays they are the
    same.
    """
    layout = GradientLayout(settings, dict(mesh.shape))
    whole = partition.partition_specs(settings.specs)
    parameter_specs = layout.partition_specs if settings.overlap_param_gather else whole

    def gradients(
        parameters: Tree,
        batch: Batch | CompactBatch,
        dropout_key: Key[Array, ""] | None,
        scale: Array | None = None,
    ) -> tuple[Tree, Tree]:
        batch = expand(batch)

        def body(parameters: Tree, batch: Batch, key: Key[Array, ""] | None, scale: Array | None) -> tuple[Tree, Tree]:
            batch = own_part(with_padding(batch) if settings.has_experts else batch, settings.parallel.context)
            return local_gradients(settings, layout, parameters, batch, key, 1.0 if scale is None else scale)

        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(parameter_specs, batch_specs(batch), PartitionSpec(), PartitionSpec()),
            out_specs=(report_specs(settings), layout.partition_specs),
        )
        return mapped(parameters, batch, dropout_key, scale)

    return gradients


def _parts_and_whole(settings: StepSettings, mesh: Mesh) -> tuple[Callable[[Tree], Tree], Callable[[Tree], Tree]]:
    """Returns (whole parameters -> each rank's part, the other way round) on global arrays.

    Communication: the first none, the second an all-gather over the data axes.
    """
    if not settings.distributed_optimizer:
        return (lambda tree: tree), (lambda tree: tree)
    layout = GradientLayout(settings, dict(mesh.shape))
    whole, parts = partition.partition_specs(settings.specs), layout.partition_specs

    def own_parts(tree: Tree) -> Tree:
        divide = lambda p, spec: jax.lax.with_sharding_constraint(p, NamedSharding(mesh, spec))  # noqa: E731
        return jax.tree.map(divide, tree, parts)

    def gather(tree: Tree) -> Tree:
        if settings.overlap_param_gather:
            return tree  # the next step's forward gathers
        return jax.shard_map(layout.gather, mesh=mesh, in_specs=(parts,), out_specs=whole)(tree)

    return own_parts, gather


def _skip_unless_finite(settings: StepSettings, old: TrainState, new: TrainState, leaf_norms: Array) -> TrainState:
    """Returns the new state if every gradient is finite, else the old one, a step further and with its scale updated.

    Communication: none beyond that of the norms, which every device knows alike.
    """
    assert settings.scaler is not None and old.loss_scale is not None
    finite = jnp.isfinite(leaf_norms).all()
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)  # noqa: E731
    return TrainState(
        step=new.step,
        parameters=keep(new.parameters, old.parameters),
        master=keep(new.master, old.master),
        optimizer=keep(new.optimizer, old.optimizer),
        loss_scale=loss_scaler.update(settings.scaler, old.loss_scale, ~finite),
        skipped=old.skipped + ~finite,
    )


def _cast_to(specs: Tree, dtype: Any, mesh: Mesh) -> Callable[[Tree], Tree]:
    """Returns the cast of master weights, as a function of what is stored whatever XLA fuses."""

    def cast(tree: Tree) -> Tree:
        return partition.cast(specs, tree, dtype)

    if mesh.devices.flat[0].platform != "cpu" or jnp.dtype(dtype) == jnp.float32:
        return cast

    def called(tree: Tree) -> Tree:
        with set_xla_metadata(inlineable="false"):
            return jax.jit(cast)(tree)

    return called


def _expert_metrics(settings: StepSettings, figures: Array, num_parts: int) -> Metrics:
    """Returns what is reported of the routers, over all layers that have one.

    moe_aux_loss and moe_z_loss: mean over layers, micro-batches and replicas, without coefficients; neither where the
    router has no such loss. expert_load_max and
    expert_load_min: the largest and the smallest number of tokens of an expert over its layer's mean, of all layers.
    dropped_tokens: rows that went to no expert although the router chose one.

    Args:
      settings: of the step.
      figures: [*places, experts + NUM_FIGURES] of the global batch.
      num_parts: micro-batches times replicas.
    """
    moe = settings.model.layer.moe
    assert moe is not None
    spec = settings.specs["layers"]["moe"]["router"]["kernel"]
    present = np.flatnonzero(np.asarray(spec.stacked).reshape(-1) >= 0)
    rows = figures.reshape(-1, figures.shape[-1])[present]
    counts, (balance, z_loss, dropped) = rows[:, : settings.num_experts], rows[:, settings.num_experts :].sum(0)
    load = counts / jnp.maximum(counts.mean(1, keepdims=True), 1.0)
    parts = len(present) * num_parts
    losses = {}
    if moe.router.balancing != "none":
        losses["moe_aux_loss"] = balance / parts
    if moe.router.z_coefficient:
        losses["moe_z_loss"] = z_loss / parts
    return {
        **losses,
        "expert_load_max": load.max(),
        "expert_load_min": load.min(),
        "dropped_tokens": dropped,
    }


def _with_expert_bias(settings: StepSettings, weights: Tree, figures: Array) -> Tree:
    """Returns the weights with the routers' biases of the next global batch, where there are such."""
    moe = settings.model.layer.moe
    if moe is None or not moe.router.expert_bias:
        return weights
    layers = weights["layers"]
    router = layers["moe"]["router"]
    counts = figures[..., : settings.num_experts]
    # Without the places that hold no layer: theirs stay zero.
    places = np.asarray(settings.specs["layers"]["moe"]["router"]["kernel"].stacked).reshape(counts.shape[:-1])
    rate = moe.router.bias_update_rate * jnp.asarray(places >= 0, jnp.float32)[..., None]
    bias = updated_bias(router["expert_bias"], counts, rate)
    return {**weights, "layers": {**layers, "moe": {**layers["moe"], "router": {**router, "expert_bias": bias}}}}


def make_train_step(
    settings: StepSettings,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    schedule: Callable[[Array], Array],
) -> Callable[[TrainState, Batch | CompactBatch, Key[Array, ""] | None], tuple[TrainState, Metrics]]:
    """Returns the step (state, batch, dropout_key) -> (state, metrics); jit it with the state donated.

    Metrics: loss (token-weighted mean over the global batch), grad_norm (before clipping), num_tokens, lr (of this
    step: `schedule` is the one that the optimizer was built with), rank_loss_sums [data ranks] and leaf_norms [leaves,
    in tree order] (squared; they tell where a number is not finite); with `check_gradients` finite_gradients [ranks of
    the mesh, leaves] (of each rank's own gradients before any reduction); where the loss is scaled also loss_scale (of
    this step) and skipped (steps so far): a step whose gradients are not finite changes neither weights nor schedule.
    Communication: see `local_gradients`; the norm adds one all-reduce over tp of a scalar per leaf that tp divides.
    """
    gradient_function = make_gradient_function(settings, mesh)
    own_parts, gather = _parts_and_whole(settings, mesh)
    cast = _cast_to(settings.specs, settings.compute_dtype, mesh)

    def train_step(
        state: TrainState, batch: Batch | CompactBatch, dropout_key: Key[Array, ""] | None
    ) -> tuple[TrainState, Metrics]:
        scaler = state.loss_scale
        scale = None if scaler is None else scaler.scale
        report, gradients = gradient_function(state.parameters, batch, dropout_key, scale)
        if scaler is not None:
            gradients = loss_scaler.unscale(gradients, scaler)
        leaf_norms = squared_norms(gradients)
        grad_norm = jnp.sqrt(leaf_norms.sum())
        gradients = clip_by_norm(gradients, grad_norm, settings.optimizer.clip_grad)
        mixed = state.master is not None
        master = state.master if mixed else own_parts(state.parameters)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, master)
        master = optax.apply_updates(master, updates)
        if settings.has_experts:
            master = _with_expert_bias(settings, master, report[MOE_FIGURES])
        if mixed:
            # XLA may compute an update once for what is stored and once more, rounded otherwise, for what is cast: the
            # barrier makes the parameters those that a restart casts from the stored ones. On CPUs it does nothing.
            master = jax.lax.optimization_barrier(master)
        new_state = TrainState(
            step=state.step + 1,
            parameters=gather(cast(master)),
            master=master if mixed else None,
            optimizer=optimizer_state,
        )
        metrics = {
            "loss": report["loss_sum"] / jnp.maximum(report["num_tokens"], 1.0),
            "grad_norm": grad_norm,
            "num_tokens": report["num_tokens"],
            "lr": schedule(num_updates(state.optimizer)),
            "leaf_norms": leaf_norms,
            **{name: value for name, value in report.items() if name in ("rank_loss_sums", "finite_gradients")},
        }
        if settings.has_experts:
            microbatches = (batch.tokens if isinstance(batch, Batch) else batch.text).shape[0]
            parts = microbatches * mesh.shape["dp"] * mesh.shape["ep"]
            metrics |= _expert_metrics(settings, report[MOE_FIGURES], parts)
        if scaler is not None:
            new_state = _skip_unless_finite(settings, state, new_state, leaf_norms)
            metrics |= {"loss_scale": scale, "skipped": new_state.skipped}
        return new_state, metrics

    return train_step


def make_eval_step(settings: StepSettings, mesh: Mesh) -> Callable[[Tree, Batch | CompactBatch], Metrics]:
    """Returns (parameters, batch) -> sums of loss and tokens over the global batch; no dropout, no gradients.

    Experts receive all rows there are, whatever their bound in training: what was cut off would be counted nowhere.
    Communication: the forward part of `gpt_loss` per micro-batch, two scalars over the data axes.
    """
    specs, unbounded = settings.specs, without_receive_bound(settings.model)

    def body(parameters: Tree, batch: Batch) -> Metrics:
        model = gpt_pipeline_model(unbounded, settings.parallel, settings.pipeline.parallel)
        schedule = settings.pipeline.build(batch.loss_mask.shape[0])
        batch = own_part(with_padding(batch) if settings.has_experts else batch, settings.parallel.context)
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
