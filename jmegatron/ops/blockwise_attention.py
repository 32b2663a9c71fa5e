"""Attention block by block in plain XLA, for any platform, dtype and mask: O(seq) memory both ways. No communication.

Forward: the running softmax of arXiv:2205.14135. Backward: arXiv:2307.08691, scores again from the log-sum-exp, 5
matmuls a block where the forward has 2. Both are scans over a list of (query block, key block) that is known when
tracing: blocks that are hidden by place are not in it, and the work can be read off the compiled program. Inside,
arrays are [batch, kv_heads, group, seq, head_dim], so that keys and values are never repeated.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float

from jmegatron import random
from jmegatron.collectives import vary_like
from jmegatron.ops.attention_mask import AttentionMask

BLOCK_SIZE = 512
"""Most tokens of a block: enough work for a GPU's kernels, few hidden scores on a diagonal (1/16 at 4096 tokens)."""


class BlockPairs(NamedTuple):
    """Which blocks are computed."""

    num_rows: int
    """Queries of a block."""
    num_columns: int
    """Keys of a block."""
    pairs: np.ndarray
    """int32 [pairs, 2]: the first row and the first column that a pair owns. A last block begins earlier to have its
    full size, and hides what the block before it owns."""


def block_pairs(
    seq: int, seq_kv: int, *, causal: bool, window: int | None = None, block_size: int = BLOCK_SIZE
) -> BlockPairs:
    """Returns the pairs in which a query can see a key, in the order of the queries. Communication: none.

    Args:
      seq: number of queries.
      seq_kv: number of keys; the last query stands at the last key's place.
      causal: a query sees the keys up to its own place.
      window: the same, and none more than this before it; None: all.
      block_size: most tokens of a block; blocks are as equal as they can be.
    """
    num_rows, num_columns = (_equal_blocks(length, block_size) for length in (seq, seq_kv))
    pairs = []
    for row in range(0, seq, num_rows):
        for column in range(0, seq_kv, num_columns):
            last_row, last_column = min(row + num_rows, seq) - 1, min(column + num_columns, seq_kv) - 1
            nearest, farthest = row - last_column + seq_kv - seq, last_row - column + seq_kv - seq
            after = (causal or window is not None) and farthest < 0
            if not after and (window is None or nearest <= window):
                pairs.append((row, column))
    return BlockPairs(num_rows, num_columns, np.array(pairs, np.int32).reshape(-1, 2))


