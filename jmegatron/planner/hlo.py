"""What an optimised program does: matmul FLOPs, bytes on each mesh axis, loops, overlap and memory.

No communication: it reads the text of a compiled step, for CPU or GPU, and runs nothing. XLA's own cost analysis
counts a loop's body once and knows no mesh; here every count is multiplied by the trip counts of the loops around it,
and every collective is named by the mesh axes it runs over. All numbers are per device (SPMD: one program for all).

A loop whose trip count cannot be known makes `matmul_flops` and `summary` raise `UnknownTripCountError`; the other
functions report None. Pass `trip_counts={"while.7": 12}` to settle it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jmegatron.planner.hlo_text import (
    ArrayShape,
    Computation,
    Instruction,
    Module,
    Shape,
    leaves,
    parse_module,
    shape_bytes,
)
from jmegatron.planner.replica_groups import Groups, axes_of_groups, axes_of_pairs, parse_groups, parse_pairs
from jmegatron.planner.trip_counts import trip_count

COLLECTIVE_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "send",
)

# Kernels that may multiply matrices but do not say how much.
_OPAQUE_OPCODES = ("convolution", "ragged-dot", "scaled-dot")
_OPAQUE_TARGETS = ("__cudnn$", "mosaic", "triton", "te_gemm", "te_fused_attn", "te_grouped_gemm")
# Instructions that take no time of their own.
_FREE_OPCODES = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id")


class UnknownTripCountError(ValueError):
    """A count was asked for that depends on a loop whose trip count the program does not tell."""

    def __init__(self, loop: str, op_name: str = ""):
        where = f" ({op_name})" if op_name else ""
        super().__init__(
            f"the trip count of loop {loop!r}{where} cannot be known from the program: pass "
            f"trip_counts={{{loop!r}: n}}, or write the loop with a constant bound (lax.scan, fori_loop with constants)"
        )


# ---- the module and its call graph ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """Where in the program an instruction stands, and how often one step gets there.

    Attributes:
        computation: name of the computation that holds it.
        loops: names of the `while` instructions around it, outermost first.
        branches: conditionals around it, as `name[branch number]`; `executions` then says how often the conditional is
            reached, an upper bound for what stands in one branch.
        executions: product of the trip counts of `loops`; None when one of them is unknown.
        in_async: it stands in a computation that an `async-start` runs.
    """

    computation: str
    loops: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()
    executions: int | None = 1
    in_async: bool = False

    def times(self, count: int | None) -> Site:
        """The same place, reached `count` times as often."""
        if self.executions is None or count is None:
            return replace(self, executions=None)
        return replace(self, executions=self.executions * count)


def load(program: Any) -> Module:
    """Module of a compiled step (`jax.stages.Compiled`), of HLO text, or the module itself.

    Raises:
        ValueError: the text is not an HLO module.
    """
    if isinstance(program, Module):
        return program
    return parse_module(program if isinstance(program, str) else program.as_text())


def walk(module: Module, trip_counts: Mapping[str, int] | None = None) -> Iterator[tuple[Instruction, Site]]:
    """Every instruction that a step executes with its place, in schedule order, called computations inlined.

    Args:
        module: the program.
        trip_counts: trip counts of loops that the program does not tell, by the name of the `while`.
    """
    yield from _walk(module, module.entry, Site(module.entry.name), trip_counts or {})


def _walk(
    module: Module, computation: Computation, site: Site, given: Mapping[str, int]
) -> Iterator[tuple[Instruction, Site]]:
    for instruction in computation.instructions:
        yield instruction, site
        for called, inner in _called(module, computation, instruction, site, given):
            yield from _walk(module, module.computation(called), replace(inner, computation=called), given)


def _called(
    module: Module, computation: Computation, instruction: Instruction, site: Site, given: Mapping[str, int]
) -> Iterator[tuple[str, Site]]:
    """Computations that an instruction runs, each with the place of its content."""
    opcode = instruction.opcode
    if opcode == "while":
        count = _trip_count(module, computation, instruction, given)
        inner = replace(site, loops=(*site.loops, instruction.name))
        yield instruction.called("body")[0], inner.times(count)
        yield instruction.called("condition")[0], inner.times(None if count is None else count + 1)
    elif opcode == "conditional":
        for number, branch in enumerate(_branches(instruction)):
            yield branch, replace(site, branches=(*site.branches, f"{instruction.name}[{number}]"))
    elif opcode == "fusion" or opcode.endswith("-start") or opcode in ("call", "async-start"):
        # A reduction (to_apply of all-reduce and the like) is not work of its own; `call` and old CPU calls are.
        names = instruction.called("calls") or (instruction.called("to_apply") if opcode == "call" else ())
        for name in names:
            yield name, replace(site, in_async=site.in_async or opcode.endswith("-start"))


def _branches(conditional: Instruction) -> tuple[str, ...]:
    named = conditional.called("branch_computations")
    return named or (*conditional.called("true_computation"), *conditional.called("false_computation"))


def _trip_count(module: Module, computation: Computation, loop: Instruction, given: Mapping[str, int]) -> int | None:
    count = trip_count(module, computation, loop)
    return given.get(loop.name) if count is None else count


# ---- loops ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A `while`: its name, trip count (None when unknown), place, depth of nesting (0 = outermost) and JAX name.

    `flops` are the matmul FLOPs of all its iterations when it is reached once; None when a trip count is unknown.
    """

    name: str
    trip_count: int | None
    site: Site
    op_name: str
    flops: int | None = None

    @property
    def depth(self) -> int:
        """Number of loops around it."""
        return len(self.site.loops)


