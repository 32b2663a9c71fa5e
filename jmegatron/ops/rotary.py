"""Rotary position embedding. No communication. Megatron-LM rotary_pos_embedding.py:72-133, rope_utils.py:73-156.

Angles, cosines and the rotation in fp32 (the reference's fused kernel; its unfused path rounds cos and sin to bf16).
"""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """How Llama 3.1 slows rotations down, for sequences longer than those of the pre-training.

    What turns once or less over the `original_positions` turns `factor` times slower, what turns `high_turns` times or
    more is left alone, so that near positions stay apart as they were; between the two the change is gradual.
    """

    factor: float = 8.0
    low_turns: float = 1.0
    high_turns: float = 4.0
    original_positions: int = 8192


def rotary_angles(
    positions: Integer[Array, "batch seq"],
    rotary_dim: int,
    *,
    base: float = 10000.0,
    interpolation_factor: float = 1.0,
    scaling: RotaryScaling | None = None,
) -> Float[Array, "batch seq half"]:
    """Returns the fp32 angle position / factor x f_i with f_i = base^(-2i / rotary_dim), i = 0 .. rotary_dim/2 - 1.

    With scaling f_i becomes (1 - k) f_i / scaling.factor + k f_i, where f_i makes n_i = original_positions f_i / 2 pi
    turns and k = (n_i - low_turns) / (high_turns - low_turns), at least 0 and at most 1.

    Raises:
      ValueError: rotary_dim is odd or below 2.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and at least 2, got {rotary_dim}")
    exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    frequencies = 1.0 / (base**exponents)
    if scaling is not None:
        turns = frequencies * (scaling.original_positions / (2 * math.pi))
        kept = jnp.clip((turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns), 0.0, 1.0)
        frequencies = (1.0 - kept) * frequencies / scaling.factor + kept * frequencies
    return positions.astype(jnp.float32)[..., None] / interpolation_factor * frequencies


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
