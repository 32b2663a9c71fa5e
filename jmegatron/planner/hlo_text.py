"""Read XLA's HLO text into a small object tree: module -> computations -> instructions.

No communication. Grammar: the `ToString` form that `compiled.as_text()` and `HloModule.to_string()` print on both back
ends (CPU and GPU) and at both JAX ends; operands may or may not carry their shapes. A line inside a computation that
does not follow the grammar raises `ValueError`: a line that is skipped silently would be work that is not counted.

The analysis of what is read stands in `hlo.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_BRACKET_OR_QUOTE = re.compile(r'[()\[\]{}"]')
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\]")
_ASSIGNMENT = re.compile(r"\s*(ROOT\s+)?%?([^\s=]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([a-zA-Z][\w-]*)\(")
_HEADER = re.compile(r"(ENTRY\s+)?%?([^\s(]+)\s*(\(.*)?\{\s*$")
_OPENING = {"(": ")", "[": "]", "{": "}"}


# ---- shapes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArrayShape:
    """One dense array: XLA's name of the element type, and the dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the elements, without padding or layout."""
        return -(-self.size * bits_of(self.dtype) // 8)


# A tuple holds shapes; the recursion is left out of the type because run-time checkers cannot follow it.
Shape = ArrayShape | tuple[Any, ...]


def bits_of(dtype: str) -> int:
    """Bits of one element of XLA's type `dtype` (`bf16`, `f8e4m3fn`, `s4`, ...).

    Raises:
        ValueError: `dtype` is not a type name.
    """
    if dtype in _BITS:
        return _BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    if digits is None:
        raise ValueError(f"HLO text: unknown element type {dtype!r}")
    return int(digits.group(1))


def leaves(shape: Shape) -> Iterator[ArrayShape]:
    """The arrays of a shape, tuples flattened, in order."""
    if isinstance(shape, ArrayShape):
        yield shape
    else:
        for part in shape:
            yield from leaves(part)


def shape_bytes(shape: Shape) -> int:
    """Bytes of all arrays of a shape."""
    return sum(leaf.bytes for leaf in leaves(shape))


def parse_shape(text: str) -> Shape:
    """Shape written as `bf16[4,64]{1,0}` or `(f32[], (s32[2], pred[]))`; layouts are dropped.

    Raises:
        ValueError: the text is not a shape.
    """
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        return tuple(parse_shape(part) for part in split_top_level(text[1 : _closing(text, 0)]))
    match = _ARRAY_SHAPE.match(text)
    if match is None:
        raise ValueError(f"HLO text: expected a shape, got {text[:80]!r}")
    # "<=8" marks a bounded dynamic dim: count its bound.
    dims = tuple(int(dim.strip().lstrip("<=")) for dim in match.group(2).split(",") if dim.strip())
    return ArrayShape(match.group(1), dims)


# ---- instructions, computations, modules ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One HLO instruction; attributes are split on first use."""

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    argument_text: str
    attribute_text: str
    is_root: bool = False

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Raw attribute texts by name, such as `dimensions` -> `{0}`."""
        pairs = (part.partition("=") for part in split_top_level(self.attribute_text))
        return {key.strip(): value.strip() for key, _, value in pairs}

    @cached_property
    def backend_config(self) -> dict[str, Any]:
        """The back end's JSON configuration; empty when there is none or when it is not a JSON object."""
        text = self.attributes.get("backend_config", "")
        try:
            value = json.loads(text) if text else {}
            value = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def op_name(self) -> str:
        """JAX's name stack of the operation (`metadata.op_name`), or an empty string."""
        match = re.search(r'op_name="([^"]*)"', self.attributes.get("metadata", ""))
        return match.group(1) if match else ""

    def int_list(self, key: str) -> tuple[int, ...]:
        """An attribute such as `lhs_contracting_dims={1,2}` as integers; empty when absent."""
        return tuple(int(number) for number in re.findall(r"-?\d+", self.attributes.get(key, "")))

    def called(self, key: str) -> tuple[str, ...]:
        """Names of the computations that the attribute `key` refers to."""
        text = self.attributes.get(key, "").strip("{}")
        return tuple(name.strip().lstrip("%") for name in text.split(",") if name.strip())


@dataclass(frozen=True)
class Computation:
    """A named list of instructions; in an optimised module the order of the list is the schedule."""

    name: str
    instructions: tuple[Instruction, ...]
    is_entry: bool = False

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        marked = [instruction for instruction in self.instructions if instruction.is_root]
        return marked[0] if marked else self.instructions[-1]

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        return {int(each.argument_text): each for each in self.instructions if each.opcode == "parameter"}

    @cached_property
    def done_of_start(self) -> dict[str, Instruction]:
        """The `-done` of every `-start`, by the start's name; updates in between are followed."""
        begun: dict[str, str] = {}
        done: dict[str, Instruction] = {}
        for each in self.instructions:
            if each.opcode.endswith("-start"):
                begun[each.name] = each.name
            elif each.operands and each.operands[0] in begun:
                if each.opcode.endswith("-update"):
                    begun[each.name] = begun[each.operands[0]]
                elif each.opcode.endswith("-done"):
                    done[begun[each.operands[0]]] = each
        return done


@dataclass(frozen=True)
class Module:
    """An HLO module."""

    name: str
    computations: dict[str, Computation]
    entry: Computation
    num_devices: int

    def computation(self, name: str) -> Computation:
        """The computation called `name`.

        Raises:
            ValueError: the module does not hold it.
        """
        try:
            return self.computations[name]
        except KeyError:
            raise ValueError(f"HLO text: computation {name!r} is called but not in the module") from None


def parse_module(text: str) -> Module:
    """Module printed by `compiled.as_text()` or `HloModule.to_string()`.

    Raises:
        ValueError: no entry computation, or a line that does not follow the grammar.
    """
    header = ""
    computations: dict[str, Computation] = {}
    body: list[Instruction] = []
    name, is_entry = "", False
    for line in text.splitlines():
        if line.startswith("HloModule"):
            header = line
        elif name and line.startswith("}"):
            computations[name] = Computation(name, tuple(body), is_entry)
            name = ""
        elif name:
            if line.strip():
                body.append(parse_instruction(line))
        elif start := _computation_header(line):
            name, is_entry, body = start[0], start[1], []
    entries = [computation for computation in computations.values() if computation.is_entry]
    if len(entries) != 1:
        raise ValueError(f"HLO text: expected one ENTRY computation, got {len(entries)}")
    module_name = header.split(",")[0].removeprefix("HloModule").strip()
    return Module(module_name, computations, entries[0], _num_devices(header))


def parse_instruction(line: str) -> Instruction:
    """Instruction of one line.

    Raises:
        ValueError: the line does not follow the grammar.
    """
    start = _ASSIGNMENT.match(line)
    if start is None:
        raise ValueError(f"HLO text: expected an instruction, got {line[:120]!r}")
    shape_end = _shape_end(line, start.end())
    opcode = _OPCODE.match(line, shape_end)
    if opcode is None:
        raise ValueError(f"HLO text: expected an opcode after the shape in {line[:120]!r}")
    close = _closing(line, opcode.end() - 1)
    arguments = _COMMENT.sub("", line[opcode.end() : close]).strip()
    return Instruction(
        name=start.group(2),
        shape=parse_shape(line[start.end() : shape_end]),
        opcode=opcode.group(1),
        operands=_operand_names(opcode.group(1), arguments),
        argument_text=arguments,
        attribute_text=line[close + 1 :].lstrip(", "),
        is_root=start.group(1) is not None,
    )


# ---- scanning -------------------------------------------------------------------------------------------------------


def split_top_level(text: str) -> list[str]:
    """Parts of `text` between the commas that stand in no bracket and in no quotes; empty parts are dropped."""
    parts, begin, position = [], 0, 0
    while position < len(text):
        character = text[position]
        if character == ",":
            parts.append(text[begin:position])
            begin = position + 1
        elif character == '"':
            position = _quote_end(text, position)
        elif character in _OPENING:
            position = _closing(text, position)
        position += 1
    parts.append(text[begin:])
    return [part.strip() for part in parts if part.strip()]


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth, position = 0, start
    while match := _BRACKET_OR_QUOTE.search(text, position):
        position = match.start()
        if match.group() == '"':
            position = _quote_end(text, position)
        elif match.group() in _OPENING:
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return position
        position += 1
    raise ValueError(f"HLO text: bracket is never closed in {text[start : start + 80]!r}")


def _quote_end(text: str, start: int) -> int:
    """Index of the quote that ends the string that begins at `start`."""
    position = start + 1
    while position < len(text) and text[position] != '"':
        position += 2 if text[position] == "\\" else 1
    return position


def _shape_end(line: str, start: int) -> int:
    """Index behind the shape that begins at `start`: a tuple, or a type with dims and perhaps a layout."""
    if line[start] == "(":
        return _closing(line, start) + 1
    match = _ARRAY_SHAPE.match(line, start)
    if match is None:
        raise ValueError(f"HLO text: expected a shape in {line[:120]!r}")
    end = match.end()
    return _closing(line, end) + 1 if line[end : end + 1] == "{" else end


def _operand_names(opcode: str, arguments: str) -> tuple[str, ...]:
    """Names in an operand list; each may stand behind its shape."""
    if opcode in ("parameter", "constant", "iota"):
        return ()
    return tuple(part.split()[-1].lstrip("%") for part in split_top_level(arguments))


def _computation_header(line: str) -> tuple[str, bool] | None:
    """Name of the computation that the line opens and whether it is the entry, or None."""
    if not line or line[0].isspace() or not line.rstrip().endswith("{"):
        return None
    match = _HEADER.match(line)
    return (match.group(2), match.group(1) is not None) if match else None


def _num_devices(header: str) -> int:
    """Devices that the module runs on: replicas times partitions."""
    found = {key: int(number) for key, number in re.findall(r"(num_partitions|replica_count)=(\d+)", header)}
    return found.get("num_partitions", 1) * found.get("replica_count", 1)