def loops(module: Module, trip_counts: Mapping[str, int] | None = None) -> list[Loop]:
    """Loops of the program in schedule order, outer ones before those inside."""
    given = trip_counts or {}
    counter, found = _Counter(module, given), []
    for each, site in walk(module, given):
        if each.opcode == "while":
            computation = module.computation(site.computation)
            count, flops = _trip_count(module, computation, each, given), counter.total(computation, each)
            found.append(Loop(each.name, count, site, each.op_name, flops))
    return found


# ---- matmul FLOPs ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MatmulFlops:
    """Executed matmul FLOPs of one step on one device (a multiply and an add are two).

    Attributes:
        dot: FLOPs of dots, of GEMM library calls and of the dots inside fusions.
        attention: FLOPs of cuDNN attention calls over the whole score rectangle: two matmuls forward, four backward
            (the recomputed scores of the flash backward are the kernel's own business and are not counted).
        attention_visible: the same, halved for calls with a causal mask (the kernel skips those blocks).
        branches: FLOPs of each branch of every conditional that multiplies, for one execution of the conditional; the
            sums above hold the largest branch.
        uncounted: names of operations that may multiply matrices but do not say how much (convolutions, hand-written
            kernels): a comparison with theory must find this empty.
    """

    dot: int = 0
    attention: int = 0
    attention_visible: int = 0
    branches: dict[str, tuple[int, ...]] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Dots and whole attention rectangles."""
        return self.dot + self.attention

    def __add__(self, other: MatmulFlops) -> MatmulFlops:
        return MatmulFlops(
            self.dot + other.dot,
            self.attention + other.attention,
            self.attention_visible + other.attention_visible,
            {**self.branches, **other.branches},
            self.uncounted + tuple(name for name in other.uncounted if name not in self.uncounted),
        )

    def times(self, count: int) -> MatmulFlops:
        """The FLOPs of `count` executions."""
        return replace(
            self,
            dot=self.dot * count,
            attention=self.attention * count,
            attention_visible=self.attention_visible * count,
        )


def matmul_flops(module: Module, trip_counts: Mapping[str, int] | None = None) -> MatmulFlops:
    """Matmul FLOPs that one step executes on one device.

    A product that XLA turned into multiply-and-sum (matrix times vector, outer products) is not a matmul any more and
    is not counted.

    Args:
        module: the program.
        trip_counts: trip counts of loops that the program does not tell, by the name of the `while`.

    Raises:
        UnknownTripCountError: matmuls stand in a loop whose trip count is unknown.
    """
    return _Counter(module, trip_counts or {}).computation(module.entry)


class _Counter:
    """Counts each computation once and remembers it."""

    def __init__(self, module: Module, given: Mapping[str, int]):
        self._module = module
        self._given = given
        self._known: dict[str, MatmulFlops] = {}

    def computation(self, computation: Computation) -> MatmulFlops:
        if computation.name not in self._known:
            total = MatmulFlops()
            for instruction in computation.instructions:
                total = total + self.instruction(computation, instruction)
            self._known[computation.name] = total
        return self._known[computation.name]

    def instruction(self, computation: Computation, instruction: Instruction) -> MatmulFlops:
        place = Site(computation.name)
        called = [
            (self.computation(self._module.computation(name)), site.executions)
            for name, site in _called(self._module, computation, instruction, place, self._given)
        ]
        if instruction.opcode == "conditional":
            return _largest_branch(instruction, [flops for flops, _ in called])
        total = _own_flops(computation, instruction)
        for flops, executions in called:
            if flops == MatmulFlops():
                continue
            if executions is None:
                raise UnknownTripCountError(instruction.name, instruction.op_name)
            total = total + flops.times(executions)
        return total

    def total(self, computation: Computation, instruction: Instruction) -> int | None:
        """Matmul FLOPs of one execution; None when they depend on an unknown trip count."""
        try:
            return self.instruction(computation, instruction).total
        except UnknownTripCountError:
            return None


def _largest_branch(conditional: Instruction, branches: list[MatmulFlops]) -> MatmulFlops:
    largest = max(branches, key=lambda flops: flops.total, default=MatmulFlops())
    merged = sum(branches, MatmulFlops())
    own = {conditional.name: tuple(flops.total for flops in branches)} if merged.total else {}
    return replace(largest, branches={**merged.branches, **own}, uncounted=merged.uncounted)


def _own_flops(computation: Computation, instruction: Instruction) -> MatmulFlops:
    """FLOPs of the instruction itself, without what it calls."""
    if instruction.opcode == "dot":
        return MatmulFlops(dot=_dot_flops(computation, instruction, instruction.int_list("lhs_contracting_dims")))
    if instruction.opcode in _OPAQUE_OPCODES:
        return MatmulFlops(uncounted=(instruction.name,))
    if instruction.opcode != "custom-call":
        return MatmulFlops()
    target = _target(instruction)
    if target.startswith("__cublas$"):
        return MatmulFlops(dot=_dot_flops(computation, instruction, _gemm_contracting(instruction)))
    if target.startswith("__onednn$matmul"):
        return MatmulFlops(dot=_dot_flops(computation, instruction, _onednn_contracting(computation, instruction)))
    if "fmha" in target:
        return _attention_flops(computation, instruction, target)
    return MatmulFlops(uncounted=(instruction.name,) if any(part in target for part in _OPAQUE_TARGETS) else ())


def _dot_flops(computation: Computation, instruction: Instruction, contracting: Iterable[int]) -> int:
    """2 x elements of the result (batch dims among them) x elements summed over."""
    lhs = _operand(computation, instruction, 0)
    result = next(leaves(instruction.shape))
    return 2 * result.size * math.prod(lhs.dims[dim] for dim in contracting)


def _gemm_contracting(instruction: Instruction) -> tuple[int, ...]:
    config = instruction.backend_config.get("gemm_backend_config", instruction.backend_config)
    try:
        return tuple(int(dim) for dim in config["dot_dimension_numbers"]["lhs_contracting_dimensions"])
    except KeyError:
        raise ValueError(f"HLO text: GEMM call {instruction.name!r} does not say what it sums over") from None


def _onednn_contracting(computation: Computation, instruction: Instruction) -> tuple[int, ...]:
    config = instruction.backend_config.get("onednn_matmul_config", {})
    rank = len(_operand(computation, instruction, 0).dims)
    return (rank - 2 if config.get("transpose_a") else rank - 1,)


def _attention_flops(computation: Computation, instruction: Instruction, target: str) -> MatmulFlops:
    config = instruction.backend_config.get("cudnn_fmha_backend_config", {})
    try:
        scores = math.prod(int(dim) for dim in config["intermediate_tensor_shape"]["dimensions"])
    except KeyError:
        raise ValueError(
            f"HLO text: attention call {instruction.name!r} does not give the shape of its scores"
        ) from None
    head_size = _operand(computation, instruction, 0).dims[-1]
    flops = (4 if "Backward" in target else 2) * 2 * scores * head_size
    return MatmulFlops(attention=flops, attention_visible=flops // 2 if "CAUSAL" in config["mask_type"] else flops)


def _target(instruction: Instruction) -> str:
    return instruction.attributes.get("custom_call_target", "").strip('"')


def _operand(computation: Computation, instruction: Instruction, index: int) -> ArrayShape:
    return next(leaves(computation.by_name[instruction.operands[index]].shape))


# ---- collectives ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """One collective of the program.

    Attributes:
        name: of the HLO instruction.
        kind: one of `COLLECTIVE_KINDS`.
        is_async: it is a start/done pair, so that other work may run meanwhile.
        dtype: element type of the first operand as sent (the CPU back end sends bf16 as f32).
        operand_bytes: bytes that a device puts in, all operands together; of a ragged all-to-all those of the smaller
            side: what its slices hold is known at run time, and this is the most that they can.
        result_bytes: bytes that a device gets.
        operand_count: arrays combined into this one operation, also those that were concatenated into one operand.
        groups: device numbers that talk to each other; empty for permutes.
        pairs: (source, target) of permutes; empty for others.
        axes: mesh axes it runs over, in mesh order; None when its groups are not whole axes of the mesh.
        site: where it stands and how often it runs.
        op_name: JAX's name of it.
        channel_id, use_global_device_ids: as in the program.
    """

    name: str
    kind: str
    is_async: bool
    dtype: str
    operand_bytes: int
    result_bytes: int
    operand_count: int
    groups: Groups
    pairs: tuple[tuple[int, int], ...]
    axes: tuple[str, ...] | None
    site: Site
    op_name: str
    channel_id: int | None = None
    use_global_device_ids: bool = False

    @property
    def executions(self) -> int | None:
        """How often one step runs it; None when unknown."""
        return self.site.executions

    @property
    def group_size(self) -> int:
        """Devices that talk to each other (2 for a permute)."""
        return max((len(group) for group in self.groups), default=2)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution.

        Ring formulas with n devices: all-reduce 2 (n-1)/n x operand, all-gather (n-1)/n x result, reduce-scatter and
        all-to-all (n-1)/n x operand; permute, send and broadcast: the operand (of a device that sends at all).
        """
        share = (self.group_size - 1) / self.group_size
        if self.kind == "all-reduce":
            return 2 * share * self.operand_bytes
        if self.kind == "all-gather":
            return share * self.result_bytes
        if self.kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
            return share * self.operand_bytes
        moves = any(source != target for source, target in self.pairs) or (self.group_size > 1 and not self.pairs)
        return float(self.operand_bytes) if moves else 0.0


