"""Every rank attends with a share of the heads over the whole sequence: two all-to-alls and back. Talks on cp.

With n ranks, forward sends (n - 1) / n of a rank's q, k, v and of its output, backward the same of their gradients.
arXiv:2309.14509; Megatron-LM's counterpart is TransformerEngine's AttnFuncWithCPAndQKVOA2A.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jmegatron.collectives import own_slice
from jmegatron.context_parallel.layout import Order, from_order, to_order
from jmegatron.ops.attention import AttentionDropout, TokenIds, attention


def check_heads(heads: int, kv_heads: int, num_ranks: int) -> None:
    """Checks that heads can be divided over the ranks.

    Raises:
      ValueError: num_ranks does not divide both.
    """
    if heads % num_ranks or kv_heads % num_ranks:
        raise ValueError(
            f"cp_comm_type a2a divides the {heads} query heads and {kv_heads} kv heads of a tensor-parallel rank over"
            f" context_parallel_size {num_ranks}, which must divide both; use p2p or all_gather, or fewer ranks"
        )


def all_to_all_attention(
    query: Float[Array, "batch seq_local heads head_dim"],
    key: Float[Array, "batch seq_local kv_heads head_dim"],
    value: Float[Array, "batch seq_local kv_heads head_dim"],
    *,
    axis: str,
    order: Order,
    segments: Any = None,
    dropout: AttentionDropout | None = None,
    **options: Any,
) -> Float[Array, "batch seq_local heads head_dim"]:
    """Returns the attention of this rank's tokens to all tokens.

    Communication over the axis: an all-to-all of query, key and value joined, and one of the output; backward the same
    of their gradients.

    Args:
      query: of this rank's tokens.
      key: of this rank's tokens.
      value: of this rank's tokens.
      axis: mesh axis.
      order: of the tokens.
      segments: integer [batch, seq], the whole sequence in its true order, or None.
      dropout: of the probabilities.
      options: of `ops.attention.attention`.

    Raises:
      ValueError: heads cannot be divided (`check_heads`).
    """
    num_ranks = lax.axis_size(axis)
    check_heads(query.shape[2], key.shape[2], num_ranks)
    shares = [x.reshape(*x.shape[:2], num_ranks, -1, x.shape[-1]) for x in (query, key, value)]
    sizes = [share.shape[3] for share in shares]
    # [batch, seq_local, ranks, heads of a rank, head_dim] -> [batch, seq, 1, heads of a rank, head_dim]
    own = lax.all_to_all(jnp.concatenate(shares, 3), axis, split_axis=2, concat_axis=1, tiled=True)
    own = from_order(own[:, :, 0], num_ranks, 1, order)
    query, key, value = jnp.split(own, [sizes[0], sizes[0] + sizes[1]], 2)
    if dropout is not None:
        dropout = dataclasses.replace(dropout, head_index=own_slice(dropout.head_index, axis, 0))
    tokens = TokenIds(None, segments)  # in order
    out, _ = attention(query, key, value, query_tokens=tokens, key_tokens=tokens, dropout=dropout, **options)
    return lax.all_to_all(to_order(out, num_ranks, 1, order), axis, split_axis=1, concat_axis=2, tiled=True)
