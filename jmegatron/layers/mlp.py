"""The feed-forward part of a layer, plain or gated, divided over its inner size. Talks on the axis it is given (tp).

Source: arXiv:1909.08053 section 3, gated arXiv:2002.05202; Megatron-LM transformer/mlp.py.

    up    kernel [hidden, ffn]       plain;  [hidden, 2, ffn] gated (gate, then up); bias [ffn] or [2, ffn]
    down  kernel [ffn, hidden]       bias [hidden]

The inner dim is divided, so a rank holds gate_r and up_r of the same columns (a slice of the concatenation would not).
"""

import dataclasses

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jmegatron.layers.linear import (
    column_parallel_linear,
    column_parallel_specs,
    row_parallel_linear,
    row_parallel_specs,
)
from jmegatron.ops.activations import activate, is_gated
from jmegatron.partition import Initializer, Tree

MLP_KEPT = ("mlp_pre_activation",)
"""Name of what selective recompute keeps of this layer, 2 seq ffn bytes in half precision, divided over the axis."""


@dataclasses.dataclass(frozen=True)
class MLPSettings:
    """Plain numbers of a feed-forward layer."""

    hidden_size: int
    ffn_hidden_size: int
    activation: str = "gelu_tanh"
    use_bias: bool = True


def mlp_specs(
    settings: MLPSettings,
    *,
    axis: str | None,
    sequence_parallel: bool = False,
    kernel_init: Initializer | None = None,
    output_init: Initializer | None = None,
) -> Tree:
    """Returns the declarations above.

    Raises:
      ValueError: unknown activation.
    """
    s = settings
    inner = (2, s.ffn_hidden_size) if is_gated(s.activation) else s.ffn_hidden_size
    return {
        "up": column_parallel_specs(s.hidden_size, inner, axis=axis, use_bias=s.use_bias, kernel_init=kernel_init),
        "down": row_parallel_specs(
            s.ffn_hidden_size,
            s.hidden_size,
            axis=axis,
            use_bias=s.use_bias,
            sequence_parallel=sequence_parallel,
            kernel_init=output_init or kernel_init,
        ),
    }


def mlp(
    parameters: Tree,
    x: Float[Array, "batch seq_in hidden"],
    settings: MLPSettings,
    *,
    axis: str | None,
    sequence_parallel: bool = False,
) -> Float[Array, "batch seq_in hidden"]:
    """Returns down(activation(up(x))).

    Communication over axis, B = bytes of the whole x: forward one all-reduce of B, backward one all-reduce of B
    (sequence_parallel: one all-gather and one reduce-scatter of B each way).
    """
    y = column_parallel_linear(parameters["up"], x, axis=axis, sequence_parallel=sequence_parallel)

    def down(parameters: Tree, y: Array) -> Array:
        y = activate(settings.activation, y)
        return row_parallel_linear(parameters, y, axis=axis, sequence_parallel=sequence_parallel)

    # The product's input for backward is the activation, an elementwise function of what its own backward keeps: it is
    # computed again, the product is not (its backward does not need its result). No cse barrier, see `activate`.
    return jax.checkpoint(down, prevent_cse=False)(parameters["down"], checkpoint_name(y, *MLP_KEPT))
