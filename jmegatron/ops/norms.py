"""LayerNorm and RMSNorm over the last dim. No communication; under sequence parallelism each rank norms its tokens.

Statistics in fp32 whatever the input's dtype; the result has the input's dtype. Megatron-LM: torch.nn.LayerNorm
(biased variance, eps inside the root) and RMSNorm. With n = (x - mean) r, r = 1 / sqrt(var + eps) and g = dy scale:

    dx = r (g - avg(g) - n avg(g n))      dscale = sum over tokens of dy n      dbias = sum over tokens of dy

avg is over the last dim; without mean and avg(g) for RMSNorm. Backward in fp32 from x, mean and r alone: plain autodiff
would keep three fp32 arrays of x's size.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jmegatron.collectives import vary_like


def layer_norm(
    x: Float[Array, "*batch hidden"],
    scale: Float[Array, "hidden"],
    bias: Float[Array, "hidden"] | None,
    eps: float = 1e-5,
) -> Float[Array, "*batch hidden"]:
    """Returns (x - mean) / sqrt(var + eps) * scale + bias, var being the biased variance. Communication: none."""
    return _apply(True, eps, x, scale, bias)


def rms_norm(
    x: Float[Array, "*batch hidden"], scale: Float[Array, "hidden"], eps: float = 1e-5
) -> Float[Array, "*batch hidden"]:
    """Returns x / sqrt(mean(x^2) + eps) * scale. Communication: none."""
    return _apply(False, eps, x, scale, None)


def _apply(centered: bool, eps: float, x: Array, scale: Array, bias: Array | None) -> Array:
    # Outside the custom gradient, so that autodiff adds whatever reduction the caller's sharding asks for.
    together = x, scale, bias
    return _norm(centered, eps, *(vary_like(each, together) for each in together))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _norm(centered: bool, eps: float, x: Array, scale: Array, bias: Array | None) -> Array:
    return _forward(centered, eps, x, scale, bias)[0]


def _forward(centered: bool, eps: float, x: Array, scale: Array, bias: Array | None):
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True) if centered else None
    y = y if mean is None else y - mean
    inverse = lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    y = y * inverse * scale.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype), (x, scale, bias, mean, inverse)


def _backward(centered: bool, eps: float, residuals, cotangent: Array) -> tuple[Array, Array, Array | None]:
    x, scale, bias, mean, inverse = residuals
    normed = x.astype(jnp.float32)
    normed = (normed - mean if centered else normed) * inverse
    cotangent = cotangent.astype(jnp.float32)
    scaled = cotangent * scale.astype(jnp.float32)
    dx = scaled - normed * (scaled * normed).mean(-1, keepdims=True)
    if centered:
        dx = dx - scaled.mean(-1, keepdims=True)
    tokens = tuple(range(x.ndim - 1))
    dscale = (cotangent * normed).sum(tokens).astype(scale.dtype)
    dbias = None if bias is None else cotangent.sum(tokens).astype(bias.dtype)
    return (dx * inverse).astype(x.dtype), dscale, dbias


_norm.defvjp(_forward, _backward)
