"""Order of samples in a global batch, and the background loader's behaviour at its edges."""

import gc
import threading
import time

import numpy as np
import pytest

from jmegatron.data.loader import GlobalBatchLoader, build_global_batch
from jmegatron.data.sampler import (
    CyclicOrder,
    SequentialOrder,
    iterate_rank_sample_ids,
    microbatch_major,
    num_global_batches,
    num_microbatches,
    permutation,
    rank_sample_ids,
)
from jmegatron.errors import UsageError


class Numbers:
    """Sample i is the number i; counts what was read, and fails where told to."""

    def __init__(self, size, fails_at=None):
        self.size, self.fails_at, self.read = size, fails_at, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.fails_at:
            raise OSError("the disk is gone")
        self.read.append(index)
        return {"tokens": np.full(4, index, dtype=np.int32), "loss_mask": np.ones(4, dtype=np.float32)}


def _threads():
    return [thread for thread in threading.enumerate() if thread.name == "jmegatron-data-loader"]


def _wait_until(condition):
    for _ in range(200):
        if condition():
            return True
        time.sleep(0.02)
    return False


# -------------------------------------------------------------------------------------------------------- sampler


def test_global_batch_is_micro_batch_major():
    assert rank_sample_ids(100, 12, 2, 3, 1).tolist() == [[102, 103], [108, 109]]
    batch = np.arange(12)
    assert microbatch_major(batch, 2, 3).tolist() == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    assert microbatch_major(np.zeros((12, 5)), 2, 3).shape == (2, 3, 2, 5)


def test_set_of_samples_does_not_depend_on_dp():
    for dp in (1, 2, 4):
        ids = np.concatenate([rank_sample_ids(16, 8, 2, dp, rank).ravel() for rank in range(dp)])
        assert sorted(ids.tolist()) == list(range(16, 24))


def test_last_partial_global_batch_is_dropped():
    assert len(list(iterate_rank_sample_ids(37, 0, 8, 2, 4, 0))) == 4
    assert num_global_batches(37, 32, 8) == 0
    assert num_global_batches(10, 99, 8) == 0


@pytest.mark.parametrize(("global_batch", "micro", "dp"), [(8, 3, 2), (8, 2, 3), (0, 1, 1), (8, 0, 1)])
def test_global_batch_that_does_not_divide_is_refused(global_batch, micro, dp):
    with pytest.raises(UsageError, match="--global-batch-size"):
        num_microbatches(global_batch, micro, dp)


@pytest.mark.parametrize("size", [1, 2, 3, 9, 1025, 5000])
@pytest.mark.parametrize("seed", [0, 5])
def test_permutation_equals_the_plain_loop_of_swaps(size, seed):
    rng = np.random.RandomState(seed)
    values = list(range(size))
    for at in range(size - 1):
        other = at + int(rng.randint(0, 2**32, dtype=np.uint32)) % (size - at)
        values[at], values[other] = values[other], values[at]
    assert permutation(size, seed).tolist() == values


def _cyclic(dp, positions, sharded, total=41, micro=2):
    return CyclicOrder(total, micro, dp, sharded).ids(np.asarray(positions)).tolist()


def test_cyclic_epochs_hold_every_sample_once_and_differ():
    epochs = [_cyclic(2, range(first, first + 40), sharded=False) for first in (0, 40, 80)]
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_cyclic_global_batch_across_the_end_of_an_epoch():
    whole = _cyclic(2, range(80), sharded=True)
    assert _cyclic(2, range(36, 48), sharded=True) == whole[36:48]


def test_cyclic_samples_of_a_step_do_not_depend_on_dp_without_sharding():
    steps = [[sorted(_cyclic(dp, range(at, at + 8), False)) for at in range(0, 80, 8)] for dp in (1, 2, 4)]
    assert steps[0] == steps[1] == steps[2]


def test_cyclic_sharding_keeps_each_rank_to_its_own_part():
    ids = _cyclic(2, range(40), sharded=True)
    rows = np.array(ids).reshape(-1, 2, 2)  # [microbatch, rank, micro]
    assert sorted(rows[:, 0].ravel().tolist()) == list(range(20))
    assert sorted(rows[:, 1].ravel().tolist()) == list(range(20, 40))


def test_cyclic_needs_a_micro_batch_on_every_rank_and_a_known_number_of_draws():
    with pytest.raises(UsageError, match=r"--dataloader-type cyclic: got 3 samples"):
        CyclicOrder(3, 2, 2)
    with pytest.raises(UsageError, match=r"expected at most \d+"):
        CyclicOrder(2**31, 1, 1)


# --------------------------------------------------------------------------------------------------------- loader


