"""Attention over a sequence whose tokens are divided over ranks: one entry for every way to do it. Talks on cp.

Megatron-LM's counterpart is attn_forward_func_with_cp of TransformerEngine (transformer/dot_product_attention.py has no
context parallelism of its own).
"""

from functools import partial
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from jmegatron.collectives import axis_size, vary, vary_like
from jmegatron.context_parallel import all_gather, ring
from jmegatron.context_parallel.all_to_all import all_to_all_attention
from jmegatron.context_parallel.blocks import Blocks, Masks, Queries, joined
from jmegatron.context_parallel.layout import CommType, ContextParallel, check_divisible
from jmegatron.ops.attention import ATTENTION_LSE, ATTENTION_OUT, AttentionDropout, Backend, TokenIds, attention


def context_parallel_attention(
    query: Float[Array, "batch seq_local heads head_dim"],
    key: Float[Array, "batch seq_local kv_heads head_dim"],
    value: Float[Array, "batch seq_local kv_heads head_dim"],
    context: ContextParallel,
    *,
    causal: bool = True,
    window: int | None = None,
    segments: Integer[Array, "batch seq"] | None = None,
    dropout: AttentionDropout | None = None,
    backend: Backend = "unfused",
) -> Float[Array, "batch seq_local heads head_dim"]:
    """Returns the attention of this rank's tokens to the tokens of all ranks.

    Communication over the axis, with KV the bytes of this rank's keys and values and n ranks: `p2p` and `all_gather`
    forward (n - 1) KV, backward (n - 1) KV and (n - 1) dKV in fp32; `a2a` forward (n - 1) / n of query, key, value and
    output, backward the same of their gradients. A checkpoint that keeps the names of `ops.attention` does not repeat
    the forward of `p2p` and `all_gather`.

    Args:
      query: of the tokens that this rank holds (`layout`), rotated already.
      key: the same; heads must be a multiple of kv_heads.
      value: the same.
      context: how the sequence is divided.
      causal: a token sees the tokens up to itself.
      window: tokens before itself that a token sees; None: all.
      segments: of the whole sequence in its true order, the same on every rank: a token sees its own segment only.
      dropout: of the probabilities.
      backend: "fused" or "unfused".

    Raises:
      ValueError: the sequence cannot be cut (`layout.check_divisible`); segments are not of the whole sequence; `p2p`
        or `all_gather` with a causal mask over contiguous tokens, or with "fused" and a window; heads that `a2a` cannot
        divide (`all_to_all.check_heads`).
    """
    axis, num_ranks = context.axis, axis_size(context.axis)
    seq = query.shape[1] * num_ranks
    check_divisible(seq, num_ranks, context.order)
    if segments is not None and segments.shape[1] != seq:
        raise ValueError(
            f"segments of the whole sequence must be given: expected {seq} tokens, got {segments.shape[1]}"
        )
    options: dict[str, Any] = dict(causal=causal, window=window, backend=backend)
    if axis is None or num_ranks == 1:
        tokens = TokenIds(None, segments)
        return attention(query, key, value, query_tokens=tokens, key_tokens=tokens, dropout=dropout, **options)[0]
    if context.comm_type == "a2a":
        options |= dict(segments=segments, dropout=dropout)
        return all_to_all_attention(query, key, value, axis=axis, order=context.order, **options)
    _check_blocks(context, causal, window, backend)
    masks = Masks(segments, dropout)
    query, key, value = vary(vary_like((query, key, value), query, key, value, masks), (axis,))
    return _attention(Blocks(axis, num_ranks, context.order, **options), context.comm_type, query, key, value, masks)


def _check_blocks(context: ContextParallel, causal: bool, window: int | None, backend: Backend) -> None:
    if causal and context.order == "contiguous":
        raise ValueError(
            f"cp_comm_type {context.comm_type} with a causal mask needs zigzag order, got contiguous: ranks would have"
            " unequal work"
        )
    if window is not None and backend == "fused":
        raise ValueError(
            f"cp_comm_type {context.comm_type}: fused attention counts a window by place in a block, not in the"
            " sequence; use attention_backend unfused, or cp_comm_type a2a"
        )


_WAYS = {"p2p": ring, "all_gather": all_gather}


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(blocks: Blocks, comm_type: CommType, query: Array, key: Array, value: Array, masks: Masks) -> Array:
    return _forward(blocks, comm_type, query, key, value, masks)[0]


def _forward(blocks: Blocks, comm_type: CommType, query: Array, key: Array, value: Array, masks: Masks):
    merged = _WAYS[comm_type].forward(blocks, blocks.cut(query, 1), blocks.stacked(key, value), masks)
    out = checkpoint_name(joined(merged.out, 1).astype(query.dtype), ATTENTION_OUT)
    lse = checkpoint_name(joined(merged.lse, 2), ATTENTION_LSE)
    return out, (query, key, value, out, lse, masks)


def _backward(blocks: Blocks, comm_type: CommType, residuals: tuple, d_out: Array):
    query, key, value, out, lse, masks = residuals
    # Without it XLA finds that the forward has sent the same before, and keeps the keys and values of all ranks.
    key, value = lax.optimization_barrier((key, value))
    queries = Queries(blocks.cut(query, 1), blocks.cut(out, 1), blocks.cut(lse, 2), blocks.cut(d_out, 1))
    gradients = _WAYS[comm_type].backward(blocks, queries, blocks.stacked(key, value), masks)
    d_key, d_value = joined(gradients.key_value, 2)
    return joined(gradients.query, 1).astype(query.dtype), d_key.astype(key.dtype), d_value.astype(value.dtype), None


_attention.defvjp(_forward, _backward)
