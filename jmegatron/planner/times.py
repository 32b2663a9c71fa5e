"""What a step sends over each mesh axis, and how long it should take: closed forms over a card's peaks and links.

No communication, no jax; plain numbers. Bytes are what one device sends in one step (ring algorithms; `hlo.py` counts
the same way in the compiled step). Seconds are a roofline: to rank layouts, and to know about what to expect.

Assumptions, each a constant or a field of `StepTime`:

1. Matmuls run at `MATMUL_SHARE` of the card's peak; or at `assumed_tflops`, which then stands for all work on a device.
2. Work that only moves bytes (norms, residuals, activations, gradient sums, the update) runs at the card's bandwidth.
3. Attention skips blocks above the diagonal, and its backward multiplies the scores again.
4. Links run at `LINK_SHARE` of their rate; each collective takes `LATENCY_S` more. A group with g members in each node
   uses g network cards, and so does a ring around them.
5. tp: nothing hides it. cp: attention hides a ring and a gather, nothing an all-to-all. pp: layers hide permutes, but
   not with half ticks; of four all-reduces of a micro-batch the two around the output layer are exposed. dp: with
   overlap the backward of one micro-batch's layers hides the layers' reduction, and the forward their gather.
6. In lock step each idle slot costs what a full one does, tp and cp included; embedding and output layer run m times.
   A slot costs `SLOT_S` more than its layers, so that chunks cannot be made ever shorter for nothing.

7. Every expert has equally many tokens; with a busier one all devices wait for its device.

Sources: arXiv:2104.04473 section 3, arXiv:2205.05198 section 4.2, arXiv:1910.02054 section 7.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jmegatron.planner import formulas
from jmegatron.planner.cards import Card
from jmegatron.planner.costs import Layout, bubble, elements, expert_rows, layers_held, slots
from jmegatron.planner.formulas import GPTShape
from jmegatron.planner.memory import dense_width, expert_inner_width

MATMUL_SHARE = 0.65
"""Part of the peak that large matmuls and fused attention reach."""
LINK_SHARE = 0.8
"""Part of a link's rate that collectives of many megabytes reach."""
LATENCY_S = 10e-6
"""Start of a collective; between nodes twice as long."""
SLOT_S = 50e-6
"""What a slot of a pipeline, forward or backward, costs beside its layers: launches, waiting for the slowest stage."""


