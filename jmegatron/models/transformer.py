"""A pre-norm transformer layer and the scanned stack of equal layers. Talks on tp, through its layers.

Source: Megatron-LM transformer/transformer_layer.py, fusions/fused_bias_dropout.py:42-59.

    x = x + dropout(attention(norm(x)))
    x = x + dropout(mlp(norm(x)))

A cp rank holds seq / cp tokens of x. Without sequence parallelism they are replicated over tp; with it each rank keeps
1 / tp of them, so norms, dropout and residuals cost 1/tp. The layers' parameters are stacked along a leading dim and
scanned: compile time does not grow with depth.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from jmegatron import partition, random
from jmegatron.collectives import own_slice
from jmegatron.context_parallel.layout import WHOLE_SEQUENCE, ContextParallel
from jmegatron.layers.attention import ATTENTION_KEPT, AttentionSettings, TokenContext, attention_specs, self_attention
from jmegatron.layers.mlp import MLP_KEPT, MLPSettings, mlp, mlp_specs
from jmegatron.layers.norm import norm, norm_specs
from jmegatron.moe.experts import EXPERTS_EXCHANGED, EXPERTS_KEPT
from jmegatron.moe.layer import ExpertParallel, MoESettings, moe, moe_specs
from jmegatron.partition import Tree

ONE_EXPERT_RANK = ExpertParallel()
MOE_FIGURES = "moe_figures"
"""Key among a layer's parameters under which a step puts what is to receive the router's figures (`moe.layer.moe`)."""
Recompute = Literal["full", "selective"]  # in the order of the option: typing keeps one of two equal unions


@dataclasses.dataclass(frozen=True)
class LayerParallel:
    """How layers are divided over tensor- and context-parallel ranks."""

    axis: str | None = None
    """Mesh axis of tensor parallelism."""
    num_ranks: int = 1
    """Its size."""
    sequence_parallel: bool = False
    """Whether tp divides the tokens between the regions, too (those that a cp rank holds)."""
    context: ContextParallel = WHOLE_SEQUENCE
    """How the sequence is divided everywhere."""
    experts: ExpertParallel = ONE_EXPERT_RANK
    """How experts are divided."""

    @property
    def sequence_axis(self) -> str | None:
        """The axis that divides the sequence outside the regions, or None."""
        return self.axis if self.sequence_parallel else None

    @property
    def norm_partial_axes(self) -> tuple[str, ...]:
        """Axes over which gradients of per-token parameters (norms, output biases) are parts."""
        return (self.axis,) if self.sequence_parallel and self.axis else ()


@dataclasses.dataclass(frozen=True)
class LayerSettings:
    """Plain numbers of one transformer layer."""

    attention: AttentionSettings
    mlp: MLPSettings
    normalization: str = "LayerNorm"
    norm_eps: float = 1e-5
    zero_centered_norm: bool = False
    hidden_dropout: float = 0.0
    recompute: Recompute | None = None
    """What a layer's backward computes again. full: all of it, its input alone is kept. selective: all but the products
    with parameters: norms, gathers, the attention core, activations; kept is what has a name. None: activations."""
    recompute_mlp: bool = False
    """With selective: the feed-forward part as a whole is computed again as well."""
    recompute_unit: int = 1
    """With full: consecutive layers of which the input of the first alone is kept, see `setting_runs`."""
    moe: MoESettings | None = None
    """A mixture of experts in place of `mlp`."""

    @property
    def shared_expert(self) -> MLPSettings | None:
        """The feed-forward layer that every token passes beside its experts, if there is one."""
        width = None if self.moe is None else self.moe.shared_ffn_hidden_size
        return None if width is None else dataclasses.replace(self.mlp, ffn_hidden_size=width)


def layer_specs(
    settings: LayerSettings,
    parallel: LayerParallel,
    *,
    kernel_init: partition.Initializer,
    output_init: partition.Initializer,
) -> Tree:
    """Returns the declarations of one layer: input_norm, attention, mlp_norm, and mlp or moe.

    Raises:
      ValueError: heads or experts cannot be divided over the ranks.
    """
    norm_ = lambda: norm_specs(  # noqa: E731
        settings.attention.hidden_size,
        settings.normalization,
        partial_axes=parallel.norm_partial_axes,
        zero_centered=settings.zero_centered_norm,
    )
    return {
        "input_norm": norm_(),
        "attention": attention_specs(
            settings.attention,
            axis=parallel.axis,
            num_ranks=parallel.num_ranks,
            sequence_parallel=parallel.sequence_parallel,
            kernel_init=kernel_init,
            output_init=output_init,
        ),
        "mlp_norm": norm_(),
        **_feed_forward_specs(settings, parallel, kernel_init, output_init),
    }


def _feed_forward_specs(
    settings: LayerSettings,
    parallel: LayerParallel,
    kernel_init: partition.Initializer,
    output_init: partition.Initializer,
) -> Tree:
    """Returns {"mlp": ...}, or {"moe": router, experts and perhaps the shared expert}."""

    def dense(of: MLPSettings) -> Tree:
        return mlp_specs(
            of,
            axis=parallel.axis,
            sequence_parallel=parallel.sequence_parallel,
            kernel_init=kernel_init,
            output_init=output_init,
        )

    if settings.moe is None:
        return {"mlp": dense(settings.mlp)}
    specs = moe_specs(
        settings.moe, parallel.experts, axis=parallel.axis, kernel_init=kernel_init, output_init=output_init
    )
    shared = settings.shared_expert
    return {"moe": specs if shared is None else {**specs, "shared": dense(shared)}}


def transformer_layer(
    parameters: Tree,
    x: Float[Array, "batch seq_local hidden"],
    context: TokenContext,
    settings: LayerSettings,
    parallel: LayerParallel,
    layer: int | Integer[Array, ""] = 0,
) -> Float[Array, "batch seq_local hidden"]:
    """Returns the layer's output.

    Communication over tp, B = bytes of a cp rank's x: forward 2 all-reduces of B, backward 2 (sequence parallel: 2
    all-gathers and 2 reduce-scatters each way, which send the same bytes); over cp that of
    `context_parallel_attention`. A mixture of experts talks as `moe.layer.moe` says, in place of the second.

    Args:
      parameters: this rank's part of `layer_specs`.
      x: this cp rank's tokens (all without cp), or the tp rank's shard of them under sequence parallelism.
      context: of this cp rank's tokens.
      settings: numbers of the layer.
      parallel: how layers are divided.
      layer: global layer number (dropout key).
    """
    axis, shard = parallel.axis, parallel.sequence_parallel
    token_index = own_slice(context.token_index, parallel.sequence_axis, 0)

    def norm_(name: str, y: Array) -> Array:
        return norm(
            parameters[name],
            y,
            settings.normalization,
            eps=settings.norm_eps,
            zero_centered=settings.zero_centered_norm,
        )

    def drop(y: Array, site: random.Site) -> Array:
        key = context.dropout_key
        if key is None or settings.hidden_dropout == 0.0:
            return y
        site_key = random.site_key(key, layer, site)
        return random.dropout(y, settings.hidden_dropout, site_key, context.sample_ids, token_index)

    y = self_attention(
        parameters["attention"],
        norm_("input_norm", x),
        context,
        settings.attention,
        axis=axis,
        sequence_parallel=shard,
        context_parallel=parallel.context,
        layer=layer,
    )
    # The rank's own tokens under sequence parallelism: what is gathered for the regions is gathered again.
    x = checkpoint_name(x + drop(y, random.Site.ATTENTION_OUTPUT), "residual")
    y = _feed_forward(parameters, norm_("mlp_norm", x), context, settings, parallel)
    return x + drop(y, random.Site.MLP_OUTPUT)


def _feed_forward(
    parameters: Tree, x: Array, context: TokenContext, settings: LayerSettings, parallel: LayerParallel
) -> Array:
    axis, shard = parallel.axis, parallel.sequence_parallel
    if settings.moe is None:
        return mlp(parameters["mlp"], x, settings.mlp, axis=axis, sequence_parallel=shard)
    y = moe(
        parameters["moe"],
        x,
        settings.moe,
        parallel.experts,
        axis=axis,
        sequence_parallel=shard,
        context_axis=parallel.context.axis,
        auxiliary_weight=context.auxiliary_weight,
        padding=context.padding,
        figures_to=parameters.get(MOE_FIGURES),
    )
    shared = settings.shared_expert
    if shared is None:
        return y
    return y + mlp(parameters["moe"]["shared"], x, shared, axis=axis, sequence_parallel=shard)


@dataclasses.dataclass(frozen=True)
class SettingRun:
    """Consecutive layers with equal settings."""

    settings: LayerSettings
    num_layers: int
    layers_per_unit: int = 1
    """Over 1: what so many layers need for their backward is computed again together, from the input of the first. The
    settings are then those of a layer without recompute."""


def setting_runs(settings: Iterable[LayerSettings]) -> tuple[SettingRun, ...]:
    """Returns the runs of layers with these settings, in order. Communication: none.

    A unit of recompute ends with the run of equal settings that it stands in: the last one may be shorter, and is a run
    of its own then. (The reference's `checkpointed_forward` cuts a chunk of equal layers in the same way.)
    """
    runs = []
    for one, group in itertools.groupby(settings):
        num_layers = len(list(group))
        unit = one.recompute_unit if one.recompute == "full" else 1
        in_whole_units = num_layers - num_layers % unit
        for length, per_unit in ((in_whole_units, unit), (num_layers - in_whole_units, num_layers - in_whole_units)):
            if length:
                computed = one if per_unit == 1 else dataclasses.replace(one, recompute=None, recompute_unit=1)
                runs.append(SettingRun(computed, length, per_unit))
    return tuple(runs)


def kept_names(settings: LayerSettings) -> tuple[str, ...]:
    """Returns the names of what recompute keeps of a layer beside its input. Communication: none."""
    if settings.recompute == "full":
        return ()
    # Rows that have come and gone over ep are kept even so: to compute them again would send them again.
    feed_forward = EXPERTS_EXCHANGED if settings.recompute_mlp else (*MLP_KEPT, *EXPERTS_KEPT)
    return (*ATTENTION_KEPT, "residual", random.DROPOUT_MASK, *feed_forward)


def stacked_layer(
    parameters: Tree,
    x: Float[Array, "batch seq_local hidden"],
    context: TokenContext,
    settings: LayerSettings,
    parallel: LayerParallel,
    layer: Integer[Array, ""],
    *,
    may_be_absent: bool = False,
) -> Float[Array, "batch seq_local hidden"]:
    """Returns `transformer_layer`, computed again in its backward where the settings ask for that.

    Communication: that of `transformer_layer`; in the backward once more its all-gathers with selective recompute, its
    forward without the last reduction with full recompute.

    Args:
      parameters: of one layer.
      x: see `transformer_layer`.
      context: of the whole sequence.
      settings: numbers of the layer.
      parallel: how layers are divided.
      layer: global layer number; -1 with `may_be_absent`: no layer, x passes.
      may_be_absent: whether the number may be -1.
    """
    if may_be_absent and context.auxiliary_weight is not None:
        weight = jnp.where(layer >= 0, context.auxiliary_weight, 0.0)
        context = dataclasses.replace(context, auxiliary_weight=weight)

    def one(parameters: Tree, x: Array, layer: Array, context: TokenContext) -> Array:
        return transformer_layer(parameters, x, context, settings, parallel, layer)

    if settings.recompute is not None:
        # Inside a scan nothing can merge the second computation with the first, so that no barrier is needed.
        kept = jax.checkpoint_policies.save_only_these_names(*kept_names(settings))
        one = jax.checkpoint(one, prevent_cse=False, policy=kept)
    y = one(parameters, x, layer, context)
    return jnp.where(layer >= 0, y, x) if may_be_absent else y


def transformer_stack(
    parameters: Tree,
    x: Float[Array, "batch seq_local hidden"],
    context: TokenContext,
    settings: Sequence[LayerSettings],
    parallel: LayerParallel,
    layer_index: Integer[Array, "layers"],
) -> Float[Array, "batch seq_local hidden"]:
    """Returns x after the stacked layers, in order. Communication: that of `stacked_layer`, once a layer.

    Layers with equal settings are one scan, see `setting_runs`.

    Args:
      parameters: `layer_specs` with a leading dim of `layers`.
      x: see `transformer_layer`.
      context: of the whole sequence.
      settings: numbers of each layer.
      parallel: how layers are divided.
      layer_index: global numbers of the stacked layers.
    """
    first, stacks = 0, partial_stacks(settings)
    for run in setting_runs(settings):
        last = first + run.num_layers
        own = {}
        for key, tree in parameters.items():
            present = stacks.get(key, (True,) * len(settings))
            if present[first]:
                before = sum(present[:first])
                own[key] = jax.tree.map(lambda leaf, a=before, b=before + run.num_layers: leaf[a:b], tree)
        x = _scan_run(x, (own, jnp.asarray(layer_index)[first:last]), context, run, parallel)
        first = last
    return x


def partial_stacks(settings: Sequence[LayerSettings]) -> dict[str, tuple[bool, ...]]:
    """Returns for each key in a layer's tree that only some of the layers have whether each has it."""
    experts = tuple(one.moe is not None for one in settings)
    if all(experts) or not any(experts):
        return {}
    return {"mlp": tuple(not one for one in experts), "moe": experts, MOE_FIGURES: experts}


def _scan_run(x: Array, layers: Tree, context: TokenContext, run: SettingRun, parallel: LayerParallel) -> Array:
    def one(x: Array, scanned: tuple[Tree, Array]) -> tuple[Array, None]:
        parameters, layer = scanned
        return stacked_layer(parameters, x, context, run.settings, parallel, layer), None

    if run.layers_per_unit == 1:
        return lax.scan(one, x, layers)[0]

    def unit(x: Array, scanned: Tree) -> tuple[Array, None]:
        return lax.scan(one, x, scanned)

    units = jax.tree.map(lambda leaf: leaf.reshape(-1, run.layers_per_unit, *leaf.shape[1:]), layers)
    return lax.scan(jax.checkpoint(unit, prevent_cse=False), x, units)[0]
