"""Learning-rate schedules of the reference. No communication. Megatron-LM core/optimizer_param_scheduler.py.

The reference counts in samples; with a constant global batch that is iterations times the batch, so `count` here is the
number of updates done so far and a warm-up may be a fraction of an iteration. The first update sees count 0: with a
warm-up from 0 its learning rate is 0, as in the reference.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

STYLES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class LearningRateSchedule:
    """Warm-up, then decay. Calling it gives the fp32 learning rate of the update after `count` updates."""

    style: str
    peak: float
    minimum: float
    warmup: float
    """Updates (may be fractional)."""
    decay: float
    """Updates until the minimum, warm-up included."""
    warmup_start: float = 0.0

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise ValueError(f"lr_decay_style: got {self.style!r}, expected one of {', '.join(STYLES)}")
        if self.decay <= 0 or not 0 <= self.warmup < self.decay:
            raise ValueError(
                f"lr_decay_iters {self.decay} and lr_warmup_iters {self.warmup}: expected 0 <= warm-up < decay"
            )

    def __call__(self, count: Integer[Array, ""] | int) -> Float[Array, ""]:
        """Returns the learning rate."""
        count = jnp.asarray(count, jnp.float32)
        warm = self.warmup_start + (self.peak - self.warmup_start) * count / max(self.warmup, 1e-30)
        ratio = (count - self.warmup) / (self.decay - self.warmup)
        if self.style == "constant":
            decayed = jnp.full_like(count, self.peak)
        else:
            part = 1.0 - ratio if self.style == "linear" else 0.5 * (jnp.cos(jnp.pi * ratio) + 1.0)
            decayed = self.minimum + part * (self.peak - self.minimum)
            decayed = jnp.where(count > self.decay, self.minimum, decayed)
        # "<=": the update at exactly the warm-up's end still belongs to it (optimizer_param_scheduler.py:181).
        in_warmup = (count <= self.warmup) & (self.warmup > 0)
        return jnp.where(in_warmup, warm, decayed)
