"""Which layouts a model could be trained in on a cluster, by the formulas: enumerated, judged, ranked. No jax.

No communication. `plan` tries every combination of tensor, pipeline, context and data parallelism, chunks, micro-batch
size, recompute and optimizer sharding, keeps those whose estimated memory fits the card, and ranks them by estimated
step time. A layout that is left out keeps the reason. The same request gives the same plan.

What is tried: tp divides a node, heads, feed-forward width and kv heads (or is a multiple of them), always with
sequence parallelism; cp only where a rank keeps `SHORTEST_SEQUENCE` tokens; pp times chunks divides the layers, or pp
alone with shorter end stages; micro-batches of up to `LARGEST_MICROBATCH` sequences; recompute none, selective or full,
one layer at a time; the distributed optimizer off, on, or on with both overlaps; the low-memory schedule beside the
default. What the request fixes is tried as it is. Expert parallelism is not searched: ep, and whether tp divides each
expert, stay as the request's `base` says.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jmegatron.config.layer_split import LayerSplit, chunk_lengths
from jmegatron.config.resolution import padded_vocab_size
from jmegatron.errors import ConfigError
from jmegatron.planner.cards import CARDS, Card
from jmegatron.planner.costs import Layout, expert_places
from jmegatron.planner.formulas import GPTShape
from jmegatron.planner.memory import Memory, memory_of_step
from jmegatron.planner.times import StepTime, step_time

HEADROOM = 0.1
"""Part of a card's memory that stays free: context, NCCL's buffers, fragmentation, and the estimate's own error."""
SHORTEST_SEQUENCE = 2048
"""Tokens that a cp rank keeps at least; below, blocks of attention are too small to hide what travels."""
LARGEST_MICROBATCH = 16
"""Sequences of a micro-batch that are tried, in powers of two."""

SPLIT_FIELDS = tuple(f.name for f in dataclasses.fields(LayerSplit) if f.name not in ("num_layers", "num_stages"))
"""What `Request.fixed` may say about the cut into stages, in the words of `LayerSplit`."""


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        shape: of the model; `vocab_rows` is what `padded_vocab_size` or the options say.
        vocab_size: token ids, to pad anew where the rows cannot be divided; None: the rows may not change.
        divisible_by: as `--make-vocab-size-divisible-by`.
        num_gpus: devices.
        gpus_per_node: devices that NVLink joins.
        card: the GPU.
        global_batch_size: sequences of a step.
        base: what no layout changes: dtypes, optimizer, dropout, `cp_comm_type`, ep and `experts_over_tp`.
        fixed: fields of `Layout`, or `SPLIT_FIELDS`, that are not to be tried: name -> value.
        assumed_tflops: see `times.step_time`.
        headroom: see `HEADROOM`.
    """

    shape: GPTShape
    num_gpus: int
    card: Card
    global_batch_size: int
    gpus_per_node: int = 8
    vocab_size: int | None = None
    divisible_by: int = 128
    base: Layout = field(default_factory=Layout)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    assumed_tflops: float | None = None
    headroom: float = HEADROOM

    def __post_init__(self) -> None:
        known = {f.name for f in dataclasses.fields(Layout)} | set(SPLIT_FIELDS)
        if unknown := sorted(set(self.fixed) - known):
            raise ValueError(f"fixed: unknown {', '.join(unknown)}")
        if min(self.num_gpus, self.gpus_per_node, self.global_batch_size) < 1 or not 0 <= self.headroom < 1:
            raise ValueError(
                f"expected at least 1 GPU, 1 a node, 1 sequence and a headroom in [0, 1), got {self.num_gpus}, "
                f"{self.gpus_per_node}, {self.global_batch_size}, {self.headroom}"
            )

    @property
    def usable_bytes(self) -> float:
        """Memory of a device that a step may take."""
        return self.card.memory_bytes * (1 - self.headroom)


@dataclass(frozen=True)
class Candidate:
    """A layout that the model can be divided into.

    Attributes:
        layout: the layout.
        split: the cut into stages, in the words of the options.
        vocab_rows: rows of the embedding.
        memory: of a device.
        time: of a step.
    """

    layout: Layout
    split: LayerSplit
    vocab_rows: int
    memory: Memory
    time: StepTime


@dataclass(frozen=True)
class Rejected:
    """What was left out.

    Attributes:
        kind: group of reasons: "devices", "heads", "vocabulary", "sequence", "layers", "batch", "memory" or "slower".
        what: the layout, or the part of it that is enough to leave it out.
        reason: why.
        candidate: with "memory" and "slower".
    """

    kind: str
    what: str
    reason: str
    candidate: Candidate | None = None


@dataclass(frozen=True)
class Plan:
    """Layouts that fit, the fastest first, and why the others do not, or are slower.

    Attributes:
        request: what was asked for.
        ranked: those that fit.
        rejected: those that cannot be, and those that do not fit (the fastest first).
    """

    request: Request
    ranked: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits."""
        return self.ranked[0] if self.ranked else None

    @property
    def losers(self) -> tuple[Rejected, ...]:
        """Those that fit and are slower than the first, in their order, each with what costs it most."""
        return tuple(_slower(self.ranked[0], one) for one in self.ranked[1:])

    @property
    def nearest_miss(self) -> Candidate | None:
        """What needs least memory of all that does not fit."""
        misses = [one.candidate for one in self.rejected if one.kind == "memory" and one.candidate]
        return min(misses, key=lambda one: one.memory.total, default=None)


