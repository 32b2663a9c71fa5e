"""What the processes that write or read one checkpoint tell one another; through a key-value store, not on a mesh axis.

Each call is one that all processes make, in the same order for the same name.
"""

import collections
import json
import time
from typing import Protocol, runtime_checkable


@runtime_checkable
class Store(Protocol):
    """Strings that all processes read and write."""

    def set(self, key: str, value: str) -> None:
        """Writes a value."""

    def get(self, key: str, seconds: float) -> str:
        """Returns a value, waiting for it. Raises TimeoutError after `seconds`."""

    def delete(self, prefix: str) -> None:
        """Removes all values whose keys begin with `prefix`/."""


class Peers:
    """The processes of a job, seen by one of them.

    Args:
      index: number of this process.
      count: processes.
      store: what they share; None where there is one process.
      seconds: how long one waits for another.
    """

    def __init__(self, index: int = 0, count: int = 1, store: Store | None = None, seconds: float = 600.0):
        if (store is None) != (count == 1):
            raise ValueError(f"Peers: {count} processes and store {store}: expected a store if, and only if, several")
        self.index, self.count, self.seconds = index, count, seconds
        self._store = store
        self._calls: collections.Counter[str] = collections.Counter()

    def collect(self, name: str, problem: str = "") -> str:
        """Returns the first problem that a process has, with its number; "" where none has one. Waits for all.

        Communication: one value written and one read by each process, all read by process 0.
        """
        if self._store is None:
            return problem
        key = self._key(name)
        if self.index:
            self._store.set(f"{key}/{self.index}", problem)
            return self._read(f"{key}/verdict", 2 * self.seconds, "process 0")
        if self._calls[name] > 2:  # all have left a call when they come to the next but one
            self._store.delete(f"checkpoint/{name}/{self._calls[name] - 3}")
        problems = [problem and f"process 0: {problem}"]
        end = time.monotonic() + self.seconds
        for index in range(1, self.count):
            try:
                # One limit for all of them: the others wait twice as long for the verdict, not once for each.
                said = self._store.get(f"{key}/{index}", max(end - time.monotonic(), 0.1))
            except TimeoutError:
                said = f"has not come within {self.seconds:.0f} s"
            problems.append(said and f"process {index}: {said}")
        verdict = next(filter(None, problems), "")
        self._store.set(f"{key}/verdict", verdict)
        return verdict

    def share(self, name: str, value: object) -> object:
        """Returns process 0's value (of what JSON can say) in every process.

        Process 0 does not wait for those who read it, so that its value stays in the store.

        Raises:
          TimeoutError: process 0 has not come.
        """
        if self._store is None:
            return value
        key = self._key(name)
        if self.index == 0:
            self._store.set(f"{key}/verdict", json.dumps(value))
            return value
        try:
            return json.loads(self._store.get(f"{key}/verdict", self.seconds))
        except TimeoutError:
            raise TimeoutError(f"{name}: process 0 has not come within {self.seconds:.0f} s") from None

    def _read(self, key: str, seconds: float, who: str) -> str:
        assert self._store is not None
        try:
            return self._store.get(key, seconds)
        except TimeoutError:
            return f"{who} has not come within {seconds:.0f} s"

    def _key(self, name: str) -> str:
        call = self._calls[name]
        self._calls[name] += 1
        return f"checkpoint/{name}/{call}"
