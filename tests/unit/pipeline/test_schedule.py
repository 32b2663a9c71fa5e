"""Schedules: every chunk once and after what it needs, at the textbook's ticks, bubble, memory and messages."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_support import LOCK_STEP, schedule_arguments, valid_group_sizes

from jmegatron.errors import ConfigError
from jmegatron.pipeline.schedule import (
    NONE,
    SCHEDULES,
    build_schedule,
    check_schedule,
    group_sizes,
    in_flight,
    num_warmup,
    reference_order,
    rings,
    simulate,
)

SIZES = [(p, v) for p in (1, 2, 3, 4, 8) for v in (1, 2, 3, 4)]
COSTS = [(1.0, 2.0), (1.0, 1.0), (0.5, 1.25), (3.0, 1.0)]


def _pipedream(v):
    return "1f1b" if v == 1 else "interleaved"


# ------------------------------------------------------------------------------------------------------- all schedules


@settings(deadline=None, max_examples=200)
@given(schedule_arguments())
def test_every_chunk_runs_once_each_way_and_after_what_it_needs(arguments):
    schedule = build_schedule(**arguments)
    check_schedule(schedule)
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    everything = sorted((microbatch, chunk) for microbatch in range(m) for chunk in range(v))
    finished = {}  # (way, micro-batch, global stage) -> (tick, slot in it)
    for stage in range(p):
        order = schedule.order(stage)
        for way in "FB":
            assert sorted(work[1:] for work in order if work[0] == way) == everything
    for slot, (way, microbatches, chunks) in enumerate(
        (
            ("F", schedule.forward_microbatch, schedule.forward_chunk),
            ("B", schedule.backward_microbatch, schedule.backward_chunk),
        )
    ):
        for tick, stage in np.argwhere(microbatches != NONE).tolist():
            work = int(microbatches[tick, stage]), int(chunks[tick, stage]) * p + stage
            finished[way, *work] = (tick, 0 if schedule.half_ticks else slot)
    for (way, microbatch, place), when in finished.items():
        if way == "F" and place > 0:
            assert finished["F", microbatch, place - 1][0] < when[0]
        if way == "B" and place < v * p - 1:
            assert finished["B", microbatch, place + 1][0] < when[0]
        if way == "B" and place == v * p - 1:
            tick, slot = finished["F", microbatch, place]
            assert (tick + schedule.loss_delay, slot) < when


@settings(deadline=None, max_examples=200)
@given(schedule_arguments())
def test_simulation_agrees_with_the_tables(arguments):
    schedule = build_schedule(**arguments)
    simulation = simulate(schedule)
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    assert simulation.num_ticks == schedule.num_ticks
    assert simulation.ideal == 3 * m * v
    assert simulation.bubble == (simulation.total - simulation.ideal) / simulation.ideal
    assert simulation.bubble_of_total == (simulation.total - simulation.ideal) / simulation.total
    # Each boundary carries every chunk once; the way around from the last stage to the first all but one chunk.
    around = m * (v - 1) if p > 1 else 0
    assert simulation.messages.tolist() == [[m * v] * (p - 1) + [around], [around] + [m * v] * (p - 1)]
    # In flight: forward done, backward not, when the forward slot of a tick has run.
    for stage in range(p):
        forward, backward = schedule.forward_tick[stage], schedule.backward_tick[stage]
        most = max(int(((forward <= tick) & (backward >= tick)).sum()) for tick in range(schedule.num_ticks))
        assert simulation.in_flight[stage] == most


@settings(deadline=None, max_examples=100)
@given(schedule_arguments(names=("1f1b", "interleaved")))
def test_order_is_the_references(arguments):
    schedule = build_schedule(**arguments)
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
    counts = [num_warmup(stage, p, m, v) for stage in range(p)]
    assert counts == sorted(counts, reverse=True)
    if v == 1:
        for stage in range(p):
            reference = reference_order(stage, p, m)
            for way in "FB":
                assert [w for w in schedule.order(stage) if w[0] == way] == [w for w in reference if w[0] == way]


# -------------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(("p", "v"), SIZES)
@pytest.mark.parametrize("m", [8, 9, 13, 16, 40])
@pytest.mark.parametrize("gpipe", [False, True])
def test_ticks_and_bubble_in_lock_step(gpipe, p, v, m):
    name = "gpipe" if gpipe else _pipedream(v)
    for group_size in [None, *(valid_group_sizes(m, p) if v > 1 else [])]:
        schedule = build_schedule(name, p, m, v, group_size=group_size)
        for forward_cost, backward_cost in COSTS:
            simulation = simulate(schedule, forward_cost, backward_cost)
            assert simulation.num_forward_slots == simulation.num_backward_slots == m * v + p - 1
            assert simulation.total == (m * v + p - 1) * (forward_cost + backward_cost)
            assert simulation.bubble == (p - 1) / (v * m)
            assert simulation.bubble_of_total == (p - 1) / (v * m + p - 1)


@pytest.mark.parametrize("name", LOCK_STEP)
@pytest.mark.parametrize(("p", "m"), [(2, 1), (4, 1), (4, 3), (8, 5), (8, 7)])
def test_ticks_with_fewer_micro_batches_than_stages(name, p, m):
    for v in (1,) if name == "1f1b" else (2, 3, 4):
        simulation = simulate(build_schedule(name, p, m, v))
        slots = (v - 1) * p + m + p - 1
        assert simulation.num_forward_slots == simulation.num_backward_slots == slots
        assert simulation.bubble == pytest.approx((slots - m * v) / (m * v))


@pytest.mark.parametrize(("p", "v"), SIZES)
def test_chunks_in_flight_do_not_depend_on_the_number_of_micro_batches(p, v):
    for m in (4 * p, 8 * p, 32 * p):
        for loss_delay in (0, 1):
            schedule = build_schedule(_pipedream(v), p, m, v, loss_delay=loss_delay)
            expected = [2 * (p - 1 - stage) + (v - 1) * p + 1 + loss_delay for stage in range(p)]
            assert in_flight(schedule).tolist() == expected


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 16])
def test_low_memory_holds_one_micro_batch_for_each_stage_still_to_come(p, m):
    schedule = build_schedule("1f1b-low-memory", p, m)
    assert in_flight(schedule).tolist() == [min(p - stage, m) for stage in range(p)]
    assert schedule.num_ticks == 2 * (m + p - 1)
    assert simulate(schedule, 1.0, 1.0).bubble == (p - 1) / m
    assert not ((schedule.forward_microbatch != NONE) & (schedule.backward_microbatch != NONE)).any()


def test_half_ticks_take_the_longer_of_forward_and_backward():
    # F0 F0 | F1 at stage 0 beside B0 at stage 1, ...: 2 half ticks of 1, then those with a backward of 2.
    schedule = build_schedule("1f1b-low-memory", 2, 2)
    assert [schedule.order(stage) for stage in range(2)] == [
        [("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0)],
        [("F", 0, 0), ("B", 0, 0), ("F", 1, 0), ("B", 1, 0)],
    ]
    assert simulate(schedule, 1.0, 2.0).total == 1 + 1 + 2 + 2 + 2 + 2


@pytest.mark.parametrize("v", [1, 2, 3])
def test_gpipe_holds_everything(v):
    for p, m in ((1, 4), (4, 2), (4, 8), (8, 16)):
        schedule = build_schedule("gpipe", p, m, v)
        assert in_flight(schedule).tolist() == [m * v] * p
        both = schedule.forward_slots & schedule.backward_slots
        assert not both.any()


def test_tables_cannot_be_changed():
    schedule = build_schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match="read-only"):
        schedule.forward_microbatch[0, 0] = 1
    assert schedule.forward_microbatch.dtype == schedule.backward_chunk.dtype == np.int32


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 16))
def test_default_groups_are_even_and_of_at_least_the_number_of_stages(m, p):
    sizes = group_sizes(m, p)
    assert sum(sizes) == m
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(p, m)
    if m % p == 0:
        assert set(sizes) == {p}
    for group_size in valid_group_sizes(m, p):
        sizes = group_sizes(m, p, group_size)
        assert sum(sizes) == m
        assert min(sizes) >= min(p, m)


# --------------------------------------------------------------------------------------------------------------- errors


def _changed(schedule, change):
    """Returns the schedule with its tables changed in place by change(forward mb, forward chunk, backward ...)."""
    names = ("forward_microbatch", "forward_chunk", "backward_microbatch", "backward_chunk")
    tables = {name: getattr(schedule, name).copy() for name in names}
    change(*tables.values())
    return dataclasses.replace(schedule, **tables)


def _shift_stage(microbatch, chunk, stage, ticks):
    for table in (microbatch, chunk):
        table[:, stage] = np.roll(table[:, stage], ticks)


def _leave_out(f, fc, b, bc):
    f[2, 0] = NONE


def _twice(f, fc, b, bc):
    f[2, 0] = 0


def _extra(f, fc, b, bc):
    f[-1, 0] = 0


def _unknown_microbatch(f, fc, b, bc):
    b[-1, 0] = 99


def _negative_microbatch(f, fc, b, bc):
    b[-1, 0] = -2


def _unknown_chunk(f, fc, b, bc):
    fc[0, 0] = 2


def _negative_chunk(f, fc, b, bc):
    fc[0, 0] = -1


def _wrong_chunk(f, fc, b, bc):
    fc[0, 0] = 1


def _forward_late(f, fc, b, bc):
    _shift_stage(f, fc, 1, 1)


def _forward_early(f, fc, b, bc):
    _shift_stage(f, fc, 1, -1)


def _backward_late(f, fc, b, bc):
    _shift_stage(b, bc, 1, 1)


def _backward_early(f, fc, b, bc):
    _shift_stage(b, bc, 1, -1)


def _all_backward_early(f, fc, b, bc):
    for table in (b, bc):
        table[:] = np.roll(table, -2, axis=0)


BROKEN = [
    (_leave_out, "runs 0 times on stage 0"),
    (_twice, "runs [02] times on stage 0"),
    (_extra, "runs 2 times on stage 0"),
    (_unknown_microbatch, "outside 8 micro-batches"),
    (_negative_microbatch, "outside 8 micro-batches"),
    (_unknown_chunk, "outside 8 micro-batches and [12] chunks"),
    (_negative_chunk, "outside 8 micro-batches and [12] chunks"),
    (_wrong_chunk, "times on stage 0|outside"),
    (_forward_late, "forward of micro-batch 0, chunk 0 on stage 2, runs before"),
    (_forward_early, "forward of micro-batch 0, chunk 0 on stage 1, runs before"),
    (_backward_late, "backward of micro-batch 0, chunk . on stage 0, runs before"),
    (_backward_early, "backward of micro-batch 0, chunk . on stage 1, runs before"),
    (_all_backward_early, "backward of micro-batch 0, chunk . on stage 3, runs before"),
]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (name, *broken)
        for name in SCHEDULES
        for broken in BROKEN
        if (name, broken[0]) != ("gpipe", _all_backward_early)  # its first backward could run earlier
    ],
)
def test_a_broken_table_is_found(name, change, message):
    schedule = build_schedule(name, 4, 8, 2 if name == "interleaved" else 1)
    with pytest.raises(ValueError, match=message):
        check_schedule(_changed(schedule, change))


def test_a_loss_later_than_its_backward_is_found():
    with pytest.raises(ValueError, match="runs before what it needs"):
        check_schedule(dataclasses.replace(build_schedule("1f1b", 4, 8), loss_delay=1))


def test_half_ticks_hold_one_piece_of_work():
    def backward_late(f, fc, b, bc):
        b[:] = np.roll(b, 1, axis=0)

    schedule = build_schedule("1f1b-low-memory", 4, 8)
    tables = {}
    for name in ("forward_microbatch", "forward_chunk", "backward_microbatch", "backward_chunk"):
        idle = np.full((1, 4), NONE if "microbatch" in name else 0, np.int32)
        tables[name] = np.concatenate([getattr(schedule, name), idle])
    longer = dataclasses.replace(schedule, **tables)
    check_schedule(longer)
    with pytest.raises(ValueError, match="half tick 5 has a forward and a backward"):
        check_schedule(_changed(longer, backward_late))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("zigzag", 4, 8), {}, "got 'zigzag', expected one of 1f1b, interleaved, 1f1b-low-memory, gpipe"),
        (("1f1b", 0, 8), {}, "got 0 stages, 8 micro-batches, 1 chunks"),
        (("1f1b", 4, 0), {}, "got 4 stages, 0 micro-batches"),
        (("interleaved", 4, 8, 0), {}, "0 chunks a stage; expected 1 or more"),
        (("1f1b", 4, 8, 2), {}, "1f1b: got 2 chunks a stage, expected 1; fix: --pipeline-schedule interleaved"),
        (("1f1b-low-memory", 4, 8, 2), {}, "low-memory: got 2 chunks"),
        (("1f1b", 4, 8), {"group_size": 4}, "expected several chunks a stage; fix: leave it out"),
        (
            ("interleaved", 4, 8, 2),
            {"group_size": 3},
            r"got 3 with 8 .*; expected 4 \.\. 8, .* \(groups of 4\), or give 8",
        ),
        (("interleaved", 4, 8, 2), {"group_size": 0}, r"got 0 with 8"),
        (("interleaved", 4, 8, 2), {"group_size": -4}, r"got -4 with 8"),
        (("interleaved", 4, 8, 2), {"group_size": 9}, r"got 9 with 8 .* expected 4 \.\. 8"),
        (("interleaved", 4, 10, 2), {"group_size": 4}, r"got 4 with 10 .*\(a last group of 2\).* \(groups of 5\)"),
        (("interleaved", 4, 3, 2), {"group_size": 3}, r"got 3 with 3 .* expected 4 \.\. 4"),
        (("1f1b", 4, 8), {"loss_delay": 2}, "got a loss 2 ticks after its forward, expected 0 or 1"),
        (("1f1b", 4, 8), {"loss_delay": -1}, "got a loss -1 ticks after"),
    ],
)
def test_numbers_without_a_schedule(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        build_schedule(*arguments, **options)


# ---------------------------------------------------------------------------------------------------------------- rings


def _traffic(schedule):
    """Returns for each ring what each (tick, stage) writes and what it must read, from the tables alone."""
    p, v, ticks = schedule.num_stages, schedule.num_chunks, schedule.num_ticks
    written = {name: {} for name in ("residuals", "inputs", "gradients", "losses")}
    read = {name: {} for name in written}
    for tick in range(ticks):
        for stage in range(p):
            microbatch, chunk = schedule.forward_microbatch[tick, stage], schedule.forward_chunk[tick, stage]
            if microbatch != NONE:
                place = chunk * p + stage
                written["residuals"][tick, stage] = ("residual", microbatch, place)
                if place < v * p - 1:
                    written["inputs"][tick + 1, (stage + 1) % p] = ("y", microbatch, place)
                else:
                    written["losses"][tick + schedule.loss_delay, stage] = ("loss", microbatch)
                if place > 0:
                    read["inputs"][tick, stage] = ("y", microbatch, place - 1)
            microbatch, chunk = schedule.backward_microbatch[tick, stage], schedule.backward_chunk[tick, stage]
            if microbatch != NONE:
                place = chunk * p + stage
                read["residuals"][tick, stage] = ("residual", microbatch, place)
                if place > 0:
                    written["gradients"][tick + 1, (stage - 1) % p] = ("dx", microbatch, place)
                if place < v * p - 1:
                    read["gradients"][tick, stage] = ("dx", microbatch, place + 1)
                else:
                    read["losses"][tick, stage] = ("loss", microbatch)
    return written, read


def _replay(ring, writes, written, read):
    """Runs the ring; ticks of `writes` without anything to keep write garbage."""
    for stage in range(ring.write.shape[1]):
        memory = ["empty"] * ring.size
        for tick in range(len(writes)):
            if writes[tick]:
                memory[ring.write[tick, stage]] = written.get((tick, stage), "garbage")
            if (tick, stage) in read:
                assert memory[ring.read[tick, stage]] == read[tick, stage], (tick, stage)
                if ring.immediate:
                    assert written[tick, stage] == read[tick, stage]


def _smallest(writes, written, read, num_stages):
    """Returns the places that some tick needs: what is wanted now or later, and one for garbage written then."""
    until = [{value: tick for (tick, place), value in read.items() if place == stage} for stage in range(num_stages)]
    most = 1
    for stage in range(num_stages):
        live = [(tick, until[stage][value]) for (tick, place), value in written.items() if place == stage]
        for tick in np.flatnonzero(writes):
            garbage = (tick, stage) not in written
            most = max(most, sum(begin <= tick <= end for begin, end in live) + garbage)
    return most


@settings(deadline=None, max_examples=150)
@given(schedule_arguments(names=LOCK_STEP))
def test_every_read_of_a_ring_gets_what_was_written_for_it(arguments):
    schedule = build_schedule(**arguments)
    written, read = _traffic(schedule)
    always = np.ones(schedule.num_ticks, bool)
    program = {  # the ticks in which the program writes at least, and at most
        "residuals": (schedule.forward_slots, schedule.forward_slots),
        "inputs": (schedule.forward_slots, always),
        "gradients": (schedule.backward_slots, always),
        "losses": (schedule.backward_slots, always),
    }
    for name, ring in rings(schedule)._asdict().items():
        assert sorted(map(str, written[name].values())) == sorted(map(str, read[name].values()))
        least, most = program[name]
        least = least.copy()
        least[[tick for tick, _ in written[name]]] = True
        for writes in (least, most):
            _replay(ring, writes, written[name], read[name])
        assert ring.size == _smallest(most, written[name], read[name], schedule.num_stages)
        assert (ring.write < ring.size).all()
        assert (ring.read < ring.size).all()
        assert ring.immediate == all(read[name].get(key) == value for key, value in written[name].items())


@pytest.mark.parametrize(("p", "v"), SIZES)
@pytest.mark.parametrize("loss_delay", [0, 1])
def test_rings_hold_what_is_in_flight_and_messages_need_none(p, v, loss_delay):
    for m in (4 * p, 16 * p):
        schedule = build_schedule(_pipedream(v), p, m, v, loss_delay=loss_delay)
        buffers = rings(schedule)
        assert buffers.residuals.size == 2 * (p - 1) + (v - 1) * p + 1 + loss_delay
        assert buffers.inputs.immediate
        assert buffers.gradients.immediate
        assert buffers.losses.immediate
        assert {ring.size for ring in buffers[1:]} == {1}


def test_groups_larger_than_the_number_of_stages_wait_in_rings():
    buffers = rings(build_schedule("interleaved", 4, 12, 2, group_size=6))
    assert not buffers.inputs.immediate
    assert not buffers.gradients.immediate
    assert buffers.inputs.size > 1


def test_one_stage_keeps_nothing():
    assert rings(build_schedule("1f1b", 1, 8)).residuals.immediate
    assert rings(build_schedule("gpipe", 4, 8)).losses.size == 8 + 1  # and a place for what nobody wants
