"""Keys and values travel around the ring of ranks, and in the backward their gradients with them. Talks on cp.

With KV the bytes of a rank's keys and values and n ranks: forward sends (n - 1) KV, backward (n - 1) KV and as often
their gradients in fp32. arXiv:2310.01889; Megatron-LM's counterpart is TransformerEngine's AttnFuncWithCPAndKVP2P.

What is sent was there before the block that hides it, and is first used behind that block (n = 4):

    forward    | own           | 1             | 2             | 3
    KV         | -- to 1 ----> | -- to 2 ----> | -- to 3 ----> |
    backward   | own, causal   | 1             | 2             | 3             | rest of own   |
    KV         | -- to 1 ----> | -- to 2 ----> | -- to 3 ----> |               |               |
    dKV        |               |               | -- of 1 ----> | -- of 1, 2 -> | -- of 1-3 --> | + own
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jmegatron.context_parallel.blocks import DIAGONAL, Blocks, Gradients, Masks, Merged, Place, Queries, together


def forward(
    blocks: Blocks,
    query: Float[Array, "pieces batch size heads head_dim"],
    key_value: Float[Array, "pieces 2 batch size kv_heads head_dim"],
    masks: Masks,
) -> Merged:
    """Returns the attention of this rank's queries to the keys of all ranks.

    Communication over the axis: num_ranks - 1 permutes of key_value.
    """
    coming, merged = together(_send(blocks, key_value), blocks.own(query, key_value, masks))

    def step(number: Place, carry: tuple[Array, Merged], *, last: bool = False) -> tuple[Array, Merged]:
        here, merged = carry
        pairs = blocks.pairs(number)
        coming = here if last else _send(blocks, here)
        coming, parts = together(coming, blocks.attend(number, pairs, query, here, masks))
        return coming, blocks.merge(merged, pairs, parts)

    last = blocks.num_ranks - 1
    return step(last, _repeat(step, (coming, merged), 1, last), last=True)[1]


def backward(
    blocks: Blocks,
    queries: Queries,
    key_value: Float[Array, "pieces 2 batch size kv_heads head_dim"],
    masks: Masks,
) -> Gradients:
    """Returns the gradients of this rank's queries, keys and values.

    Communication over the axis: num_ranks - 1 permutes of key_value and as many of its gradient in fp32.
    """
    own = blocks.no_gradients(queries, key_value)
    coming = _send(blocks, key_value)
    if blocks.causal:
        coming, parts = together(coming, blocks.gradients(0, DIAGONAL, queries, key_value, masks, causal=True))
        own = blocks.add(own, DIAGONAL, parts)

    # Keys and values that are here, and the gradients of those that were here before: the sum of the ranks they passed.
    Carry = tuple[Array, Gradients]

    def step(number: Place, carry: Carry, *, first: bool = False, last: bool = False) -> Carry:
        here, sums = carry
        pairs = blocks.pairs(number)
        coming = here if last else _send(blocks, here)
        of_keys = sums.key_value if first else _send(blocks, sums.key_value)
        coming, of_keys, parts = together(coming, of_keys, blocks.gradients(number, pairs, queries, here, masks))
        return coming, blocks.add(sums._replace(key_value=of_keys), pairs, parts)

    last = blocks.num_ranks - 1
    carry = step(1, (coming, own._replace(key_value=jnp.zeros_like(own.key_value))), first=True, last=last == 1)
    if last > 1:
        carry = step(last, _repeat(step, carry, 2, last), last=True)
    sums = carry[1]
    home, parts = together(_send(blocks, sums.key_value), blocks.gradients(0, blocks.below, queries, key_value, masks))
    own = blocks.add(Gradients(sums.query, own.key_value), blocks.below, parts)
    return own._replace(key_value=own.key_value + home)


def _send(blocks: Blocks, x: Array) -> Array:
    """Returns what the rank before this one sent. Communication over the axis: a permute of x."""
    return lax.ppermute(x, blocks.axis, [(rank, (rank + 1) % blocks.num_ranks) for rank in range(blocks.num_ranks)])


def _repeat(step: Callable[[Place, Any], Any], carry: Any, first: int, end: int) -> Any:
    """Returns the carry after the steps first .. end - 1: a loop, or compiling would take longer for more ranks."""
    if end - first <= 1:
        return step(first, carry) if end > first else carry
    return lax.scan(lambda carry, number: (step(number, carry), None), carry, jnp.arange(first, end))[0]