def plan(request: Request) -> Plan:
    """Returns the plan of a request."""
    fitting: list[Candidate] = []
    rejected: list[Rejected] = []
    misses: list[Rejected] = []
    for found in _candidates(request):
        if isinstance(found, Rejected):
            rejected.append(found)
        elif found.memory.total <= request.usable_bytes:
            fitting.append(found)
        else:
            needs, has = found.memory.total / 1e9, request.usable_bytes / 1e9
            reason = f"needs {needs:.1f} GB, {has:.1f} GB of the card are to be used"
            misses.append(Rejected("memory", describe(found.layout), reason, found))
    fitting.sort(key=_order)
    misses.sort(key=lambda one: _order(one.candidate) if one.candidate else ())
    return Plan(request, tuple(fitting), (*rejected, *misses))


def _order(one: Candidate) -> tuple[Any, ...]:
    """Sorts by time to four digits, then by memory to three; of equals the one that divides less comes first."""
    layout, digits = one.layout, (float(f"{one.time.total:.3e}"), float(f"{one.memory.total:.2e}"))
    return *digits, layout.cp, layout.num_chunks, layout.pp, layout.tp, describe(layout)


def describe(layout: Layout) -> str:
    """Returns a layout in few words, such as `tp 8 pp 4 x 4 dp 16, 64 micro-batches of 1, selective`."""
    words = [f"tp {layout.tp}", f"pp {layout.pp}" + (f" x {layout.num_chunks}" if layout.num_chunks > 1 else "")]
    words += [f"cp {layout.cp}"] if layout.cp > 1 else []
    words += [f"ep {layout.ep}"] if layout.ep > 1 else []
    words += [f"dp {layout.dp}"]
    parts = [" ".join(words), f"{layout.num_microbatches} micro-batches of {layout.micro_batch_size}"]
    parts += [layout.recompute or "no recompute"]
    parts += [layout.schedule] if layout.schedule not in ("", "1f1b", "interleaved") else []
    if layout.distributed_optimizer:
        parts.append("sharded optimizer" + (", overlapped" if layout.overlap_param_gather else ""))
    return ", ".join(parts)


_PARTS = {
    "matmul": "products",
    "memory_bound": "memory-bound work",
    "tp": "exposed tp communication",
    "ep": "exposed ep communication",
    "cp": "exposed cp communication",
    "pp": "exposed pp communication",
    "data": "exposed dp communication",
    "bubble": "bubble",
}


def _slower(best: Candidate, one: Candidate) -> Rejected:
    """Says what costs a layout most, compared with the best."""
    excess = {part: getattr(one.time, part) - getattr(best.time, part) for part in _PARTS}
    part = max(excess, key=lambda name: excess[name])
    if excess[part] <= 0.002 * best.time.total:
        reason = f"{one.memory.total / 1e9:.1f} GB against {best.memory.total / 1e9:.1f} in about the same time"
        return Rejected("slower", "memory", reason, one)
    mine, theirs = getattr(one.time, part), getattr(best.time, part)
    return Rejected("slower", _PARTS[part], f"{_PARTS[part]} {mine:.3g} s against {theirs:.3g}", one)


