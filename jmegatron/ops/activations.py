"""Activations of the MLP, plain and gated. No communication.

Names are explicit because the reference picks between two GELU formulas by its fusion flags (Megatron-LM
fusions/fused_bias_gelu.py, mlp.py:300-336). Computed in the input's dtype.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

GELU_TANH_CONSTANT = 0.79788456
"""sqrt(2/pi) to the eight digits that the reference's fused kernel uses."""


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the tanh approximation of GELU with the reference's constants."""
    return 0.5 * x * (1.0 + jnp.tanh(GELU_TANH_CONSTANT * x * (1.0 + 0.044715 * x * x)))


def _normal_cdf(x: Array) -> Array:
    return 0.5 * lax.erfc(-x * math.sqrt(0.5))


@jax.custom_jvp
def gelu_erf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the exact GELU, x times the normal distribution function."""
    return x * _normal_cdf(x)


# By hand: in jax 0.12.0 the derivative of erf cannot be traced inside shard_map(check_vma=True).
@gelu_erf.defjvp
def _gelu_erf_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    cdf = _normal_cdf(x)
    density = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return x * cdf, tangent * (cdf + x * density)


def squared_relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns relu(x)^2."""
    return jnp.square(jax.nn.relu(x))


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns x sigmoid(1.702 x)."""
    return x * jax.nn.sigmoid(1.702 * x)


_FUNCTIONS: dict[str, tuple[Callable[[Array], Array], bool]] = {
    "gelu_tanh": (gelu_tanh, False),
    "gelu_erf": (gelu_erf, False),
    "squared_relu": (squared_relu, False),
    "quick_gelu": (quick_gelu, False),
    "swiglu": (jax.nn.silu, True),
    "geglu": (gelu_tanh, True),
    "geglu_erf": (gelu_erf, True),
}
ACTIVATIONS = tuple(_FUNCTIONS)


def _lookup(name: str) -> tuple[Callable[[Array], Array], bool]:
    if name not in _FUNCTIONS:
        raise ValueError(f"activation: got {name!r}, expected one of {', '.join(ACTIVATIONS)}")
    return _FUNCTIONS[name]


def is_gated(name: str) -> bool:
    """Returns whether the activation multiplies a gate with a second projection.

    Raises:
      ValueError: unknown name.
    """
    return _lookup(name)[1]


def activate(name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the activation of x: [..., ffn] plain; [..., 2, ffn] (gate, up) -> [..., ffn] gated.

    Raises:
      ValueError: unknown name, or a gated activation whose second to last dim is not 2.
    """
    function, gated = _lookup(name)
    if gated and (x.ndim < 2 or x.shape[-2] != 2):
        raise ValueError(f"activation {name}: expected shape [..., 2, ffn] (gate, up), got {x.shape}")

    def compute(x: Array) -> Array:
        return function(x[..., 0, :]) * x[..., 1, :] if gated else function(x)

    # Plain autodiff would keep up to four arrays of the ffn size for backward (tanh, its argument, ...); this keeps x
    # alone and computes the elementwise rest again. prevent_cse is for code outside a scan: here it costs copies.
    return jax.checkpoint(compute, prevent_cse=False)(x)
