"""Which process holds the others up (`--log-straggler`). Talks: an all-gather of two numbers a process a log line.

In a job in lock step every process takes equally long for a step: the fast ones wait inside collectives. So two things
are measured that a process does alone:

    own work   host time of a step outside the devices' steps and the waits for them: input, Python, reports
    probe      a chain of matrix products on each local device, without collectives, the slowest device counts

A host that cannot feed its devices shows in the first, a device that runs slower than its likes in the second. What
neither shows: a slow link. Megatron-LM core/utils.py (StragglerDetector) times the GPU work between the collectives of
a step, which is one program here.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jmegatron.training.job import Job

RATIO = 1.2
"""A process is slow from this multiple of the median of the others on."""
_NOTICEABLE = 0.05
"""Own work counts only where it exceeds the others' by this part of a step."""
_SHOWN = 16
"""Processes up to which each one's numbers are printed."""


class StragglerLog:
    """Measures this process and compares it with the others.

    Args:
      job: the processes and the names of their hosts.
      wanted: off, `report` returns None and nothing is measured.
    """

    def __init__(self, job: Job, *, wanted: bool):
        self._job, self._wanted = job, wanted
        self.reset()
        self._probe = _Probe(jax.local_devices()) if wanted else None

    def reset(self) -> None:
        """Begins to measure anew."""
        self._start, self._waited, self._steps = time.perf_counter(), 0.0, 0

    @contextlib.contextmanager
    def waiting(self, steps: int = 0) -> Iterator[None]:
        """Leaves a block, in which `steps` steps begin, out of this process's own work."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start
        self._steps += steps

    def report(self, step: int, step_seconds: float) -> str | None:
        """Returns the line about the steps since the last one, which took `step_seconds` each; waits for all others.

        Every process must call it at the same step, with nothing queued on its devices.
        """
        if self._probe is None:
            return None
        own = (time.perf_counter() - self._start - self._waited) / max(self._steps, 1)
        mine = np.array([own, self._probe()], np.float32)
        everyone = np.asarray(multihost_utils.process_allgather(mine)).reshape(-1, 2)
        self.reset()
        owns, probes = everyone.T.tolist()
        return straggler_line(step, self._job.hosts, owns, probes, step_seconds)


def straggler_line(
    step: int, hosts: Sequence[str], own: Sequence[float], probes: Sequence[float], step_seconds: float
) -> str:
    """Returns the log line: seconds of each process, and which one is slow.

    Args:
      step: number of the step.
      hosts: name of each process's machine.
      own: own work of each process, seconds a step.
      probes: its probe, seconds.
      step_seconds: of a whole step.
    """
    found = []
    for what, values, floor in (("own work", own, _NOTICEABLE * step_seconds), ("probe", probes, 0.0)):
        slow = slowest(values, floor)
        if slow is not None:
            others = _median_of_others(values, slow)
            host = f" ({hosts[slow]})" if slow < len(hosts) else ""
            found.append(f"process {slow}{host}: {what} {_ms(values[slow])} ms, others {_ms(others)} ms")
    return (
        f" straggler check at iteration {step} | own work per step (ms): {_listed(own)} | probe (ms): {_listed(probes)}"
        f" | slow: {'; '.join(found) or 'none'} |"
    )


def slowest(values: Sequence[float], floor: float = 0.0) -> int | None:
    """Returns the process with the largest value if that is RATIO times the others' median or more, else None.

    Args:
      values: of each process.
      floor: least difference that counts.
    """
    if len(values) < 2:
        return None
    worst = int(np.argmax(values))
    others = _median_of_others(values, worst)
    return worst if values[worst] > RATIO * others and values[worst] - others > floor else None


def _median_of_others(values: Sequence[float], index: int) -> float:
    return statistics.median(float(value) for other, value in enumerate(values) if other != index)


def _listed(values: Sequence[float]) -> str:
    if len(values) <= _SHOWN:
        return " ".join(_ms(value) for value in values)
    return f"least {_ms(min(values))}, median {_ms(statistics.median(map(float, values)))}, most {_ms(max(values))}"


def _ms(seconds: float) -> str:
    return f"{float(seconds) * 1000:.1f}"


class _Probe:
    """Seconds that the slowest of some devices takes for a fixed chain of matrix products."""

    def __init__(self, devices: Sequence[Any]):
        # About 10 ms of an H100, and a few of a CPU core.
        size, dtype = (256, jnp.float32) if devices[0].platform == "cpu" else (8192, jnp.bfloat16)
        self._inputs = [jax.device_put(jnp.full((size, size), 1 / size, dtype), device) for device in devices]
        self._chain = jax.jit(lambda a: jax.lax.fori_loop(0, 8, lambda _, x: x @ a, a))
        self()

    def __call__(self) -> float:
        return min(self._once() for _ in range(3))

    def _once(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready([self._chain(a) for a in self._inputs])
        return time.perf_counter() - start
