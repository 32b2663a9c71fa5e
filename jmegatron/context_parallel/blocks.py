"""Attention of a rank's queries to the keys of one rank at a time, merged; and its gradients. No communication.

Ring and all-gather compute the same blocks and differ in how keys and values get here. A rank's tokens are cut into
pieces (leading dim): its low and its high chunk with a causal mask, all of them as one piece without. A block is a
piece of queries and a piece of keys. Which blocks there are, and why every rank has equally many: README.md.
arXiv:2310.01889; Megatron-LM's counterpart is TransformerEngine's AttnFuncWithCPAndKVP2P.

Blocks are merged by their log-sum-exps in fp32. The backward of a block takes the *global* output and log-sum-exp:
differentiating the merge instead is wrong with kernels that give their log-sum-exp no gradient.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Integer

from jmegatron.collectives import axis_rank, vary_like
from jmegatron.context_parallel.layout import Order, tokens_of
from jmegatron.ops.attention import AttentionDropout, Backend, TokenIds, attention_backward, attention_forward
from jmegatron.ops.attention_mask import AttentionMask

Place = int | Integer[Array, ""]
"""Of a piece among a rank's pieces, or of a step around the ring; may be traced."""
LOW, HIGH = 0, 1
"""Places of a rank's two chunks."""


class Pairs(NamedTuple):
    """Blocks that are computed as one batch, by the places of their pieces."""

    queries: tuple[Place, ...]
    keys: tuple[Place, ...]


DIAGONAL = Pairs((LOW, HIGH), (LOW, HIGH))
"""A rank's queries and its own keys where a causal mask goes through the block."""


class Masks(NamedTuple):
    """What hides single probabilities; the same on every rank of the axis. A pytree."""

    segments: Any = None
    """Integer [batch, seq], the whole sequence in its true order, or None."""
    dropout: AttentionDropout | None = None


class Merged(NamedTuple):
    """Attention of pieces of queries to some keys."""

    out: Float[Array, "pieces batch size heads head_dim"]
    lse: Float[Array, "pieces batch heads size"]


class Queries(NamedTuple):
    """What the backward knows of pieces of queries: themselves, and the output to all keys with its gradient."""

    query: Float[Array, "pieces batch size heads head_dim"]
    out: Float[Array, "pieces batch size heads head_dim"]
    lse: Float[Array, "pieces batch heads size"]
    d_out: Float[Array, "pieces batch size heads head_dim"]


