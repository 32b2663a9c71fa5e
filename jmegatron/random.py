"""The one place where random keys are folded: a random number depends on what it is for, never on which rank draws it.

No communication. Parameters are keyed by (path, global layer); dropout by (sample, position, layer, site). A mesh only
decides which rank computes which part of the same numbers. The reference keys by rank instead (Megatron-LM
tensor_parallel/random.py), so the two cannot have equal masks: compare them at dropout 0.
"""

import zlib
from enum import IntEnum

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, Integer, Key

DROPOUT_MASK = "dropout_mask"
"""Name of the masks of hidden dropout, which selective recompute keeps: a byte each, and drawing numbers is dear."""


class Site(IntEnum):
    """Where in a layer a dropout stands. The numbers are part of the key: never renumber them."""

    EMBEDDING = 0
    ATTENTION_PROBABILITIES = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3


def parameter_key(key: Key[Array, ""], path: str) -> Key[Array, ""]:
    """Returns the key of the parameter at `path` ("layers/mlp/up/kernel"); the same on every machine and version."""
    return jax.random.fold_in(key, zlib.crc32(path.encode()))


def layer_keys(key: Key[Array, ""], layers: Integer[Array, "layers"]) -> Key[Array, "layers"]:
    """Returns one key per global layer number."""
    return jax.vmap(lambda layer: jax.random.fold_in(key, layer))(layers)


def site_key(key: Key[Array, ""], layer: int | Int[Array, ""], site: Site) -> Key[Array, ""]:
    """Returns the key of one dropout site of one global layer."""
    return jax.random.fold_in(jax.random.fold_in(key, layer), int(site))


def _fold(keys: Key[Array, "..."], numbers: Integer[Array, "n"]) -> Key[Array, "... n"]:
    fold = lambda key: jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)  # noqa: E731
    for _ in range(keys.ndim):
        fold = jax.vmap(fold)
    return fold(keys)


def _keep(keys: Key[Array, "..."], rate: float, width: int) -> Bool[Array, "... width"]:
    draw = lambda key: jax.random.bernoulli(key, 1.0 - rate, (width,))  # noqa: E731
    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    return draw(keys)


def dropout(
    x: Float[Array, "batch seq width"],
    rate: float,
    key: Key[Array, ""] | None,
    sample_ids: Integer[Array, "batch"],
    token_index: Integer[Array, "seq"],
) -> Float[Array, "batch seq width"]:
    """Returns x with each element zeroed with probability `rate` and the others scaled by 1/(1-rate).

    Communication: none. `sample_ids` are positions in the run's stream of samples and `token_index` positions in the
    whole sequence, so that any split of batch or sequence gives parts of the same mask. The last dim must be whole.
    `key=None` or `rate=0` returns x.
    """
    if key is None or rate == 0.0:
        return x
    keep = _keep(_fold(_fold(key, sample_ids), token_index), rate, x.shape[-1])
    keep = checkpoint_name(keep, DROPOUT_MASK)
    return jnp.where(keep, x / (1.0 - rate), 0).astype(x.dtype)


def attention_dropout(
    probabilities: Float[Array, "batch heads seq_q seq_kv"],
    rate: float,
    key: Key[Array, ""] | None,
    sample_ids: Integer[Array, "batch"],
    head_index: Integer[Array, "heads"],
    token_index: Integer[Array, "seq_q"],
) -> Float[Array, "batch heads seq_q seq_kv"]:
    """Returns dropped-out attention probabilities, keyed by sample, global head and query position.

    Communication: none. The key/value dim must be whole. `key=None` or `rate=0` returns the input.
    """
    if key is None or rate == 0.0:
        return probabilities
    keys = _fold(_fold(_fold(key, sample_ids), head_index), token_index)
    keep = _keep(keys, rate, probabilities.shape[-1])
    return jnp.where(keep, probabilities / (1.0 - rate), 0).astype(probabilities.dtype)