def collectives(
    module: Module, mesh_shape: Mapping[str, int], trip_counts: Mapping[str, int] | None = None
) -> list[Collective]:
    """Collectives of the program in schedule order.

    Args:
        module: the program.
        mesh_shape: size of each mesh axis, in mesh order, slowest first (`dict(mesh.shape)`).
        trip_counts: trip counts of loops that the program does not tell, by the name of the `while`.

    Raises:
        ValueError: the mesh has another number of devices than the program.
    """
    if module.num_devices not in (1, math.prod(mesh_shape.values())):
        raise ValueError(f"the program runs on {module.num_devices} devices, the mesh {dict(mesh_shape)} has others")
    return [
        _collective(module, each, site, mesh_shape)
        for each, site in walk(module, trip_counts)
        if _collective_kind(each) is not None
    ]


def _collective_kind(instruction: Instruction) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    if kind == "send" and instruction.attributes.get("is_host_transfer") == "true":
        return None
    return kind if kind in COLLECTIVE_KINDS else None


def _groups_text(instruction: Instruction) -> str:
    """The whole spelling of the groups: that of a reordered mesh has a comma, and looks like two attributes."""
    text = instruction.attributes.get("replica_groups", "{}")
    order = instruction.attributes.get("device_ids")
    return text if order is None else f"{text}, device_ids={order}"


