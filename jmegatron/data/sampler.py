"""Which sample ids form a global batch, and which of them each data-parallel rank gets (no communication).

Samples are taken in order from `consumed_samples` on. A global batch is laid out micro-batch major,
[num_microbatches, dp, micro_batch_size]: micro-batch m of rank r holds the ids

    consumed + (m * dp + r) * micro_batch_size + 0 .. micro_batch_size - 1

A contiguous block per rank would give the same set per step but other micro-batches (Megatron-LM
training/datasets/data_samplers.py:175-189). The set does not depend on dp, so a run resumed with another dp and the
same global batch size sees the same batches. A last partial global batch is dropped.
"""

from collections.abc import Iterator

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
