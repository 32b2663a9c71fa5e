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
from jaxtyping import Array, Bool, Float, Int, Integer, Key, UInt32

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


def attention_keys(
    key: Key[Array, ""], sample_ids: Integer[Array, "batch"], head_index: Integer[Array, "heads"]
) -> UInt32[Array, "batch heads 2"]:
    """Returns what `attention_keep` hashes with: two words for each sample and global head. Communication: none."""
    words = jax.random.bits(key, (2,), jnp.uint32)
    return jnp.stack(_threefry(words[0], words[1], sample_ids[:, None], head_index[None, :]), -1)


def attention_keep(
    keys: UInt32[Array, "batch heads 2"],
    rate: float,
    query_index: Integer[Array, "queries"],
    key_index: Integer[Array, "keys"],
) -> Bool[Array, "batch heads queries keys"]:
    """Returns which attention probabilities are kept, each with probability 1 - rate.

    Communication: none. A bit is a hash of (query index, key index) under the two words of its sample and head: a block
    of the matrix, in any order of the tokens, is a part of the same mask and costs its own size alone.
    """
    words = keys[:, :, None, None]
    hashed, _ = _threefry(words[..., 0], words[..., 1], query_index[:, None], key_index[None, :])
    return hashed >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def _threefry(key_0: Array, key_1: Array, count_0: Array, count_1: Array, rounds: int = 13) -> tuple[Array, Array]:
    """Returns two words of Threefry-2x32 (Salmon et al., SC 2011) for integers that broadcast.

    With 20 rounds it is JAX's, whose primitive wants its operands whole in memory, and loops on CPUs: 35 times slower
    than this, which becomes a part of the computation around it. 13 rounds are the fewest that passed every test there.
    """
    key_0, key_1, x, y = (a.astype(jnp.uint32) for a in (key_0, key_1, count_0, count_1))
    schedule = (key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(0x1BD11BDA))
    rotations = (13, 15, 26, 6, 17, 29, 16, 24)
    x, y = x + key_0, y + key_1
    for number in range(rounds):
        turn = rotations[number % 8]
        x = x + y
        y = x ^ ((y << turn) | (y >> (32 - turn)))
        if number % 4 == 3:
            injection = number // 4 + 1
            x = x + schedule[injection % 3]
            y = y + schedule[(injection + 1) % 3] + jnp.uint32(injection)
    return x, y