def test_loader_gives_every_whole_batch_in_order_then_ends():
    with GlobalBatchLoader(Numbers(11), 3) as loader:
        assert len(loader) == 3
        batches = list(loader)
        assert next(loader, None) is None
    assert [batch["tokens"][:, 0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [batch["sample_ids"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert batches[0]["sample_ids"].dtype == np.uint32
    assert batches[0]["tokens"].shape == batches[0]["loss_mask"].shape == (3, 4)


def test_loader_goes_on_at_consumed_samples_as_if_never_stopped():
    whole = list(GlobalBatchLoader(Numbers(20), 4))
    resumed = list(GlobalBatchLoader(Numbers(20), 4, consumed_samples=8))
    assert len(resumed) == 3
    for left, right in zip(whole[2:], resumed, strict=True):
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])


@pytest.mark.parametrize("consumed", [18, 20, 50])
def test_loader_without_a_whole_batch_left_ends_at_once(consumed):
    assert list(GlobalBatchLoader(Numbers(20), 4, consumed_samples=consumed)) == []


def test_sample_ids_wrap_at_32_bits():
    class Endless(Numbers):
        def __getitem__(self, index):
            return super().__getitem__(index % 100)

    loader = GlobalBatchLoader(Endless(2**32 + 8), 4, consumed_samples=2**32 - 2)
    assert next(loader)["sample_ids"].tolist() == [2**32 - 2, 2**32 - 1, 0, 1]
    loader.close()


def test_loader_reads_ahead_and_no_further_than_prefetch():
    dataset = Numbers(100)
    with GlobalBatchLoader(dataset, 2, prefetch=3) as loader:
        # 3 batches in the queue and one in the hand of the thread
        assert _wait_until(lambda: len(dataset.read) == 8)
        time.sleep(0.3)
        assert len(dataset.read) == 8
        next(loader)
        assert _wait_until(lambda: len(dataset.read) == 10)


def test_exception_of_the_dataset_reaches_the_consumer_after_the_batches_before_it():
    loader = GlobalBatchLoader(Numbers(20, fails_at=9), 4)
    assert next(loader)["tokens"][0, 0] == 0
    assert next(loader)["tokens"][0, 0] == 4
    with pytest.raises(OSError, match="the disk is gone"):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)
    loader.close()


def test_close_stops_the_thread_and_may_be_called_twice():
    loader = GlobalBatchLoader(Numbers(10_000), 2)
    next(loader)
    loader.close()
    loader.close()
    assert list(loader) == []
    assert _wait_until(lambda: not _threads())


def test_close_wakes_a_consumer_that_waits():
    started, go_on = threading.Event(), threading.Event()

    class Stuck(Numbers):
        def __getitem__(self, index):
            started.set()
            go_on.wait(20)
            return super().__getitem__(index)

    loader = GlobalBatchLoader(Stuck(100), 2)
    results = []
    consumer = threading.Thread(target=lambda: results.append(list(loader)))
    consumer.start()
    assert started.wait(10)
    closer = threading.Thread(target=loader.close)
    closer.start()
    go_on.set()
    closer.join(10)
    consumer.join(10)
    assert not consumer.is_alive()
    assert not closer.is_alive()
    assert len(results) == 1


def test_forgotten_loader_stops_its_thread():
    loader = GlobalBatchLoader(Numbers(10_000), 2)
    next(loader)
    del loader
    gc.collect()
    assert _wait_until(lambda: not _threads())


@pytest.mark.parametrize("arguments", [(0,), (2, -1), (2, 0, 0)])
def test_loader_refuses_impossible_numbers(arguments):
    with pytest.raises(UsageError, match="--global-batch-size"):
        GlobalBatchLoader(Numbers(10), *arguments)


@pytest.mark.parametrize("num_workers", [0, 1, 2, 5])
def test_any_number_of_workers_gives_the_same_batches(num_workers):
    order = CyclicOrder(20, 1, 2, sharded=True)
    loader = GlobalBatchLoader(Numbers(20), 4, 8, order=order, num_workers=num_workers)
    with loader:
        batches = [next(loader) for _ in range(6)]  # beyond the end of the epoch
    for number, batch in enumerate(batches):
        first = 8 + 4 * number
        assert batch["tokens"][:, 0].tolist() == order.ids(np.arange(first, first + 4)).tolist()
        assert batch["sample_ids"].tolist() == list(range(first, first + 4))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_workers_pass_on_the_exception_after_the_batches_before_it(num_workers):
    loader = GlobalBatchLoader(Numbers(20, fails_at=9), 4, num_workers=num_workers)
    assert [next(loader)["tokens"][0, 0] for _ in range(2)] == [0, 4]
    with pytest.raises(OSError, match="the disk is gone"):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)
    loader.close()


def test_no_workers_no_thread_and_nothing_read_ahead():
    dataset = Numbers(20)
    loader = GlobalBatchLoader(dataset, 4, num_workers=0)
    assert not _threads()
    assert dataset.read == []
    next(loader)
    assert dataset.read == [0, 1, 2, 3]
    assert len(list(loader)) == 4
    assert next(loader, None) is None


def test_placing_happens_in_order_on_the_background_thread():
    names = []

    def place(batch):
        names.append(threading.current_thread().name)
        return int(batch["tokens"][0, 0])

    assert list(GlobalBatchLoader(Numbers(12), 3, place=place, num_workers=2)) == [0, 3, 6, 9]
    assert set(names) == {"jmegatron-data-loader"}


def test_two_processes_build_their_own_rows_only_and_together_the_batch():
    # Two processes with one data-parallel rank each: dp 2, micro-batches of 2 in a global batch of 8.
    whole = build_global_batch(Numbers(40), 16, 8)
    seen = []
    for rank in range(2):
        rows = rank_sample_ids(0, 8, 2, 2, rank).reshape(-1)
        dataset = Numbers(40)
        batch = next(GlobalBatchLoader(dataset, 8, 16, rows=rows, num_workers=0))
        assert dataset.read == (16 + rows).tolist()
        for name, values in batch.items():
            np.testing.assert_array_equal(values, whole[name][rows])
        seen += rows.tolist()
    assert sorted(seen) == list(range(8))


def test_sequential_order_is_the_default():
    assert SequentialOrder(11).num_batches(2, 3) == 3
    assert SequentialOrder(11).ids(np.arange(3)).tolist() == [0, 1, 2]
