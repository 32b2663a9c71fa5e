"""Trip counts: noted by XLA, derived where it did not note them, unknown otherwise."""

import pytest

from jmegatron.planner.hlo_text import parse_module
from jmegatron.planner.trip_counts import trip_count

LOOP = """HloModule jit_f

%step (p: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {
  %p = (s32[], f32[4]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4]{0} get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %one = s32[] constant(STEP)
  %next = s32[] add(%i, %one)
  %y = f32[4]{0} add(%x, %x)
  ROOT %t = (s32[], f32[4]{0}, s32[]) tuple(%next, %y, %n)
}

%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %c = pred[] compare(%a, %b), direction=DIRECTION
}

%test (q: (s32[], f32[4], s32[])) -> pred[] {
  %q = (s32[], f32[4]{0}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=2
  ROOT %r = pred[] fusion(OPERANDS), kind=kLoop, calls=%less
}

ENTRY %main (x0: f32[4], n0: s32[]) -> (s32[], f32[4], s32[]) {
  %x0 = f32[4]{0} parameter(0)
  %n0 = s32[] parameter(1)
  %start = s32[] constant(START)
  %bound = s32[] constant(BOUND)
  %start_copy = s32[] copy(%start)
  %init = (s32[], f32[4]{0}, s32[]) tuple(%start_copy, %x0, %LIMIT)
  ROOT %while.1 = (s32[], f32[4]{0}, s32[]) while(%init), condition=%test, body=%stepCONFIG
}
"""


def count(start=0, step=1, bound=10, direction="LT", operands="%j, %m", limit="bound", config=""):
    text = LOOP
    for key, value in {
        "START": start,
        "STEP": step,
        "BOUND": bound,
        "DIRECTION": direction,
        "OPERANDS": operands,
        "LIMIT": limit,
        "CONFIG": config,
    }.items():
        text = text.replace(key, str(value))
    module = parse_module(text)
    return trip_count(module, module.entry, module.entry.by_name["while.1"])


def test_what_xla_noted_is_taken():
    assert count(config=', backend_config={"known_trip_count":{"n":"7"}}') == 7


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, 10),
        ({"start": 3}, 7),
        ({"step": 3}, 4),
        ({"bound": 0}, 0),
        ({"start": 5, "bound": 2}, 0),
        ({"direction": "LE"}, 11),
        ({"start": 10, "bound": 0, "step": -1, "direction": "GT"}, 10),
        ({"start": 10, "bound": 0, "step": -3, "direction": "GE"}, 4),
        ({"direction": "NE", "step": 5}, 2),
        ({"operands": "%m, %j", "direction": "GT"}, 10),
    ],
)
def test_a_counter_against_a_constant_is_derived(arguments, expected):
    assert count(**arguments) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"limit": "n0"},  # the bound is an argument of the program
        {"step": 0},
        {"step": -1},
        {"direction": "NE", "step": 3},
        {"direction": "EQ"},
        {"operands": "%m, %m"},
    ],
)
def test_anything_else_is_unknown(arguments):
    assert count(**arguments) is None
