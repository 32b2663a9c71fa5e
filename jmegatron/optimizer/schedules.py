"""Learning rate and weight decay of each update. No communication. Megatron-LM core/optimizer_param_scheduler.py.

The reference counts samples, and so do the lengths here: n is the number of samples of the updates done so far. What is
called is a function of `count`, the number of those updates, which the optimizer carries: n grows by the global batch
with each, and where a run went on from a checkpoint it does so from the samples that were counted there, whatever the
batch was before (`Position`). The first update sees n = 0: with a warm-up from 0 its learning rate is 0, as in the
reference. A step that is skipped is no update and moves nothing.

    n samples done, W warm-up, D decay (W included), A = D - (WSD's decay);  left(a, b) = (b - n) / (b - a)
    n <= W               warmup_start + (peak - warmup_start) n / W
    constant             peak, at any n > W
    n > D                minimum
    inverse-square-root  max(minimum, peak sqrt(max(W, 1) / max(n, 1)))
    others               minimum + c (peak - minimum):
      linear  c = left(W, D)
      cosine  c = sin(pi/2 left(W, D))^2           = (1 + cos(pi (1 - left))) / 2
      WSD     c = 1 up to A, then with q = left(A, D)
              linear q, cosine sin(pi/2 q)^2, exponential 2^q - 1, minus_sqrt q / (1 + sqrt(1 - q)) = 1 - sqrt(1 - q)
    weight decay         start + c (end - start), r = n / steps up to 1: linear c = r, cosine c = sin(pi/2 r)^2

Written with what is left of a decay, since nothing then cancels near its end: fp32 keeps its 1e-7 of every value, where
1 + cos would lose it. Bounds are turned into updates as exact fractions, and whole updates are counted in integers: no
bound is missed by rounding, and samples beyond 32 bits do not overflow.
"""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
INCREMENTS = ("constant", "linear", "cosine")
_LARGEST_COUNT = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Position:
    """Where the schedules stand: after so many updates they have counted so many samples."""

    updates: int = 0
    samples: int = 0

    def after(self, updates: int, samples_per_update: int) -> "Position":
        """Returns where they stand after `updates` updates in all, those since here of so many samples each."""
        return Position(updates, self.samples + (updates - self.updates) * samples_per_update)


START = Position()
"""Where a run begins that goes on from no checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _InSamples:
    """What turns samples into updates."""

    samples_per_update: int = 1
    """Global batch."""
    position: Position = START
    """Where updates of so many samples began."""

    def _bound(self, samples: float) -> Fraction:
        """Returns the number of updates, whole or not, after which `samples` are counted."""
        return self.position.updates + (Fraction(samples) - self.position.samples) / self.samples_per_update

    def _since(self, count: Any, first: float, dtype: Any) -> Any:
        """Returns the updates since `first` samples were counted, rounded once however large count is."""
        bound = self._bound(first)
        whole = _whole(bound)
        return (count - whole).astype(dtype) - dtype(float(bound - whole))

    def _left(self, count: Any, first: float, last: float, dtype: Any) -> Any:
        """Returns (last - n) / (last - first), where n is the samples after `count` updates."""
        length = Fraction(last) - Fraction(first)
        return -self._since(count, last, dtype) / dtype(float(length / self.samples_per_update))


@dataclasses.dataclass(frozen=True)
class LearningRateSchedule(_InSamples):
    """Warm-up, then decay. Calling it gives the fp32 learning rate of the update after `count` updates."""

    style: str
    peak: float
    minimum: float
    warmup: float
    """Samples (may be fractional)."""
    decay: float
    """Samples until the minimum, warm-up included."""
    warmup_start: float = 0.0
    wsd_style: str = "exponential"
    wsd_decay: float | None = None
    """Samples of the last phase of WSD, needed for it alone."""

    def __post_init__(self) -> None:
        _check_choice("lr_decay_style", self.style, STYLES)
        _check_choice("lr_wsd_decay_style", self.wsd_style, WSD_STYLES)
        if self.decay <= 0 or not 0 <= self.warmup < self.decay:
            raise ValueError(
                f"lr_decay_samples {self.decay} and lr_warmup_samples {self.warmup}: expected 0 <= warm-up < decay"
            )
        if self.style == "WSD" and not (self.wsd_decay and self.wsd_decay > 0):
            raise ValueError(f"lr_wsd_decay_samples {self.wsd_decay}: expected above 0 with lr_decay_style WSD")

    def __call__(self, count: Integer[Array, ""] | int) -> Float[Array, ""]:
        """Returns the learning rate."""
        return self._rate(jnp.asarray(count), jnp.float32, jnp)

    def in_float64(self, counts: Integer[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
        """Returns the same in float64, computed on the host."""
        return self._rate(counts, np.float64, np)

    def _rate(self, count: Any, dtype: Any, xp: Any) -> Any:
        decayed = self._decayed(count, dtype, xp)
        if self.style != "constant":
            decayed = xp.where(count > _whole(self._bound(self.decay)), dtype(self.minimum), decayed)
        if self.warmup == 0:
            return decayed
        done = self._since(count, 0.0, dtype) / dtype(self.warmup / self.samples_per_update)
        warm = dtype(self.warmup_start) + dtype(self.peak - self.warmup_start) * done
        # "<=": the update at exactly the warm-up's end still belongs to it (optimizer_param_scheduler.py:181).
        return xp.where(count <= _whole(self._bound(self.warmup)), warm, decayed)

    def _decayed(self, count: Any, dtype: Any, xp: Any) -> Any:
        if self.style == "constant":
            return xp.full(count.shape, self.peak, dtype)
        if self.style == "inverse-square-root":
            # No update has fewer samples than 1, so that only n = 0 needs the reference's floor.
            samples = xp.maximum(self._since(count, 0.0, dtype) * dtype(self.samples_per_update), dtype(1))
            return xp.maximum(dtype(self.minimum), dtype(self.peak) * xp.sqrt(dtype(max(self.warmup, 1.0)) / samples))
        if self.style == "WSD":
            assert self.wsd_decay is not None
            start = self.decay - self.wsd_decay
            left = xp.minimum(self._left(count, start, self.decay, dtype), dtype(1))  # before the last phase: all
            if self.wsd_style == "minus_sqrt":
                done = xp.maximum(self._left(count, self.decay, start, dtype), dtype(0))  # 1 - left would cancel
                part = left / (dtype(1) + xp.sqrt(done))
            else:
                part = _falling(self.wsd_style, left, dtype, xp)
        else:
            part = _falling(self.style, self._left(count, self.warmup, self.decay, dtype), dtype, xp)
        return dtype(self.minimum) + part * dtype(self.peak - self.minimum)


@dataclasses.dataclass(frozen=True)
class WeightDecaySchedule(_InSamples):
    """Weight decay that grows. Calling it gives the fp32 decay of the update after `count` updates."""

    style: str
    start: float
    end: float
    steps: float
    """Samples until the end: those of the whole run."""

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
        grown = self._since(count, 0.0, dtype) / dtype(self.steps / self.samples_per_update)
        grown = xp.minimum(grown, dtype(1))
        part = _falling(self.style, grown, dtype, xp)
        return xp.where(grown < 1, dtype(self.start) + part * dtype(self.end - self.start), dtype(self.end))


def _whole(bound: Fraction) -> int:
    """Returns the largest count that is at most `bound`; -1: none is."""
    return min(max(math.floor(bound), -1), _LARGEST_COUNT)


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
