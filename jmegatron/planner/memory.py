"""What a device's memory holds in a step: model state, activations of each kind of recompute, work space. No jax.

No communication; plain numbers. Every device has the same: all run one program, with rings as large as the first stage
needs and as many places as the longest chunk has. Attention is fused, or in blocks: no s x s scores are kept.

Sources: arXiv:2205.05198 section 4 (activations), arXiv:1910.02054 (distributed optimizer).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jmegatron.planner.costs import (
    Layers,
    Layout,
    chunks_kept,
    elements,
    expert_places,
    expert_rows,
    layers_held,
    leaves,
)
from jmegatron.planner.formulas import GPTShape

LOGITS_BYTES = 64 * 2**20
"""fp32 logits that exist at once on a device (`layers/cross_entropy.py`)."""


# ---- model state ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelState:
    """Bytes of a device.

    Attributes:
        parameters: in the compute dtype, as they lie between steps.
        gradients: main gradients, within a step.
        master: fp32 weights; 0 where the compute dtype is fp32 (the parameters are they).
        moments: of the optimizer, fp32.
        reduced_gradients: the reduced ones, where they stand beside the others.
        gathered_parameters: whole parameters within a step, where they lie in parts between steps.
    """

    parameters: float
    gradients: float
    master: float
    moments: float
    reduced_gradients: float = 0.0
    gathered_parameters: float = 0.0

    @property
    def between_steps(self) -> float:
        """What the compiled step's arguments hold: 2 + 12/d a parameter with adam and the distributed optimizer."""
        return self.parameters + self.master + self.moments

    @property
    def total(self) -> float:
        """Peak within a step: 18 a parameter, with the distributed optimizer 6 + 12/d."""
        return self.between_steps + self.gradients + self.reduced_gradients + self.gathered_parameters


def model_state_bytes(shape: GPTShape, layout: Layout) -> ModelState:
    """Returns the bytes of parameters and all that belongs to them on a device; the same on every device.

    Leaf by leaf: one of which d divides no dim stays whole with the distributed optimizer. Empty places count.

    Raises:
        ValueError: the model cannot be divided so.
    """
    kinds, places, sums = _kinds(shape, layout), layers_held(shape, layout), [0.0] * 6
    for (matrix, fp32, parts), (dense, experts, rest) in kinds.items():
        one = state_bytes_per_parameter(layout, 1 / parts, matrix=matrix, fp32=fp32)
        for i, value in enumerate(vars(one).values()):
            sums[i] += value * (dense * places.dense + experts * places.experts + rest)
    return ModelState(*sums)


def _kinds(shape: GPTShape, layout: Layout) -> Mapping[tuple[bool, bool, int], tuple[int, int, int]]:
    ranks = layout.data_ranks, layout.expert_data_ranks
    return _elements_by_kind(shape, layout.tp, layout.pp, layout.ep, layout.experts_over_tp, ranks)


@functools.lru_cache(maxsize=1024)  # of all the layouts of a plan
def _elements_by_kind(
    shape: GPTShape, t: int, p: int, ep: int, experts_over_tp: bool, data_ranks: tuple[int, int]
) -> Mapping[tuple[bool, bool, int], tuple[int, int, int]]:
    """Returns (a matrix, in fp32 always, parts that the distributed optimizer makes of it) -> elements (of a layer
    without experts, of one with experts, in no layer).
    """
    found: dict[tuple[bool, bool, int], tuple[int, int, int]] = {}
    for leaf in leaves(shape, Layout(tp=t, pp=p, ep=ep, experts_over_tp=experts_over_tp)):
        key = leaf.matrix, leaf.fp32, leaf.size // leaf.part_of(data_ranks[leaf.over_ep])
        dense, experts, rest = found.get(key, (0, 0, 0))
        if leaf.per_layer:
            dense += leaf.size * leaf.number(Layers(1, 0))
            experts += leaf.size * leaf.number(Layers(0, 1))
        else:
            rest += leaf.size
        found[key] = dense, experts, rest
    return found


def state_bytes_per_parameter(
    layout: Layout, ratio: float | None = None, *, matrix: bool = True, fp32: bool = False
) -> ModelState:
    """Returns the bytes of one parameter of a device: the closed forms 18 and 6 + 12/d, see `optimizer/README.md`.

    Args:
        layout: the layout.
        ratio: what the distributed optimizer leaves on a rank; None: 1/d.
        matrix: whether muon takes it for a matrix, which has one moment.
        fp32: whether a step computes with it in fp32 in any case.
    """
    e, sharded = float(layout.parameter_bytes), layout.distributed_optimizer
    part = (1 / layout.data_ranks if ratio is None else ratio) if sharded else 1.0
    moments = {"adam": 2, "sgd": 1, "lion": 1, "muon": 1 if matrix else 2}[layout.optimizer]
    gathered = layout.overlap_param_gather and sharded
    beside = layout.overlap_grad_reduce and layout.data_ranks > 1
    computed = 4.0 if fp32 else e
    return ModelState(
        parameters=computed * (part if gathered else 1.0),
        gradients=float(layout.gradient_bytes),
        master=4.0 * part if e < 4 else 0.0,
        moments=4.0 * moments * part,
        reduced_gradients=4.0 * part if beside else 0.0,
        gathered_parameters=computed if gathered else 0.0,
    )


