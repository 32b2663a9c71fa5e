"""Loops over ticks: the kinds in their order, as many bodies for any number of micro-batches, each loss once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_support import LOCK_STEP, schedule_arguments

from jmegatron.pipeline.loops import Kind, Loop, embedding_lead, loop_nest, tick_tables
from jmegatron.pipeline.schedule import NONE, build_schedule


def _unrolled(nest):
    """Returns the kinds that the loops run, in order."""
    kinds = []
    for loop in nest:
        for _ in range(loop.repeats):
            for part in loop.parts:
                kinds += _unrolled([part]) if isinstance(part, Loop) else [part]
    return kinds


def _bodies(nest):
    """Returns how many ticks are compiled."""
    return sum(_bodies(part.parts) if isinstance(part, Loop) else 1 for part in nest)


def _wanted(schedule, microbatch, chunk, stage, which):
    """Returns (tick, micro-batch) of a stage's work in one chunk."""
    ticks = np.flatnonzero((microbatch[:, stage] != NONE) & (chunk[:, stage] == which)).tolist()
    return [(tick, int(microbatch[tick, stage])) for tick in ticks]


@settings(deadline=None, max_examples=150)
@given(schedule_arguments(names=LOCK_STEP), st.booleans())
def test_loops_run_the_kinds_in_order(arguments, backward):
    schedule = build_schedule(**arguments)
    kinds = tick_tables(schedule, backward=backward).kinds
    nest = loop_nest(kinds)
    assert _unrolled(nest) == kinds
    assert sum(loop.num_ticks for loop in nest) == len(kinds)
    for field in Kind._fields:
        assert sum(loop.count(field) for loop in nest) == sum(getattr(kind, field) for kind in kinds)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60))
def test_loops_run_any_kinds_in_order(numbers):
    kinds = [Kind(bool(n & 1), bool(n & 2), False, False, False) for n in numbers]
    assert _unrolled(loop_nest(kinds)) == kinds


@settings(deadline=None, max_examples=150)
@given(schedule_arguments(names=LOCK_STEP))
def test_kinds_have_every_slot_and_each_loss_once(arguments):
    schedule = build_schedule(**arguments)
    tables = tick_tables(schedule)
    p, v = schedule.num_stages, schedule.num_chunks
    assert [kind.forward for kind in tables.kinds] == schedule.forward_slots.tolist()
    assert [kind.backward for kind in tables.kinds] == schedule.backward_slots.tolist()
    assert sum(kind.loss for kind in tables.kinds) == schedule.num_microbatches
    losses = _wanted(schedule, schedule.forward_microbatch, schedule.forward_chunk, p - 1, v - 1)
    found = [(tick, int(tables.loss_microbatch[tick])) for tick, kind in enumerate(tables.kinds) if kind.loss]
    assert found == [(tick + schedule.loss_delay, microbatch) for tick, microbatch in losses]
    assert len({(kind.forward, kind.loss, kind.backward) for kind in tables.kinds}) == len(set(tables.kinds))


@settings(deadline=None, max_examples=150)
@given(schedule_arguments(names=LOCK_STEP))
def test_embeddings_are_there_when_stage_0_needs_them_and_get_their_gradient_after_it(arguments):
    schedule = build_schedule(**arguments)
    tables, lead = tick_tables(schedule), embedding_lead(schedule)
    assert lead == (schedule.num_stages > 1)
    needs = _wanted(schedule, schedule.forward_microbatch, schedule.forward_chunk, 0, 0)
    assert needs[0][0] == 0  # with a lead, looked up before the first tick
    for tick, microbatch in needs:
        if tick >= lead:
            assert tables.kinds[tick - lead].embed
            assert tables.embed_microbatch[tick - lead] == microbatch
    assert (tables.embed_microbatch != NONE).sum() == len(needs) - lead
    gives = _wanted(schedule, schedule.backward_microbatch, schedule.backward_chunk, 0, 0)
    assert gives[-1][0] == schedule.num_ticks - 1  # with a lead, added after the last tick
    for tick, microbatch in gives:
        if tick + lead < schedule.num_ticks:
            assert tables.kinds[tick + lead].embed_gradient
            assert tables.embed_gradient_microbatch[tick + lead] == microbatch
    assert (tables.embed_gradient_microbatch != NONE).sum() == len(gives) - lead


@settings(deadline=None, max_examples=100)
@given(schedule_arguments(names=LOCK_STEP))
def test_without_backward_the_ticks_end_with_the_last_loss(arguments):
    schedule = build_schedule(**arguments)
    tables = tick_tables(schedule, backward=False)
    assert not any(kind.backward or kind.embed_gradient for kind in tables.kinds)
    assert sum(kind.loss for kind in tables.kinds) == schedule.num_microbatches
    assert tables.kinds[-1].loss
    assert len(tables.kinds) == int(schedule.forward_slots.sum()) + schedule.loss_delay
    assert {len(table) for table in tables[1:]} == {len(tables.kinds)}


@pytest.mark.parametrize("loss_delay", [0, 1])
@pytest.mark.parametrize(
    ("name", "p", "v"),
    [
        ("1f1b", 1, 1),
        ("1f1b", 2, 1),
        ("1f1b", 4, 1),
        ("1f1b", 8, 1),
        ("interleaved", 1, 2),
        ("interleaved", 2, 2),
        ("interleaved", 2, 4),
        ("interleaved", 4, 2),
        ("interleaved", 4, 4),
        ("gpipe", 4, 1),
        ("gpipe", 4, 2),
    ],
)
def test_bodies_do_not_depend_on_the_number_of_micro_batches(name, p, v, loss_delay):
    counts = {
        _bodies(loop_nest(tick_tables(build_schedule(name, p, m, v, loss_delay=loss_delay)).kinds))
        for m in (8, 16, 32, 64)
    }
    assert len(counts) == 1
    assert counts.pop() <= (4 if v == 1 else 6)


def test_bodies_are_few_for_any_number_of_micro_batches():
    for p in (1, 2, 3, 4, 8):
        for v in (2, 3, 4):
            for m in range(1, 101):
                nest = loop_nest(tick_tables(build_schedule("interleaved", p, m, v)).kinds)
                assert _bodies(nest) <= 7, (p, v, m)


def test_1f1b_is_three_loops():
    nest = loop_nest(tick_tables(build_schedule("1f1b", 4, 8)).kinds)
    assert [(loop.repeats, loop.parts[0][1:4]) for loop in nest] == [
        (3, (True, False, False)),  # warm-up
        (8, (True, True, True)),
        (3, (False, False, True)),  # cool-down
    ]


def test_a_repeated_sequence_becomes_a_loop_of_loops():
    a, b = Kind(True, True, False, False, False), Kind(True, True, True, True, True)
    assert loop_nest([a, a, b] * 5 + [a]) == [Loop(5, (Loop(2, (a,)), Loop(1, (b,)))), Loop(1, (a,))]
    assert loop_nest([]) == []
