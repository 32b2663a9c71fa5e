"""`--split`: which sequences of a corpus belong to training, validation and test (no communication).

The split is one of sequences, not of tokens: with N sequences and cumulative fractions f_0 = 0, f_1, f_2, f_3, part k
holds the sequences round(f_k * N) .. round(f_(k+1) * N) - 1, where round is Python's (halves go to the even neighbour).
Megatron-LM: core/datasets/blended_megatron_dataset_builder.py:483 and blended_megatron_dataset_config.py.
"""

import math
import re

import numpy as np

from jmegatron.errors import UsageError

SPLIT_NAMES = ("train", "valid", "test")
DEFAULT_SPLIT = "969,30,1"  # Megatron-LM arguments.py:668

Range = tuple[int, int]


def split_fractions(split: str) -> list[float]:
    """Return the cumulative fractions [0, f_1, f_2, f_3] of a split such as "969,30,1".

    Raises:
        UsageError: not one to three numbers, a negative one, all zero, or an infinite sum.
    """
    weights = np.array(_parse_weights(split), dtype=np.float64)
    # numpy's sum, not Python's: from 3.12 on that one compensates rounding, and a bound could move by one sequence.
    shares = (weights / np.sum(weights)).tolist()
    bounds = [0.0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    return bounds


def split_ranges(split: str, num_sequences: int) -> tuple[Range | None, ...]:
    """Return for train, valid and test the range [begin, end) of its sequences.

    A part whose weight is 0 is None; a part with a weight that comes out empty by rounding is an empty range.

    Args:
        split: up to three weights, for example "969,30,1"; missing ones are 0.
        num_sequences: number of sequences in the corpus.

    Raises:
        UsageError: `split` cannot be read, see `split_fractions`.
    """
    bounds = split_fractions(split)
    edges = [round(bound * float(num_sequences)) for bound in bounds]
    return tuple(
        (edges[part], edges[part + 1]) if bounds[part + 1] > bounds[part] else None for part in range(len(SPLIT_NAMES))
    )


def _parse_weights(split: str) -> list[float]:
    """Return the three weights as written."""
    parts = [part for part in re.split(r"[,/\s]+", split.strip()) if part]
    try:
        weights = [float(part) for part in parts]
    except ValueError:
        weights = []
    usable = all(weight >= 0 for weight in weights) and 0 < sum(weights) < math.inf
    if not 1 <= len(weights) <= len(SPLIT_NAMES) or not usable:
        raise UsageError(
            f"--split: got {split!r}, expected up to three weights of 0 or more for train, valid and test, not all 0 "
            f"and with a finite sum; fix: for example --split {DEFAULT_SPLIT}"
        )
    return weights + [0.0] * (len(SPLIT_NAMES) - len(weights))
