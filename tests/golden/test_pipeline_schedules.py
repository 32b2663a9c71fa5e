"""Pipeline schedules against what Megatron-Core ran (`data/tables/pipeline_schedules.json`).

The traces were recorded from the reference's own schedule functions with stand-in models: what each rank ran, in order,
as `F3.1` for the forward of micro-batch 3 in chunk 1. `n` is its microbatch_group_size_per_vp_stage.
"""

import json
from pathlib import Path

import pytest

from jmegatron.pipeline.schedule import (
    NONE,
    build_schedule,
    in_flight,
    num_warmup,
    reference_order,
)

RECORDED = json.loads((Path(__file__).parent / "data/tables/pipeline_schedules.json").read_text())
TRACES, TABLES = RECORDED["traces"], RECORDED["schedule_tables"]


def _order(text):
    """Returns [("F", micro-batch, chunk), ...] of a rank's trace."""
    return [(item[0], *map(int, item[1:].split("."))) for item in text.split()]


def _numbers(trace):
    """Returns p, m, v and the group size as an argument of ours."""
    return trace["p"], trace["m"], trace["v"], trace["n"] if trace["v"] > 1 else None


def _of(order, way):
    return [work for work in order if work[0] == way]


@pytest.mark.parametrize("name", TRACES)
def test_reference_order_is_the_trace(name):
    p, m, v, n = _numbers(TRACES[name])
    assert len(TRACES[name]["orders"]) == p
    for stage, recorded in enumerate(TRACES[name]["orders"]):
        assert reference_order(stage, p, m, v, n) == _order(recorded)


@pytest.mark.parametrize("name", TRACES)
def test_schedules_run_forward_and_backward_in_the_order_of_the_trace(name):
    p, m, v, n = _numbers(TRACES[name])
    for kind in ("1f1b", "gpipe") if v == 1 else ("interleaved", "gpipe"):
        schedule = build_schedule(kind, p, m, v, group_size=n)
        for stage, recorded in enumerate(TRACES[name]["orders"]):
            for way in "FB":
                assert _of(schedule.order(stage), way) == _of(_order(recorded), way), (kind, stage)


@pytest.mark.parametrize("name", [name for name, trace in TRACES.items() if trace["v"] == 1])
def test_low_memory_is_the_trace_in_its_interleaving_and_its_memory_too(name):
    trace = TRACES[name]
    schedule = build_schedule("1f1b-low-memory", trace["p"], trace["m"])
    assert [schedule.order(stage) for stage in range(trace["p"])] == [_order(order) for order in trace["orders"]]
    assert in_flight(schedule).tolist() == trace["peak_live_activations"]


@pytest.mark.parametrize("name", TRACES)
def test_the_first_backward_follows_the_warm_up_and_one_forward(name):
    p, m, v, n = _numbers(TRACES[name])
    expected = [min(num_warmup(stage, p, m, v, n) + 1, m * v) for stage in range(p)]
    assert TRACES[name]["forwards_before_first_backward"] == expected


@pytest.mark.parametrize("name", TRACES)
def test_lock_step_holds_at_most_twice_what_the_reference_holds(name):
    p, m, v, n = _numbers(TRACES[name])
    ours = in_flight(build_schedule("1f1b" if v == 1 else "interleaved", p, m, v, group_size=n))
    theirs = TRACES[name]["peak_live_activations"]
    # Several chunks: the same but for small m. One chunk: 2 (p - 1 - r) + 1 instead of p - r.
    assert all(a <= (b if v > 1 and m >= 2 * p else 2 * b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", TABLES)
def test_schedule_tables_are_the_forward_order(name):
    m, v, n = (int(part[1:]) for part in name.split("_"))
    p = min(n, m % n or n)  # the order does not depend on p, but a last group has at least p
    schedule = build_schedule("interleaved", p, m, v, group_size=n)
    table = [tuple(map(int, item.split("."))) for item in TABLES[name].split()]
    assert len(table) == m * v
    for stage in range(p):
        busy = schedule.forward_microbatch[:, stage] != NONE
        columns = (schedule.forward_microbatch[busy, stage], schedule.forward_chunk[busy, stage])
        assert list(zip(*(column.tolist() for column in columns), strict=True)) == table


def test_schedule_tables_with_groups_larger_than_the_number_of_stages():
    # parity.md 5: p 2, v 2, N 3, m 5.
    forward = [work[1:] for work in reference_order(0, 2, 5, 2, 3) if work[0] == "F"]
    assert [microbatch for microbatch, _ in forward] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [chunk for _, chunk in forward] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("p", "m", "v", "n", "expected"),
    [
        (4, 64, 1, None, [3, 2, 1, 0]),
        (8, 4, 1, None, [4, 4, 4, 4, 3, 2, 1, 0]),
        (4, 64, 4, None, [18, 16, 14, 12]),
        (4, 8, 2, None, [10, 8, 6, 4]),
        (4, 4, 2, None, [8, 8, 6, 4]),
        (2, 5, 2, 3, [5, 3]),
    ],
)
def test_warm_up_counts_of_the_reference(p, m, v, n, expected):
    assert [num_warmup(stage, p, m, v, n) for stage in range(p)] == expected
    for stage, warmup in enumerate(expected):
        order = reference_order(stage, p, m, v, n)
        assert "".join(way for way, _, _ in order).index("B") == min(warmup + 1, m * v)
