"""Blends: which corpus each sample of a mixture comes from, and how it is written down (no communication).

Sample t = 0, 1, 2, ... goes to the corpus that lags furthest behind its share: with weights w (sum 1, float64) and
counts c of samples given so far, the first i with the largest

    w_i * max(t, 1) - c_i

(Megatron-LM core/datasets/helpers.cpp:103-129; `build_exhaustive_blending_indices` there leaves out a corpus once all
its samples are given). The rule is sequential. It is evaluated here in many blocks of t side by side: each block starts
a little early from estimated counts, and since two runs of this rule approach one another (for the difference d of
their counts, sum d_i^2 never grows), the estimate is forgotten before the block begins. That is checked, not believed:
a block whose first counts are not the last ones of the block before it runs again from those. The result is the walk's,
bit for bit.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jmegatron.errors import DataFileError, UsageError

SURPLUS = 0.005
"""Part of its samples that each corpus of a blend is built larger (Megatron-LM --mid-level-dataset-surplus)."""

MAX_CORPORA = 2**15 - 1
# Blocks side by side, steps that a block starts early, shortest block: found by timing.
_LANES, _WARM_UP, _SHORTEST = 4096, 512, 512


class BlendIndex(NamedTuple):
    """Where each sample of a blend lies.

    dataset_index: int16 [samples], number of the corpus.
    dataset_sample_index: int64 [samples], number of the sample within that corpus's samples.
    """

    dataset_index: np.ndarray
    dataset_sample_index: np.ndarray


class Blend(NamedTuple):
    """Corpora and their shares.

    prefixes: paths without `.bin` and `.idx`.
    weights: one per prefix, above 0, of any sum; None: every sample of every corpus once.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


# ------------------------------------------------------------------------------------------------------- written down


def parse_blend(words: Sequence[str], option: str = "--data-path") -> Blend:
    """Return the blend of `W1 P1 W2 P2 ...` or `P1 P2 ...`.

    As in the reference, the words are weights and prefixes in turn if their number is even and every other one, from
    the first on, is a number.

    Raises:
        UsageError: nothing given, numbers at some of these places only, a weight that is not above 0 and finite, or
            weights whose sum or shares floating-point numbers do not hold.
    """
    words = tuple(words)
    if not words:
        raise UsageError(f"{option}: got nothing, expected PREFIX ... or WEIGHT PREFIX ...; fix: name a corpus")
    numbers = [_number(word) for word in words[::2]]
    known = [number for number in numbers if number is not None]
    if len(words) % 2 or not known:
        blend = Blend(words, None)
    elif len(known) < len(numbers):
        odd = next(word for word, number in zip(words[::2], numbers, strict=True) if number is None)
        raise UsageError(
            f"{option}: got {' '.join(words)!r} with {odd!r} where a weight should be, expected a weight before every "
            "prefix or before none; fix: write WEIGHT PREFIX WEIGHT PREFIX ..."
        )
    else:
        blend = Blend(words[1::2], tuple(known))
    _check_blend(blend, option)
    return blend


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _check_blend(blend: Blend, option: str) -> None:
    """Refuse weights that mean nothing and more corpora than an int16 can number."""
    if len(blend.prefixes) > MAX_CORPORA:
        raise UsageError(
            f"{option}: got {len(blend.prefixes)} corpora, expected at most {MAX_CORPORA}; fix: merge some"
        )
    for weight, prefix in zip(blend.weights or (), blend.prefixes, strict=False):
        if not (math.isfinite(weight) and weight > 0):
            raise UsageError(
                f"{option}: got weight {weight} for {prefix}, expected a finite number above 0; fix: "
                + ("leave the corpus out if nothing is to be read from it" if weight == 0 else "correct the weight")
            )
    total = sum(blend.weights or (1.0,))
    if not math.isfinite(total) or min(blend.weights or (1.0,)) / total == 0.0:
        raise UsageError(
            f"{option}: got the weights {blend.weights}, expected a finite sum and no share that rounds to 0; fix: "
            "divide them all by the largest, and leave out what is nothing beside it"
        )


def read_data_args(path: str) -> tuple[str, ...]:
    """Return the words of a `--data-args-path` file: what would stand after `--data-path`.

    Raises:
        DataFileError: the file cannot be read or is empty.
    """
    words = tuple(_read_text(path, "--data-args-path").split())
    if not words:
        raise DataFileError(f"--data-args-path {path}: got an empty file, expected WEIGHT PREFIX ... or PREFIX ...")
    return words


