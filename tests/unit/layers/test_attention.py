"""SelfAttention: sharded equals unsharded equals a dense softmax with repeated kv heads, for 1, 2, 4 and 8 kv heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from layer_support import (
    SEQUENCE,
    WHOLE,
    assert_equal_results,
    dense,
    mesh_of,
    module_on_mesh,
    module_on_one_device,
    noisy,
    normal,
    sharded,
)

from jmegatron import partition
from jmegatron.layers import AttentionSettings, SelfAttention, TokenContext, attention_specs, self_attention
from jmegatron.mesh import build_mesh
from jmegatron.ops.rotary import rotary_angles

HIDDEN, HEADS, HEAD_DIM = 12, 8, 4
X = normal(2, 8, HIDDEN)


def settings_of(kv_heads: int, **changes) -> AttentionSettings:
    return AttentionSettings(HIDDEN, HEADS, kv_heads, HEAD_DIM, **changes)


def formula(p, x, *, kv_heads: int):
    """Plain causal attention, no rotary, no q/k norm."""
    query = jnp.einsum("bsh,hnd->bsnd", x, p["query"]["kernel"]) + p["query"]["bias"]
    key_value = jnp.einsum("bsh,hncd->bsncd", x, p["key_value"]["kernel"]) + p["key_value"]["bias"]
    key, value = (jnp.repeat(key_value[..., i, :], HEADS // kv_heads, axis=2) for i in (0, 1))
    scores = jnp.einsum("bsnd,btnd->bnst", query, key) / HEAD_DIM**0.5
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), scores, -jnp.inf)
    weights = jnp.exp(scores) / jnp.exp(scores).sum(-1, keepdims=True)
    out = jnp.einsum("bnst,btnd->bsnd", weights, value)
    return jnp.einsum("bsnd,ndh->bsh", out, p["output"]["kernel"]) + p["output"]["bias"]


@functools.cache
def alone(kv_heads: int):
    result, parameters = module_on_one_device(SelfAttention(settings_of(kv_heads), axis=None, rngs=nnx.Rngs(0)), X)
    assert_equal_results(result, dense(functools.partial(formula, kv_heads=kv_heads), parameters, X))
    return result


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_attention_at_tp_4_equals_the_dense_formula_and_its_gradients(kv_heads, sequence_parallel):
    layer = SelfAttention(
        settings_of(kv_heads), axis="tp", rngs=nnx.Rngs(0), num_ranks=4, sequence_parallel=sequence_parallel
    )
    spec = SEQUENCE if sequence_parallel else WHOLE
    assert_equal_results(module_on_mesh(layer, X, tp=4, x_spec=spec, y_spec=spec), alone(kv_heads))


@pytest.mark.parametrize(
    ("kv_heads", "dp", "tp", "sequence_parallel"),
    [(1, 2, 2, True), (2, 1, 2, False), (2, 2, 4, False), (8, 2, 2, False)],
)
def test_gradients_taken_inside_the_map_are_whole_and_counted_once(kv_heads, dp, tp, sequence_parallel):
    layer = SelfAttention(
        settings_of(kv_heads), axis="tp", rngs=nnx.Rngs(0), num_ranks=tp, sequence_parallel=sequence_parallel
    )
    spec = SEQUENCE if sequence_parallel else WHOLE
    assert_equal_results(module_on_mesh(layer, X, dp=dp, tp=tp, x_spec=spec, y_spec=spec, inside=True), alone(kv_heads))


def test_attention_without_biases_equals_the_formula_with_zero_ones():
    settings = settings_of(2, use_bias=False, use_qkv_bias=False)
    layer = SelfAttention(settings, axis=None, rngs=nnx.Rngs(0))
    parameters = layer.tree()
    assert all(set(part) == {"kernel"} for part in parameters.values())
    zeros = {"query": 0.0, "key_value": 0.0, "output": 0.0}
    with_zeros = {name: part | {"bias": zeros[name]} for name, part in parameters.items()}
    np.testing.assert_allclose(layer(X), formula(with_zeros, X, kv_heads=2), atol=1e-6)


# ---- rotary, q/k norm and dropout through the pure function -------------------------------------------------------
@pytest.mark.parametrize(("kv_heads", "dp", "sequence_parallel"), [(2, 1, False), (4, 2, True)])
def test_rotary_norms_and_dropout_are_the_same_on_any_mesh(kv_heads, dp, sequence_parallel):
    """A rank's heads, samples and tokens are rotated, normed and dropped by their global numbers."""
    tp = 4
    settings = settings_of(kv_heads, qk_norm="RMSNorm", dropout=0.4)
    specs = attention_specs(settings, axis="tp", num_ranks=tp, sequence_parallel=sequence_parallel)
    parameters = noisy(partition.init_parameters(specs, jax.random.key(0)))

    def function(axis, shard, samples_of):
        def call(p, x):
            index = jnp.arange(8)
            rotary = rotary_angles(index[None], HEAD_DIM)
            context = TokenContext(samples_of(x), index, rotary, jax.random.key(5))
            return self_attention(p, x, context, settings, axis=axis, sequence_parallel=shard, layer=3)

        return call

    whole = dense(function(None, False, lambda x: jnp.array([4, 9])), parameters, X)
    own = lambda x: jnp.array([4, 9])[jax.lax.axis_index("dp")][None] if dp == 2 else jnp.array([4, 9])  # noqa: E731
    spec = SEQUENCE if sequence_parallel else WHOLE
    got = sharded(
        function("tp", sequence_parallel, own),
        parameters,
        partition.partition_specs(specs),
        X,
        dp=dp,
        tp=tp,
        x_spec=spec,
        y_spec=spec,
    )
    assert_equal_results(got, whole)