# ---- communication --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The devices of an axis that talk to one another, or of axes next to one another.

    Attributes:
        size: devices of a group.
        stride: distance of neighbours in the order of the devices.
        gpus_per_node: devices of a node.
    """

    size: int
    stride: int
    gpus_per_node: int

    @property
    def within_node(self) -> bool:
        """Whether no byte of it leaves a node."""
        return self.size == 1 or (
            self.size * self.stride <= self.gpus_per_node and self.gpus_per_node % (self.size * self.stride) == 0
        )

    @property
    def members_per_node(self) -> int:
        """Members that share a node, at least 1."""
        return max(1, min(self.size, self.gpus_per_node // self.stride))

    def bytes_per_s(self, card: Card, kind: str) -> float:
        """Returns the rate at which a device sends what a collective of this kind counts."""
        inside, outside = LINK_SHARE * card.nvlink_bytes_per_s, LINK_SHARE * card.network_bytes_per_s
        if self.within_node:
            return inside
        if kind == "permute":
            return min(inside, outside)  # the neighbour in another node is the slowest
        if kind.endswith("all-to-all"):
            away = (self.size - self.members_per_node) / max(1, self.size - 1)
            return min(inside, outside / away)
        return min(inside, outside * self.members_per_node)


def groups(layout: Layout) -> dict[str, Group]:
    """Returns the group of each axis, of "data", the axes (dp, ep, cp) together, and of "expert data", (dp, cp).

    Order tp, cp, ep, dp, pp. The last one's members are not evenly apart with cp and ep; its extent counts.
    """
    found, stride = {}, 1
    for axis in ("tp", "cp", "ep", "dp", "pp"):
        size = getattr(layout, axis)
        found[axis] = Group(size, stride, layout.gpus_per_node)
        stride *= size
    found["data"] = Group(layout.data_ranks, layout.tp, layout.gpus_per_node)
    found["expert data"] = Group(layout.expert_data_ranks, layout.tp * layout.ep, layout.gpus_per_node)
    return found


@dataclass(frozen=True)
class Traffic:
    """One kind of message.

    Attributes:
        axis: mesh axis, "data" for (dp, ep, cp) together, or "expert data" for (dp, cp).
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all" or "permute".
        what: what is sent.
        executions: times in a step, without idle slots.
        bytes: that one device sends in a step (a device that sends most), without idle slots.
        within_node: whether all of it stays in a node.
        seconds: of all executions, if nothing else runs.
    """

    axis: str
    kind: str
    what: str
    executions: float
    bytes: float
    within_node: bool
    seconds: float = 0.0


_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "permute": lambda n: 1.0,
}


def communication(shape: GPTShape, layout: Layout, card: Card | None = None) -> tuple[Traffic, ...]:
    """Returns what a device sends in a step; with a card how long each takes.

    Per layer and micro-batch, B = bytes of a cp rank's activation (s b h / cp in the compute dtype):
    tp: two reductions of B forward and two backward; with sequence parallelism as a gather and a scatter each, and with
    recompute what runs again (selective: its two gathers; full: all of the forward but the last reduction).
    ep: k rows a token and back, forward and backward; with full recompute forward again. Around it over tp, in place of
    one reduction each way: without sequence parallelism a gather of B, and where tp divides experts a gather and a
    scatter of the buffers of received rows. Counts, and figures of the router, are left out.
    cp: a ring sends keys and values cp - 1 times forward; backward them again and their gradients in fp32.
    Per micro-batch: embedding and output layer over tp (one reduction of B each way), their four all-reduces of an
    activation over pp, two small ones of the losses over (pp, tp), which are left out; a send per chunk and direction.
    Per step: (d-1)/d of the gradients and of the new parameters, or an all-reduce of the gradients; of experts over dp
    and cp alone.

    Raises:
        ValueError: the model cannot be divided so.
    """
    add = _Sum(layout, card)
    e, m = float(layout.parameter_bytes), layout.num_microbatches
    tokens = shape.seq_len // layout.cp * layout.micro_batch_size
    whole = e * tokens * shape.hidden_size
    own = whole / layout.sequence_ranks
    layers = layers_held(shape, layout)
    _tensor_parallel(add, shape, layout, whole)
    if layers.experts:
        _expert_parallel(add, shape, layout)
    _context_parallel(add, shape, layout, tokens, m * sum(layers))
    if layout.pp > 1:
        sends = m * layout.num_chunks
        add("pp", "permute", "activations", sends, own)
        add("pp", "permute", "gradients of activations", sends, own)
        add("pp", "all-reduce", "embedding and its gradient", 2 * m, own)
        add("pp", "all-reduce", "input of the output layer and its gradient", 2 * m, own)
    for axis, what, held in zip(
        ("data", "expert data"), ("", " of experts"), elements(shape, layout).held(layers), strict=True
    ):
        if not held:
            continue
        gradients = float(held * layout.gradient_bytes)
        if layout.distributed_optimizer:
            add(axis, "reduce-scatter", f"gradients{what}", 1, gradients)
            add(axis, "all-gather", f"parameters{what}", 1, held * e)
        else:
            add(axis, "all-reduce", f"gradients{what}", 1, gradients)
    return tuple(add.found)


class _Sum:
    """Collects messages: (axis, kind, what, executions, bytes of the whole operand or result)."""

    def __init__(self, layout: Layout, card: Card | None):
        self.groups, self.card, self.found = groups(layout), card, list[Traffic]()

    def __call__(self, axis: str, kind: str, what: str, executions: int | float, size: float) -> None:
        group = self.groups[axis]
        if group.size == 1 or not executions:
            return
        sent = executions * size * _SENT[kind](group.size)
        seconds = 0.0
        if self.card is not None:
            latency = LATENCY_S * (1 if group.within_node else 2)
            seconds = sent / group.bytes_per_s(self.card, kind) + executions * latency
        self.found.append(Traffic(axis, kind, what, float(executions), sent, group.within_node, seconds))


def recomputed_share(shape: GPTShape, layout: Layout) -> float:
    """Returns the part of the layers whose forward runs again: 1 with full recompute and method uniform."""
    if layout.recompute != "full":
        return 0.0
    if layout.recompute_method == "uniform":
        return 1.0
    places = layout.places_of_chunk(shape.num_layers)
    return min(layout.recompute_num_layers, places) / places


def _tensor_parallel(add: _Sum, shape: GPTShape, layout: Layout, whole: float) -> None:
    m, layers, share = layout.num_microbatches, layers_held(shape, layout), recomputed_share(shape, layout)
    # Attention of all layers; the feed-forward part of dense layers, and shared experts.
    shared = layers.experts if shape.experts is not None and shape.experts.shared_ffn_hidden_size else 0
    regions = m * (sum(layers) + layers.dense + shared)
    unit = layout.recompute_num_layers if layout.recompute_method == "uniform" else 1
    last = m * (layers.dense + shared) * share if unit == 1 else 0  # one layer alone leaves its last reduction out
    reductions_again = regions * share - last
    if not layout.sequence_parallel:
        add("tp", "all-reduce", "activations of layers", 2 * regions + reductions_again, whole)
        # Each tp rank routes its own tokens: what comes of them is joined, backward as well.
        joins = m * layers.experts * (2 + (share if unit > 1 else 0))
        add("tp", "all-gather", "activations of layers", joins, whole)
        add("tp", "all-reduce", "embedding and output layer", 2 * m, whole)
        return
    gathers_again = regions if layout.recompute == "selective" else regions * share
    add("tp", "all-gather", "activations of layers", 2 * regions + gathers_again, whole)
    add("tp", "reduce-scatter", "activations of layers", 2 * regions + reductions_again, whole)
    add("tp", "all-gather", "embedding and output layer", 2 * m, whole)
    add("tp", "reduce-scatter", "embedding and output layer", 2 * m, whole)


def _expert_parallel(add: _Sum, shape: GPTShape, layout: Layout) -> None:
    layers = layout.num_microbatches * layers_held(shape, layout).experts
    rows, row = expert_rows(shape, layout), float(layout.parameter_bytes * shape.hidden_size)
    again = layers * recomputed_share(shape, layout)
    add("ep", "ragged-all-to-all", "rows of experts", 4 * layers + 2 * again, rows.sent * row)
    if layout.experts_over_tp:
        gathers = layers if layout.recompute == "selective" else again
        add("tp", "all-gather", "rows of experts", 2 * layers + gathers, rows.joined * row)
        add("tp", "reduce-scatter", "rows of experts", 2 * layers + again, rows.joined * row)


def _context_parallel(add: _Sum, shape: GPTShape, layout: Layout, tokens: int, layers: int) -> None:
    e, hops = float(layout.parameter_bytes), layout.cp - 1
    width = shape.kv_channels * max(1.0, shape.num_query_groups / layout.tp)
    key_values = 2 * e * tokens * width
    # Full recompute runs the forward again; otherwise output and log-sum-exp are kept.
    forwards = layers * (1 + recomputed_share(shape, layout))
    if layout.cp_comm_type == "p2p":
        add("cp", "permute", "keys and values", (forwards + layers) * hops, key_values)
        add("cp", "permute", "gradients of keys and values", layers * hops, key_values * 4 / e)
    elif layout.cp_comm_type == "all_gather":
        add("cp", "all-gather", "keys and values", forwards + layers, key_values * layout.cp)
        add("cp", "reduce-scatter", "gradients of keys and values", layers, key_values * 4 / e * layout.cp)
    else:
        query = e * tokens * shape.query_width / layout.tp
        add("cp", "all-to-all", "queries, keys, values", forwards + layers, query + key_values)
        add("cp", "all-to-all", "output of attention", forwards + layers, query)


# ---- time -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, in parts that add up to `total`.

    Attributes:
        matmul: products of layers and output layer, recomputed ones too.
        memory_bound: work that only moves bytes; 0 with `assumed_tflops`.
        tp, ep, cp, pp, data: exposed communication of the axis; data is all that happens once a step.
        bubble: idle slots.
        model_flops: of a step on all devices, by `formulas.model_flops_per_step` with causal skip (Megatron-LM's).
        tokens: of a step.
        num_devices: devices.
        peak_flops: of a device.
    """

    matmul: float
    memory_bound: float
    tp: float
    ep: float
    cp: float
    pp: float
    data: float
    bubble: float
    model_flops: float
    tokens: int
    num_devices: int
    peak_flops: float

    @property
    def exposed(self) -> float:
        """Exposed communication."""
        return self.tp + self.ep + self.cp + self.pp + self.data

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return self.matmul + self.memory_bound + self.exposed + self.bubble

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, of all devices."""
        return self.tokens / self.total

    @property
    def tflops_per_device(self) -> float:
        """Model TFLOP/s of a device."""
        return self.model_flops / self.total / self.num_devices / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, 0 to 1."""
        return formulas.mfu(self.model_flops, self.total, self.num_devices, self.peak_flops)

    def days(self, token_budget: float) -> float:
        """Returns the days that so many tokens take."""
        return token_budget / self.tokens_per_s / 86400


