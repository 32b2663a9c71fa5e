"""Word embedding divided over the vocabulary. Talks on the axis it is given (tp).

Source: arXiv:1909.08053 section 3; Megatron-LM tensor_parallel/layers.py:332-379. Rank r holds rows
[r V/n, (r+1) V/n) of the padded vocabulary; a token outside gives zeros, and the sum over ranks gives its row.
"""

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer

from jmegatron.collectives import Axes, axis_rank, leave_region
from jmegatron.partition import Initializer, ParameterSpec, normal


def pad_vocab_size(vocab_size: int, divisible_by: int, num_ranks: int) -> int:
    """Returns the smallest multiple of divisible_by x num_ranks that holds the vocabulary.

    Raises:
      ValueError: an argument is below 1.
    """
    if min(vocab_size, divisible_by, num_ranks) < 1:
        raise ValueError(f"vocab_size {vocab_size}, divisible_by {divisible_by}, ranks {num_ranks}: all must be >= 1")
    multiple = divisible_by * num_ranks
    return -(-vocab_size // multiple) * multiple


def padded_rows(init: Initializer, num_real: int) -> Initializer:
    """Returns `init` with every row from `num_real` on set to zero: rows that no token uses and no loss sees."""

    def padded(key, shape, dtype):
        values = init(key, shape, dtype)
        return jnp.where(jnp.arange(shape[0])[:, None] < num_real, values, 0).astype(dtype)

    return padded


def vocab_parallel_embedding_specs(
    padded_vocab_size: int, hidden_size: int, *, axis: Axes, init: Initializer | None = None
) -> dict[str, ParameterSpec]:
    """Returns the declaration of embedding [padded_vocab_size, hidden_size], rows divided over axis (or axes)."""
    shape = (padded_vocab_size, hidden_size)
    return {"embedding": ParameterSpec(shape, P(axis, None), init or normal(0.02), vocabulary=True)}


def vocab_parallel_lookup(
    table: Float[Array, "rows_local hidden"], ids: Integer[Array, "*batch"], axis: Axes
) -> Float[Array, "*batch hidden"]:
    """Returns the rows of those ids that this rank holds, zeros for the others; to be summed over axis.

    Communication: none. Rows are divided over the ranks of axis in their order.
    """
    rows_local = table.shape[0]
    row = ids - axis_rank(axis) * rows_local
    owned = (row >= 0) & (row < rows_local)
    return jnp.where(owned[..., None], jnp.take(table, jnp.clip(row, 0, rows_local - 1), axis=0), 0)


def vocab_parallel_embedding(
    parameters: dict[str, Array],
    tokens: Integer[Array, "batch seq"],
    *,
    axis: str | None,
    sequence_parallel: bool = False,
) -> Float[Array, "batch seq_out hidden"]:
    """Returns the rows of the tokens.

    Communication over axis, B = bytes of the whole result: forward all-reduce of B (sequence_parallel: reduce-scatter
    of B, seq_out = seq / axis size), backward none (sequence_parallel: all-gather of B). Token ids must lie in the
    vocabulary (the data pipeline checks them): an id outside gives zeros.
    """
    found = vocab_parallel_lookup(parameters["embedding"], tokens, axis)
    return leave_region(found, axis, sequence_parallel=sequence_parallel)
