"""Random numbers depend on what they are for: masks are parts of one mask however the work is divided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmegatron import random

KEY = jax.random.key(3)
SAMPLES, TOKENS, HEADS, WIDTH, RATE = jnp.arange(4), jnp.arange(6), jnp.arange(4), 16, 0.3
ONES = jnp.ones((4, 6, WIDTH))
PROBABILITIES = jnp.ones((4, 4, 6, 6))


def mask(key=KEY, samples=SAMPLES, tokens=TOKENS, rate=RATE, width=WIDTH):
    x = jnp.ones((len(samples), len(tokens), width))
    return np.asarray(random.dropout(x, rate, key, samples, tokens))


def attention_mask(samples=SAMPLES, heads=HEADS, tokens=TOKENS, key=KEY, seq_kv=6):
    p = jnp.ones((len(samples), len(heads), len(tokens), seq_kv))
    return np.asarray(random.attention_dropout(p, RATE, key, samples, heads, tokens))


def test_any_split_of_batch_and_sequence_gives_parts_of_the_same_mask():
    whole = mask()
    np.testing.assert_array_equal(mask(samples=SAMPLES[2:]), whole[2:])
    np.testing.assert_array_equal(mask(tokens=TOKENS[3:]), whole[:, 3:])
    np.testing.assert_array_equal(mask(samples=SAMPLES[1:2], tokens=TOKENS[::2]), whole[1:2, ::2])


def test_any_split_of_batch_heads_and_queries_gives_parts_of_the_same_attention_mask():
    whole = attention_mask()
    np.testing.assert_array_equal(attention_mask(samples=SAMPLES[2:]), whole[2:])
    np.testing.assert_array_equal(attention_mask(heads=HEADS[1:3]), whole[:, 1:3])
    np.testing.assert_array_equal(attention_mask(tokens=TOKENS[4:]), whole[:, :, 4:])
    np.testing.assert_array_equal(attention_mask(SAMPLES[:1], HEADS[3:], TOKENS[2:3]), whole[:1, 3:, 2:3])


def test_every_sample_token_layer_and_site_has_its_own_mask():
    rows = mask().reshape(-1, WIDTH)
    assert len(np.unique(rows, axis=0)) == len(rows)
    keys = [random.site_key(KEY, layer, site) for layer in range(3) for site in random.Site]
    masks = np.stack([mask(key).ravel() for key in keys])
    assert len(np.unique(masks, axis=0)) == len(keys)


def test_every_head_and_query_has_its_own_attention_mask():
    rows = attention_mask(seq_kv=64).reshape(-1, 64)
    assert len(np.unique(rows, axis=0)) == len(rows)


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


def test_attention_probabilities_are_dropped_at_the_rate():
    values = attention_mask(seq_kv=512)
    assert abs((values == 0).mean() - RATE) < 5 * (RATE * (1 - RATE) / values.size) ** 0.5
    np.testing.assert_allclose(values[values != 0], 1 / (1 - RATE), rtol=1e-6)


def test_without_a_key_or_at_rate_0_nothing_is_dropped():
    for key, rate in ((None, 0.5), (KEY, 0.0)):
        assert random.dropout(ONES, rate, key, SAMPLES, TOKENS) is ONES
        assert random.attention_dropout(PROBABILITIES, rate, key, SAMPLES, HEADS, TOKENS) is PROBABILITIES


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