def step_time(shape: GPTShape, layout: Layout, card: Card, assumed_tflops: float | None = None) -> StepTime:
    """Returns the expected time of a step, with the assumptions at the top.

    Args:
        shape: of the model.
        layout: how it is divided.
        card: the GPU.
        assumed_tflops: TFLOP/s of a device in its layers and output layer; None: a roofline of the card.

    Raises:
        ValueError: the model cannot be divided so.
    """
    m, traffic = layout.num_microbatches, communication(shape, layout, card)
    seconds = lambda axis, *what: sum((t.seconds for t in traffic if t.axis == axis and t.what in what), 0.0)  # noqa: E731
    rate = MATMUL_SHARE * card.peak_bf16_flops * (1 if layout.parameter_bytes == 2 else 0.5)
    rate = rate if assumed_tflops is None else assumed_tflops * 1e12
    layer_flops, attention_flops, output_flops = _device_flops(shape, layout)
    layer_bytes, once_bytes = (0.0, 0.0) if assumed_tflops else _device_bytes(shape, layout)
    layers = layer_flops / rate + layer_bytes / card.memory_bytes_per_s
    tp, ep = seconds("tp", "activations of layers", "rows of experts"), seconds("ep", "rows of experts")
    cp = sum((t.seconds for t in traffic if t.axis == "cp"), 0.0)
    if layout.cp_comm_type != "a2a":
        cp = max(0.0, cp - attention_flops / rate)
    sends = seconds("pp", "activations", "gradients of activations")
    if layout.schedule_name != "1f1b-low-memory":
        sends = max(0.0, sends - layers)
    between_slots = 2 * slots(layout) * SLOT_S if layout.pp > 1 else 0.0
    in_slots = layers + tp + ep + cp + sends
    costs = (1.0, 3.0 if recomputed_share(shape, layout) > 0.5 else 2.0)
    forward, backward = layers / m / sum(costs), layers / m * costs[1] / sum(costs)
    share = _share_of_layers(shape, layout)
    reduce = seconds("data", "gradients") + seconds("expert data", "gradients of experts")
    gather = seconds("data", "parameters") + seconds("expert data", "parameters of experts")
    hidden = min(reduce * share, backward) if layout.overlap_grad_reduce else 0.0
    hidden += min(gather * share, forward) if layout.overlap_param_gather else 0.0
    tokens = layout.global_batch_size * shape.seq_len
    return StepTime(
        matmul=(layer_flops + output_flops) / rate,
        memory_bound=(layer_bytes + once_bytes) / card.memory_bytes_per_s,
        tp=tp + seconds("tp", "embedding and output layer"),
        ep=ep,
        cp=cp,
        pp=sends + seconds("pp", "input of the output layer and its gradient") + between_slots,
        data=reduce + gather - hidden,
        bubble=in_slots * bubble(layout, *costs),
        model_flops=formulas.model_flops_per_step(shape, tokens, causal_skip=True),
        tokens=tokens,
        num_devices=layout.num_devices,
        peak_flops=card.peak_bf16_flops,
    )


