"""Tokens to the ranks that hold their experts, and back. Talks on ep (and on tp with counts, where it divides experts).

Source: Megatron-LM transformer/moe/token_dispatcher.py (all-to-all), arXiv:2211.15841 (dropless).

An assignment is one of a token's k choices: a row. Rows are sorted by expert, so that what goes to one rank is one
slice, and `ragged_all_to_all` sends each slice, no more, to its place in a buffer of fixed size on the other side:

    own rows       [tokens * k]    expert 0 | expert 1 | ... | expert E-1 | rows that go nowhere
    received rows  [bound]         from rank 0: first own expert, second, ... | from rank 1: ... | nothing

Every rank knows every rank's counts (an all-gather of `experts` integers), so all offsets follow without asking back.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Integer, Shaped

from jmegatron.collectives import vary_like


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Order:
    """This rank's rows in order of their experts. A pytree."""

    row: Any
    """Integer [rows]: row (token * k + choice) at each place of the order."""
    place: Any
    """Integer [tokens, k]: the inverse: place of each row."""
    counts: Any
    """Integer [experts]: rows of each expert that go there."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slices:
    """One rank's slices of an exchange, int32 [ranks] each. A pytree."""

    input_offsets: Any
    send_sizes: Any
    output_offsets: Any
    """Where each slice begins on the rank that receives it."""
    recv_sizes: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Received:
    """Which rows lie where in the buffer of received rows. A pytree."""

    starts: Any
    """Integer [sources, experts_local]: first row that a source has sent for an expert."""
    counts: Any
    """Integer [sources, experts_local]: number of them."""


