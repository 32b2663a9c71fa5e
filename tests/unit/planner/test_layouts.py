"""Planned layouts: each divides what it must, fits, and is judged by the formulas; the others have a reason."""

import dataclasses
import functools
import itertools
import subprocess
import sys

import pytest

from jmegatron.planner import layouts, memory, times
from jmegatron.planner.cards import CARDS
from jmegatron.planner.costs import Layout
from jmegatron.planner.formulas import ExpertShape, GPTShape
from jmegatron.planner.layouts import Request, describe, plan

H100 = CARDS["h100"]
SMALL = GPTShape(4, 1024, 4096, 8, 2, 128, vocab_rows=50304, seq_len=8192, num_positions=8192)
BIG = GPTShape(4, 40960, 163840, 320, 320, 128, vocab_rows=51200, seq_len=1024, num_positions=1024)
"""80 billion parameters in few layers, so that there are few ways to divide it."""
ONE_WAY = {"recompute": "full", "distributed_optimizer": True, "micro_batch_size": 1}
"""So that few layouts are tried."""
ON_8 = Request(BIG, 8, H100, 8, vocab_size=50257)


def small(**changes) -> Request:
    return dataclasses.replace(Request(SMALL, 8, H100, 8, vocab_size=50257), **changes)


@functools.cache
def small_plan() -> layouts.Plan:
    return plan(small())


def kinds(found) -> set[str]:
    return {one.kind for one in found.rejected}


def test_every_layout_that_is_ranked_uses_all_gpus_divides_what_it_must_and_fits():
    found = small_plan()
    assert len(found.ranked) > 100
    for one in found.ranked:
        layout = one.layout
        assert layout.num_devices == 8
        assert layout.global_batch_size == 8
        assert 8 % layout.tp == 0
        assert 8192 % (2 * layout.cp * layout.tp) == 0
        assert one.vocab_rows % (layout.tp * layout.pp) == 0
        assert sum(map(sum, layout.chunk_lengths)) == 4
        assert one.memory.total <= 0.9 * H100.memory_bytes
        sized = dataclasses.replace(SMALL, vocab_rows=one.vocab_rows)
        assert one.memory == memory.memory_of_step(sized, layout)
        assert one.time == times.step_time(sized, layout, H100)
    assert len({(one.layout, one.split) for one in found.ranked}) == len(found.ranked)
    seconds = [one.time.total for one in found.ranked]
    assert all(later > earlier * 0.999 for earlier, later in itertools.pairwise(seconds))
    assert found.best == found.ranked[0]


def test_every_degree_that_divides_is_tried():
    found = small_plan()
    tried = {(one.layout.tp, one.layout.pp, one.layout.cp) for one in found.ranked}
    # cp 8 would leave a rank 1024 tokens.
    expected = {
        (tp, pp, cp) for tp, pp, cp in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)) if 8 % (tp * pp * cp) == 0
    }
    assert tried == expected
    assert {one.layout.recompute for one in found.ranked} == {None, "selective", "full"}
    assert {one.layout.num_chunks for one in found.ranked if one.layout.pp == 2} == {1, 2}


def test_the_same_request_gives_the_same_plan():
    assert plan(small()) == small_plan()


def test_of_equal_layouts_the_one_that_divides_less_comes_first():
    digits = lambda one: (f"{one.time.total:.3e}", f"{one.memory.total:.2e}")  # noqa: E731
    for first, second in itertools.pairwise(small_plan().ranked):
        if digits(first) == digits(second):
            assert first.layout.cp <= second.layout.cp


