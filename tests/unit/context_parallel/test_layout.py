"""Which tokens a rank holds: every token once, equal causal work, and the same answer from every function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jmegatron.context_parallel import layout
from jmegatron.mesh import build_mesh

RANKS = (1, 2, 4, 8)


@pytest.mark.parametrize(
    ("num_ranks", "chunks"), [(2, [[0, 3], [1, 2]]), (4, [[0, 7], [1, 6], [2, 5], [3, 4]]), (1, [[0]])]
)
def test_zigzag_gives_rank_r_the_chunks_r_and_2n_minus_1_minus_r(num_ranks, chunks):
    assert layout.chunks_of(num_ranks).tolist() == chunks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_every_rank_of_a_zigzag_order_sees_equally_many_keys(num_ranks):
    tokens = layout.to_order(np.arange(4 * num_ranks), num_ranks, 0).reshape(num_ranks, -1)
    assert len({int((rank + 1).sum()) for rank in tokens}) == 1


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("num_ranks", RANKS)
def test_from_order_is_the_inverse_of_to_order_along_any_dim(num_ranks, order):
    x = np.arange(3 * 16).reshape(3, 16)
    reordered = layout.to_order(x, num_ranks, -1, order)
    assert sorted(reordered[0]) == list(x[0])
    np.testing.assert_array_equal(layout.from_order(reordered, num_ranks, 1, order), x)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_a_rank_cuts_out_the_tokens_whose_places_it_knows(order):
    def body(x):
        return layout.own_tokens(x, "cp", 1, order), layout.token_index(4, "cp", order)

    x = jnp.arange(100, 116)[None]
    mapped = jax.shard_map(
        body, mesh=build_mesh(jax.devices()[:4], cp=4), in_specs=P(), out_specs=(P(None, "cp"), P("cp"))
    )
    tokens, index = jax.jit(mapped)(x)
    np.testing.assert_array_equal(tokens, layout.to_order(np.asarray(x), 4, 1, order))
    np.testing.assert_array_equal(index, np.asarray(tokens[0]) - 100)


@pytest.mark.parametrize(
    ("seq", "num_ranks", "order", "message"),
    [
        (10, 4, "zigzag", "10 tokens cannot be cut into 8 equal chunks for context_parallel_size 4 .* such as 8"),
        (4, 4, "zigzag", "4 tokens .* 8 equal chunks .* such as 8"),
        (10, 4, "contiguous", "10 tokens cannot be cut into 4 equal chunks"),
    ],
)
def test_a_sequence_that_cannot_be_cut_stops_with_a_length_that_can(seq, num_ranks, order, message):
    with pytest.raises(ValueError, match=message):
        layout.check_divisible(seq, num_ranks, order)
    cut = jax.shard_map(
        lambda x: layout.own_tokens(x, "cp", 0, order),
        mesh=build_mesh(jax.devices()[:num_ranks], cp=num_ranks),
        in_specs=P(),
        out_specs=P("cp"),
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(cut, jnp.zeros(seq))