def _equal_blocks(length: int, block_size: int) -> int:
    size = -(-length // -(-length // block_size))
    return min(length, block_size, -(-size // 8) * 8)  # whole vectors


class _Blocks:
    """What both directions do with a pair: take its part of an array, find its mask; and run over all pairs."""

    def __init__(self, query: Array, key: Array, mask: AttentionMask, block_size: int) -> None:
        self.batch, self.seq, heads, _ = query.shape
        self.seq_kv, self.kv_heads = key.shape[1:3]
        self.group = heads // self.kv_heads
        self.mask = mask
        self.window_in_order = mask.window if mask.in_order else None
        self.num_rows, self.num_columns, self.pairs = block_pairs(
            self.seq, self.seq_kv, causal=mask.causal, window=self.window_in_order, block_size=block_size
        )
        self.index = mask.indices(self.seq, self.seq_kv)
        self.dropout_keys = None
        if mask.dropout is not None:
            # Outside the loop, which would draw them for every block.
            drop = mask.dropout
            self.dropout_keys = random.attention_keys(drop.key, drop.sample_ids, drop.head_index)

    def grouped(self, x: Array) -> Array:
        """[batch, seq, heads, d] -> [batch, kv_heads, group, seq, d]."""
        return x.reshape(self.batch, self.seq, self.kv_heads, self.group, -1).transpose(0, 2, 3, 1, 4)

    def ungrouped(self, x: Array) -> Array:
        """[batch, kv_heads, group, seq, d] -> [batch, seq, heads, d]."""
        return x.transpose(0, 3, 1, 2, 4).reshape(self.batch, self.seq, self.kv_heads * self.group, -1)

    # A slice that would end behind the array begins earlier instead: that is how a last block has its full size.
    def rows(self, x: Array, pair: Array, dim: int = -2) -> Array:
        return lax.dynamic_slice_in_dim(x, pair[0], self.num_rows, dim)

    def columns(self, x: Array, pair: Array, dim: int = -2) -> Array:
        return lax.dynamic_slice_in_dim(x, pair[1], self.num_columns, dim)

    def scan(self, body: Callable[[Any, Array], Any], carry: Any, inputs: Any) -> Any:
        """Returns the carry after `body(carry, pair)` of all pairs; `inputs`: all that the body uses."""
        carry = vary_like(carry, inputs, self.mask)
        return lax.scan(lambda carry, pair: (body(carry, pair), None), carry, jnp.asarray(self.pairs))[0]

    def visible(self, pair: Array) -> Bool[Array, "..."] | None:
        """Returns which scores of the pair count, to be broadcast to all of them; None: all."""
        mask, conditions = self.mask, []
        row = jnp.minimum(pair[0], self.seq - self.num_rows) + jnp.arange(self.num_rows)[:, None]
        column = jnp.minimum(pair[1], self.seq_kv - self.num_columns) + jnp.arange(self.num_columns)
        distance = row - column + (self.seq_kv - self.seq)
        if mask.causal:
            conditions.append(distance >= 0)
        if self.window_in_order is not None:
            conditions += [distance >= 0, distance <= self.window_in_order]
        if self.seq % self.num_rows:
            conditions.append(row >= pair[0])
        if self.seq_kv % self.num_columns:
            conditions.append(column >= pair[1])
        if mask.window is not None and not mask.in_order:
            distance = self.rows(self.index[0], pair, 0)[:, None] - self.columns(self.index[1], pair, 0)
            conditions += [distance >= 0, distance <= mask.window]
        if mask.has_segments:
            row = self.rows(mask.query_tokens.segments, pair, 1)
            column = self.columns(mask.key_tokens.segments, pair, 1)
            conditions.append((row[:, :, None] == column[:, None, :])[:, None, None])
        return reduce(jnp.logical_and, conditions) if conditions else None

    def keep(self, pair: Array) -> Bool[Array, "batch kv_heads group rows columns"] | None:
        """Returns which probabilities of the pair are kept; None: all."""
        if self.mask.dropout is None or self.dropout_keys is None:
            return None
        index = self.rows(self.index[0], pair, 0), self.columns(self.index[1], pair, 0)
        keep = random.attention_keep(self.dropout_keys, self.mask.dropout.rate, *index)
        return keep.reshape(self.batch, self.kv_heads, self.group, self.num_rows, self.num_columns)

    @property
    def kept_scale(self) -> float:
        """What kept probabilities are multiplied by."""
        return 1.0 if self.mask.dropout is None else 1.0 / (1.0 - self.mask.dropout.rate)


def _matmul(equation: str, x: Array, y: Array) -> Array:
    """fp32 product, operands in y's dtype: half-precision ones stay on the tensor cores' fast path."""
    return jnp.einsum(equation, x.astype(y.dtype), y, preferred_element_type=jnp.float32)


def _dropped(x: Array, keep: Array | None) -> Array:
    return x if keep is None else jnp.where(keep, x, 0.0)


def _heads_first(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3)


def _put(x: Array, part: Array, start: Array, dim: int = -2) -> Array:
    return lax.dynamic_update_slice_in_dim(x, part, start, dim)


def forward(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq_kv kv_heads head_dim"],
    value: Float[Array, "batch seq_kv kv_heads head_dim"],
    mask: AttentionMask,
    *,
    scale: float,
    out_dtype: DTypeLike,
    block_size: int = BLOCK_SIZE,
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch heads seq"]]:
    """Returns (out in `out_dtype`, fp32 log-sum-exp of the scores).

    Communication: none. FLOPs: 4 batch heads head_dim of each score of a computed pair.
    """
    blocks = _Blocks(query, key, mask, block_size)
    q, k, v = blocks.grouped(query), _heads_first(key), _heads_first(value)

    def body(carry: Any, pair: Array) -> Any:
        largest, total, summed = carry
        # fp32 from the matmul on: a half-precision softmax loses the tail of long rows.
        scores = _matmul("bngsd,bntd->bngst", blocks.rows(q, pair), blocks.columns(k, pair)) * scale
        visible = blocks.visible(pair)
        if visible is not None:
            scores = jnp.where(visible, scores, -jnp.inf)
        before = blocks.rows(largest, pair, -1)
        now = jnp.maximum(before, scores.max(-1))
        shift = jnp.where(now == -jnp.inf, 0.0, now)  # a row that has seen nothing yet
        decay = jnp.exp(before - shift)
        weights = jnp.exp(scores - shift[..., None])
        row_total = blocks.rows(total, pair, -1) * decay + weights.sum(-1)
        product = _matmul("bngst,bntd->bngsd", _dropped(weights, blocks.keep(pair)), blocks.columns(v, pair))
        row_summed = blocks.rows(summed, pair) * decay[..., None] + product
        start = pair[0]
        return _put(largest, now, start, -1), _put(total, row_total, start, -1), _put(summed, row_summed, start)

    rows = q.shape[:-1]
    zeros = jnp.zeros(rows, jnp.float32), jnp.zeros((*rows, v.shape[-1]), jnp.float32)
    carry = jnp.full(rows, -jnp.inf, jnp.float32), *zeros
    largest, total, summed = blocks.scan(body, carry, (query, key, value))
    out = summed * (blocks.kept_scale / jnp.where(total == 0.0, 1.0, total))[..., None]
    lse = largest + jnp.log(total)
    return blocks.ungrouped(out).astype(out_dtype), lse.reshape(blocks.batch, -1, blocks.seq)


def backward(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq_kv kv_heads head_dim"],
    value: Float[Array, "batch seq_kv kv_heads head_dim"],
    out: Float[Array, "batch seq heads head_dim"],
    lse: Float[Array, "batch heads seq"],
    d_out: Float[Array, "batch seq heads head_dim"],
    mask: AttentionMask,
    *,
    scale: float,
    out_dtype: DTypeLike | None,
    block_size: int = BLOCK_SIZE,
) -> tuple[
    Float[Array, "batch seq heads head_dim"],
    Float[Array, "batch seq_kv kv_heads head_dim"],
    Float[Array, "batch seq_kv kv_heads head_dim"],
]:
    """Returns (d_query, d_key, d_value) in `out_dtype` (None: those of the inputs).

    Communication: none. FLOPs: 10 batch heads head_dim of each score of a computed pair. With P the probabilities,
    delta = rowsum(d_out * out), dP = d_out value^T (dropped and scaled as P was):

        d_value = dropped(P)^T d_out     dS = P * (dP - delta) scale     d_query = dS key     d_key = dS^T query
    """
    blocks = _Blocks(query, key, mask, block_size)
    q, k, v, d_o = blocks.grouped(query), _heads_first(key), _heads_first(value), blocks.grouped(d_out)
    delta = (d_o.astype(jnp.float32) * blocks.grouped(out).astype(jnp.float32)).sum(-1)
    shift = jnp.where(lse == -jnp.inf, 0.0, lse).reshape(delta.shape)
    d_o = d_o.astype(query.dtype)

    def body(carry: Any, pair: Array) -> Any:
        d_query, d_key, d_value = carry
        q_rows, d_o_rows, k_columns = blocks.rows(q, pair), blocks.rows(d_o, pair), blocks.columns(k, pair)
        scores = _matmul("bngsd,bntd->bngst", q_rows, k_columns) * scale
        visible = blocks.visible(pair)
        if visible is not None:
            scores = jnp.where(visible, scores, -jnp.inf)
        keep = blocks.keep(pair)
        p = jnp.exp(scores - blocks.rows(shift, pair, -1)[..., None])
        d_p = blocks.kept_scale * _matmul("bngsd,bntd->bngst", d_o_rows, blocks.columns(v, pair))
        d_scores = p * (_dropped(d_p, keep) - blocks.rows(delta, pair, -1)[..., None]) * scale
        row, column = pair[0], pair[1]
        return (
            _put(d_query, blocks.rows(d_query, pair) + _matmul("bngst,bntd->bngsd", d_scores, k_columns), row),
            _put(d_key, blocks.columns(d_key, pair) + _matmul("bngst,bngsd->bntd", d_scores, q_rows), column),
            _put(
                d_value,
                blocks.columns(d_value, pair) + _matmul("bngst,bngsd->bntd", _dropped(p, keep), d_o_rows),
                column,
            ),
        )

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    d_query, d_key, d_value = blocks.scan(body, zeros, (query, key, value, out, lse, d_out))
    gradients = blocks.ungrouped(d_query), _heads_first(d_key), _heads_first(d_value) * blocks.kept_scale
    d_q, d_k, d_v = (g.astype(out_dtype or x.dtype) for g, x in zip(gradients, (query, key, value), strict=True))
    return d_q, d_k, d_v