def test_70b_on_512_to_4096_gpus_is_planned_in_seconds():
    # In a process of its own: the tests' type checks take ten times as long as the work.
    program = (
        "import time; from jmegatron.planner.cards import CARDS; from jmegatron.planner.formulas import GPTShape\n"
        "from jmegatron.planner.layouts import Request, plan\n"
        "shape = GPTShape(80, 8192, 32768, 64, 64, 128, vocab_rows=51200, seq_len=4096, num_positions=4096)\n"
        "best = [plan(Request(shape, n, CARDS['h100'], 4096, vocab_size=50257)).best for n in (512, 4096)]\n"
        "assert None not in best; print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert float(done.stdout) < 30  # 3 s on an idle machine


def test_what_cannot_be_divided_says_so():
    odd = dataclasses.replace(SMALL, num_attention_heads=6, num_query_groups=6, seq_len=8190, num_layers=7)
    found = plan(small(shape=odd, num_gpus=48, fixed=ONE_WAY))
    reasons = {one.reason for one in found.rejected}
    assert "num_attention_heads 6 is no multiple of 4" in reasons
    assert "seq_length 8190 is no multiple of 2 x 2" in reasons
    assert "global batch 8 is no multiple of 48" in reasons
    assert {"heads", "sequence", "batch"} <= kinds(found)
    fixed_rows = plan(
        small(vocab_size=None, fixed={"pp": 4, "tp": 2}, shape=dataclasses.replace(SMALL, vocab_rows=1002))
    )
    assert [one.reason for one in fixed_rows.rejected if one.kind == "vocabulary"]
    groups = plan(small(shape=dataclasses.replace(SMALL, num_query_groups=4, num_attention_heads=12), fixed={"tp": 6}))
    assert not groups.ranked


def test_layers_that_the_stages_cannot_share_get_a_shorter_end():
    odd = dataclasses.replace(SMALL, num_layers=7)
    found = plan(small(shape=odd, fixed={**ONE_WAY, "pp": 4}))
    assert found.best is not None
    assert found.best.layout.chunk_lengths == ((2,), (2,), (2,), (1,))
    assert found.best.split.last_stage_layers == 1
    # 5 stages of 2 would leave the last one none: both ends are shorter.
    six = plan(small(shape=dataclasses.replace(SMALL, num_layers=6), num_gpus=5, fixed={**ONE_WAY, "pp": 5}))
    assert {one.reason for one in six.rejected if one.kind == "layers"} == {
        "6 layers on 5 stages: end stages would have none"
    }
    ten = plan(small(shape=dataclasses.replace(SMALL, num_layers=10), fixed={**ONE_WAY, "pp": 4}))
    assert ten.best is not None
    assert ten.best.layout.chunk_lengths == ((3,), (3,), (3,), (1,))
    nine = plan(small(shape=dataclasses.replace(SMALL, num_layers=14), fixed={**ONE_WAY, "pp": 8}))
    assert nine.best is not None
    assert nine.best.layout.chunk_lengths == ((1,), *((2,),) * 6, (1,))


def test_a_vocabulary_is_padded_anew_where_its_rows_cannot_be_divided():
    ten = dataclasses.replace(SMALL, num_layers=10)
    found = plan(small(shape=ten, num_gpus=40, fixed={**ONE_WAY, "pp": 5, "tp": 4}, global_batch_size=24))
    assert found.best is not None
    assert found.best.vocab_rows == 51200  # the next multiple of 4 x lcm(128, 5)


def test_what_is_fixed_stays():
    fixed = {"tp": 2, "pp": 2, **ONE_WAY, "overlap_grad_reduce": False}
    found = plan(small(fixed=fixed, base=Layout(optimizer="lion")))
    assert found.ranked
    for one in found.ranked:
        assert {name: getattr(one.layout, name) for name in fixed} == fixed
        assert one.layout.optimizer == "lion"
    cut = plan(small(fixed={**ONE_WAY, "num_chunks": 2}))
    assert {one.layout.num_chunks for one in cut.ranked} == {2}
    ends = plan(small(fixed={**ONE_WAY, "pp": 2, "first_stage_layers": 3}))
    assert {one.layout.chunk_lengths for one in ends.ranked} == {((3,), (1,))}
    with pytest.raises(ValueError, match="unknown tensor"):
        small(fixed={"tensor": 2})


@pytest.mark.parametrize("fixed", [{"tp": 3}, {"pp": 5}, {"cp": 3}, {"micro_batch_size": 3}, {"num_chunks": 3}])
def test_what_is_fixed_and_impossible_leaves_nothing_but_reasons(fixed):
    found = plan(small(fixed=fixed))
    assert not found.ranked
    assert found.rejected


def test_a_short_sequence_is_divided_only_when_asked_to():
    short = dataclasses.replace(SMALL, seq_len=1024)
    assert {one.layout.cp for one in plan(small(shape=short)).ranked} == {1}
    assert {one.layout.cp for one in plan(small(shape=short, fixed={"cp": 4})).ranked} == {4}


def test_what_does_not_fit_says_what_it_needs_and_the_nearest_is_named():
    found = plan(ON_8)
    assert found.best is None
    miss = found.nearest_miss
    assert miss is not None
    needed = [one.candidate.memory.total for one in found.rejected if one.candidate is not None]
    assert miss.memory.total == min(needed) > 0.9 * H100.memory_bytes
    assert all("GB of the card" in one.reason for one in found.rejected if one.kind == "memory")


def test_ways_out_are_plans_that_fit():
    ways = layouts.ways_out(ON_8)
    gpus = next(way for way in ways if " GPUs: " in way)
    more = plan(dataclasses.replace(ON_8, num_gpus=int(gpus.split()[1])))
    assert more.best is not None
    assert gpus == f"take {more.request.num_gpus} GPUs: {describe(more.best.layout)}"
    ends = plan(dataclasses.replace(ON_8, num_gpus=32, fixed={**ONE_WAY, "tp": 8, "pp": 1}))
    assert ends.best is None
    ways = layouts.ways_out(ends.request, {"pp": "--pp"})
    assert ways[0].startswith("leave --pp out: tp 8 pp 4 ")


def test_where_leaving_out_one_of_what_is_fixed_does_not_help_all_of_it_is():
    request = dataclasses.replace(ON_8, num_gpus=32, fixed={"tp": 1, "pp": 1})
    assert plan(request).best is None
    ways = layouts.ways_out(request)
    assert ways[0].startswith("leave tp, pp out: tp ")
    assert ways[1].startswith("take 64 GPUs and leave tp, pp out: tp ")


def test_each_loser_says_what_costs_it_most():
    found = small_plan()
    assert len(found.losers) == len(found.ranked) - 1
    best = found.ranked[0].time
    for loser in found.losers:
        assert loser.candidate is not None
        parts = [name for name, title in layouts._PARTS.items() if title == loser.what]
        if parts:
            excess = {part: getattr(loser.candidate.time, part) - getattr(best, part) for part in layouts._PARTS}
            assert excess[parts[0]] == max(excess.values())
        else:
            assert loser.what == "memory"


def test_the_low_memory_schedule_never_meets_a_ring_or_an_overlap():
    for one in small_plan().ranked:
        if one.layout.schedule == "1f1b-low-memory" and one.layout.pp > 1:
            assert one.layout.cp == 1
            assert not one.layout.overlap_grad_reduce


@pytest.mark.parametrize("changes", [{"num_gpus": 0}, {"headroom": 1.0}, {"global_batch_size": 0}])
def test_numbers_that_mean_nothing_are_refused(changes):
    with pytest.raises(ValueError, match="expected at least 1 GPU"):
        small(**changes)


# ---- experts --------------------------------------------------------------------------------------------------------


def with_experts(pattern=(True,) * 4, **base) -> Request:
    experts = ExpertShape(8, 2, 2816, sum(pattern), pattern=pattern)
    return small(
        shape=dataclasses.replace(SMALL, experts=experts),
        base=Layout(ep=2, **base),
        fixed={"recompute": "selective", "distributed_optimizer": True, "micro_batch_size": 1},
    )


def test_layouts_with_experts_keep_ep_and_use_all_gpus():
    found = plan(with_experts())
    assert {(one.layout.ep, one.layout.num_devices, one.layout.global_batch_size) for one in found.ranked} == {
        (2, 8, 8)
    }
    assert {one.layout.tp for one in found.ranked} == {1, 2, 4}
    assert {one.layout.pp for one in found.ranked} == {1, 2, 4}
    assert "ep 2 dp" in describe(found.ranked[0].layout)


def test_what_experts_cannot_be_divided_into_is_left_out_with_a_reason():
    narrow = with_experts()
    narrow = dataclasses.replace(
        narrow,
        shape=dataclasses.replace(narrow.shape, experts=dataclasses.replace(narrow.shape.experts, ffn_hidden_size=102)),
    )
    assert {one.layout.tp for one in plan(narrow).ranked} == {1, 2}
    assert any("moe_ffn_hidden_size 102 is no multiple of 4" in one.reason for one in plan(narrow).rejected)
    whole = dataclasses.replace(narrow, base=dataclasses.replace(narrow.base, experts_over_tp=False))
    assert {one.layout.tp for one in plan(whole).ranked} == {1, 2, 4}
    assert not plan(dataclasses.replace(narrow, num_gpus=5)).ranked


def test_chunks_of_which_some_have_experts_where_others_have_none_are_left_out():
    found = plan(with_experts(pattern=(False, True, False, True)))
    assert {one.layout.pp * one.layout.num_chunks for one in found.ranked} == {1, 2}
    assert any(one.kind == "layers" and "some have experts only" in one.reason for one in found.rejected)