def read_split_data_args(path: str) -> dict[str, tuple[str, ...]]:
    """Return the words for train, valid and test of a `--per-split-data-args-path` file.

    The file is a JSON object with the keys train, valid and test; each value is a list of words, one string, or null
    for none.

    Raises:
        DataFileError: the file cannot be read or is not of this form.
    """
    text = _read_text(path, "--per-split-data-args-path")
    try:
        content = json.loads(text)
        parts = {name: _words(content[name]) for name in ("train", "valid", "test")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataFileError(
            f"--per-split-data-args-path {path}: {type(error).__name__}: {error}; expected a JSON object with the keys "
            'train, valid and test, each a list of words; fix: {"train": ["0.3", "PREFIX1", "0.7", "PREFIX2"], '
            '"valid": ["PREFIX3"], "test": []}'
        ) from error
    return parts


def _words(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return tuple(value.split())
    if not isinstance(value, list):
        raise TypeError(f"got {value!r}")
    if not all(isinstance(word, str | int | float) and not isinstance(word, bool) for word in value):
        raise TypeError(f"got {value!r}")
    return tuple(str(word) for word in value)


def _read_text(path: str, option: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataFileError(f"{option} {path}: {error}; expected a readable text file; fix: check the path") from error


# -------------------------------------------------------------------------------------------------------------- sizes


def normalised(weights: Sequence[float]) -> np.ndarray:
    """Return float64 weights divided by their sum."""
    values = np.asarray(weights, dtype=np.float64)
    return values / np.sum(values)


def samples_per_corpus(weights: np.ndarray, num_samples: int, surplus: float = SURPLUS) -> list[int]:
    """Return how many samples each corpus must have ready: ceil(ceil(n * w) * (1 + surplus)).

    With `surplus=0` this is the number a blend draws from each at most; their sum is the length of the blend, which
    exceeds `num_samples` where shares round up.

    Args:
        weights: normalised, float64 [corpora].
        num_samples: n, samples of the blend.
        surplus: part to add, for the greedy rule does not give exactly the rounded shares.
    """
    targets = [math.ceil(num_samples * weight) for weight in weights.tolist()]
    return [math.ceil(target * (1 + surplus)) for target in targets]


# -------------------------------------------------------------------------------------------------------------- order


def build_blend_index(weights: np.ndarray, num_samples: int) -> BlendIndex:
    """Return the corpus of each of `num_samples` samples.

    Args:
        weights: float64 [corpora], normalised.
        num_samples: samples of the blend.
    """
    return _Greedy(np.asarray(weights, np.float64), num_samples, None).run()


def build_exhaustive_blend_index(sizes: Sequence[int]) -> BlendIndex:
    """Return an order that gives every sample of every corpus once, in proportion to the sizes all along.

    Args:
        sizes: samples of each corpus.
    """
    limits = np.asarray(sizes, dtype=np.int64)
    total = int(limits.sum())
    return _Greedy(limits / np.float64(max(total, 1)), total, limits).run()


class _Greedy:
    """The greedy rule over blocks of samples side by side ("lanes").

    Arrays are [corpora, lanes]. Counts are kept as float64: the error is computed in float64 in any case, and numbers
    below 2**53 are exact.
    """

    def __init__(self, weights: np.ndarray, num_samples: int, limits: np.ndarray | None):
        self.weights = weights[:, None]
        self.num_samples = num_samples
        self.limits = None if limits is None else limits[:, None].astype(np.float64)
        lanes = min(_LANES, max(1, num_samples // _SHORTEST))
        self.length = max(1, -(-num_samples // lanes))
        lanes = -(-num_samples // self.length)
        self.starts = np.arange(lanes, dtype=np.int64) * self.length
        # One row per lane: flattened and cut, they are the samples in order.
        self.picks = np.empty((lanes, self.length), np.int16)
        self.numbers = np.empty((lanes, self.length), np.int64)

    def run(self) -> BlendIndex:
        """Return the order; every lane has been checked against its neighbour."""
        if len(self.starts):
            begin = self._warm_up()
            end = self._fill(np.arange(len(self.starts)), begin)
            self._repair(begin, end)
        return BlendIndex(self.picks.reshape(-1)[: self.num_samples], self.numbers.reshape(-1)[: self.num_samples])

    def _repair(self, begin: np.ndarray, end: np.ndarray) -> None:
        """Run lanes again until each begins with the counts the one before it ends with.

        The first lane begins with zeros, so by induction all are then right; each round settles at least one more.
        """
        while True:
            wrong = 1 + np.flatnonzero((begin[:, 1:] != end[:, :-1]).any(axis=0))
            if not wrong.size:
                return
            begin[:, wrong] = end[:, wrong - 1]
            end[:, wrong] = self._fill(wrong, begin[:, wrong])

    def _warm_up(self) -> np.ndarray:
        """Return estimated counts at the start of each lane, zeros for the first."""
        early = np.maximum(self.starts - _WARM_UP, 0)
        counts = self._estimate(early)
        for ahead in range(_WARM_UP):
            now = early + ahead
            running = now < self.starts
            if not running.any():
                break
            pick = self._pick(now, counts)
            at = np.flatnonzero(running)
            counts[pick[at], at] += 1
        return counts

    def _estimate(self, samples: np.ndarray) -> np.ndarray:
        """Return counts near the shares whose sum is the number of samples: largest remainders are rounded up."""
        shares = self.weights * samples
        counts = np.floor(shares)
        missing = samples - counts.sum(axis=0)
        rank = np.argsort(np.argsort(counts - shares, axis=0, kind="stable"), axis=0)
        return counts + (rank < missing)

    def _fill(self, lanes: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Run whole lanes from `counts`, write their samples, and return the counts at their end."""
        counts = counts.copy()
        at = np.arange(len(lanes))
        everything = len(lanes) == len(self.starts)
        for ahead in range(self.length):
            now = self.starts[lanes] + ahead if not everything else self.starts + ahead
            pick = self._pick(now, counts)
            given = counts[pick, at]
            self.picks[lanes if not everything else slice(None), ahead] = pick
            self.numbers[lanes if not everything else slice(None), ahead] = given
            counts[pick, at] = given + 1
        return counts

    def _pick(self, now: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the corpus furthest behind, the first of equals: integer [lanes]."""
        errors = self.weights * np.maximum(now, 1).astype(np.float64)
        errors -= counts
        if self.limits is not None:
            errors[counts >= self.limits] = -np.inf
        if len(errors) > 2:
            return errors.argmax(axis=0)
        return (errors[-1] > errors[0]).astype(np.intp)