def _share_of_layers(shape: GPTShape, layout: Layout) -> float:
    """Returns the part of a device's parameters that lies in layers."""
    held = sum(elements(shape, layout).held(layers_held(shape, layout)))
    return 1 - elements(shape, layout).rest / held


def _device_flops(shape: GPTShape, layout: Layout) -> tuple[float, float, float]:
    """Returns a device's FLOPs of a step: layers (attention among them), attention alone, output layer."""
    tokens = layout.num_microbatches * layout.micro_batch_size * shape.seq_len / layout.cp / layout.tp
    again, layers = recomputed_share(shape, layout), layers_held(shape, layout)
    output = 2.0 * shape.vocab_rows * shape.hidden_size
    dense = replace(shape, num_layers=1, experts=None)
    attention = formulas.attention_flops_per_token(dense, causal_skip=True)
    products = lambda one: formulas.forward_flops_per_token(one, causal_skip=True) - output - attention  # noqa: E731
    total = products(dense) * layers.dense
    if shape.experts is not None:
        one = replace(shape, num_layers=1, experts=replace(shape.experts, num_layers=1, pattern=()))
        total += (products(one) + _padding_flops(shape, layout)) * layers.experts
    attention *= (3 + 0.5 + again) * sum(layers)
    total *= 3 + again
    if layout.recompute == "selective" and "mlp" in layout.recompute_modules:
        total += formulas.first_product_flops_per_token(shape) * sum(layers) / shape.num_layers
    return (total + attention) * tokens, attention * tokens, 3 * output / layout.pp * tokens


