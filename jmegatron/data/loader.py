"""Global batches, built ahead of the training step on one background thread (no communication).

Reading and stacking samples is work for the CPU while the accelerators compute; numpy leaves Python free for most of
it, so one thread suffices. The batches come in sample order; `sampler` says how ranks divide them.
"""

import contextlib
import queue
import threading
import weakref
from types import TracebackType

import numpy as np

from jmegatron.data.gpt_dataset import SampleSource
from jmegatron.data.sampler import num_global_batches
from jmegatron.errors import UsageError

Batch = dict[str, np.ndarray]

# How long the thread waits for room before it looks whether it is still wanted, in seconds.
_POLL_SECONDS = 0.1


class GlobalBatchLoader:
    """Iterator of global batches from `consumed_samples` on; a last partial batch is dropped.

    Each batch holds the dataset's arrays stacked to [global_batch, ...] and `sample_ids` uint32 [global_batch], the
    absolute sample numbers (modulo 2**32), by which random numbers such as dropout can be keyed.

    An exception in the dataset is raised from `next()`, after the batches before it. Close the loader, or use it as a
    context manager, when leaving before the end.

    Args:
        dataset: the samples.
        global_batch_size: in sequences.
        consumed_samples: samples used up before; the number to store in a checkpoint is this plus
            `global_batch_size` times the batches trained on (not those built ahead).
        prefetch: batches held ready.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(self, dataset: SampleSource, global_batch_size: int, consumed_samples: int = 0, prefetch: int = 2):
        if global_batch_size < 1 or consumed_samples < 0 or prefetch < 1:
            raise UsageError(
                f"got --global-batch-size {global_batch_size}, consumed samples {consumed_samples}, prefetch "
                f"{prefetch}; expected at least 1, 0 and 1"
            )
        self._num_batches = num_global_batches(len(dataset), consumed_samples, global_batch_size)
        self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        self._finished = False
        # The thread must not hold the loader itself: a forgotten loader can then be collected, which stops the thread.
        self._finalizer = weakref.finalize(self, self._stop.set)
        self._thread = threading.Thread(
            target=_produce,
            args=(dataset, global_batch_size, consumed_samples, self._num_batches, self._queue, self._stop),
            name="jmegatron-data-loader",
            daemon=True,
        )
        self._thread.start()

    def __len__(self) -> int:
        """Return the number of batches from the start of this loader to its end."""
        return self._num_batches

    def __iter__(self) -> "GlobalBatchLoader":
        """Return the loader itself: it can be gone through once."""
        return self

    def __next__(self) -> Batch:
        """Return the next global batch."""
        if self._finished:
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, dict):
            return item
        self._finished = True
        if item is None:
            raise StopIteration
        raise item

    def __enter__(self) -> "GlobalBatchLoader":
        """Return the loader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the loader."""
        self.close()

    def close(self) -> None:
        """Stop the thread and drop the batches built ahead; harmless when called again."""
        self._finished = True
        self._stop.set()
        self._thread.join(timeout=10.0)
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        with contextlib.suppress(queue.Full):  # wakes a consumer that waits in another thread
            self._queue.put_nowait(None)


def _produce(
    dataset: SampleSource,
    global_batch_size: int,
    consumed_samples: int,
    num_batches: int,
    batches: "queue.Queue[Batch | BaseException | None]",
    stop: threading.Event,
) -> None:
    """Put every batch, then None; or the exception that ended it."""
    last: BaseException | None = None
    try:
        for number in range(num_batches):
            batch = build_global_batch(dataset, consumed_samples + number * global_batch_size, global_batch_size)
            if not _put(batches, batch, stop):
                return
    except BaseException as error:  # the consumer's to handle, whatever it is
        last = error
    _put(batches, last, stop)


def _put(
    batches: "queue.Queue[Batch | BaseException | None]", item: Batch | BaseException | None, stop: threading.Event
) -> bool:
    """Put an item as soon as there is room; return False if the loader was closed meanwhile."""
    while not stop.is_set():
        try:
            batches.put(item, timeout=_POLL_SECONDS)
            return True
        except queue.Full:
            continue
    return False


def build_global_batch(dataset: SampleSource, first: int, global_batch_size: int) -> Batch:
    """Return the samples first .. first + global_batch_size - 1 stacked, plus their `sample_ids`.

    Args:
        dataset: the samples.
        first: absolute number of the first sample.
        global_batch_size: in sequences.
    """
    samples = [dataset[first + row] for row in range(global_batch_size)]
    batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    ids = first + np.arange(global_batch_size, dtype=np.int64)
    batch["sample_ids"] = (ids & 0xFFFFFFFF).astype(np.uint32)
    return batch