# ---- capacity -----------------------------------------------------------------------------------------------------
def capacity_of(tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Returns the rows that an expert takes of one rank's tokens: ceil(tokens k / experts x factor), at most tokens."""
    return min(tokens, -int(-(tokens * top_k / num_experts * factor) // 1))


def within_capacity(
    experts: Integer[Array, "tokens k"],
    priority: Float[Array, "tokens k"],
    kept: Bool[Array, "tokens k"],
    num_experts: int,
    capacity: int | Integer[Array, ""],
) -> Bool[Array, "tokens k"]:
    """Returns which rows are among the `capacity` of highest priority of their experts. Communication: none.

    Args:
      experts: global number of each row's expert.
      priority: the larger the better.
      kept: rows that take part; the others fill no place.
      num_experts: of all ranks.
      capacity: of one expert.
    """
    expert = jnp.where(kept, experts, num_experts).reshape(-1)
    order = jnp.lexsort((-priority.reshape(-1), expert))
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[expert].add(1)
    starts = jnp.cumsum(counts) - counts
    rank = jnp.arange(len(order), dtype=jnp.int32) - starts[expert[order]]
    ranks = jnp.zeros_like(rank).at[order].set(rank).reshape(experts.shape)
    return kept & (ranks < capacity)


# ---- order --------------------------------------------------------------------------------------------------------
def order_by_expert(experts: Integer[Array, "tokens k"], kept: Bool[Array, "tokens k"], num_experts: int) -> Order:
    """Returns the order of rows by expert, those that are not kept at the end. Communication: none."""
    expert = jnp.where(kept, experts, num_experts).reshape(-1)
    row = jnp.argsort(expert, stable=True).astype(jnp.int32)
    place = jnp.zeros_like(row).at[row].set(jnp.arange(row.size, dtype=jnp.int32))
    counts = jnp.zeros(num_experts + 1, jnp.int32).at[expert].add(1)[:num_experts]
    return Order(row, place.reshape(experts.shape), counts)


@jax.custom_vjp
def take_rows(
    x: Shaped[Array, "rows width"], index: Integer[Array, "taken"], users: Integer[Array, "rows copies"]
) -> Shaped[Array, "taken width"]:
    """Returns x[index], zeros where an index is outside. Communication: none.

    Autodiff would add the gradients up row by row (atomics on GPUs). Here each row fetches them from its users.

    Args:
      x: rows.
      index: row for each place of the result; outside 0 .. rows - 1: none.
      users: the inverse: places of the result that have each row; outside 0 .. taken - 1: none.
    """
    return _fetch(x, index)


def _fetch(x: Array, index: Array) -> Array:
    outside = jnp.where(index < 0, len(x), index)
    return jnp.take(x, outside, axis=0, mode="fill", fill_value=0)


def _take_backward(users: Array, cotangent: Array) -> tuple[Array, None, None]:
    copies = [_fetch(cotangent, users[:, i]) for i in range(users.shape[1])]
    if len(copies) == 1:
        return copies[0], None, None
    return jnp.stack(copies).astype(jnp.float32).sum(0).astype(cotangent.dtype), None, None


take_rows.defvjp(lambda x, index, users: (_fetch(x, index), users), _take_backward)


def permute(x: Shaped[Array, "tokens hidden"], order: Order) -> Shaped[Array, "rows hidden"]:
    """Returns each row's token, in order. Communication: none."""
    k = order.place.shape[1]
    x, row, place = vary_like((x, order.row // k, order.place), x, order)
    return take_rows(x, row, place)


def combine(
    rows: Shaped[Array, "rows hidden"], weights: Float[Array, "tokens k"], order: Order
) -> Shaped[Array, "tokens hidden"]:
    """Returns the sum of each token's rows times their weights, in fp32. Communication: none."""
    tokens, k = order.place.shape
    rows, place, row = vary_like((rows, order.place.reshape(-1), order.row[:, None]), rows, order)
    own = take_rows(rows, place, row).reshape(tokens, k, -1)
    return (own.astype(jnp.float32) * weights[:, :, None]).sum(1).astype(rows.dtype)


# ---- exchange -----------------------------------------------------------------------------------------------------
def plan(
    counts: Integer[Array, "experts"], axis: str | None, num_ranks: int, bound: int
) -> tuple[Slices | None, Slices | None, Received, Integer[Array, ""]]:
    """Returns (slices to the experts, slices back, what is received, own rows that fit nowhere).

    Communication: forward an all-gather of the counts over the axis.

    Args:
      counts: own rows of each expert.
      axis: mesh axis of the experts, or None.
      num_ranks: its size.
      bound: rows of the buffer. What a source sends beyond it is cut off, from its end: the same on both sides.
    """
    local = len(counts) // num_ranks
    if axis is None:
        starts = jnp.cumsum(counts) - counts
        return None, None, Received(starts[None], counts[None]), jnp.zeros((), jnp.int32)
    whole = lax.all_gather(counts, axis).reshape(num_ranks, num_ranks, local)  # [source, target, expert]
    me = lax.axis_index(axis)
    # Of each target's buffer: where what (source, expert) sends begins, and how much of it fits.
    by_target = whole.transpose(1, 0, 2).reshape(num_ranks, -1)
    starts = jnp.cumsum(by_target, 1) - by_target
    kept = jnp.clip(bound - starts, 0, by_target).reshape(num_ranks, num_ranks, local)  # [target, source, expert]
    starts = starts.reshape(num_ranks, num_ranks, local)
    sent = whole.sum(2)
    own = Slices(
        input_offsets=(jnp.cumsum(sent, 1) - sent)[me],
        send_sizes=kept.sum(2)[:, me],
        output_offsets=jnp.minimum(starts[:, me, 0], bound),
        recv_sizes=kept.sum(2)[me],
    )
    back = Slices(
        input_offsets=jnp.minimum(starts[me, :, 0], bound),
        send_sizes=kept.sum(2)[me],
        output_offsets=(jnp.cumsum(sent, 1) - sent)[:, me],
        recv_sizes=kept.sum(2)[:, me],
    )
    return own, back, Received(starts[me], kept[me]), (counts.sum() - kept.sum(2)[:, me].sum()).astype(jnp.int32)


def exchange(
    rows: Shaped[Array, "rows width"], slices: Slices, back: Slices, size: int, axis: str, ragged: bool
) -> Shaped[Array, "size width"]:
    """Returns the buffer of rows that the other ranks have sent here; zeros where nothing was sent.

    Communication over the axis: forward the rows that `slices` name, backward the same rows the other way.

    Args:
      rows: this rank's.
      slices: of this exchange.
      back: of the opposite one.
      size: rows of the buffer.
      axis: mesh axis.
      ragged: by `ragged_all_to_all`, which XLA has on GPUs; else each rank gathers all rows and picks its own.
    """
    rows, slices, back = vary_like((rows, slices, back), rows, slices)
    return _exchange(size, axis, ragged, rows, slices, back)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _exchange(size: int, axis: str, ragged: bool, rows: Array, slices: Slices, back: Slices) -> Array:
    return (_ragged if ragged else _gathered)(rows, slices, size, axis)


def _exchange_backward(size: int, axis: str, ragged: bool, residuals: Any, cotangent: Array):
    num_rows, back = residuals
    return (_ragged if ragged else _gathered)(cotangent, back, num_rows.shape[0], axis), None, None


def _exchange_forward(size: int, axis: str, ragged: bool, rows: Array, slices: Slices, back: Slices):
    # An array without bytes tells the backward the number of rows.
    return _exchange(size, axis, ragged, rows, slices, back), (jnp.zeros((len(rows), 0), jnp.int8), back)


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _ragged(rows: Array, slices: Slices, size: int, axis: str) -> Array:
    buffer = vary_like(jnp.zeros((size, rows.shape[1]), rows.dtype), rows)
    s = slices
    return lax.ragged_all_to_all(
        rows, buffer, s.input_offsets, s.send_sizes, s.output_offsets, s.recv_sizes, axis_name=axis
    )


def _gathered(rows: Array, slices: Slices, size: int, axis: str) -> Array:
    """What `ragged_all_to_all` does, for back ends that do not have it."""
    everyone = lax.all_gather((rows, slices.input_offsets, slices.send_sizes, slices.output_offsets), axis)
    all_rows, inputs, sizes, outputs = everyone
    me = lax.axis_index(axis)
    starts = outputs[:, me]
    place = jnp.arange(size, dtype=jnp.int32)[:, None]
    from_source = (place >= starts) & (place < starts + sizes[:, me])  # [size, sources]
    source = jnp.argmax(from_source, 1)
    row = inputs[source, me] + place[:, 0] - starts[source]
    found = all_rows[source, jnp.clip(row, 0, len(rows) - 1)]
    return jnp.where(from_source.any(1)[:, None], found, jnp.zeros((), rows.dtype))


def gathered_over(received: Received, axis: str | None, bound: int) -> Received:
    """Returns what the buffers of all ranks of `axis`, joined, hold. Communication: an all-gather of the counts."""
    if axis is None:
        return received
    starts, counts = (lax.all_gather(each, axis) for each in (received.starts, received.counts))
    ranks = starts.shape[0]
    starts = starts + bound * jnp.arange(ranks, dtype=starts.dtype)[:, None, None]
    experts = starts.shape[-1]
    return Received(starts.reshape(-1, experts), counts.reshape(-1, experts))