def _collective(module: Module, instruction: Instruction, site: Site, mesh_shape: Mapping[str, int]) -> Collective:
    computation = module.computation(site.computation)
    kind = instruction.opcode.removesuffix("-start")
    operands = [computation.by_name[name] for name in instruction.operands]
    if kind in ("send", "ragged-all-to-all"):
        operands = operands[:1]  # the rest is a token, or the buffer of the result and offsets
    sent, received = (
        sum(shape_bytes(operand.shape) for operand in operands),
        shape_bytes(_result_shape(computation, instruction)),
    )
    if kind == "ragged-all-to-all":
        sent = min(sent, received)  # one of the two sides may be a buffer with room for more
    pairs = _pairs(instruction)
    groups = () if pairs else parse_groups(_groups_text(instruction), module.num_devices)
    channel = instruction.int_list("channel_id")
    return Collective(
        name=instruction.name,
        kind=kind,
        is_async=_is_async(instruction, site),
        dtype=next(leaves(operands[0].shape)).dtype,
        operand_bytes=sent,
        result_bytes=received,
        operand_count=sum(_combined_arrays(module, computation, operand) for operand in operands),
        groups=groups,
        pairs=pairs,
        axes=axes_of_pairs(pairs, mesh_shape) if pairs else axes_of_groups(groups, mesh_shape),
        site=site,
        op_name=instruction.op_name,
        channel_id=channel[0] if channel else None,
        use_global_device_ids=instruction.attributes.get("use_global_device_ids") == "true",
    )


