"""The store of a job in memory, for tests that let threads play the processes."""

import threading
import time

from jmegatron.training.job import Job


class MemoryStore:
    """Strings that all jobs of a test read and write."""

    def __init__(self, count: int):
        self._count = count
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._barriers: dict[str, int] = {}

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, seconds):
                raise TimeoutError(key)
            return self._values[key]

    def list(self, prefix: str) -> dict[str, str]:
        with self._changed:
            start = f"{prefix}/"
            return {key.removeprefix(start): v for key, v in self._values.items() if key.startswith(start)}

    def delete(self, prefix: str) -> None:
        with self._changed:
            self._values = {key: value for key, value in self._values.items() if not key.startswith(f"{prefix}/")}

    def barrier(self, name: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        with self._changed:
            self._barriers[name] = self._barriers.get(name, 0) + 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._barriers[name] >= self._count, end - time.monotonic()):
                raise TimeoutError(name)


def job_of(store: MemoryStore, index: int, minutes: float = 1.0) -> Job:
    """A job of several as one of them sees it, without signals and thread."""
    job = Job()
    job.index, job.count, job.minutes, job.store = index, store._count, minutes, store
    return job
