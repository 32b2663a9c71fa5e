"""How a GPT is divided over a mesh: layout, parameters of each device, chunks in flight, bubble. No jax.

No communication; plain numbers. `formulas.py` knows the model alone; what the devices' memory holds stands in
`memory.py`, what they send and how long a step takes in `times.py`.

- Every stage holds 1/(p t) of embedding and output layer (`models/gpt.py`); norms and output biases are whole on each
  tp rank, and so are the kernels of keys and values where there are fewer kv heads than tp ranks.
- All devices run one program: with stages of unequal length each holds as many places as the longest needs.
  `RankParameters.total` is what belongs to a stage, `held` what lies on it.
- Experts lie on ep, and on tp where that divides each of them; routers are whole everywhere. For experts dp and cp
  alone are data ranks. Layers with and without experts are two stacks; every chunk has the same pattern of them.

Sources: arXiv:2104.04473 section 2.2 (bubble); Megatron-LM training/theoretical_memory_usage.py.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from jmegatron.planner.formulas import GPTShape, Parameters


@dataclass(frozen=True)
class Layout:
    """How a step is divided, in the words of the options.

    Attributes:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        dp: data-parallel ranks, expert-parallel ones apart.
        cp: context-parallel ranks.
        ep: expert-parallel ranks (for everything but experts more data-parallel ones).
        experts_over_tp: tp divides each expert; else each tp rank has whole ones.
        num_chunks: chunks of layers a stage.
        micro_batch_size: sequences of a micro-batch and data-parallel rank.
        num_microbatches: micro-batches of a step and data-parallel rank.
        sequence_parallel: tp divides the tokens between the regions.
        distributed_optimizer: master weights and moments are divided over dp, ep and cp.
        overlap_grad_reduce: gradients are reduced layer by layer in the last backward.
        overlap_param_gather: parameters are gathered layer by layer in the first forward.
        recompute: None, "selective" or "full".
        recompute_method: "uniform" or "block", with full.
        recompute_num_layers: layers of a unit (uniform), or computed again in each chunk (block).
        recompute_modules: with selective.
        parameter_bytes: of the compute dtype, 2 or 4.
        gradient_bytes: of a main gradient.
        optimizer: as `--optimizer`.
        dropout: hidden dropout keeps its masks.
        schedule: as `--pipeline-schedule`; "": 1f1b, with several chunks interleaved.
        group_size: micro-batches that go through a chunk before the next; None: as near to p as can be.
        chunk_lengths: layers by [stage][chunk], as `config.layer_split.chunk_lengths`; (): all equal.
        cp_comm_type: "p2p", "all_gather" or "a2a".
        gpus_per_node: devices that NVLink joins.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    experts_over_tp: bool = True
    num_chunks: int = 1
    micro_batch_size: int = 1
    num_microbatches: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    recompute: str | None = None
    recompute_method: str = "uniform"
    recompute_num_layers: int = 1
    recompute_modules: tuple[str, ...] = ("core_attn",)
    parameter_bytes: int = 2
    gradient_bytes: int = 4
    optimizer: str = "adam"
    dropout: bool = False
    schedule: str = ""
    group_size: int | None = None
    chunk_lengths: tuple[tuple[int, ...], ...] = ()
    cp_comm_type: str = "p2p"
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        if self.recompute not in (None, "selective", "full"):
            raise ValueError(f"recompute {self.recompute!r}: expected None, 'selective' or 'full'")
        if self.cp_comm_type not in ("p2p", "all_gather", "a2a"):
            raise ValueError(f"cp_comm_type {self.cp_comm_type!r}: expected 'p2p', 'all_gather' or 'a2a'")

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.tp * self.pp * self.dp * self.cp * self.ep

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same parameters, but for experts: d = dp x ep x cp."""
        return self.dp * self.ep * self.cp

    @property
    def expert_data_ranks(self) -> int:
        """Ranks that hold the same experts: dp x cp."""
        return self.dp * self.cp

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step."""
        return self.micro_batch_size * self.num_microbatches * self.dp * self.ep

    @property
    def schedule_name(self) -> str:
        """The schedule, where it was left open as well."""
        return self.schedule or ("interleaved" if self.num_chunks > 1 else "1f1b")

    @property
    def sequence_ranks(self) -> int:
        """Ranks of tp that divide what lies between the regions."""
        return self.tp if self.sequence_parallel else 1

    def layers_of_chunks(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Returns the layers by [stage][chunk].

        Raises:
            ValueError: the layers are not divisible, or not those of `chunk_lengths`.
        """
        if self.chunk_lengths:
            found = sum(map(sum, self.chunk_lengths))
            if found != num_layers or len(self.chunk_lengths) != self.pp:
                raise ValueError(f"chunk_lengths {self.chunk_lengths}: expected {num_layers} layers, {self.pp} stages")
            return self.chunk_lengths
        length, rest = divmod(num_layers, self.pp * self.num_chunks)
        if rest:
            raise ValueError(f"{num_layers} layers on {self.pp} stages of {self.num_chunks} chunks: not divisible")
        return ((length,) * self.num_chunks,) * self.pp

    def places_of_chunk(self, num_layers: int) -> int:
        """Returns the places for layers that each chunk of each stage has: those of the longest chunk."""
        return max(map(max, self.layers_of_chunks(num_layers)))


# ---- layers ---------------------------------------------------------------------------------------------------------


class Layers(NamedTuple):
    """How many layers, without and with experts."""

    dense: int
    experts: int


def expert_places(shape: GPTShape, layout: Layout) -> tuple[bool, ...]:
    """Returns whether the layer at each place of a chunk has experts; the same in every chunk.

    Raises:
        ValueError: the chunks differ, or the layers cannot be divided.
    """
    lengths = layout.layers_of_chunks(shape.num_layers)
    pattern = () if shape.experts is None else shape.experts.pattern
    if shape.experts is None or all(pattern):
        return (shape.experts is not None,) * max(map(max, lengths))
    return _places_of_pattern(pattern, lengths)


@functools.lru_cache(maxsize=256)
def _places_of_pattern(pattern: tuple[bool, ...], lengths: tuple[tuple[int, ...], ...]) -> tuple[bool, ...]:
    longest = max(map(max, lengths))
    found: list[bool | None] = [None] * longest
    layer = 0
    for chunk in range(len(lengths[0])):  # chunks follow one another over the stages
        for stage in lengths:
            for place in range(stage[chunk]):
                if found[place] not in (None, pattern[layer]):
                    raise ValueError(f"layer {layer + 1}: of place {place + 1} of the chunks some have experts only")
                found[place] = pattern[layer]
                layer += 1
    return tuple(bool(one) for one in found)


def layers_held(shape: GPTShape, layout: Layout) -> Layers:
    """Returns the places for layers that every device has."""
    places = expert_places(shape, layout)
    experts = sum(places)
    return Layers(layout.num_chunks * (len(places) - experts), layout.num_chunks * experts)


def layers_of_stage(shape: GPTShape, layout: Layout, stage: int) -> Layers:
    """Returns the layers that belong to a stage."""
    places = expert_places(shape, layout)
    lengths = layout.layers_of_chunks(shape.num_layers)[stage]
    experts = sum(sum(places[:length]) for length in lengths)
    return Layers(sum(lengths) - experts, experts)


# ---- parameters -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """One parameter as a device holds it.

    Attributes:
        part: field of `formulas.Parameters`.
        dims: lengths on the device, of one layer where it belongs to layers.
        per_layer: whether layers have one each.
        sharing: devices of (pp, ep, tp) that hold different parts of it; 1: each has the whole.
        matrix: whether muon takes it for a matrix.
        of: layers that have it: "all", "dense" or "experts".
        over_ep: ep divides it, so that its data ranks are those of experts.
        fp32: a step computes with it in fp32 whatever its dtype is.
    """

    part: str
    dims: tuple[int, ...]
    per_layer: bool = True
    sharing: int = 1
    matrix: bool = False
    of: str = "all"
    over_ep: bool = False
    fp32: bool = False

    @property
    def size(self) -> int:
        """Elements on the device, of one layer."""
        return math.prod(self.dims)

    def part_of(self, data_ranks: int) -> int:
        """Returns the elements that the distributed optimizer leaves on a rank: 1/d, or all if d divides no dim."""
        return self.size // data_ranks if any(dim % data_ranks == 0 for dim in self.dims) else self.size

    def number(self, layers: Layers) -> int:
        """Returns how many such parameters so many layers have; 1 of one that is in no layer."""
        if not self.per_layer:
            return 1
        return sum(layers) if self.of == "all" else int(getattr(layers, self.of))


def leaves(shape: GPTShape, layout: Layout) -> tuple[Leaf, ...]:
    """Returns every parameter of a device, each layer's once.

    Raises:
        ValueError: heads, widths, experts or vocabulary cannot be divided over the ranks.
    """
    return _leaves(shape, layout.tp, layout.pp, layout.ep, layout.experts_over_tp)


@functools.lru_cache(maxsize=256)  # a plan asks for the same ones thousands of times
def _leaves(shape: GPTShape, t: int, p: int, ep: int, experts_over_tp: bool) -> tuple[Leaf, ...]:
    pt, h, experts = p * t, shape.hidden_size, shape.experts
    all_experts = experts is not None and experts.num_layers == shape.num_layers
    numbers = [("num_attention_heads", shape.num_attention_heads, t), ("rows of the vocabulary", shape.vocab_rows, pt)]
    if not all_experts:
        numbers.append(("ffn_hidden_size", shape.ffn_hidden_size, t))
    if experts is not None:
        numbers.append(("num_experts", experts.num_experts, ep))
        numbers.append(("ffn_hidden_size of the shared expert", experts.shared_ffn_hidden_size, t))
        numbers.append(("ffn_hidden_size of an expert", experts.ffn_hidden_size, t if experts_over_tp else 1))
    for what, number, ranks in numbers:
        if number % ranks:
            raise ValueError(f"{what} {number} cannot be divided over {ranks} ranks")
    groups, heads, width = shape.num_query_groups, shape.num_attention_heads // t, shape.kv_channels
    if groups % t and t % groups:
        raise ValueError(f"num_query_groups {groups} and {t} tp ranks: one must divide the other")
    kv_sharing = t if groups % t == 0 else 1
    kv_heads = groups // kv_sharing
    found = [
        Leaf("attention", (h, heads, width), sharing=t, matrix=True),
        Leaf("attention", (h, kv_heads, 2, width), sharing=kv_sharing, matrix=True),
        Leaf("attention", (heads, width, h), sharing=t, matrix=True),
    ]
    if shape.biases or shape.qkv_bias:
        found += [
            Leaf("attention", (heads, width), sharing=t),
            Leaf("attention", (kv_heads, 2, width), sharing=kv_sharing),
        ]
    if shape.biases:
        found.append(Leaf("attention", (h,)))
    if not all_experts:
        found += _mlp_leaves(shape, shape.ffn_hidden_size // t, t, "all" if experts is None else "dense")
    if experts is not None:
        found += _expert_leaves(shape, t, ep, experts_over_tp)
    vectors = 2 if shape.norm == "layernorm" else 1
    found += [Leaf("norms", (h,))] * (2 * vectors)
    found += [Leaf("norms", (width,))] * (2 * vectors if shape.qk_norm else 0)
    found += [Leaf("norms", (h,), per_layer=False)] * vectors
    found.append(Leaf("word_embedding", (shape.vocab_rows // pt, h), per_layer=False, sharing=pt))
    if not shape.tied:
        found.append(Leaf("output_layer", (h, shape.vocab_rows // pt), per_layer=False, sharing=pt))
    if shape.num_positions:
        sharing = pt if p > 1 and shape.num_positions % pt == 0 else 1
        found.append(Leaf("position_embedding", (shape.num_positions // sharing, h), per_layer=False, sharing=sharing))
    return tuple(found)


def _mlp_leaves(shape: GPTShape, ffn: int, t: int, of: str) -> list[Leaf]:
    h, inner = shape.hidden_size, (2, ffn) if shape.gated else (ffn,)
    found = [
        Leaf("mlp", (h, *inner), sharing=t, matrix=True, of=of),
        Leaf("mlp", (ffn, h), sharing=t, matrix=True, of=of),
    ]
    if shape.biases:
        found += [Leaf("mlp", inner, sharing=t, of=of), Leaf("mlp", (h,), of=of)]
    return found


def _expert_leaves(shape: GPTShape, t: int, ep: int, over_tp: bool) -> list[Leaf]:
    """Returns the parameters of router, experts and shared expert."""
    experts = shape.experts
    assert experts is not None
    h, number, divided = shape.hidden_size, experts.num_experts // ep, t if over_tp else 1
    ffn = experts.ffn_hidden_size // divided
    inner = (2, ffn) if shape.gated else (ffn,)
    own = functools.partial(Leaf, "experts", of="experts", over_ep=ep > 1)
    found = [Leaf("router", (h, experts.num_experts), of="experts")]
    if experts.router_bias:
        found.append(Leaf("router", (experts.num_experts,), of="experts", fp32=True))
    found += [
        own((number, h, *inner), sharing=ep * divided, matrix=True),
        own((number, ffn, h), sharing=ep * divided, matrix=True),
    ]
    if shape.biases:
        found += [own((number, *inner), sharing=ep * divided), own((number, h), sharing=ep)]
    if experts.shared_ffn_hidden_size:
        found += _mlp_leaves(shape, experts.shared_ffn_hidden_size // t, t, "experts")
    return found


class Elements(NamedTuple):
    """Parameters of a device: of one layer without and with experts (of these the experts alone), and of no layer."""

    dense_layer: int
    expert_layer: int
    experts: int
    rest: int

    def held(self, layers: Layers) -> tuple[int, int]:
        """Returns all that so many layers and the rest have: (what ep does not divide, what it does)."""
        divided = self.experts * layers.experts
        whole = self.dense_layer * layers.dense + self.expert_layer * layers.experts + self.rest - divided
        return whole, divided


def elements(shape: GPTShape, layout: Layout) -> Elements:
    """Returns the parameters of a device."""
    return _elements(shape, layout.tp, layout.pp, layout.ep, layout.experts_over_tp)


@functools.lru_cache(maxsize=256)
def _elements(shape: GPTShape, *ranks: int | bool) -> Elements:
    found = _leaves(shape, *ranks)
    total = lambda layers: sum(leaf.size * leaf.number(layers) for leaf in found if leaf.per_layer)  # noqa: E731
    return Elements(
        total(Layers(1, 0)),
        total(Layers(0, 1)),
        sum(leaf.size for leaf in found if leaf.over_ep),
        sum(leaf.size for leaf in found if not leaf.per_layer),
    )


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one device.

    Attributes:
        parts: by part, what belongs to the device.
        empty: in places without a layer, which a stage shorter than the longest has; they hold zeros.
    """

    parts: Parameters
    empty: int

    @property
    def total(self) -> int:
        """What belongs to the device."""
        return self.parts.total

    @property
    def held(self) -> int:
        """What lies on the device."""
        return self.total + self.empty


def parameters_of_rank(shape: GPTShape, layout: Layout, stage: int = 0) -> RankParameters:
    """Returns the parameters of a device of a stage (all its tp and data ranks have equally many).

    Raises:
        ValueError: the model cannot be divided so.
    """
    own, places = layers_of_stage(shape, layout, stage), layers_held(shape, layout)
    parts = dict.fromkeys(Parameters.__dataclass_fields__, 0)
    empty = 0
    for leaf in leaves(shape, layout):
        parts[leaf.part] += leaf.size * leaf.number(own)
        empty += leaf.size * (leaf.number(places) - leaf.number(own))
    return RankParameters(Parameters(**parts), empty)


def unique_parameters(shape: GPTShape, layout: Layout) -> int:
    """Returns the sum over all devices of what belongs to them, each element once: the model's parameters."""
    total = 0
    for stage in range(layout.pp):
        own = layers_of_stage(shape, layout, stage)
        total += sum(leaf.size * leaf.sharing * leaf.number(own) for leaf in leaves(shape, layout) if leaf.per_layer)
    return total + sum(leaf.size * leaf.sharing for leaf in leaves(shape, layout) if not leaf.per_layer)


# ---- rows of experts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertRows:
    """Rows of a layer with experts, of one device and micro-batch, as `moe.layer` sizes its buffers.

    Attributes:
        tokens: of this rank; each tp rank has its own.
        sent: k for each token; as many come back.
        received: room for those of all ep ranks.
        joined: the same of all tp ranks together, where tp divides the experts.
        even: of those joined, if every expert has equally many.
        places: largest number that a product multiplies, padding included.
    """

    tokens: int
    sent: int
    received: int
    joined: int
    even: float
    places: int


def expert_rows(shape: GPTShape, layout: Layout) -> ExpertRows:
    """Returns the rows of a layer with experts."""
    experts = shape.experts
    assert experts is not None
    tokens = shape.seq_len // layout.cp * layout.micro_batch_size // layout.tp
    k, local = experts.top_k, experts.num_experts // layout.ep
    of_expert = tokens
    if experts.capacity_factor is not None:
        of_expert = min(tokens, math.ceil(tokens * k / experts.num_experts * experts.capacity_factor))
    received = tokens * k
    if layout.ep > 1:
        received = min(layout.ep * tokens * min(k, local), layout.ep * of_expert * local)
        if experts.bound_factor is not None:
            received = min(received, math.ceil(experts.bound_factor * tokens * k))
    sources = layout.tp if layout.experts_over_tp else 1
    return ExpertRows(
        tokens=tokens,
        sent=tokens * k,
        received=received,
        joined=received * sources,
        even=float(tokens * k * sources),
        places=local * sources * min(layout.ep * of_expert, received),
    )


# ---- pipeline -------------------------------------------------------------------------------------------------------


def largest_group(layout: Layout) -> int:
    """Returns the most micro-batches that go through a chunk before the next (`pipeline.schedule.group_sizes`)."""
    m, p = layout.num_microbatches, layout.pp
    if layout.group_size is not None:
        return max(min(layout.group_size, m), p)
    return max(-(-m // max(m // p, 1)), p)


def chunks_in_flight(layout: Layout, stage: int = 0) -> int:
    """Returns the most chunks of micro-batches whose activations a stage needs at a time.

    2(p-1-r) + 1 + (v-1) g in lock step for groups of g micro-batches (g = p where p divides m), p - r with half ticks,
    never more than there are; as `pipeline.schedule.in_flight` counts them in the table.
    """
    p, m, v = layout.pp, layout.num_microbatches, layout.num_chunks
    if layout.schedule_name == "gpipe":
        return m * v
    if layout.schedule_name == "1f1b-low-memory":
        return min(m, p - stage)
    window = 2 * (p - 1 - stage) + 1
    if v > 1 and m < p:
        return (v - 1) * m + min(m, window)
    return min(m * v, window + (v - 1) * largest_group(layout))


def chunks_kept(layout: Layout) -> int:
    """Returns the chunks that the rings have room for on every device: what stage 0 needs, and one place more where an
    idle slot would find none free (`pipeline.schedule.rings`).
    """
    p, m, v = layout.pp, layout.num_microbatches, layout.num_chunks
    if layout.schedule_name == "1f1b-low-memory" or p == 1:
        return chunks_in_flight(layout)
    if layout.schedule_name == "gpipe" or (v > 1 and m < p):
        return m * v + 1
    return min(m * v + 1, 2 * (p - 1) + 1 + (v - 1) * largest_group(layout))


def slots(layout: Layout) -> int:
    """Returns the forward slots (and as many backward slots) of a step in lock step, idle ones included: m v + p - 1,
    with several chunks and fewer micro-batches than stages (v-1) p + m + p - 1.
    """
    p, m, v = layout.pp, layout.num_microbatches, layout.num_chunks
    return (max(m, p) if v > 1 else m) * (v - 1) + m + p - 1


def bubble(layout: Layout, forward_cost: float = 1.0, backward_cost: float = 2.0) -> float:
    """Returns the bubble as a part of the ideal time, (time - ideal) / ideal: (p-1) / (v m) in lock step.

    Costs of a chunk's forward and backward count with the low-memory schedule alone, whose stages wait for one another
    every half tick: p (F + B) + 2 (m-1) max(F, B).
    """
    p, m, v = layout.pp, layout.num_microbatches, layout.num_chunks
    if p == 1:
        return 0.0
    if layout.schedule_name == "1f1b-low-memory":
        both = forward_cost + backward_cost
        return (p * both + 2 * (m - 1) * max(forward_cost, backward_cost)) / (m * both) - 1
    return slots(layout) / (m * v) - 1


def bubble_of_total(layout: Layout, forward_cost: float = 1.0, backward_cost: float = 2.0) -> float:
    """Returns the bubble as a part of the whole time, (time - ideal) / time: (p-1) / (v m + p - 1) in lock step."""
    part = bubble(layout, forward_cost, backward_cost)
    return part / (1 + part)