def _pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    text = instruction.attributes.get("source_target_pairs", "")
    if instruction.opcode == "send":
        attributes = instruction.attributes.get("frontend_attributes", "")
        found = re.search(r'_xla_send_recv_source_target_pairs="?(\{\{.*?\}\})', attributes)
        text = found.group(1) if found else ""
    return parse_pairs(text) if text else ()


def _is_async(instruction: Instruction, site: Site) -> bool:
    config = instruction.backend_config.get("collective_backend_config", {})
    return (instruction.opcode.endswith("-start") or site.in_async) and not config.get("is_sync", False)


def _result_shape(computation: Computation, instruction: Instruction) -> Shape:
    """Shape of what the collective gives; a start's own shape holds its operands too, so that of its done is taken."""
    if not instruction.opcode.endswith("-start"):
        return instruction.shape
    done = computation.done_of_start.get(instruction.name)
    if done is None:
        raise ValueError(f"HLO text: {instruction.name!r} is started but not awaited in its computation")
    return done.shape


def _combined_arrays(module: Module, computation: Computation, operand: Instruction) -> int:
    """Arrays that were concatenated into a collective's operand by XLA's combiner (1 when none was)."""
    while operand.opcode in ("bitcast", "copy", "reshape"):
        operand = computation.by_name[operand.operands[0]]
    if operand.opcode == "fusion":
        inner = module.computation(operand.called("calls")[0]).root
        # Only the combiner's own fusion: a concatenation of the user's is fused with other work and named otherwise.
        return len(inner.operands) if inner.opcode == "concatenate" and "wrapped" in operand.name else 1
    return len(operand.operands) if operand.opcode == "concatenate" and not operand.op_name else 1


# ---- sums per mesh axis ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisTraffic:
    """What one device sends over some mesh axes by one kind of collective in one step.

    Attributes:
        axes: mesh axes, in mesh order; None for groups that are not whole axes.
        kind: kind of collective.
        count: collectives in the program's text.
        executions: how often they run, all together.
        wire_bytes: bytes that one device sends in one step, by the ring formulas of `Collective.wire_bytes`.
    """

    axes: tuple[str, ...] | None
    kind: str
    count: int
    executions: int
    wire_bytes: float


def summary(records: Iterable[Collective]) -> dict[tuple[tuple[str, ...] | None, str], AxisTraffic]:
    """Traffic of one step per mesh axes and kind, keyed by (axes, kind), in order of first appearance.

    Collectives in the branches of a conditional are all counted: an upper bound.

    Raises:
        UnknownTripCountError: one of them stands in a loop whose trip count is unknown.
    """
    rows: dict[tuple[tuple[str, ...] | None, str], AxisTraffic] = {}
    for each in records:
        if each.executions is None:
            raise UnknownTripCountError(each.site.loops[-1], each.op_name)
        row = rows.get((each.axes, each.kind), AxisTraffic(each.axes, each.kind, 0, 0, 0.0))
        rows[each.axes, each.kind] = replace(
            row,
            count=row.count + 1,
            executions=row.executions + each.executions,
            wire_bytes=row.wire_bytes + each.wire_bytes * each.executions,
        )
    return rows


