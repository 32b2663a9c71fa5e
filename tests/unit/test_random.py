"""Random numbers depend on what they are for: masks are parts of one mask however the work is divided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

from jmegatron import random

KEY = jax.random.key(3)
SAMPLES, TOKENS, HEADS, WIDTH, RATE = jnp.arange(4), jnp.arange(6), jnp.arange(4), 16, 0.3
ONES = jnp.ones((4, 6, WIDTH))


def mask(key=KEY, samples=SAMPLES, tokens=TOKENS, rate=RATE, width=WIDTH):
    x = jnp.ones((len(samples), len(tokens), width))
    return np.asarray(random.dropout(x, rate, key, samples, tokens))


def attention_mask(samples=SAMPLES, heads=HEADS, queries=TOKENS, keys=TOKENS, key=KEY, rate=RATE):
    keep = jax.jit(lambda *ids: random.attention_keep(random.attention_keys(key, *ids[:2]), rate, *ids[2:]))
    return np.asarray(keep(samples, heads, queries, keys))


def test_any_split_of_batch_and_sequence_gives_parts_of_the_same_mask():
    whole = mask()
    np.testing.assert_array_equal(mask(samples=SAMPLES[2:]), whole[2:])
    np.testing.assert_array_equal(mask(tokens=TOKENS[3:]), whole[:, 3:])
    np.testing.assert_array_equal(mask(samples=SAMPLES[1:2], tokens=TOKENS[::2]), whole[1:2, ::2])


def test_any_part_of_batch_heads_queries_and_keys_in_any_order_is_a_part_of_the_same_attention_mask():
    whole = attention_mask()
    np.testing.assert_array_equal(attention_mask(samples=SAMPLES[2:]), whole[2:])
    np.testing.assert_array_equal(attention_mask(heads=HEADS[1:3]), whole[:, 1:3])
    np.testing.assert_array_equal(attention_mask(queries=TOKENS[4:]), whole[:, :, 4:])
    np.testing.assert_array_equal(attention_mask(keys=TOKENS[::-2]), whole[..., ::-2])
    part = attention_mask(SAMPLES[:1], HEADS[3:], TOKENS[jnp.array([5, 2])], TOKENS[1:4])
    np.testing.assert_array_equal(part, whole[:1, 3:, [5, 2], 1:4])


def test_every_sample_token_layer_and_site_has_its_own_mask():
    rows = mask().reshape(-1, WIDTH)
    assert len(np.unique(rows, axis=0)) == len(rows)
    keys = [random.site_key(KEY, layer, site) for layer in range(3) for site in random.Site]
    masks = np.stack([mask(key).ravel() for key in keys])
    assert len(np.unique(masks, axis=0)) == len(keys)


def test_every_sample_head_query_and_key_has_its_own_attention_mask():
    far = 2**20 + jnp.arange(64)
    rows, columns = attention_mask(keys=far), attention_mask(queries=far).swapaxes(-1, -2)
    for lines in (rows.reshape(-1, 64), columns.reshape(-1, 64)):
        assert len(np.unique(lines, axis=0)) == len(lines) == 4 * 4 * 6


def test_a_traced_layer_number_gives_the_key_of_the_plain_one():
    plain = random.site_key(KEY, 5, random.Site.MLP_OUTPUT)
    traced = jax.jit(lambda layer: random.site_key(KEY, layer, random.Site.MLP_OUTPUT))(jnp.int32(5))
    assert (jax.random.key_data(plain) == jax.random.key_data(traced)).all()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_elements_are_dropped_at_the_rate_and_the_others_keep_the_mean(rate):
    values = mask(rate=rate, width=4096)
    count, dropped = values.size, (values == 0).mean()
    # Five standard deviations of a binomial share.
    assert abs(dropped - rate) < 5 * (rate * (1 - rate) / count) ** 0.5
    np.testing.assert_allclose(values[values != 0], 1 / (1 - rate), rtol=1e-6)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_attention_probabilities_are_dropped_at_the_rate(rate):
    kept = attention_mask(keys=jnp.arange(1024), rate=rate)
    assert abs((~kept).mean() - rate) < 5 * (rate * (1 - rate) / kept.size) ** 0.5


def test_neighbours_in_an_attention_mask_are_independent():
    """Equal bits among neighbouring keys, queries, heads and samples: half of them, within five standard deviations."""
    tokens = jnp.arange(256)
    mask = attention_mask(SAMPLES, HEADS, tokens, tokens, rate=0.5)
    for axis in range(4):
        for step in (1, 2, 8):
            if step < mask.shape[axis]:
                ends = [slice(None)] * 4, [slice(None)] * 4
                ends[0][axis], ends[1][axis] = slice(step, None), slice(None, -step)
                equal = mask[tuple(ends[0])] == mask[tuple(ends[1])]
                assert abs(equal.mean() - 0.5) < 5 * (0.25 / equal.size) ** 0.5


def test_the_hash_is_threefry_with_fewer_rounds():
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.integers(0, 2**32, 50, dtype=np.uint32)) for _ in range(4)]
    for got, expected in zip(random._threefry(*operands, rounds=20), threefry2x32_p.bind(*operands), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_the_attention_mask_of_a_key_stays_as_it_is():
    """Part of every run with dropout: a resumed one must draw the same bits."""
    expected = [[1, 0, 1, 0, 1, 1], [1, 1, 0, 1, 0, 1], [1, 0, 0, 0, 1, 0]]
    np.testing.assert_array_equal(attention_mask(SAMPLES[:1], HEADS[:1], TOKENS[:3], TOKENS[:6])[0, 0], expected)


def test_without_a_key_or_at_rate_0_nothing_is_dropped():
    for key, rate in ((None, 0.5), (KEY, 0.0)):
        assert random.dropout(ONES, rate, key, SAMPLES, TOKENS) is ONES


def test_dropout_keeps_the_dtype():
    assert random.dropout(ONES.astype(jnp.bfloat16), 0.5, KEY, SAMPLES, TOKENS).dtype == jnp.bfloat16


# ---- parameters ---------------------------------------------------------------------------------------------------
def test_parameter_keys_are_those_of_the_path_on_every_machine():
    """The checksum is written out: a hash that changes between processes or versions would change every start."""
    expected = jax.random.fold_in(KEY, 3402393033)
    got = random.parameter_key(KEY, "layers/mlp/up/kernel")
    assert (jax.random.key_data(got) == jax.random.key_data(expected)).all()


def test_a_layers_key_does_not_depend_on_how_many_layers_there_are():
    few, many = (jax.random.key_data(random.layer_keys(KEY, jnp.arange(n))) for n in (2, 5))
    assert (few == many[:2]).all()
    assert len(np.unique(many, axis=0)) == 5


def test_dropout_sites_keep_their_numbers():
    """Part of every mask: a resumed run of an older version must draw the same ones."""
    assert {site.name: int(site) for site in random.Site} == {
        "EMBEDDING": 0,
        "ATTENTION_PROBABILITIES": 1,
        "ATTENTION_OUTPUT": 2,
        "MLP_OUTPUT": 3,
    }