def test_the_module_rotates_by_position_when_given_a_base():
    def make(axis, **options):
        return SelfAttention(settings_of(4), axis=axis, rngs=nnx.Rngs(0), num_ranks=4, rotary_base=100.0, **options)

    one, _ = module_on_one_device(make(None), X)
    got = module_on_mesh(make("tp", sequence_parallel=True), X, tp=4, x_spec=SEQUENCE, y_spec=SEQUENCE)
    assert_equal_results(got, one)
    # Not at position 0, where nothing turns.
    difference = np.abs(np.asarray(got.y) - np.asarray(alone(4).y)).max(-1)
    assert difference[:, 0].max() < 1e-5
    assert difference[:, 1:].max() > 1e-3


# ---- layout of the groups -----------------------------------------------------------------------------------------
def test_rank_0_holds_whole_groups():
    """4 query heads in 2 groups at tp 2: rank 0 holds q0 q1 k0 v0, rank 1 q2 q3 k1 v1."""
    specs = attention_specs(AttentionSettings(1, 4, 2, 1), axis="tp", num_ranks=2)
    query, key_value = specs["query"]["kernel"], specs["key_value"]["kernel"]
    mesh = build_mesh(jax.devices()[:2], tp=2)
    place = lambda spec, a: [  # noqa: E731
        np.asarray(shard.data).ravel().tolist()
        for shard in jax.device_put(a.reshape(spec.shape), partition.shardings(spec, mesh)).addressable_shards
    ]
    assert place(query, np.arange(4.0)) == [[0, 1], [2, 3]]
    # Keys 10, 11 and values 20, 21 of groups 0 and 1.
    assert place(key_value, np.array([10.0, 20.0, 11.0, 21.0])) == [[10, 20], [11, 21]]


def test_fewer_kv_heads_than_ranks_are_replicated_and_their_gradients_parts():
    spec = attention_specs(settings_of(2), axis="tp", num_ranks=4)["key_value"]["kernel"]
    assert spec.spec == P(None, None, None, None)
    assert spec.partial_axes == ("tp",)
    assert attention_specs(settings_of(4), axis="tp", num_ranks=4)["key_value"]["kernel"].partial_axes == ()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "numbers"),
    [(6, 6, 4, ("6", "4")), (12, 3, 2, ("3", "2")), (12, 6, 4, ("6", "4"))],
)
def test_heads_that_the_ranks_cannot_share_stop_with_both_numbers(heads, kv_heads, ranks, numbers):
    with pytest.raises(ValueError, match=rf"{numbers[0]}\b.*\b{numbers[1]}\b"):
        SelfAttention(AttentionSettings(12, heads, kv_heads, 4), axis="tp", rngs=nnx.Rngs(0), num_ranks=ranks)


def test_query_heads_that_are_no_multiple_of_the_groups_stop_with_both_numbers():
    with pytest.raises(ValueError, match=r"num_attention_heads 4 must be a multiple of num_query_groups 3"):
        AttentionSettings(12, 4, 3, 4)


def test_heads_are_checked_for_tp_only():
    check = functools.partial(attention_specs, AttentionSettings(12, 6, 3, 4))
    assert check(axis=None)["query"]["kernel"].shape == (12, 6, 4)
    assert check(axis="tp", num_ranks=3)["key_value"]["kernel"].spec == P(None, "tp", None, None)


def test_key_values_declared_for_more_ranks_than_there_are_still_meet_their_own_queries():
    """Replicated kv heads (4 for 8 ranks) on a mesh of 4: each rank takes its one head, not all four in a row."""
    settings = AttentionSettings(HIDDEN, 16, 4, HEAD_DIM)
    make = functools.partial(SelfAttention, settings, rngs=nnx.Rngs(0), num_ranks=8)
    graph, state = nnx.split(make(axis="tp"))
    mapped = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x),
        mesh=mesh_of(1, 4),
        in_specs=(nnx.get_partition_spec(state), P()),
        out_specs=P(),
    )
    alone = nnx.merge(nnx.split(SelfAttention(settings, axis=None, rngs=nnx.Rngs(0)))[0], state)(X)
    np.testing.assert_allclose(jax.jit(mapped)(state, X), alone, atol=1e-5 * np.abs(alone).max())


def test_dropout_without_a_key_is_refused_instead_of_left_out():
    settings = AttentionSettings(16, 4, 4, 4, dropout=0.5)
    module = SelfAttention(settings, axis=None, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="dropout_key"):
        module(jnp.ones((1, 4, 16)))