# ---- activations ----------------------------------------------------------------------------------------------------


def textbook_activation_bytes(shape: GPTShape, layout: Layout) -> float:
    """Returns the bytes of a layer and micro-batch that the paper says are kept, for ffn = 4 h with GELU and dropout.

    34 s b h / t with sequence parallelism, s b h (10 + 24 / t) without; without recompute also 5 b a s^2 / t of scores;
    2 s b h (/ t) with full recompute (arXiv:2205.05198 table 2). s is divided by cp.
    """
    s, b = shape.seq_len / layout.cp, layout.micro_batch_size
    unit, t = s * b * shape.hidden_size, layout.tp
    if layout.recompute == "full":
        return 2 * unit / layout.sequence_ranks
    base = unit * (10 / layout.sequence_ranks + 24 / t)
    scores = 5 * b * shape.num_attention_heads * s * shape.seq_len / t
    return base if layout.recompute == "selective" else base + scores


def kept_of_layer(shape: GPTShape, layout: Layout, experts: bool | None = None) -> dict[str, float]:
    """Returns the bytes that a layer keeps of a micro-batch, by the name under which it is kept, recompute considered.

    Names are those of `checkpoint_name` in `models/transformer.py`, `layers/` and `moe/`. With full recompute (one
    layer a unit) the input alone; `recompute_method` and `recompute_num_layers` are `chunk_activation_bytes`'s. Buffers
    of experts have the size that they may need at most (`costs.expert_rows`), however the router divides the tokens.
    Left out: counts, and without recompute what the router keeps of all its scores, a few numbers a token and expert.

    Args:
        shape: of the model.
        layout: how it is divided.
        experts: of a layer with experts; None: if any layer has such.
    """
    experts = shape.experts is not None if experts is None else experts
    e, t = float(layout.parameter_bytes), layout.tp
    tokens = shape.seq_len // layout.cp * layout.micro_batch_size
    whole = e * tokens * shape.hidden_size
    own = whole / layout.sequence_ranks
    if layout.recompute == "full":
        return {"input": own}
    heads, kv_heads = shape.num_attention_heads / t, max(1, shape.num_query_groups / t)
    query, key = e * tokens * heads * shape.kv_channels, e * tokens * kv_heads * shape.kv_channels
    width = dense_width(shape, experts)
    kept = {
        "input": own,
        "residual": own,
        "query": query,
        "key": key,
        "value": key,
        "attention_out": query,
        "attention_lse": 4 * tokens * heads,
    }
    if width:
        kept["mlp_pre_activation"] = e * tokens * width * (2 if shape.gated else 1) / t
    if experts:
        kept |= _kept_of_experts(shape, layout)
    if layout.dropout:
        kept["dropout_mask"] = 2 * tokens * shape.hidden_size / layout.sequence_ranks
    if layout.recompute is None:
        statistics = (8 if shape.norm == "layernorm" else 4) * tokens
        kept["gathered_inputs"] = (2 if width else 1) * whole
        kept["norm_statistics"] = 2 * statistics / layout.sequence_ranks
        if shape.qk_norm:
            kept["normed_query_key"] = query + key + statistics * (heads + kv_heads)
    elif "mlp" in layout.recompute_modules:
        kept.pop("mlp_pre_activation", None)
        kept.pop("expert_pre_activation", None)
    return kept


def dense_width(shape: GPTShape, experts: bool) -> int:
    """Returns the inner width of what every token passes in a layer: the shared expert's in one with experts, or 0."""
    if not experts:
        return shape.ffn_hidden_size
    assert shape.experts is not None
    return shape.experts.shared_ffn_hidden_size


def expert_inner_width(shape: GPTShape, layout: Layout) -> int:
    """Returns the columns of the first product of an expert on a device."""
    assert shape.experts is not None
    columns = shape.experts.ffn_hidden_size * (2 if shape.gated else 1)
    return columns // (layout.tp if layout.experts_over_tp else 1)


