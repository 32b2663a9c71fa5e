"""Keys and values of all ranks are gathered, one layer at a time, and the ring's blocks cut out of them. Talks on cp.

With KV the bytes of a rank's keys and values and n ranks: forward sends (n - 1) KV, backward (n - 1) KV again, since
what was gathered is not kept, and (n - 1) times their gradients in fp32. arXiv:2407.21783 section 3.3.2.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jmegatron.collectives import vary_like
from jmegatron.context_parallel.blocks import DIAGONAL, Blocks, Gradients, Masks, Merged, Place, Queries, together


def forward(
    blocks: Blocks,
    query: Float[Array, "pieces batch size heads head_dim"],
    key_value: Float[Array, "pieces 2 batch size kv_heads head_dim"],
    masks: Masks,
) -> Merged:
    """Returns the attention of this rank's queries to the keys of all ranks.

    Communication over the axis: an all-gather of key_value.
    """
    gathered, merged = together(lax.all_gather(key_value, blocks.axis), blocks.own(query, key_value, masks))

    def step(merged: Merged, number: Place) -> tuple[Merged, None]:
        pairs = blocks.pairs(number)
        parts = blocks.attend(number, pairs, query, gathered[blocks.source(number)], masks)
        return blocks.merge(merged, pairs, parts), None

    return lax.scan(step, merged, jnp.arange(1, blocks.num_ranks))[0]


def backward(
    blocks: Blocks,
    queries: Queries,
    key_value: Float[Array, "pieces 2 batch size kv_heads head_dim"],
    masks: Masks,
) -> Gradients:
    """Returns the gradients of this rank's queries, keys and values.

    Communication over the axis: an all-gather of key_value and a reduce-scatter of all ranks' gradients of it in fp32.
    """
    own = blocks.no_gradients(queries, key_value)
    nothing = own.key_value
    gathered = lax.all_gather(key_value, blocks.axis)
    if blocks.causal:
        gathered, parts = together(gathered, blocks.gradients(0, DIAGONAL, queries, key_value, masks, causal=True))
        own = blocks.add(own, DIAGONAL, parts)

    def step(carry: tuple[Array, Array], number: Place) -> tuple[tuple[Array, Array], None]:
        d_query, of_ranks = carry
        source, pairs = blocks.source(number), blocks.pairs(number)
        parts = blocks.gradients(number, pairs, queries, gathered[source], masks)
        sums = blocks.add(Gradients(d_query, nothing), pairs, parts)
        return (sums.query, of_ranks.at[source].set(sums.key_value)), None

    of_ranks = vary_like(jnp.zeros((blocks.num_ranks, *nothing.shape), jnp.float32), nothing)
    (d_query, of_ranks), _ = lax.scan(step, (own.query, of_ranks), jnp.arange(1, blocks.num_ranks))
    of_others, parts = together(
        lax.psum_scatter(of_ranks, blocks.axis), blocks.gradients(0, blocks.below, queries, key_value, masks)
    )
    own = blocks.add(Gradients(d_query, own.key_value), blocks.below, parts)
    return own._replace(key_value=own.key_value + of_others)
