"""VocabParallelEmbedding: sharded equals unsharded equals a table look-up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from layer_support import SEQUENCE, WHOLE, check_module, mesh_of

from jmegatron.layers import VocabParallelEmbedding, pad_vocab_size, vocab_parallel_embedding
from jmegatron.layers.embedding import padded_rows

TOKENS = np.random.default_rng(0).integers(0, 29, (2, 8), dtype=np.int32)


@pytest.mark.parametrize(
    ("dp", "tp", "sequence_parallel", "inside"),
    [(1, 2, False, False), (1, 4, True, False), (2, 2, True, True), (2, 4, False, True)],
)
def test_embedding_equals_a_table_lookup_and_its_gradient(dp, tp, sequence_parallel, inside):
    def make(axis):
        return VocabParallelEmbedding(
            29,
            6,
            axis=axis,
            rngs=nnx.Rngs(0),
            make_vocab_size_divisible_by=8,
            num_ranks=4,
            sequence_parallel=sequence_parallel,
        )

    assert make(None).padded_vocab_size == 32
    check_module(
        make,
        lambda parameters, tokens: parameters["embedding"][tokens],
        TOKENS,
        dp=dp,
        tp=tp,
        x_spec=WHOLE,
        y_spec=SEQUENCE if sequence_parallel else WHOLE,
        inside=inside,
    )


def test_a_token_outside_the_vocabulary_gives_zeros():
    table, tokens = {"embedding": np.ones((8, 3), np.float32)}, np.array([[-1, 8, 100, 7]], np.int32)
    mapped = jax.shard_map(
        lambda p, t: vocab_parallel_embedding(p, t, axis="tp"),
        mesh=mesh_of(1, 4),
        in_specs=(P("tp"), P()),
        out_specs=P(),
    )
    np.testing.assert_array_equal(mapped(table, tokens)[0, :, 0], [0, 0, 0, 1])


@pytest.mark.parametrize(
    ("vocab", "divisible_by", "ranks", "expected"),
    [
        (50257, 128, 1, 50304),
        (50257, 128, 8, 51200),
        (128, 128, 1, 128),
        (129, 128, 1, 256),
        (29, 8, 4, 32),
        (1, 1, 1, 1),
    ],
)
def test_vocabulary_is_padded_to_the_reference_size(vocab, divisible_by, ranks, expected):
    assert pad_vocab_size(vocab, divisible_by, ranks) == expected


@pytest.mark.parametrize("arguments", [(0, 128, 1), (10, 0, 1), (10, 128, 0)])
def test_sizes_below_one_are_refused(arguments):
    with pytest.raises(ValueError, match="must be >= 1"):
        pad_vocab_size(*arguments)


def test_rows_of_padding_start_at_zero_and_the_others_are_untouched():
    ones = lambda key, shape, dtype: jnp.ones(shape, dtype)  # noqa: E731
    rows = padded_rows(ones, 5)(None, (8, 2), jnp.float32)
    np.testing.assert_array_equal(rows[:, 0], [1, 1, 1, 1, 1, 0, 0, 0])
