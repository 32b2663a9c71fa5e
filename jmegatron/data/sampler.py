"""Which sample ids form a global batch, and which of them each data-parallel rank gets (no communication).

A run is one long sequence of positions 0, 1, 2, ..., of which `consumed_samples` are used up; an order says which
sample lies at a position (`--dataloader-type`: single, or cyclic, which shuffles anew in each epoch). A global batch is
laid out micro-batch major, [num_microbatches, dp, micro_batch_size]: micro-batch m of rank r holds the positions

    consumed + (m * dp + r) * micro_batch_size + 0 .. micro_batch_size - 1

A contiguous block per rank would give the same set per step but other micro-batches (Megatron-LM
training/datasets/data_samplers.py:175-189). The set does not depend on dp, so a run resumed with another dp and the
same global batch size sees the same batches. A last partial global batch is dropped.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np

from jmegatron.errors import UsageError


def num_microbatches(global_batch_size: int, micro_batch_size: int, dp: int) -> int:
    """Return the micro-batches per rank and step.

    Raises:
        UsageError: the global batch does not divide into whole micro-batches on every rank.
    """
    if min(global_batch_size, micro_batch_size, dp) < 1 or global_batch_size % (micro_batch_size * dp):
        raise UsageError(
            f"--global-batch-size: got {global_batch_size}, expected a multiple of --micro-batch-size "
            f"{micro_batch_size} times {dp} data-parallel ranks = {micro_batch_size * dp}"
        )
    return global_batch_size // (micro_batch_size * dp)


def num_global_batches(num_samples: int, consumed_samples: int, global_batch_size: int) -> int:
    """Return how many whole global batches are left after `consumed_samples`."""
    return max(0, num_samples - consumed_samples) // global_batch_size


def microbatch_major(global_batch: np.ndarray, micro_batch_size: int, dp: int) -> np.ndarray:
    """Return a view [num_microbatches, dp, micro_batch_size, ...] of an array [global_batch, ...] in sample order.

    Raises:
        UsageError: see `num_microbatches`.
    """
    count = num_microbatches(len(global_batch), micro_batch_size, dp)
    return global_batch.reshape(count, dp, micro_batch_size, *global_batch.shape[1:])


def rank_sample_ids(
    consumed_samples: int, global_batch_size: int, micro_batch_size: int, dp: int, dp_rank: int
) -> np.ndarray:
    """Return the sample ids of one rank in the global batch after `consumed_samples`.

    Args:
        consumed_samples: samples used up before this batch.
        global_batch_size: in sequences.
        micro_batch_size: in sequences.
        dp: number of data-parallel ranks.
        dp_rank: 0 .. dp - 1.

    Returns:
        int64 [num_microbatches, micro_batch_size].

    Raises:
        UsageError: see `num_microbatches`.
    """
    ids = consumed_samples + np.arange(global_batch_size, dtype=np.int64)
    return microbatch_major(ids, micro_batch_size, dp)[:, dp_rank]


def iterate_rank_sample_ids(
    num_samples: int, consumed_samples: int, global_batch_size: int, micro_batch_size: int, dp: int, dp_rank: int
) -> Iterator[np.ndarray]:
    """Yield `rank_sample_ids` for every whole global batch that is left."""
    for batch in range(num_global_batches(num_samples, consumed_samples, global_batch_size)):
        start = consumed_samples + batch * global_batch_size
        yield rank_sample_ids(start, global_batch_size, micro_batch_size, dp, dp_rank)


@runtime_checkable
class SampleOrder(Protocol):
    """Which sample lies at each position of a run."""

    def num_batches(self, consumed_samples: int, global_batch_size: int) -> int:
        """Return how many whole global batches are left."""
        ...

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at positions: int64, of the same shape."""
        ...