# ---- enumeration ----------------------------------------------------------------------------------------------------


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _candidates(request: Request) -> Iterator[Candidate | Rejected]:
    """Yields everything, in a fixed order."""
    fixed, n, ep = request.fixed, request.num_gpus, request.base.ep
    for tp in _choices(fixed, "tp", _divisors(min(request.gpus_per_node, n))):
        if reason := _why_no_tp(request, tp):
            yield Rejected("devices" if n % (tp * ep) else "heads", f"tp {tp}", reason)
            continue
        for cp in _choices(fixed, "cp", _divisors(n // (tp * ep))):
            if n // (tp * ep) % cp:
                yield Rejected("devices", f"tp {tp} cp {cp}", f"{n} GPUs are no multiple of {tp * cp * ep}")
                continue
            if reason := _why_no_cp(request, tp, cp):
                yield Rejected("sequence", f"tp {tp} cp {cp}", reason)
                if "cp" not in fixed and request.shape.seq_len < SHORTEST_SEQUENCE * cp:
                    break  # larger ones are not better
                continue
            yield from _with_pp(request, tp, cp)


def _choices(fixed: Mapping[str, Any], name: str, values: list[Any]) -> list[Any]:
    return [fixed[name]] if name in fixed else values


def _why_no_tp(request: Request, tp: int) -> str:
    shape, base = request.shape, request.base
    groups, experts = shape.num_query_groups, shape.experts
    if request.num_gpus % (tp * base.ep):
        return f"{request.num_gpus} GPUs are no multiple of {tp * base.ep}"
    numbers = [("num_attention_heads", shape.num_attention_heads)]
    if experts is None or experts.num_layers < shape.num_layers:
        numbers.append(("ffn_hidden_size", shape.ffn_hidden_size))
    if experts is not None:
        numbers.append(("moe_shared_expert_intermediate_size", experts.shared_ffn_hidden_size))
        if base.experts_over_tp:
            numbers.append(("moe_ffn_hidden_size", experts.ffn_hidden_size))
    for name, number in numbers:
        if number % tp:
            return f"{name} {number} is no multiple of {tp}"
    return "" if groups % tp == 0 or tp % groups == 0 else f"num_query_groups {groups}: it or tp must divide the other"


def _why_no_cp(request: Request, tp: int, cp: int) -> str:
    length, fixed = request.shape.seq_len, request.fixed
    # Each tp rank routes a part of the tokens to experts, with or without sequence parallelism.
    divided = tp > 1 and (fixed.get("sequence_parallel", True) or request.shape.experts is not None)
    if cp > 1 and length % (2 * cp):
        return f"seq_length {length} is no multiple of 2 x {cp}"
    if divided and length % (tp * cp):
        return f"seq_length {length} is no multiple of tp x cp = {tp * cp}"
    if cp > 1 and "cp" not in fixed and length // cp < SHORTEST_SEQUENCE:
        return f"{length // cp} tokens on a rank, fewer than {SHORTEST_SEQUENCE}"
    if cp > 1 and request.base.cp_comm_type == "a2a":
        heads, groups = request.shape.num_attention_heads // tp, max(1, request.shape.num_query_groups // tp)
        if heads % cp or groups % cp:
            return f"a2a: {heads} query and {groups} kv heads of a tp rank are no multiples of {cp}"
    return ""


def _with_pp(request: Request, tp: int, cp: int) -> Iterator[Candidate | Rejected]:
    shape, fixed = request.shape, request.fixed
    ep = request.base.ep
    rest = request.num_gpus // (tp * cp * ep)
    for pp in _choices(fixed, "pp", [d for d in _divisors(rest) if d <= shape.num_layers]):
        what = f"tp {tp} pp {pp}" + (f" cp {cp}" if cp > 1 else "")
        if rest % pp:
            yield Rejected("devices", what, f"{request.num_gpus} GPUs are no multiple of {tp * cp * pp * ep}")
            continue
        rows = _vocab_rows(request, tp, pp)
        if rows is None:
            yield Rejected("vocabulary", what, f"{shape.vocab_rows} rows are no multiple of tp x pp = {tp * pp}")
            continue
        dp, batch = rest // pp, request.global_batch_size
        if batch % (dp * ep):
            yield Rejected("batch", f"{what} dp {dp}", f"global batch {batch} is no multiple of {dp * ep}")
            continue
        sized = replace(shape, vocab_rows=rows)
        for split, lengths in _splits(request, pp):
            if isinstance(lengths, str):
                yield Rejected("layers", what, lengths)
                continue
            layout = replace(
                request.base,
                tp=tp,
                pp=pp,
                cp=cp,
                dp=dp,
                num_chunks=len(lengths[0]),
                chunk_lengths=lengths,
                gpus_per_node=request.gpus_per_node,
                sequence_parallel=tp > 1 and fixed.get("sequence_parallel", True),
            )
            try:
                expert_places(shape, layout)
            except ValueError as error:
                yield Rejected("layers", f"{what} x {layout.num_chunks}", str(error))
                continue
            for one in _with_batches(request, layout):
                if isinstance(one, Rejected):
                    yield one
                else:
                    yield _judged(request, sized, one, split)


def _judged(request: Request, shape: GPTShape, layout: Layout, split: LayerSplit) -> Candidate:
    time = step_time(shape, layout, request.card, request.assumed_tflops)
    return Candidate(layout, split, shape.vocab_rows, memory_of_step(shape, layout), time)


def _vocab_rows(request: Request, tp: int, pp: int) -> int | None:
    rows = request.shape.vocab_rows
    if rows % (tp * pp) == 0:
        return rows
    if request.vocab_size is None:
        return None
    return padded_vocab_size(request.vocab_size, request.divisible_by, tp, pp)


def _splits(request: Request, pp: int) -> Iterator[tuple[LayerSplit, Any]]:
    """Yields (cut into stages, layers by [stage][chunk] or why there are none)."""
    num_layers = request.shape.num_layers
    given = {name: request.fixed[name] for name in SPLIT_FIELDS if name in request.fixed}
    if given:
        yield _split(LayerSplit(num_layers=num_layers, num_stages=pp, **given))
    elif num_layers % pp:
        longest = -(-num_layers // pp)
        last = num_layers - longest * (pp - 1)
        if last >= 1:
            yield _split(LayerSplit(num_layers=num_layers, num_stages=pp, last_stage_layers=last))
        else:
            ends = num_layers - longest * (pp - 2)
            first = ends - ends // 2
            how = LayerSplit(
                num_layers=num_layers, num_stages=pp, first_stage_layers=first, last_stage_layers=ends // 2
            )
            if ends >= 2:
                yield _split(how)
            else:
                yield how, f"{num_layers} layers on {pp} stages: end stages would have none"
    else:
        for chunks in _divisors(num_layers // pp) if pp > 1 else [1]:
            num_chunks = chunks if chunks > 1 else None
            yield _split(LayerSplit(num_layers=num_layers, num_stages=pp, num_chunks=num_chunks))


@functools.lru_cache(maxsize=4096)
def _split(split: LayerSplit) -> tuple[LayerSplit, Any]:
    try:
        return split, chunk_lengths(split)
    except ConfigError as error:
        return split, str(error).splitlines()[0]


def _with_batches(request: Request, layout: Layout) -> Iterator[Layout | Rejected]:
    fixed, of_rank = request.fixed, request.global_batch_size // (layout.dp * layout.ep)
    sizes = [2**i for i in range(LARGEST_MICROBATCH.bit_length()) if of_rank % 2**i == 0]
    for micro in _choices(fixed, "micro_batch_size", sizes):
        if of_rank % micro:
            what = f"tp {layout.tp} pp {layout.pp} dp {layout.dp}"
            yield Rejected("batch", what, f"{of_rank} sequences of a rank are no multiple of micro-batches of {micro}")
            continue
        sized = replace(layout, micro_batch_size=micro, num_microbatches=of_rank // micro)
        for schedule in _schedules(request, sized):
            scheduled = replace(sized, schedule=schedule)
            for recomputed in _recomputes(fixed, scheduled):
                yield from _optimizers(fixed, recomputed)


def _schedules(request: Request, layout: Layout) -> list[str]:
    group, m = request.base.group_size, layout.num_microbatches
    if group is not None and layout.num_chunks > 1:
        last = m % group
        if not layout.pp <= group <= max(m, layout.pp) or 0 < last < layout.pp <= m:
            return []
    if name := request.fixed.get("schedule"):
        return [name] if (name == "interleaved") == (layout.num_chunks > 1) else []
    ring = layout.cp > 1 and layout.cp_comm_type == "p2p"
    overlapped = request.fixed.get("overlap_grad_reduce") or request.fixed.get("overlap_param_gather")
    low_memory = layout.pp > 1 and layout.num_chunks == 1 and not ring and not overlapped
    return ["", "1f1b-low-memory"] if low_memory else [""]


def _recomputes(fixed: Mapping[str, Any], layout: Layout) -> Iterator[Layout]:
    options = {name: value for name, value in fixed.items() if name.startswith("recompute")}
    for recompute in _choices(fixed, "recompute", [None, "selective", "full"]):
        yield replace(layout, **{**options, "recompute": recompute})


_SHARDING = ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")


def _optimizers(fixed: Mapping[str, Any], layout: Layout) -> Iterator[Layout]:
    given = {name: fixed[name] for name in _SHARDING if name in fixed}
    low_memory = layout.schedule == "1f1b-low-memory" and layout.pp > 1
    seen = set()
    for sharded, overlapped in ((False, False), (True, False), (True, True)):
        if (sharded and layout.data_ranks == 1 and not given) or (overlapped and low_memory):
            continue
        flags = dict(zip(_SHARDING, (sharded, overlapped, overlapped), strict=True)) | given
        if flags["overlap_param_gather"] and not (flags["distributed_optimizer"] and flags["overlap_grad_reduce"]):
            continue
        if tuple(flags.values()) not in seen:
            seen.add(tuple(flags.values()))
            yield replace(layout, **flags)


# ---- ways out -------------------------------------------------------------------------------------------------------


def ways_out(request: Request, names: Mapping[str, str] | None = None) -> list[str]:
    """Returns changes that make something fit, each of them planned; for a request of which nothing fits.

    Leaving out one of what is fixed, else all of it; more GPUs and a larger card, as it is, else with that left out.

    Args:
        request: what does not fit.
        names: field of `Request.fixed` -> what to call it.
    """
    names = names or {}
    called = [names.get(name, name) for name in request.fixed]
    found = []
    for name, call in zip(request.fixed, called, strict=True):
        found += _way(replace(request, fixed=_without(request.fixed, name)), f"leave {call} out")
    free = replace(request, fixed={})
    everything = f" and leave {', '.join(called)} out" if called else ""
    if not found and called:
        found += _way(free, f"leave {', '.join(called)} out")
    more = [replace(request, num_gpus=count) for count in _larger_counts(request.num_gpus, request.gpus_per_node)]
    larger = [
        replace(request, card=card)
        for card in sorted(CARDS.values(), key=lambda card: card.memory_bytes)
        if card.memory_bytes > request.card.memory_bytes
    ]
    for changed in (more, larger):
        tries = [(one, _changed(request, one)) for one in changed]
        tries += [(replace(one, fixed={}), what + everything) for one, what in tries if called]
        found += next((way for way in itertools.starmap(_way, tries) if way), [])
    return found


def _larger_counts(num_gpus: int, gpus_per_node: int) -> list[int]:
    """Returns numbers of GPUs to try, up to 64 times as many: the next whole node, multiples, and powers of two."""
    found = {(num_gpus // gpus_per_node + 1) * gpus_per_node}
    found |= {num_gpus * 2**i for i in range(1, 7)} | {2**i for i in range((64 * num_gpus).bit_length())}
    return sorted(
        count
        for count in found
        if num_gpus < count <= 64 * num_gpus and (count <= gpus_per_node or count % gpus_per_node == 0)
    )


def _without(fixed: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in fixed.items() if other != name}


def _changed(request: Request, other: Request) -> str:
    return f"take {other.num_gpus} GPUs" if other.num_gpus != request.num_gpus else f"take {other.card.name}"


def _way(request: Request, what: str) -> list[str]:
    best = plan(request).best
    return [f"{what}: {describe(best.layout)}"] if best else []
