"""A pre-norm transformer layer and the scanned stack of equal layers. Talks on tp, through its layers.

Source: Megatron-LM transformer/transformer_layer.py, fusions/fused_bias_dropout.py:42-59.

    x = x + dropout(attention(norm(x)))
    x = x + dropout(mlp(norm(x)))

Without sequence parallelism x is whole and replicated over tp; with it each rank keeps seq / tp tokens of x, so norms,
dropout and residuals cost 1/tp. The layers' parameters are stacked along a leading dim and scanned: compile time does
not grow with depth.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from jmegatron import partition, random
from jmegatron.collectives import own_slice
from jmegatron.layers.attention import ATTENTION_KEPT, AttentionSettings, TokenContext, attention_specs, self_attention
from jmegatron.layers.mlp import MLP_KEPT, MLPSettings, mlp, mlp_specs
from jmegatron.layers.norm import norm, norm_specs
from jmegatron.partition import Tree

Recompute = Literal["selective", "full"]


@dataclasses.dataclass(frozen=True)
class LayerParallel:
    """How layers are divided: the mesh axis, its size, and whether the sequence between them is divided too."""

    axis: str | None = None
    num_ranks: int = 1
    sequence_parallel: bool = False

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


def layer_specs(
    settings: LayerSettings,
    parallel: LayerParallel,
    *,
    kernel_init: partition.Initializer,
    output_init: partition.Initializer,
) -> Tree:
    """Returns the declarations of one layer: input_norm, attention, mlp_norm, mlp.

    Raises:
      ValueError: heads cannot be divided over the ranks.
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
        "mlp": mlp_specs(
            settings.mlp,
            axis=parallel.axis,
            sequence_parallel=parallel.sequence_parallel,
            kernel_init=kernel_init,
            output_init=output_init,
        ),
    }


def transformer_layer(
    parameters: Tree,
    x: Float[Array, "batch seq_local hidden"],
    context: TokenContext,
    settings: LayerSettings,
    parallel: LayerParallel,
    layer: int | Integer[Array, ""] = 0,
) -> Float[Array, "batch seq_local hidden"]:
    """Returns the layer's output.

    Communication over tp, B = bytes of the whole x: forward 2 all-reduces of B, backward 2 (sequence parallel: 2
    all-gathers and 2 reduce-scatters each way, which send the same bytes).

    Args:
      parameters: this rank's part of `layer_specs`.
      x: whole sequence, or this rank's shard under sequence parallelism.
      context: of the whole sequence.
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
        layer=layer,
    )
    # The rank's own tokens under sequence parallelism: what is gathered for the regions is gathered again.
    x = checkpoint_name(x + drop(y, random.Site.ATTENTION_OUTPUT), "residual")
    y = mlp(parameters["mlp"], norm_("mlp_norm", x), settings.mlp, axis=axis, sequence_parallel=shard)
    return x + drop(y, random.Site.MLP_OUTPUT)


def kept_names(settings: LayerSettings) -> tuple[str, ...]:
    """Returns the names of what recompute keeps of a layer beside its input. Communication: none."""
    if settings.recompute == "full":
        return ()
    return (*ATTENTION_KEPT, "residual", random.DROPOUT_MASK, *(() if settings.recompute_mlp else MLP_KEPT))


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
    settings: LayerSettings,
    parallel: LayerParallel,
    layer_index: Integer[Array, "layers"],
) -> Float[Array, "batch seq_local hidden"]:
    """Returns x after the stacked layers, in order. Communication: that of `stacked_layer`, once a layer.

    Args:
      parameters: `layer_specs` with a leading dim of `layers`.
      x: see `transformer_layer`.
      context: of the whole sequence.
      settings: numbers of each layer.
      parallel: how layers are divided.
      layer_index: global numbers of the stacked layers.
    """

    def body(x: Array, scanned: tuple[Tree, Array]) -> tuple[Array, None]:
        layer_parameters, layer = scanned
        return stacked_layer(layer_parameters, x, context, settings, parallel, layer), None

    return lax.scan(body, x, (parameters, jnp.asarray(layer_index)))[0]
