"""Attention against a dense softmax in float64 numpy; rows that see nothing; which backend serves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmegatron.ops.attention import attention, choose_backend

BATCH, SEQ, HEADS, HEAD_DIM = 2, 6, 4, 8


def inputs(kv_heads: int = HEADS, seq_kv: int = SEQ):
    rng = np.random.default_rng(0)
    shapes = [(BATCH, SEQ, HEADS, HEAD_DIM), (BATCH, seq_kv, kv_heads, HEAD_DIM), (BATCH, seq_kv, kv_heads, HEAD_DIM)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def dense(query, key, value, causal: bool, mask=None):
    """Loops over samples, heads and queries: nothing is shared with the code under test."""
    query, key, value = (np.asarray(a, np.float64) for a in (query, key, value))
    out = np.zeros(query.shape)
    for b, i, head in np.ndindex(query.shape[:3]):
        kv_head = head // (query.shape[2] // key.shape[2])
        seen = [
            j
            for j in range(key.shape[1])
            if (not causal or j <= i + key.shape[1] - query.shape[1]) and (mask is None or mask[b, i, j])
        ]
        if seen:
            scores = key[b, seen, kv_head] @ query[b, i, head] / np.sqrt(query.shape[-1])
            weights = np.exp(scores - scores.max())
            out[b, i, head] = weights / weights.sum() @ value[b, seen, kv_head]
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_a_dense_softmax_and_head_i_uses_kv_head_i_over_group(kv_heads, causal):
    query, key, value = inputs(kv_heads)
    got = attention(query, key, value, causal=causal)
    np.testing.assert_allclose(got, dense(query, key, value, causal), atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_hides_keys_and_a_row_that_sees_nothing_gives_zero(causal):
    mask = np.random.default_rng(1).random((BATCH, SEQ, SEQ)) > 0.4
    mask[0, 3] = False
    query, key, value = inputs(2)
    got = attention(query, key, value, causal=causal, mask=jnp.asarray(mask))
    np.testing.assert_allclose(got, dense(query, key, value, causal, mask), atol=1e-5)
    np.testing.assert_array_equal(got[0, 3], 0.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_that_sees_nothing_has_finite_gradients_that_reach_nothing(dtype):
    mask = np.ones((BATCH, SEQ, SEQ), bool)
    mask[1] = False
    arrays = [a.astype(dtype) for a in inputs(2)]
    loss = lambda *a: (attention(*a, mask=jnp.asarray(mask)).astype(jnp.float32) ** 2).sum()  # noqa: E731
    for gradient in jax.grad(loss, (0, 1, 2))(*arrays):
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
        np.testing.assert_array_equal(np.asarray(gradient[1], np.float32), 0.0)
        assert np.abs(np.asarray(gradient[0], np.float32)).max() > 0


def test_fewer_queries_than_keys_are_the_last_ones():
    query, key, value = inputs(seq_kv=9)
    np.testing.assert_allclose(attention(query, key, value), dense(query, key, value, True), atol=1e-5)


def test_softmax_is_fp32_in_half_precision_runs():
    """1000 equal keys: bf16 sums of 1/1000 would stall at a quarter."""
    ones = jnp.ones((1, 1000, 1, 8), jnp.bfloat16)
    out = attention(ones[:, :1], ones, ones, causal=False)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, atol=2**-7)


def test_dropout_is_given_the_probabilities_of_all_heads():
    query, key, value = inputs(2)
    seen = []

    def drop(p):
        seen.append(p)
        return jnp.zeros_like(p).at[:, 3].set(p[:, 3])

    out = attention(query, key, value, dropout=drop)
    assert seen[0].shape == (BATCH, HEADS, SEQ, SEQ)
    np.testing.assert_allclose(seen[0].sum(-1), 1.0, atol=1e-6)
    np.testing.assert_array_equal(out[:, :, :3], 0.0)
    np.testing.assert_allclose(out[:, :, 3], dense(query, key, value, True)[:, :, 3], atol=1e-5)


def test_heads_that_are_no_multiple_of_kv_heads_stop_with_both_numbers():
    with pytest.raises(ValueError, match="4 query heads cannot be divided over 3 kv heads"):
        attention(*inputs(3))


def test_the_fused_backend_refuses_a_mask():
    with pytest.raises(ValueError, match="neither a mask nor dropout"):
        attention(*inputs(), mask=jnp.ones((BATCH, SEQ, SEQ), bool), backend="fused")


# ---- which backend ------------------------------------------------------------------------------------------------
GOOD = dict(platform="gpu", dtype=jnp.dtype(jnp.bfloat16), dropout=0.0, head_dim=128)


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_auto_takes_the_fused_backend_where_it_serves(platform):
    assert choose_backend("auto", **GOOD | {"platform": platform}) == "fused"
    assert choose_backend("fused", **GOOD) == "fused"
    assert choose_backend("unfused", **GOOD) == "unfused"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"platform": "cpu"}, "the platform is cpu"),
        ({"dtype": jnp.dtype(jnp.float32)}, "the compute dtype is float32"),
        ({"dropout": 0.1}, "attention_dropout is 0.1"),
        ({"head_dim": 100}, "kv_channels is 100"),
        ({"head_dim": 136}, "kv_channels is 136"),
    ],
)
def test_where_fused_cannot_serve_auto_falls_back_and_asking_for_it_says_why(change, reason):
    assert choose_backend("auto", **GOOD | change) == "unfused"
    with pytest.raises(ValueError, match=f"fused cannot serve: {reason}.*use auto or unfused"):
        choose_backend("fused", **GOOD | change)


def test_every_reason_is_named_at_once():
    with pytest.raises(ValueError, match=r"cpu.*float32.*0\.5.*kv_channels is 7"):
        choose_backend("fused", platform="cpu", dtype=jnp.dtype(jnp.float32), dropout=0.5, head_dim=7)


def test_an_unknown_backend_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="'flash', expected auto, fused or unfused"):
        choose_backend("flash", **GOOD)
