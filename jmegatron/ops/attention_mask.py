"""Which query sees which key, and which probabilities dropout keeps. No communication.

All of it is said of true token indices and segments, so that any block of the attention matrix, on any rank of a ring,
finds its own part of the same mask.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Integer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenIds:
    """What tells one token from another; one for the queries, one for the keys. A pytree."""

    index: Any = None
    """Integer [seq]: place of each token in the whole sequence (window, dropout). None: they stand in their order, and
    the last query at the last key's place, so that a window's blocks can be left out."""
    segments: Any = None
    """Integer [batch, seq]: a query sees keys of its own segment only (packed documents). None: one segment."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionDropout:
    """Dropout of probabilities: a bit depends on key, sample, head, query index and key index alone. A pytree."""

    key: Any
    """Key []: of the layer and site (`random.site_key`)."""
    sample_ids: Any
    """Integer [batch]: place of each sequence in the run's stream of samples."""
    head_index: Any
    """Integer [heads]: global numbers of the query heads."""
    rate: float = dataclasses.field(metadata={"static": True})
    """Share that is dropped; the others are scaled by 1 / (1 - rate)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """What counts of the scores [batch, heads, seq, seq_kv]. A pytree; see `attention` for the fields."""

    causal: bool = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    query_tokens: TokenIds = TokenIds()
    key_tokens: TokenIds = TokenIds()
    dropout: AttentionDropout | None = None

    @property
    def in_order(self) -> bool:
        """Whether distances between tokens are those of their places in the arrays, known when tracing."""
        return self.query_tokens.index is None and self.key_tokens.index is None

    @property
    def has_segments(self) -> bool:
        """Whether tokens are told apart by segment."""
        return self.query_tokens.segments is not None

    def indices(self, seq: int, seq_kv: int) -> tuple[Integer[Array, "seq"], Integer[Array, "seq_kv"]]:
        """Returns the true indices of queries and keys. Communication: none."""
        query_index, key_index = self.query_tokens.index, self.key_tokens.index
        if query_index is None:
            query_index = jnp.arange(seq, dtype=jnp.int32) + max(seq_kv - seq, 0)
        if key_index is None:
            key_index = jnp.arange(seq_kv, dtype=jnp.int32) + max(seq - seq_kv, 0)
        return query_index, key_index
