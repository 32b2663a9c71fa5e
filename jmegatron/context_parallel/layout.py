"""Which tokens a rank of the context-parallel axis holds. No communication.

Zigzag: the sequence is cut into 2 n chunks for n ranks, rank r holds chunks r and 2 n - 1 - r. With causal attention
all ranks then have equal work. Source: Megatron-LM core/utils.py:2544-2560 (get_batch_on_this_cp_rank).
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Integer, Shaped

from jmegatron.collectives import axis_rank, axis_size

Order = Literal["zigzag", "contiguous"]
CommType = Literal["p2p", "all_gather", "a2a"]


@dataclasses.dataclass(frozen=True)
class ContextParallel:
    """How the sequence is divided for attention: the mesh axis, its size, and how keys and values get about."""

    axis: str | None = None
    num_ranks: int = 1
    comm_type: CommType = "p2p"
    order: Order = "zigzag"


WHOLE_SEQUENCE = ContextParallel()


def check_divisible(seq: int, num_ranks: int, order: Order = "zigzag") -> None:
    """Checks that the sequence can be cut.

    Raises:
      ValueError: it is no multiple of the number of chunks.
    """
    chunks = num_ranks * (2 if order == "zigzag" else 1)
    if num_ranks > 1 and (seq % chunks or seq < chunks):
        fits = max(chunks, seq // chunks * chunks)
        raise ValueError(
            f"a sequence of {seq} tokens cannot be cut into {chunks} equal chunks for context_parallel_size {num_ranks}"
            f" ({order}); use a multiple of {chunks}, such as {fits}"
        )


def chunks_of(num_ranks: int, order: Order = "zigzag") -> np.ndarray:
    """Returns the numbers of the chunks that each rank holds, int [ranks, chunks of a rank]."""
    ranks = np.arange(num_ranks)
    return np.stack([ranks, 2 * num_ranks - 1 - ranks], 1) if order == "zigzag" and num_ranks > 1 else ranks[:, None]


def to_order(x: Any, num_ranks: int, dim: int, order: Order = "zigzag") -> Any:
    """Returns a whole sequence reordered so that equal consecutive parts are the ranks' tokens. NumPy or JAX array."""
    return _permuted(x, chunks_of(num_ranks, order).reshape(-1), dim)


def from_order(x: Any, num_ranks: int, dim: int, order: Order = "zigzag") -> Any:
    """Returns the sequence in its true order: the inverse of `to_order`."""
    return _permuted(x, np.argsort(chunks_of(num_ranks, order).reshape(-1)), dim)


def _permuted(x: Any, chunks: np.ndarray, dim: int) -> Any:
    if len(chunks) == 1:
        return x
    dim = dim % x.ndim
    if x.shape[dim] % len(chunks):
        raise ValueError(f"dim {dim} of shape {x.shape} is not divisible by {len(chunks)} chunks")
    cut = x.reshape(*x.shape[:dim], len(chunks), -1, *x.shape[dim + 1 :])
    index = (slice(None),) * dim
    return cut[(*index, chunks)].reshape(x.shape)


def own_tokens(x: Shaped[Array, "..."], axis: str | None, dim: int, order: Order = "zigzag") -> Shaped[Array, "..."]:
    """Returns this rank's tokens of a whole sequence along `dim`, in the order it holds them. Communication: none.

    Raises:
      ValueError: the sequence cannot be cut (`check_divisible`).
    """
    num_ranks = axis_size(axis)
    if num_ranks == 1:
        return x
    check_divisible(x.shape[dim], num_ranks, order)
    return tokens_of(x, axis_rank(axis), num_ranks, dim, order)


def tokens_of(
    x: Shaped[Array, "..."], rank: Integer[Array, ""] | int, num_ranks: int, dim: int, order: Order = "zigzag"
) -> Shaped[Array, "..."]:
    """Returns the tokens of a rank (which may be traced) of a whole sequence along `dim`. Communication: none."""
    if order == "contiguous":
        size = x.shape[dim] // num_ranks
        return lax.dynamic_slice_in_dim(x, rank * size, size, dim)
    size = x.shape[dim] // (2 * num_ranks)
    chunk = lambda number: lax.dynamic_slice_in_dim(x, number * size, size, dim)  # noqa: E731
    return jnp.concatenate([chunk(rank), chunk(2 * num_ranks - 1 - rank)], dim)


def token_index(seq_local: int, axis: str | None, order: Order = "zigzag") -> Integer[Array, "seq_local"]:
    """Returns the place in the whole sequence of each of this rank's tokens. Communication: none."""
    return own_tokens(jnp.arange(seq_local * axis_size(axis), dtype=jnp.int32), axis, 0, order)
