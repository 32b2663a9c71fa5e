"""LayerNorm and RMSNorm over the last dim. No communication; under sequence parallelism each rank norms its tokens.

Statistics in fp32 whatever the input's dtype; the result has the input's dtype. Megatron-LM: torch.nn.LayerNorm
(biased variance, eps inside the root) and RMSNorm.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def layer_norm(
    x: Float[Array, "*batch hidden"],
    scale: Float[Array, "hidden"],
    bias: Float[Array, "hidden"] | None,
    eps: float = 1e-5,
) -> Float[Array, "*batch hidden"]:
    """Returns (x - mean) / sqrt(var + eps) * scale + bias, var being the biased variance. Communication: none."""
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps) * scale.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*batch hidden"], scale: Float[Array, "hidden"], eps: float = 1e-5
) -> Float[Array, "*batch hidden"]:
    """Returns x / sqrt(mean(x^2) + eps) * scale. Communication: none."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps) * scale.astype(jnp.float32)
    return y.astype(x.dtype)