def _kept_of_experts(shape: GPTShape, layout: Layout) -> dict[str, float]:
    e, h, rows, experts = float(layout.parameter_bytes), shape.hidden_size, expert_rows(shape, layout), shape.experts
    assert experts is not None
    kept = {"expert_pre_activation": e * rows.joined * expert_inner_width(shape, layout)}
    if layout.recompute is not None:
        choice = 4.0 if experts.capacity_factor is None else 5.0  # int32, and with a capacity whether it is kept
        return kept | {
            "expert_input": e * rows.received * h,
            "expert_output": e * rows.sent * h,
            "routing": choice * rows.sent,
        }
    kept |= {
        "expert_input": e * rows.joined * h,  # gathered over tp
        "expert_output": 4.0 * rows.sent * h,  # as the weights multiply it
        "router_input": (4.0 if experts.router_fp32 else e) * rows.tokens * h,
        "routing": 4.0 * (5 * rows.sent + 2 * rows.tokens),
    }
    if shape.biases:
        kept["expert_of_rows"] = e * rows.joined * (experts.num_experts // layout.ep)
    return kept


def activation_bytes(shape: GPTShape, layout: Layout, experts: bool | None = None) -> float:
    """Returns the bytes that this project keeps of a layer and micro-batch: 20 s b h / t + 4 a s b / t with selective
    recompute, sequence parallelism, ffn = 4 h and GELU (the paper: 34), see `models/README.md`. Arguments as
    `kept_of_layer`.
    """
    return sum(kept_of_layer(shape, layout, experts).values())


def chunk_activation_bytes(shape: GPTShape, layout: Layout) -> float:
    """Returns the bytes that are kept of one micro-batch in one chunk, places without a layer among them."""
    places = expert_places(shape, layout)
    if layout.recompute == "full" and layout.recompute_method == "uniform":
        runs = [len(list(run)) for _, run in itertools.groupby(places)]
        units = sum(-(-length // layout.recompute_num_layers) for length in runs)
        return units * activation_bytes(shape, layout)
    again = min(layout.recompute_num_layers, len(places)) if layout.recompute == "full" else len(places)
    plain = replace(layout, recompute=None)
    kept = {kind: activation_bytes(shape, layout, kind) for kind in set(places[:again])}
    kept_plain = {kind: activation_bytes(shape, plain, kind) for kind in set(places[again:])}
    return sum(places[:again].count(kind) * size for kind, size in kept.items()) + sum(
        places[again:].count(kind) * size for kind, size in kept_plain.items()
    )


# ---- the whole ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of a device at the peak of a step, by the formulas; the same on every device.

    Attributes:
        state: parameters and what belongs to them.
        activations: of the chunks that the rings have room for.
        layer_work: what one layer needs while its backward runs, beyond what is kept of it.
        output_work: a piece of the logits with its gradient, and the output layer's gradient in fp32.
        messages: activations and gradients between stages, of the embedding and of the loss.
    """

    state: ModelState
    activations: float
    layer_work: float
    output_work: float
    messages: float

    @property
    def temporaries(self) -> float:
        """What is there within a step alone."""
        return self.total - self.state.between_steps

    @property
    def total(self) -> float:
        """All of it."""
        return self.state.total + self.activations + self.layer_work + self.output_work + self.messages


def memory_of_step(shape: GPTShape, layout: Layout) -> Memory:
    """Returns the estimate of a device's memory in a step.

    Assumptions: rings as `chunks_kept`, with p = 1 one micro-batch; at work on one layer are its gradients in the
    compute dtype, the fp32 sum of its largest matrix, and three whole activations with the inner one of the MLP twice;
    with recompute also what the recomputed layers (all of a unit) keep meanwhile; of experts the rows as they come and
    the places that the largest product multiplies, whatever the router says. Allocation is without gaps. The
    compiled step is what counts: within about 10 % of it for models that fill a card.

    Raises:
        ValueError: the model cannot be divided so.
    """
    state, e = model_state_bytes(shape, layout), float(layout.parameter_bytes)
    tokens = shape.seq_len // layout.cp * layout.micro_batch_size
    whole = e * tokens * shape.hidden_size
    own = whole / layout.sequence_ranks
    work = max(_work_of_layer(shape, layout, kind) for kind in set(expert_places(shape, layout)))
    columns = shape.vocab_rows // (layout.tp * layout.pp)
    pieces = max(1, -(-tokens * columns * 4 // LOGITS_BYTES))
    logits = tokens * columns / pieces
    # fp32 logits, their exponentials, their gradient in the compute dtype; input whole, and its gradient.
    output = (8 + e) * logits + 4 * columns * shape.hidden_size + 2 * whole
    return Memory(
        state=state,
        activations=chunks_kept(layout) * chunk_activation_bytes(shape, layout),
        layer_work=work,
        output_work=output,
        messages=(6 if layout.pp > 1 else 2) * own,
    )


def _work_of_layer(shape: GPTShape, layout: Layout, experts: bool) -> float:
    e, h = float(layout.parameter_bytes), shape.hidden_size
    tokens = shape.seq_len // layout.cp * layout.micro_batch_size
    layers, of_device = Layers(not experts, experts), elements(shape, layout)
    largest = max(leaf.size for leaf in leaves(shape, layout) if leaf.per_layer and leaf.number(layers))
    inner = e * tokens * dense_width(shape, experts) * (2 if shape.gated else 1) / layout.tp
    work = e * (of_device.expert_layer if experts else of_device.dense_layer)
    work += 4 * largest + 3 * e * tokens * h + 2 * inner
    if experts:
        rows, columns = expert_rows(shape, layout), expert_inner_width(shape, layout)
        work += e * (rows.places * (2 * h + columns) + rows.joined * (2 * h + columns))
    if layout.recompute is not None:
        unit = layout.recompute_num_layers if layout.recompute == "full" and layout.recompute_method == "uniform" else 1
        again = activation_bytes(shape, replace(layout, recompute=None), experts)
        again -= activation_bytes(shape, layout, experts)
        work += again * min(unit, expert_places(shape, layout).count(experts))
    return work
