"""What XLA's latency hiding scheduler says of its own schedule: microseconds in which a device waits for transfers.

No communication, no jax. With `SCHEDULER_LOG` in the environment before jaxlib loads, compiling for a GPU logs for each
computation that holds transfers the time of all of it and what is wasted for each kind of transfer, before and after
scheduling. The times are XLA's own model of the GPU, not measured: it gives a loop no time (what is hidden beside a
loop counts as wasted), and a transfer its own speed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from jmegatron.planner import hlo

SCHEDULER_LOG = {
    "TF_CPP_MIN_LOG_LEVEL": "0",
    # Not TF_CPP_MAX_VLOG_LEVEL: that makes every module of XLA talk, gigabytes of it.
    "TF_CPP_VMODULE": "latency_hiding_scheduler=1",
}
"""Variables with which jaxlib logs what `SchedulerLog` reads."""

Statistics = dict[str, dict[str, float]]
"""Microseconds by computation and kind of transfer; kind "total": of the whole computation."""


class SchedulerLog:
    """Reads the log line by line."""

    def __init__(self) -> None:
        self.before: Statistics = {}
        """Before scheduling: every transfer where its value is made."""
        self.after: Statistics = {}
        self._when, self._name = self.before, ""

    def read(self, line: bytes) -> bool:
        """Takes one line; returns whether it was one of the statistics."""
        if not any(word in line for word in (b"ycles", b"tatistics ", b"For computation")):
            return False
        text = line.decode(errors="replace")
        if match := re.search(r"Statistics (before|after) scheduling", text):
            self._when = self.before if match.group(1) == "before" else self.after
        elif match := re.search(r"For computation: (\S+),", text):
            self._name = match.group(1)
        elif match := re.search(r"(Wasted cycles for ([\w -]+)|Total cycles): ([\d.e+]+)\s*$", text):
            self._when.setdefault(self._name, {})[match.group(2) or "total"] = float(match.group(3))
        else:
            return False
        return True


def scheduler_statistics(lines: Iterable[bytes]) -> dict[str, Statistics]:
    """Returns what a whole log says "before" and "after" scheduling."""
    log = SchedulerLog()
    for line in lines:
        log.read(line)
    return {"before": log.before, "after": log.after}


def bodies_of(module: hlo.Module) -> dict[str, str]:
    """Returns the computation that each loop runs."""
    return {each.name: each.called("body")[0] for each, _ in hlo.walk(module) if each.opcode == "while"}


def executions(module: hlo.Module) -> dict[str, int]:
    """Returns how often a step runs the entry computation and the body of each loop.

    Raises:
        UnknownTripCountError: the program does not tell.
    """
    bodies, times = bodies_of(module), {module.entry.name: 1}
    for loop in hlo.loops(module):
        if loop.trip_count is None or loop.site.executions is None:
            raise hlo.UnknownTripCountError(loop.name, loop.op_name)
        times[bodies[loop.name]] = loop.trip_count * loop.site.executions
    return times


def exposed_seconds(statistics: Statistics, times: dict[str, int]) -> dict[str, float]:
    """Returns the seconds of a step that a device waits for each kind of transfer.

    Args:
        statistics: of the log, after scheduling.
        times: of `executions`.
    """
    found: dict[str, float] = {}
    for name, rows in statistics.items():
        for kind, microseconds in rows.items():
            if kind != "total" and name in times:
                found[kind] = found.get(kind, 0.0) + microseconds * times[name] / 1e6
    return found
