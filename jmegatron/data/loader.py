"""Global batches, built and placed ahead of the training step on background threads (no communication).

Reading and stacking samples is work for the CPU while the accelerators compute. Worker threads build batches side by
side (numpy leaves Python free for most of it), one more thread takes them in order and places them on the devices, so
that a step finds its batch there. A process builds only the rows that its devices need; `sampler` says which sample
each row is.
"""

import collections
import contextlib
import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy as np

from jmegatron.data.gpt_dataset import SampleSource
from jmegatron.data.sampler import SampleOrder, SequentialOrder
from jmegatron.errors import UsageError

Batch = dict[str, np.ndarray]

# How long the thread waits for room before it looks whether it is still wanted, in seconds.
_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class _Batches:
    """The batches of a run and how one is made; holds no thread."""

    dataset: SampleSource
    order: SampleOrder
    global_batch_size: int
    consumed_samples: int
    rows: np.ndarray | None
    place: Callable[[Batch], Any] | None

    def build(self, number: int) -> Batch:
        """Return the arrays of batch `number`, counted from 0."""
        first = self.consumed_samples + number * self.global_batch_size
        return build_global_batch(self.dataset, first, self.global_batch_size, self.order, self.rows)

    def placed(self, batch: Batch) -> Any:
        """Return what `place` makes of a batch."""
        return batch if self.place is None else self.place(batch)


class GlobalBatchLoader:
    """Iterator of global batches from `consumed_samples` on; a last partial batch is dropped.

    Each batch holds the dataset's arrays stacked to [global_batch, ...] and `sample_ids` uint32 [global_batch], the
    places in the run (modulo 2**32), by which random numbers such as dropout can be keyed.

    An exception in the dataset is raised from `next()`, after the batches before it. Close the loader, or use it as a
    context manager, when leaving before the end.

    Args:
        dataset: the samples.
        global_batch_size: in sequences.
        consumed_samples: samples used up before; the number to store in a checkpoint is this plus
            `global_batch_size` times the batches trained on (not those built ahead).
        prefetch: batches held ready.
        order: which sample lies at each place of the run; None: sample i at place i.
        rows: integer [rows], the rows of the global batch that this process needs, in the order wanted; None: all.
        place: called with each batch on the background thread; its result is what the loader gives (None: the arrays).
        num_workers: threads that build batches (`--num-workers`). 0: no thread at all, each batch is built in `next()`;
            1: the thread that places batches also builds them.

    Raises:
        UsageError: a number is out of range.
    """

    def __init__(
        self,
        dataset: SampleSource,
        global_batch_size: int,
        consumed_samples: int = 0,
        prefetch: int = 2,
        *,
        order: SampleOrder | None = None,
        rows: np.ndarray | None = None,
        place: Callable[[Batch], Any] | None = None,
        num_workers: int = 1,
    ):
        if global_batch_size < 1 or consumed_samples < 0 or prefetch < 1 or num_workers < 0:
            raise UsageError(
                f"got --global-batch-size {global_batch_size}, consumed samples {consumed_samples}, prefetch "
                f"{prefetch}, --num-workers {num_workers}; expected at least 1, 0, 1 and 0"
            )
        order = SequentialOrder(len(dataset)) if order is None else order
        batches = _Batches(dataset, order, global_batch_size, consumed_samples, rows, place)
        self._num_batches = order.num_batches(consumed_samples, global_batch_size)
        self._queue: queue.Queue[tuple[Any] | BaseException | None] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        self._finished = False
        # The thread must not hold the loader itself: a forgotten loader can then be collected, which stops the thread.
        self._finalizer = weakref.finalize(self, self._stop.set)
        self._inline: Iterator[Any] | None = None
        self._thread: threading.Thread | None = None
        if num_workers == 0:
            self._inline = (batches.placed(batches.build(number)) for number in range(self._num_batches))
            return
        self._thread = threading.Thread(
            target=_produce,
            args=(batches, self._num_batches, num_workers, self._queue, self._stop),
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

    def __next__(self) -> Any:
        """Return the next global batch."""
        if self._finished:
            raise StopIteration
        if self._inline is not None:
            return next(self._inline)
        item = self._queue.get()
        if isinstance(item, tuple):
            return item[0]
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
        """Stop the threads and drop the batches built ahead; harmless when called again."""
        self._finished = True
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        with contextlib.suppress(queue.Full):  # wakes a consumer that waits in another thread
            self._queue.put_nowait(None)


def _produce(
    batches: _Batches,
    num_batches: int,
    num_workers: int,
    ready: "queue.Queue[tuple[Any] | BaseException | None]",
    stop: threading.Event,
) -> None:
    """Put every batch, then None; or the exception that ended it."""
    last: BaseException | None = None
    try:
        with contextlib.closing(_built(batches, num_batches, num_workers)) as built:
            for batch in built:
                if stop.is_set() or not _put(ready, (batches.placed(batch),), stop):
                    return
    except BaseException as error:  # the consumer's to handle, whatever it is
        last = error
    _put(ready, last, stop)


def _built(batches: _Batches, num_batches: int, num_workers: int) -> Generator[Batch, None, None]:
    """Yield every batch in order; with several workers, as many are under way at once."""
    if num_workers == 1:
        yield from map(batches.build, range(num_batches))
        return
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="jmegatron-data-worker")
    under_way: collections.deque[Future[Batch]] = collections.deque()
    try:
        for number in range(num_batches):
            under_way.append(pool.submit(batches.build, number))
            if len(under_way) > num_workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _put(
    ready: "queue.Queue[tuple[Any] | BaseException | None]",
    item: tuple[Any] | BaseException | None,
    stop: threading.Event,
) -> bool:
    """Put an item as soon as there is room; return False if the loader was closed meanwhile."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=_POLL_SECONDS)
            return True
        except queue.Full:
            continue
    return False


def build_global_batch(
    dataset: SampleSource,
    first: int,
    global_batch_size: int,
    order: SampleOrder | None = None,
    rows: np.ndarray | None = None,
) -> Batch:
    """Return the global batch that begins at place `first` of the run, plus its `sample_ids`.

    Args:
        dataset: the samples; a `compact` method, if it has one, is given all numbers at once and returns the form that
            goes to the devices (`gpt_dataset.finish`).
        first: place of the first sample.
        global_batch_size: in sequences.
        order: which sample lies at each place; None: sample i at place i.
        rows: integer [rows], the rows of the global batch that are wanted; None: all.
    """
    places = first + (np.arange(global_batch_size, dtype=np.int64) if rows is None else rows.astype(np.int64))
    numbers = places if order is None else order.ids(places)
    at_once = getattr(dataset, "compact", None)
    if at_once is not None:
        batch = dict(at_once(numbers))
    else:
        samples = [dataset[number] for number in numbers.tolist()]
        batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    batch["sample_ids"] = (places & 0xFFFFFFFF).astype(np.uint32)
    return batch
