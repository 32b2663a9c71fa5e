"""Loss scaling for float16: a factor that keeps small gradients above float16's smallest number.

No communication. Source: Megatron-LM core/optimizer/grad_scaler.py.

    loss weights (fp32) * scale -> backward, in float16 inside the layers -> fp32 gradients -> / scale
    -> is every gradient's norm finite? -> update(scale) -> clip and optimizer, or weights, moments, schedule as before

The scale multiplies the objective while it is still fp32 (2^32 is beyond float16's 65504), so that the first cotangent
that is cast to float16 is scaled already; where that overflows, inf runs through to the gradients, and the step is
skipped. Growth and backoff are powers of two by default: scaling and unscaling then round nothing, and 2^32 is exact.

The hysteresis counter is refilled when the scale grows, and not by a clean step: once it is used up, every overflow
lowers the scale until a whole window of clean steps has passed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jmegatron.partition import Tree


@dataclasses.dataclass(frozen=True)
class LossScalerSettings:
    """Plain numbers of the scaler.

    Raises:
      ValueError: a number is out of range.
    """

    initial: float = 2.0**32
    minimum: float = 1.0
    window: int = 1000
    """Clean steps in a row after which the scale grows."""
    hysteresis: int = 2
    """Overflows since the last growth (or the start) from which on each one lowers the scale."""
    growth: float = 2.0
    backoff: float = 0.5
    constant: float | None = None
    """A scale that never changes; the others do not count then."""

    def __post_init__(self) -> None:
        if self.constant is not None and not self.constant > 0:
            raise ValueError(f"loss_scale: got {self.constant}, expected above 0")
        if not 0 < self.minimum <= self.initial:
            raise ValueError(
                f"initial_loss_scale {self.initial}, min_loss_scale {self.minimum}: expected 0 < minimum <= initial"
            )
        if self.window < 1 or self.hysteresis < 1:
            raise ValueError(
                f"loss_scale_window {self.window}, hysteresis {self.hysteresis}: expected at least 1 of both"
            )
        if not (self.growth > 1 and 0 < self.backoff < 1):
            raise ValueError(f"growth {self.growth}, backoff {self.backoff}: expected growth > 1, 0 < backoff < 1")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """What the scaler carries from step to step. A pytree (its fields also hold shardings and abstract arrays)."""

    scale: Any
    """fp32 scalar."""
    growth_tracker: Any
    """int32 scalar: clean steps since the last overflow or growth."""
    hysteresis_tracker: Any
    """int32 scalar: overflows that are left before the scale falls; at 0 and below each one lowers it."""


def init(settings: LossScalerSettings) -> LossScale:
    """Returns the state before the first step."""
    scale = settings.initial if settings.constant is None else settings.constant
    return LossScale(jnp.float32(scale), jnp.int32(0), jnp.int32(settings.hysteresis))


def update(settings: LossScalerSettings, state: LossScale, found_inf: Bool[Array, ""] | bool) -> LossScale:
    """Returns the state for the next step. Communication: none.

    Args:
      settings: of the scaler.
      state: whose scale this step's gradients were computed with.
      found_inf: whether any of them, on any rank, was inf or NaN.
    """
    if settings.constant is not None:
        return state
    found = jnp.asarray(found_inf)
    growth_tracker = jnp.where(found, 0, state.growth_tracker + 1)
    hysteresis_tracker = state.hysteresis_tracker - found.astype(jnp.int32)
    grows = growth_tracker == settings.window
    falls = found & (hysteresis_tracker <= 0)
    grown = jnp.where(grows, state.scale * settings.growth, state.scale)
    lowered = jnp.maximum(state.scale * settings.backoff, settings.minimum)
    return LossScale(
        scale=jnp.where(falls, lowered, grown),
        growth_tracker=jnp.where(grows, 0, growth_tracker),
        hysteresis_tracker=jnp.where(grows, settings.hysteresis, hysteresis_tracker),
    )


def unscale(gradients: Tree, state: LossScale) -> Tree:
    """Returns the gradients of the unscaled objective in fp32. Communication: none."""
    # Cast first: divided by 2^32 most gradients would fall below float16's smallest number again.
    inverse = 1.0 / state.scale
    return jax.tree.map(lambda g: g.astype(jnp.float32) * inverse, gradients)
