"""Learning rate and weight decay of each update. No communication. Megatron-LM core/optimizer_param_scheduler.py.

The reference counts in samples; with a constant global batch that is updates times the batch, so `count` here is the
number of updates done so far, and a length may be a fraction of an update. The first update sees count 0: with a
warm-up from 0 its learning rate is 0, as in the reference. A step that is skipped is no update and moves nothing.

    n updates done, W warm-up, D decay (W included), A = D - (WSD's decay);  left(a, b) = (b - n) / (b - a)
    n <= W               warmup_start + (peak - warmup_start) n / W
    constant             peak, at any n > W
    n > D                minimum
    inverse-square-root  max(minimum, peak sqrt(max(W, 1) / max(n, 1))), W and n in samples
    others               minimum + c (peak - minimum):
      linear  c = left(W, D)
      cosine  c = sin(pi/2 left(W, D))^2           = (1 + cos(pi (1 - left))) / 2
      WSD     c = 1 up to A, then with q = left(A, D)
              linear q, cosine sin(pi/2 q)^2, exponential 2^q - 1, minus_sqrt q / (1 + sqrt(1 - q)) = 1 - sqrt(1 - q)
    weight decay         start + c (end - start), r = n / steps up to 1: linear c = r, cosine c = sin(pi/2 r)^2

Written with what is left of a decay, since nothing then cancels near its end: fp32 keeps its 1e-7 of every value, where
1 + cos would lose it. Whole updates are counted in integers, so that no bound is missed by rounding.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
INCREMENTS = ("constant", "linear", "cosine")
_LARGEST_COUNT = 2**31 - 1


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
    wsd_style: str = "exponential"
    wsd_decay: float | None = None
    """Updates of the last phase of WSD, needed for it alone."""
    samples_per_update: int = 1
    """Global batch; only inverse-square-root asks, whose warm-up is at least one sample."""

    def __post_init__(self) -> None:
        _check_choice("lr_decay_style", self.style, STYLES)
        _check_choice("lr_wsd_decay_style", self.wsd_style, WSD_STYLES)
        if self.decay <= 0 or not 0 <= self.warmup < self.decay:
            raise ValueError(
                f"lr_decay_iters {self.decay} and lr_warmup_iters {self.warmup}: expected 0 <= warm-up < decay"
            )
        if self.style == "WSD" and not (self.wsd_decay and self.wsd_decay > 0):
            raise ValueError(f"lr_wsd_decay_iters {self.wsd_decay}: expected a positive number with lr_decay_style WSD")

    def __call__(self, count: Integer[Array, ""] | int) -> Float[Array, ""]:
        """Returns the learning rate."""
        return self._rate(jnp.asarray(count), jnp.float32, jnp)

    def in_float64(self, counts: Integer[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Returns the same in float64, computed on the host."""
        return self._rate(counts, np.float64, np)

    def _rate(self, count: Any, dtype: Any, xp: Any) -> Any:
        decayed = self._decayed(count, dtype, xp)
        if self.style != "constant":
            decayed = xp.where(count > _whole(self.decay), dtype(self.minimum), decayed)
        if self.warmup == 0:
            return decayed
        done = count.astype(dtype) / dtype(self.warmup)
        warm = dtype(self.warmup_start) + dtype(self.peak - self.warmup_start) * done
        # "<=": the update at exactly the warm-up's end still belongs to it (optimizer_param_scheduler.py:181).
        return xp.where(count <= _whole(self.warmup), warm, decayed)

    def _decayed(self, count: Any, dtype: Any, xp: Any) -> Any:
        if self.style == "constant":
            return xp.full(count.shape, self.peak, dtype)
        if self.style == "inverse-square-root":
            first = max(self.warmup * self.samples_per_update, 1.0)
            # No update has fewer samples than 1, so that only count 0 needs the reference's floor.
            samples = xp.maximum(count.astype(dtype) * dtype(self.samples_per_update), dtype(1))
            return xp.maximum(dtype(self.minimum), dtype(self.peak) * xp.sqrt(dtype(first) / samples))
        if self.style == "WSD":
            assert self.wsd_decay is not None
            start = self.decay - self.wsd_decay
            left = xp.minimum(_left(count, start, self.decay, dtype), dtype(1))  # before the last phase: all
            if self.wsd_style == "minus_sqrt":
                done = xp.maximum(_left(count, self.decay, start, dtype), dtype(0))  # 1 - left would cancel
                part = left / (dtype(1) + xp.sqrt(done))
            else:
                part = _falling(self.wsd_style, left, dtype, xp)
        else:
            part = _falling(self.style, _left(count, self.warmup, self.decay, dtype), dtype, xp)
        return dtype(self.minimum) + part * dtype(self.peak - self.minimum)


@dataclasses.dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay that grows. Calling it gives the fp32 decay of the update after `count` updates."""

    style: str
    start: float
    end: float
    steps: float
    """Updates until the end: those of the whole run."""

    def __post_init__(self) -> None:
        _check_choice("weight_decay_incr_style", self.style, INCREMENTS)
        if not 0 <= self.start <= self.end:
            raise ValueError(
                f"start_weight_decay {self.start} and end_weight_decay {self.end}: expected 0 <= start <= end"
            )

    def __call__(self, count: Integer[Array, ""] | int) -> Float[Array, ""]:
        """Returns the weight decay."""
        return self._decay(jnp.asarray(count), jnp.float32, jnp)

    def in_float64(self, counts: Integer[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Returns the same in float64, computed on the host."""
        return self._decay(counts, np.float64, np)

    def _decay(self, count: Any, dtype: Any, xp: Any) -> Any:
        if self.style == "constant":
            return xp.full(count.shape, self.end, dtype)
        grown = xp.minimum(count.astype(dtype) / dtype(self.steps), dtype(1))
        part = _falling(self.style, grown, dtype, xp)
        return xp.where(grown < 1, dtype(self.start) + part * dtype(self.end - self.start), dtype(self.end))


def _whole(bound: float) -> int:
    """Returns the largest count that is at most `bound`."""
    return min(math.floor(bound), _LARGEST_COUNT)


def _left(count: Any, first: float, last: float, dtype: Any) -> Any:
    """Returns (last - count) / (last - first), each difference rounded once however large the count."""
    whole = _whole(last)
    return ((whole - count).astype(dtype) + dtype(last - whole)) / dtype(last - first)


def _falling(style: str, left: Any, dtype: Any, xp: Any) -> Any:
    """Returns the part of (peak - minimum) where `left` of the decay is left; 1 at 1, 0 at 0."""
    if style == "linear":
        return left
    if style == "cosine":
        return xp.square(xp.sin(dtype(math.pi / 2) * left))
    assert style == "exponential"
    return xp.expm1(dtype(math.log(2.0)) * left)


def _check_choice(option: str, got: str, choices: tuple[str, ...]) -> None:
    if got not in choices:
        raise ValueError(f"{option}: got {got!r}, expected one of {', '.join(choices)}")