class SequentialOrder:
    """`--dataloader-type single`: sample i lies at position i, and the run ends with the samples."""

    def __init__(self, num_samples: int):
        self._num_samples = num_samples

    def num_batches(self, consumed_samples: int, global_batch_size: int) -> int:
        """Return how many whole global batches are left."""
        return num_global_batches(self._num_samples, consumed_samples, global_batch_size)

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the positions themselves."""
        return positions


class CyclicOrder:
    """`--dataloader-type cyclic`: the samples in another random order in each epoch, for ever.

    Equal to Megatron-LM's MegatronPretrainingRandomSampler (training/datasets/data_samplers.py). An epoch holds the
    largest multiple A of micro_batch_size * dp samples; position p lies in epoch p // A. With data sharding each rank
    shuffles a contiguous part of its own, all by the same permutation; without, rank r takes every dp-th of one
    permutation of all, and the samples of a step do not depend on dp.

    Args:
        num_samples: samples of the dataset.
        micro_batch_size: in sequences.
        dp: number of data-parallel ranks.
        sharded: whether each rank keeps to its own part (`--no-data-sharding` turns it off).

    Raises:
        UsageError: the samples do not fill one micro-batch on every rank, or are too many.
    """

    def __init__(self, num_samples: int, micro_batch_size: int, dp: int, sharded: bool = True):
        self._micro, self._dp, self._sharded = micro_batch_size, dp, sharded
        self._active = num_samples - num_samples % (micro_batch_size * dp)
        if self._active < 1:
            raise UsageError(
                f"--dataloader-type cyclic: got {num_samples} samples, expected at least --micro-batch-size "
                f"{micro_batch_size} times {dp} data-parallel ranks; fix: a smaller micro-batch or a larger corpus"
            )
        self._shuffled = self._active // dp if sharded else num_samples - num_samples % micro_batch_size
        if self._shuffled > _MAX_PERMUTED:
            raise UsageError(
                f"--dataloader-type cyclic: got {self._shuffled} samples to shuffle, expected at most {_MAX_PERMUTED}, "
                "beyond which the reference draws other numbers; fix: --dataloader-type single"
            )
        self._permutation = functools.lru_cache(maxsize=2)(lambda epoch: permutation(self._shuffled, epoch))

    def num_batches(self, consumed_samples: int, global_batch_size: int) -> int:
        """Return a number no run reaches."""
        return sys.maxsize

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the samples at positions: int64, of the same shape."""
        ids = np.empty(positions.shape, np.int64)
        epochs = positions // self._active
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            microbatch, place = np.divmod(positions[here] - epoch * self._active, self._micro * self._dp)
            rank, row = np.divmod(place, self._micro)
            own = microbatch * self._micro + row  # place in the rank's own order
            permuted = self._permutation(epoch)
            ids[here] = permuted[own] + rank * self._shuffled if self._sharded else permuted[own * self._dp + rank]
        return ids


# torch.randperm draws 64-bit numbers from here on.
_MAX_PERMUTED = (2**32 - 1) // 20 - 1
_BLOCK = 1024
"""Swaps tried at once."""


def permutation(size: int, seed: int) -> np.ndarray:
    """Return the permutation of 0 .. size - 1 that `torch.randperm` gives on a CPU with this seed: int32 [size].

    For i = 0 .. size - 2: swap the entries i and i + (uint32 draw) % (size - i). A block of swaps whose places are all
    different is done at once; others one by one. Few blocks of a long permutation have equal places: about
    _BLOCK**2 / size.

    Args:
        size: number of entries.
        seed: 0 .. 2**32 - 1.
    """
    values = np.arange(size, dtype=np.int32)
    rng = np.random.RandomState(seed)
    for first in range(0, size - 1, _BLOCK):
        here = np.arange(first, min(first + _BLOCK, size - 1))
        draws = rng.randint(0, 2**32, size=len(here), dtype=np.uint32).astype(np.int64)
        there = here + draws % (size - here)
        ordered = np.sort(there)
        if ordered[0] > here[-1] and bool((ordered[1:] > ordered[:-1]).all()):
            values[here], values[there] = values[there], values[here]
            continue
        _swap(values, first, there.tolist())
    return values


def _swap(values: np.ndarray, first: int, there: list[int]) -> None:
    """Swap the entries first + 0, 1, ... with the entries `there`, in this order."""
    changed: dict[int, int] = {}
    for here, other in enumerate(there, first):
        left, right = changed.get(here), changed.get(other)
        changed[here] = int(values[other]) if right is None else right
        changed[other] = int(values[here]) if left is None else left
    values[list(changed)] = list(changed.values())
