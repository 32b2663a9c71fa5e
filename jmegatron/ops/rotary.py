"""Rotary position embedding. No communication. Megatron-LM rotary_pos_embedding.py:72-81, rope_utils.py:73-156.

Angles, cosines and the rotation in fp32 (the reference's fused kernel; its unfused path rounds cos and sin to bf16).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer


def rotary_angles(
    positions: Integer[Array, "batch seq"],
    rotary_dim: int,
    *,
    base: float = 10000.0,
    interpolation_factor: float = 1.0,
) -> Float[Array, "batch seq half"]:
    """Returns the fp32 angle position / factor x base^(-2i / rotary_dim), i = 0 .. rotary_dim/2 - 1.

    Raises:
      ValueError: rotary_dim is odd or below 2.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and at least 2, got {rotary_dim}")
    exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    inverse_frequencies = 1.0 / (base**exponents)
    return positions.astype(jnp.float32)[..., None] / interpolation_factor * inverse_frequencies


def apply_rotary(
    x: Float[Array, "batch seq heads head_dim"],
    angles: Float[Array, "#batch seq half"],
    *,
    interleaved: bool = False,
) -> Float[Array, "batch seq heads head_dim"]:
    """Returns x with its first 2 x half channels rotated by the angles; the other channels pass.

    Pairs are (i, i + half) by default and (2i, 2i + 1) with `interleaved`.

    Raises:
      ValueError: 2 x half exceeds head_dim.
    """
    half = angles.shape[-1]
    if 2 * half > x.shape[-1]:
        raise ValueError(f"rotary dim {2 * half} exceeds the head dim {x.shape[-1]}")
    turned = x[..., : 2 * half].astype(jnp.float32)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    parts = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        turned = jnp.stack(parts, axis=-1).reshape(turned.shape)
    else:
        turned = jnp.concatenate(parts, axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)