class Gradients(NamedTuple):
    """Gradients of pieces of queries and of keys and values."""

    query: Float[Array, "pieces batch size heads head_dim"]
    key_value: Float[Array, "pieces 2 batch size kv_heads head_dim"]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a rank. Step i uses the keys of the rank that is i before this one, around the ring."""

    axis: str
    num_ranks: int
    order: Order
    causal: bool
    window: int | None
    backend: Backend

    # ---- pieces ----
    @property
    def num_pieces(self) -> int:
        """Pieces that a rank's tokens are cut into."""
        return 2 if self.causal else 1

    def cut(self, x: Array, dim: int) -> Array:
        """Returns x with the pieces of `dim` as a new leading dim."""
        pieces = x.reshape(*x.shape[:dim], self.num_pieces, x.shape[dim] // self.num_pieces, *x.shape[dim + 1 :])
        return jnp.moveaxis(pieces, dim, 0)

    def stacked(
        self,
        key: Float[Array, "batch seq_local kv_heads head_dim"],
        value: Float[Array, "batch seq_local kv_heads head_dim"],
    ) -> Float[Array, "pieces 2 batch size kv_heads head_dim"]:
        """Returns keys and values as one array, which travels as one."""
        return self.cut(jnp.stack([key, value]), 2)

    # ---- which blocks ----
    def source(self, step: Place) -> Integer[Array, ""]:
        """Returns the rank whose keys a step uses."""
        return lax.rem(axis_rank(self.axis) - step + self.num_ranks, self.num_ranks)

    def pairs(self, step: Place) -> Pairs:
        """Returns the blocks of a step > 0."""
        if not self.causal:
            return self.below
        # High sees every low. Beside that low sees the low of a rank before, and high the high of a rank behind.
        same = jnp.where(step <= axis_rank(self.axis), LOW, HIGH)
        return Pairs((HIGH, same), (LOW, same))

    @property
    def below(self) -> Pairs:
        """The blocks of a rank's own keys that are not `DIAGONAL`."""
        return Pairs((self.num_pieces - 1,), (0,))

    # ---- forward ----
    def own(self, query: Array, key_value: Array, masks: Masks) -> Merged:
        """Returns the attention of the pieces of queries to this rank's own keys, computed as one block; fp32."""
        ids = self._token_ids(0, query, masks)
        whole = TokenIds(*(None if x is None else joined(x, dim) for x, dim in ((ids.index, 0), (ids.segments, 1))))
        key, value = joined(key_value, 2)
        mask = self._mask(whole, whole, masks, causal=self.causal)
        out, lse = attention_forward(joined(query, 1), key, value, mask, **self._results)
        return Merged(self.cut(out, 1).astype(jnp.float32), self.cut(lse, 2))

    def attend(
        self, step: Place, pairs: Pairs, query: Array, key_value: Array, masks: Masks, *, causal: bool = False
    ) -> Merged:
        """Returns the attention of some blocks of a step: a piece each, in the order of the pairs."""

        def attend(query, key_value, query_tokens, key_tokens):
            mask = self._mask(query_tokens, key_tokens, masks, causal=causal)
            return attention_forward(query, key_value[0], key_value[1], mask, **self._results)

        tokens = self._token_ids_of(step, pairs, query, masks)
        return Merged(*jax.vmap(attend)(_take(query, pairs.queries), _take(key_value, pairs.keys), *tokens))

    def merge(self, merged: Merged, pairs: Pairs, blocks: Merged) -> Merged:
        """Returns the attention with that of some blocks merged in."""
        for number, place in enumerate(pairs.queries):
            merged = _put(merged, _merged(_at(merged, place), _at(blocks, number)), place)
        return merged

    # ---- backward ----
    def no_gradients(self, queries: Queries, key_value: Array) -> Gradients:
        """Returns zeros in fp32."""
        zeros = Gradients(jnp.zeros(queries.query.shape, jnp.float32), jnp.zeros(key_value.shape, jnp.float32))
        return vary_like(zeros, queries, key_value)

    def gradients(
        self, step: Place, pairs: Pairs, queries: Queries, key_value: Array, masks: Masks, *, causal: bool = False
    ) -> Gradients:
        """Returns the gradients of some blocks of a step: a piece each, in the order of the pairs."""

        def backward(queries, key_value, query_tokens, key_tokens):
            query, out, lse, d_out = queries
            mask = self._mask(query_tokens, key_tokens, masks, causal=causal)
            arrays = query, key_value[0], key_value[1], out, lse, d_out
            d_query, *d_key_value = attention_backward(*arrays, mask, **self._results)
            return Gradients(d_query, jnp.stack(d_key_value))

        tokens = self._token_ids_of(step, pairs, queries.query, masks)
        return jax.vmap(backward)(_take(queries, pairs.queries), _take(key_value, pairs.keys), *tokens)

    def add(self, sums: Gradients, pairs: Pairs, blocks: Gradients) -> Gradients:
        """Returns the sums with the gradients of some blocks added."""
        return Gradients(
            _added(sums.query, pairs.queries, blocks.query), _added(sums.key_value, pairs.keys, blocks.key_value)
        )

    # ---- what is masked in a block ----
    def _mask(self, query_tokens: TokenIds, key_tokens: TokenIds, masks: Masks, *, causal: bool) -> AttentionMask:
        return AttentionMask(causal, self.window, query_tokens, key_tokens, masks.dropout)

    @property
    def _results(self) -> dict[str, Any]:
        """How a block is computed, and in which dtype its results come."""
        # Sums over blocks are fp32. Widening what a kernel rounded already is left to the sum, which reads it anyway.
        return dict(backend=self.backend, out_dtype=None if self.backend == "fused" else jnp.float32)

    def _token_ids_of(self, step: Place, pairs: Pairs, query: Array, masks: Masks) -> tuple[TokenIds, TokenIds]:
        """Returns those of the queries and of the keys of some blocks of a step."""
        own, other = self._token_ids(0, query, masks), self._token_ids(step, query, masks)
        return _take(own, pairs.queries), _take(other, pairs.keys)

    def _token_ids(self, step: Place, query: Array, masks: Masks) -> TokenIds:
        """Returns what is known of a step's keys: index [pieces, size] and segments [pieces, batch, size]."""
        held = lambda x, dim: self.cut(tokens_of(x, self.source(step), self.num_ranks, dim, self.order), dim)  # noqa: E731
        index = segments = None
        if self.window is not None or masks.dropout is not None:
            index = held(jnp.arange(query.shape[0] * query.shape[2] * self.num_ranks, dtype=jnp.int32), 0)
        if masks.segments is not None:
            segments = held(masks.segments, 1)
        return TokenIds(index, segments)


def together(*values: Any) -> Any:
    """Returns the values; none is used before all are there: what was sent is waited for behind the block.

    XLA's scheduler takes a cuDNN kernel for free, and would as soon put the wait before it.
    """
    return lax.optimization_barrier(values)


def joined(pieces: Array, dim: int) -> Array:
    """Returns pieces (leading dim) one after the other along `dim`: the inverse of `Blocks.cut`."""
    x = jnp.moveaxis(pieces, 0, dim)
    return x.reshape(*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :])


def _at(tree: Any, place: Place) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, place, 0, keepdims=False), tree)


def _put(tree: Any, new: Any, place: Place) -> Any:
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, place, 0), tree, new)


def _take(tree: Any, places: tuple[Place, ...]) -> Any:
    return jax.tree.map(lambda *pieces: jnp.stack(pieces), *(_at(tree, place) for place in places))


def _added(total: Array, places: tuple[Place, ...], parts: Array) -> Array:
    for part, place in zip(parts, places, strict=True):
        total = _put(total, _at(total, place) + part, place)
    return total


def _merged(first: Merged, second: Merged) -> Merged:
    """Returns the attention to the keys of both, given that to the keys of each."""
    lse = jnp.logaddexp(first.lse, second.lse)
    # A row that has seen no key at all has -inf, and exp(-inf - -inf) is NaN.
    shift = jnp.where(jnp.isneginf(lse), 0.0, lse)
    share = lambda one: jnp.exp(one.lse - shift).swapaxes(-1, -2)[..., None]  # noqa: E731
    return Merged(first.out * share(first) + second.out * share(second), lse)
