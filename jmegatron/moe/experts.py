"""The experts: a feed-forward layer each, for the rows that have come for it. Talks on tp where it divides them.

Source: arXiv:2211.15841, Megatron-LM transformer/moe/experts.py.

    up    kernel [experts, hidden, ffn], gated [experts, hidden, 2, ffn]; bias [experts, ffn] or [experts, 2, ffn]
    down  kernel [experts, ffn, hidden]; bias [experts, hidden]

experts lie on ep, ffn on tp with an expert-tensor-parallel size of tp. How many rows an expert has is known only when
they are there, shapes before: `grouped_matmul` chooses at run time among a few sizes (`ladder`) the smallest that holds
the expert with most rows, and multiplies all experts' rows, padded to it, as one batch.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Shaped

from jmegatron.collectives import gather_sequence, reduce_scatter_to, vary_like
from jmegatron.moe.dispatch import Received, take_rows
from jmegatron.moe.router import ROUTED
from jmegatron.ops.activations import activate, is_gated
from jmegatron.partition import Initializer, ParameterSpec, Tree, zeros

EXPERT_INPUT, EXPERT_OUTPUT = "expert_input", "expert_output"
"""Names of rows as they have come, and as they have come back (for the gradient of their weights)."""
_PRE_ACTIVATION = "expert_pre_activation"
EXPERTS_EXCHANGED = (ROUTED, EXPERT_INPUT, EXPERT_OUTPUT)
"""Names of what is kept so that nothing is sent again."""
EXPERTS_KEPT = (*EXPERTS_EXCHANGED, _PRE_ACTIVATION)
"""Names of what selective recompute keeps of the layer: also the rows of the up projection."""
_STEPS = (1.0, 1.125, 1.25, 1.5, 2.0, 3.0)
"""Sizes of the ladder over the balanced one; the last is the largest possible."""
_GRANULE = 64
"""Rows that sizes are rounded up to: below, a matmul takes as long for fewer."""


@dataclasses.dataclass(frozen=True)
class ExpertSettings:
    """Plain numbers of the experts."""

    num_experts: int
    hidden_size: int
    ffn_hidden_size: int
    activation: str = "swiglu"
    use_bias: bool = False


def expert_specs(
    settings: ExpertSettings,
    *,
    expert_axis: str | None,
    tensor_axis: str | None,
    partial_axes: tuple[str, ...],
    kernel_init: Initializer,
    output_init: Initializer,
) -> Tree:
    """Returns the declarations above; each expert's start values depend on its global number, not on where it lies.

    Args:
      settings: numbers of the experts.
      expert_axis: divides them.
      tensor_axis: divides ffn, or None.
      partial_axes: axes over which experts are replicated and see different tokens, beside the data axes.
      kernel_init: of up.
      output_init: of down.
    """
    s = settings
    inner = (2, s.ffn_hidden_size) if is_gated(s.activation) else (s.ffn_hidden_size,)
    lead: tuple[None, ...] = (None,) * (len(inner) - 1)

    def kernel(shape: tuple[int, ...], spec: P, init: Initializer, outputs: int) -> ParameterSpec:
        matrix = (-outputs - 1,), tuple(range(-outputs, 0))
        return ParameterSpec((s.num_experts, *shape), spec, init, partial_axes, matrix=matrix)

    def bias(shape: tuple[int, ...], spec: P, partial: tuple[str, ...]) -> ParameterSpec:
        return ParameterSpec((s.num_experts, *shape), spec, zeros, partial, weight_decay=False)

    up_spec = P(expert_axis, None, *lead, tensor_axis)
    specs: Tree = {
        "up": {"kernel": kernel((s.hidden_size, *inner), up_spec, kernel_init, len(inner))},
        "down": {
            "kernel": kernel((s.ffn_hidden_size, s.hidden_size), P(expert_axis, tensor_axis, None), output_init, 1)
        },
    }
    if s.use_bias:
        specs["up"]["bias"] = bias(inner, P(expert_axis, *lead, tensor_axis), partial_axes)
        # Added after the sum over tensor_axis, where each of its ranks has other rows.
        own = (*partial_axes, *(() if tensor_axis is None else (tensor_axis,)))
        specs["down"]["bias"] = bias((s.hidden_size,), P(expert_axis, None), own)
    return specs


def experts(
    parameters: Tree,
    rows: Shaped[Array, "rows hidden"],
    received: Received,
    joined: Received,
    settings: ExpertSettings,
    *,
    tensor_axis: str | None,
    sizes: tuple[int, ...],
) -> Shaped[Array, "rows hidden"]:
    """Returns down(activation(up(row))) of each row by its expert; zeros for rows that are none.

    Communication over tensor_axis: forward an all-gather of rows and a reduce-scatter, backward the same.

    Args:
      parameters: this rank's part of `expert_specs`.
      rows: those received.
      received: which rows they are.
      joined: the same of all ranks of tensor_axis.
      settings: numbers of the experts.
      tensor_axis: divides ffn, or None.
      sizes: see `ladder`.
    """
    # Gathered again in the backward rather than kept, as in `layers.linear`.
    rows = checkpoint_name(rows, EXPERT_INPUT)
    whole = gather_sequence(rows, tensor_axis, 0)
    y = grouped_matmul(whole, parameters["up"]["kernel"], joined, sizes)
    if "bias" in parameters["up"]:
        y = y + _of_rows(parameters["up"]["bias"], joined, len(whole))
    y = checkpoint_name(y, _PRE_ACTIVATION)

    def down(parameters: Tree, y: Array) -> Array:
        y = activate(settings.activation, y)
        y = grouped_matmul(y, parameters["kernel"], joined, sizes)
        y = reduce_scatter_to(y, tensor_axis, 0)
        return y + _of_rows(parameters["bias"], received, len(rows)) if "bias" in parameters else y

    return jax.checkpoint(down, prevent_cse=False)(parameters["down"], y)


def ladder(balanced: int, largest: int) -> tuple[int, ...]:
    """Returns the sizes among which `grouped_matmul` chooses, in rows of one expert, ascending.

    Args:
      balanced: rows of an expert when all have equally many.
      largest: rows that an expert may have.
    """
    rounded = {-int(-step * balanced // _GRANULE) * _GRANULE for step in _STEPS}
    return (*sorted(size for size in rounded if size < largest), largest)


# ---- rows of experts ----------------------------------------------------------------------------------------------
def _place_of_rows(received: Received, num_rows: int) -> tuple[Array, Array]:
    """Returns (expert of each row, its number among the expert's rows); expert -1: the row is none."""
    starts, counts = received.starts.reshape(-1), received.counts.reshape(-1)
    before = (jnp.cumsum(received.counts, 0) - received.counts).reshape(-1)
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    inside = (row >= starts) & (row < starts + counts)
    part = jnp.argmax(inside, 1)
    expert = jnp.where(inside.any(1), part % received.starts.shape[1], -1).astype(jnp.int32)
    return expert, row[:, 0] - starts[part] + before[part]


def _rows_of_places(received: Received, size: int) -> Array:
    """Returns the row at each of `size` places of each expert, [experts, size]; -1: none."""
    counts = received.counts
    after = jnp.cumsum(counts, 0)
    number = jnp.arange(size, dtype=jnp.int32)[:, None, None]
    source = (number >= after).sum(1)  # [size, experts]
    known = jnp.minimum(source, len(counts) - 1)
    pick = lambda table: jnp.take_along_axis(table, known, 0)  # noqa: E731
    row = pick(received.starts) + number[:, 0] - pick(after - counts)
    return jnp.where(source < len(counts), row, -1).T.astype(jnp.int32)


def _of_rows(bias: Array, received: Received, num_rows: int) -> Array:
    """Returns the bias of each row's expert; zeros for rows that are none."""
    expert, _ = _place_of_rows(received, num_rows)
    chosen = (expert[:, None] == jnp.arange(len(bias))).astype(bias.dtype)
    return jnp.tensordot(chosen, bias, 1)


# ---- grouped matmul -----------------------------------------------------------------------------------------------
def grouped_matmul(
    rows: Shaped[Array, "rows *inner"],
    kernel: Shaped[Array, "experts *dims"],
    received: Received,
    sizes: tuple[int, ...],
) -> Shaped[Array, "rows *outer"]:
    """Returns each row times its expert's kernel; zeros for rows that are none. Communication: none.

    forward y_e = x_e K_e; dgrad dx_e = dy_e K_e^T; wgrad dK_e = x_e^T dy_e. Executed FLOPs of each: 2 x experts x size
    x inner x outer, where size is the smallest of `sizes` that holds every expert's rows.

    Args:
      rows: of all experts.
      kernel: [experts, *inner, *outer] with the row's dims first.
      received: which rows are whose.
      sizes: ascending, the last one at least what an expert may have.
    """
    rows, kernel, received = vary_like((rows, kernel, received), rows, kernel, received)
    return _grouped(sizes, rows, kernel, received)


def _choose(sizes: tuple[int, ...], received: Received) -> Array:
    most = received.counts.sum(0).max()
    return jnp.sum(most > jnp.array(sizes[:-1], jnp.int32)) if len(sizes) > 1 else jnp.int32(0)


def _switch(sizes: tuple[int, ...], received: Received, branch, *operands):
    branches = [partial(branch, size) for size in sizes]
    if len(sizes) == 1:
        return branches[0](*operands)
    return lax.switch(_choose(sizes, received), branches, *operands)


def _in_places(rows: Array, received: Received, size: int) -> Array:
    """Returns rows [experts, size, *width], zeros where there is none."""
    place = _rows_of_places(received, size)
    flat = take_rows(rows.reshape(len(rows), -1), place.reshape(-1), jnp.full((len(rows), 1), -1))
    return flat.reshape(*place.shape, *rows.shape[1:])


def _in_rows(values: Array, received: Received, num_rows: int) -> Array:
    """Returns [experts, size, *width] as rows, zeros for those that are none."""
    expert, number = _place_of_rows(received, num_rows)
    size = values.shape[1]
    index = jnp.where(expert < 0, -1, expert * size + number)
    flat = values.reshape(values.shape[0] * size, -1)
    return take_rows(flat, index, jnp.full((len(flat), 1), -1)).reshape(num_rows, *values.shape[2:])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(sizes: tuple[int, ...], rows: Array, kernel: Array, received: Received) -> Array:
    inner = rows.ndim - 1
    dims = (tuple(range(2, 2 + inner)), tuple(range(1, 1 + inner))), ((0,), (0,))

    def branch(size: int, rows: Array, kernel: Array, received: Received) -> Array:
        y = lax.dot_general(_in_places(rows, received, size), kernel, dims)
        return _in_rows(y, received, len(rows))

    return _switch(sizes, received, branch, rows, kernel, received)


def _grouped_forward(sizes: tuple[int, ...], rows: Array, kernel: Array, received: Received):
    return _grouped(sizes, rows, kernel, received), (rows, kernel, received)


def _grouped_backward(sizes: tuple[int, ...], residuals, cotangent: Array):
    rows, kernel, received = residuals
    inner, outer = rows.ndim - 1, cotangent.ndim - 1

    def branch(size: int, rows: Array, kernel: Array, received: Received, cotangent: Array) -> tuple[Array, Array]:
        x, dy = _in_places(rows, received, size), _in_places(cotangent, received, size)
        back = (tuple(range(2, 2 + outer)), tuple(range(1 + inner, 1 + inner + outer))), ((0,), (0,))
        dx = lax.dot_general(dy, kernel, back)
        dkernel = lax.dot_general(x, dy, (((1,), (1,)), ((0,), (0,))))
        return _in_rows(dx, received, len(rows)), dkernel

    dx, dkernel = _switch(sizes, received, branch, rows, kernel, received, cotangent)
    return dx, dkernel, None


_grouped.defvjp(_grouped_forward, _grouped_backward)