def _padding_flops(shape: GPTShape, layout: Layout) -> float:
    """Returns the forward FLOPs a token of rows that only fill experts up to their capacity."""
    experts = shape.experts
    assert experts is not None
    if not experts.pad_to_capacity:
        return 0.0
    rows = expert_rows(shape, layout)
    weights = shape.hidden_size * experts.ffn_hidden_size * (3 if shape.gated else 2)
    return 2.0 * experts.top_k * weights * (rows.places / rows.even - 1)


def _device_bytes(shape: GPTShape, layout: Layout) -> tuple[float, float]:
    """Returns the bytes that a device's memory moves beside matmuls: in layers, and once a step or micro-batch.

    A layer, forward: two norms (read, write), two residual sums (two reads, a write), the activation (reads, a write);
    backward twice that. Gradients in the compute dtype are written, read and added to fp32 sums each micro-batch, and
    every weight is read three times. The update reads gradient, master and moments and writes all but the gradient.
    """
    e, m = layout.parameter_bytes, layout.num_microbatches
    tokens = shape.seq_len / layout.cp * layout.micro_batch_size
    layers, of_device = layers_held(shape, layout), elements(shape, layout)
    elementwise = sum(layers) * 10 * e * tokens * shape.hidden_size / layout.sequence_ranks
    activation = (3 if shape.gated else 2) * e
    for number, experts in ((layers.dense, False), (layers.experts, True)):
        if number:
            elementwise += number * activation * tokens * dense_width(shape, experts) / layout.tp
    if layers.experts:
        rows, inner = expert_rows(shape, layout).even, expert_inner_width(shape, layout)
        # Each time written and read: ordered, into the places of experts and out of them, back in the tokens' order;
        # and the inner rows out of the places and into them again.
        columns = 8 * shape.hidden_size + 3 * inner
        elementwise += layers.experts * rows * (e * columns + activation * inner / (2 if shape.gated else 1))
    again = 1 if layout.recompute == "selective" else recomputed_share(shape, layout)
    weights = 5 * e + 2 * layout.gradient_bytes
    logits = 3 * 8 * tokens * shape.vocab_rows / (layout.tp * layout.pp)
    whole, divided = of_device.held(layers)
    sharded = layout.distributed_optimizer
    update = whole / (layout.data_ranks if sharded else 1) + divided / (layout.expert_data_ranks if sharded else 1)
    update *= layout.gradient_bytes + 24 + e
    in_layers = whole + divided - of_device.rest
    return m * ((3 + again) * elementwise + weights * in_layers), m * (weights * of_device.rest + logits) + update
