"""How often a `while` of an optimised program runs: what XLA noted, else what the program itself says.

No communication. XLA notes `known_trip_count` in the loop's backend_config where it proved one. Where it did not, the
count is derived for loops of the form "counter starts at a constant, grows by a constant, is compared with a constant",
looking through fusions, copies and values that the loop only carries. Everything else is unknown (None), never 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jmegatron.planner.hlo_text import ArrayShape, Computation, Instruction, Module

# What an instruction's value is known to be:
#   ("constant", n)  ("state",) the loop's whole tuple  ("element", i) of it  ("plus", i, n) element i + n
#   ("tuple", (value, ...))  ("compare", direction, left, right)  or None: not known.
_Value = tuple[Any, ...] | None

_PASS_THROUGH = ("copy", "bitcast", "convert", "reshape", "opt-barrier")
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Iterations of `loop`, a `while` in `computation`; None when they cannot be known from the program."""
    noted = loop.backend_config.get("known_trip_count", {}).get("n")
    return int(noted) if noted is not None else _derived_trip_count(module, computation, loop)


def _derived_trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    start = _value(module, computation, loop.operands[0], {})
    after = _body_value(module, loop, "body")
    test = _body_value(module, loop, "condition")
    if not (start and after and test) or start[0] != "tuple" or after[0] != "tuple" or test[0] != "compare":
        return None
    _, direction, left, right = test
    left, right = (_carried_constant(side, start[1], after[1]) for side in (left, right))
    if left and left[0] == "constant":
        direction, left, right = _MIRRORED.get(direction, ""), right, left
    if not (left and right) or left[0] != "element" or right[0] != "constant":
        return None
    first, change = start[1][left[1]], after[1][left[1]]
    if not (first and change) or first[0] != "constant" or change[:2] != ("plus", left[1]):
        return None
    return _iterations(direction, first[1], right[1], change[2])


def _iterations(direction: str, first: int, bound: int, step: int) -> int | None:
    """Iterations of `for (i = first; i <direction> bound; i += step)`; None when it never ends."""
    if direction in ("GT", "GE"):
        return _iterations(_MIRRORED[direction], -first, -bound, -step)
    if direction == "LE":
        return _iterations("LT", first, bound + 1, step)
    if direction == "LT" and step > 0:
        return max(0, -((first - bound) // step))
    if direction == "NE" and step and (bound - first) % step == 0 and (bound - first) // step >= 0:
        return (bound - first) // step
    return 0 if direction == "LT" and first >= bound else None


def _carried_constant(value: _Value, start: tuple[_Value, ...], after: tuple[_Value, ...]) -> _Value:
    """A constant that the loop carries unchanged is that constant."""
    if value and value[0] == "element" and after[value[1]] == value:
        return start[value[1]]
    return value


def _body_value(module: Module, loop: Instruction, key: str) -> _Value:
    (name,) = loop.called(key)
    computation = module.computation(name)
    return _value(module, computation, computation.root.name, {0: ("state",)})


def _value(module: Module, computation: Computation, name: str, parameters: Mapping[int, _Value]) -> _Value:
    instruction = computation.by_name[name]
    # A counter is a scalar; following arrays too would walk the whole program, and shared operands again and again.
    if isinstance(instruction.shape, ArrayShape) and (
        instruction.shape.dims or instruction.shape.dtype[0] not in "sup"
    ):
        return None
    if instruction.opcode == "parameter":
        return parameters.get(int(instruction.argument_text))
    if instruction.opcode == "constant":
        text = instruction.argument_text
        return ("constant", int(text)) if text.lstrip("-").isdigit() else None

    def operand(index: int) -> _Value:
        return _value(module, computation, instruction.operands[index], parameters)

    if instruction.opcode in _PASS_THROUGH:
        return operand(0)
    if instruction.opcode == "tuple":
        return ("tuple", tuple(operand(index) for index in range(len(instruction.operands))))
    if instruction.opcode == "get-tuple-element":
        return _element(operand(0), instruction.int_list("index")[0])
    if instruction.opcode == "compare":
        return ("compare", instruction.attributes.get("direction", ""), operand(0), operand(1))
    if instruction.opcode in ("add", "subtract"):
        return _sum(operand(0), operand(1), -1 if instruction.opcode == "subtract" else 1)
    if instruction.opcode in ("fusion", "call") and isinstance(instruction.shape, ArrayShape):
        (called,) = instruction.called("calls") or instruction.called("to_apply")
        inner = module.computation(called)
        return _value(module, inner, inner.root.name, {n: operand(n) for n in range(len(instruction.operands))})
    return None


def _element(value: _Value, index: int) -> _Value:
    if value == ("state",):
        return ("element", index)
    return value[1][index] if value and value[0] == "tuple" else None


def _sum(left: _Value, right: _Value, sign: int) -> _Value:
    if left and right and left[0] == "constant" and right[0] == "element" and sign > 0:
        left, right = right, left
    if not (left and right) or right[0] != "constant":
        return None
    if left[0] == "constant":
        return ("constant", left[1] + sign * right[1])
    return ("plus", left[1], sign * right[1]) if left[0] == "element" else None
