"""Who is slow, from numbers; that a real slow process is named is in tests/multiprocess."""

import time

import pytest

from jmegatron.training import straggler
from jmegatron.training.job import Job
from jmegatron.training.straggler import StragglerLog, slowest, straggler_line


@pytest.mark.parametrize(
    ("values", "floor", "expected"),
    [
        ([1.0, 1.0, 1.21, 1.0], 0.0, 2),
        ([1.0, 1.0, 1.19, 1.0], 0.0, None),
        ([1.0, 1.3], 0.0, 1),  # of two, the other is the median
        ([1.3, 1.0], 0.0, 0),
        ([1.3, 1.3, 1.0, 1.0, 1.0], 0.0, 0),
        ([0.001, 0.009], 0.01, None),  # nine times as long, and nothing to a step of a second
        ([5.0], 0.0, None),
    ],
)
def test_the_slowest_is_named_from_a_fifth_above_the_median_of_the_others(
    values: list[float], floor: float, expected: int | None
) -> None:
    assert slowest(values, floor) == expected


def test_the_line_has_every_process_and_names_host_and_kind() -> None:
    line = straggler_line(7, ["a", "b", "c"], [0.001, 0.201, 0.001], [0.01, 0.01, 0.013], 0.25)
    assert "iteration 7 | own work per step (ms): 1.0 201.0 1.0 | probe (ms): 10.0 10.0 13.0 |" in line
    assert "slow: process 1 (b): own work 201.0 ms, others 1.0 ms; process 2 (c): probe 13.0 ms, others 10.0 ms" in line
    assert "slow: none" in straggler_line(7, ["a", "b"], [0.001, 0.003], [0.01, 0.01], 0.25)


def test_many_processes_are_summed_up() -> None:
    line = straggler_line(1, [f"h{i}" for i in range(64)], [0.001] * 63 + [0.5], [0.01] * 64, 1.0)
    assert "least 1.0, median 1.0, most 500.0" in line
    assert "process 63 (h63)" in line


def test_own_work_is_the_time_outside_the_waits_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    log = StragglerLog(Job(), wanted=True)
    monkeypatch.setattr(straggler.time, "perf_counter", lambda: now[0])
    log.reset()
    for _ in range(4):
        now[0] += 0.5
        with log.waiting(1):
            now[0] += 3.0
    with log.waiting():
        now[0] += 100.0
    assert "own work per step (ms): 500.0 |" in str(log.report(4, 3.5))


def test_nothing_is_measured_unless_asked_for() -> None:
    log = StragglerLog(Job(), wanted=False)
    start = time.perf_counter()
    assert log.report(1, 1.0) is None
    assert time.perf_counter() - start < 0.1