# ---- overlap --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """An instruction that takes time: name, opcode, matmul FLOPs of one execution (None: in an unknown loop)."""

    name: str
    opcode: str
    flops: int | None


@dataclass(frozen=True)
class AsyncPair:
    """A start/done pair and what is scheduled between: what the transfer can hide under.

    Attributes:
        kind: what was started (a collective, `copy`, ...).
        start, done: names of the two instructions.
        operation: name of the instruction that says what is started, of a collective its `Collective.name`: `start`
            itself, or what stands in the computation that it calls.
        axes: mesh axes that the collective runs over; None for other kinds, or when no mesh was given.
        site: where they stand.
        between: the work between them, in schedule order.
    """

    kind: str
    start: str
    done: str
    operation: str
    axes: tuple[str, ...] | None
    site: Site
    between: tuple[Work, ...]

    @property
    def hidden_flops(self) -> int | None:
        """Matmul FLOPs between start and done; None when they depend on an unknown trip count."""
        known = [work.flops for work in self.between if work.flops is not None]
        return sum(known) if len(known) == len(self.between) else None

    @property
    def is_hidden(self) -> bool:
        """Whether a matmul, an attention or a loop with one stands between start and done."""
        return any(work.flops != 0 for work in self.between)


def async_pairs(
    module: Module,
    mesh_shape: Mapping[str, int] | None = None,
    trip_counts: Mapping[str, int] | None = None,
    kinds: tuple[str, ...] | None = COLLECTIVE_KINDS,
) -> list[AsyncPair]:
    """Start/done pairs of the program in schedule order.

    Only the GPU back end makes pairs; a collective that it leaves synchronous is in `collectives` with
    `is_async=False` and in no pair.

    Args:
        module: the program.
        mesh_shape: size of each mesh axis, in mesh order, to name the axes of the collectives.
        trip_counts: trip counts of loops that the program does not tell, by the name of the `while`.
        kinds: kinds to report; None for all, also copies and fusions that run on another stream.
    """
    counter = _Counter(module, trip_counts or {})
    pairs = []
    for each, site in walk(module, trip_counts):
        computation = module.computation(site.computation)
        done = computation.done_of_start.get(each.name) if each.opcode.endswith("-start") else None
        started = _started(module, each, site) if done is not None else None
        if done is None or started is None or (kinds is not None and started[0] not in kinds):
            continue
        kind, instruction, place = started
        axes = None
        if mesh_shape is not None and kind in COLLECTIVE_KINDS:
            axes = _collective(module, instruction, place, mesh_shape).axes
        between = tuple(_work_between(counter, computation, each, done))
        pairs.append(AsyncPair(kind, each.name, done.name, instruction.name, axes, site, between))
    return pairs


def _started(module: Module, start: Instruction, site: Site) -> tuple[str, Instruction, Site]:
    """Kind of what a start starts, the instruction that says so, and its place."""
    for name in start.called("calls"):
        wrapped = module.computation(name)
        # Either any operation wrapped to run asynchronously, or a fusion that carries a collective (a Triton kernel).
        if start.opcode == "async-start" or _collective_kind(wrapped.root) is not None:
            return wrapped.root.opcode, wrapped.root, replace(site, computation=name, in_async=True)
    return start.opcode.removesuffix("-start"), start, site


def _work_between(counter: _Counter, computation: Computation, start: Instruction, done: Instruction) -> Iterator[Work]:
    order = computation.instructions
    for each in order[order.index(start) + 1 : order.index(done)]:
        if each.opcode in _FREE_OPCODES or each.opcode.endswith(("-start", "-done", "-update")):
            continue
        yield Work(each.name, each.opcode, counter.total(computation, each))


# ---- memory ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, as the compiler laid them out.

    Attributes:
        argument_bytes: inputs, donated ones among them.
        output_bytes: results, those that reuse a donated input among them.
        alias_bytes: part of the outputs that reuse donated inputs.
        temp_bytes: everything alive only inside the step. Of the CPU back end, not representative of a GPU.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that must fit on the device during the step."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


def memory(compiled: Any) -> Memory:
    """Memory of a compiled step (`jax.stages.Compiled`).

    Raises:
        ValueError: the back end gives no memory analysis.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError("this back end gives no memory analysis of a compiled program")
    return Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
    )
