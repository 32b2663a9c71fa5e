"""Attention in blocks against a dense softmax in float64 and its autodiff, for every mask; what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tolerances import BF16_RELATIVE, LAYER_RELATIVE

from jmegatron import random
from jmegatron.ops import fused_attention
from jmegatron.ops.attention import (
    AttentionDropout,
    TokenIds,
    attention,
    attention_backward,
    attention_forward,
    choose_backend,
)
from jmegatron.ops.attention_mask import AttentionMask

BATCH, HEADS, HEAD_DIM = 2, 4, 8
RATE = 0.3
SAMPLES, HEAD_INDEX = jnp.array([5, 9], jnp.uint32), jnp.array([2, 3, 7, 11])
DROPOUT = AttentionDropout(jax.random.key(7), SAMPLES, HEAD_INDEX, RATE)


@dataclasses.dataclass(frozen=True)
class Case:
    seq: int = 17
    seq_kv: int = 17
    causal: bool = True
    window: int | None = None
    segments: bool = False
    ring: bool = False
    """Tokens are every second or third of a longer sequence, not in their order."""
    kv_heads: int = 2
    dropout: bool = False
    block_size: int = 8

    def index(self):
        rng = np.random.default_rng(3)
        if self.ring:
            return rng.permutation(2 * self.seq)[: self.seq], rng.permutation(2 * self.seq_kv)[: self.seq_kv]
        longest = max(self.seq, self.seq_kv)
        return np.arange(longest - self.seq, longest), np.arange(longest - self.seq_kv, longest)

    def segment_ids(self):
        """The first sample's query 1 has a segment of its own, of which there is no key."""
        longest = max(self.seq, self.seq_kv)
        ids = np.sort(np.random.default_rng(4).integers(0, 3, (BATCH, longest)), 1)
        query, key = ids[:, longest - self.seq :].copy(), ids[:, longest - self.seq_kv :]
        query[0, 1] = 9
        return query, key

    def visible(self):
        """Loops over queries and keys, from what the documentation says."""
        seen = np.zeros((BATCH, self.seq, self.seq_kv), bool)
        query_index, key_index = self.index()
        query_segments, key_segments = self.segment_ids()
        for b, i, j in np.ndindex(seen.shape):
            by_place = not self.causal or j <= i + self.seq_kv - self.seq
            near = self.window is None or 0 <= query_index[i] - key_index[j] <= self.window
            same = not self.segments or query_segments[b, i] == key_segments[b, j]
            seen[b, i, j] = by_place and near and same
        return seen

    def keep(self):
        if not self.dropout:
            return np.ones((BATCH, HEADS, self.seq, self.seq_kv), bool)
        keys = random.attention_keys(DROPOUT.key, SAMPLES, HEAD_INDEX)
        keep = jax.jit(lambda *index: random.attention_keep(keys, RATE, *index))
        return np.asarray(keep(*(jnp.asarray(index) for index in self.index())))

    def keywords(self):
        index = self.index() if self.ring else (None, None)
        segments = self.segment_ids() if self.segments else (None, None)
        tokens = [TokenIds(*jax.tree.map(jnp.asarray, ids)) for ids in zip(index, segments, strict=True)]
        return {
            "causal": self.causal,
            "window": self.window,
            "query_tokens": tokens[0],
            "key_tokens": tokens[1],
            "dropout": DROPOUT if self.dropout else None,
            "block_size": self.block_size,
        }


def arrays(case: Case, dtype=jnp.float32):
    """query, key, value and the gradient of out."""
    rng = np.random.default_rng(0)
    query, kv = (BATCH, case.seq, HEADS, HEAD_DIM), (BATCH, case.seq_kv, case.kv_heads, HEAD_DIM)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in (query, kv, kv, query)]


def dense(query, key, value, visible, keep, rate):
    """The whole matrix, keys and values repeated."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = jnp.einsum("bshd,bthd->bhst", query, key) / query.shape[-1] ** 0.5
    weights = jnp.where(visible[:, None], jnp.exp(scores), 0.0)
    total = weights.sum(-1)
    probabilities = weights / jnp.where(total == 0.0, 1.0, total)[..., None]
    kept = jnp.where(keep, probabilities / (1.0 - rate), 0.0)
    return jnp.einsum("bhst,bthd->bshd", kept, value), jnp.log(total)


def expected(case: Case, inputs):
    """[out, d_query, d_key, d_value, lse] of the dense formula in float64."""
    with jax.enable_x64(True):
        *primals, d_out = (np.asarray(x, np.float64) for x in inputs)
        masks = case.visible(), case.keep(), RATE if case.dropout else 0.0

        @jax.jit
        def run(*primals):
            (out, lse), transpose = jax.vjp(lambda *p: dense(*p, *masks), *primals)
            return out, *transpose((d_out, jnp.zeros_like(lse))), lse

        return [np.asarray(x) for x in run(*primals)]


def computed(case: Case, inputs, **changes):
    """The same of the code under test."""
    *primals, d_out = inputs

    @jax.jit
    def run(*primals):
        (out, lse), transpose = jax.vjp(lambda *p: attention(*p, **case.keywords() | changes), *primals)
        return out, *transpose((d_out, jnp.zeros_like(lse))), lse

    return [np.asarray(x, np.float32) for x in run(*primals)]


def assert_close(got, truth, tolerance=LAYER_RELATIVE):
    for a, b in zip(got, truth, strict=True):
        assert a.shape == b.shape
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite)
        np.testing.assert_array_equal(a[~finite], b[~finite])
        assert np.abs(a[finite] - b[finite]).max() <= tolerance * np.abs(b[finite]).max()


CASES = {
    "one block": Case(10, 10, block_size=512),
    "causal, sizes that no block divides": Case(kv_heads=4),
    "causal, sizes that blocks divide": Case(24, 24),
    "full": Case(17, 10, causal=False, kv_heads=1),
    "window in order": Case(26, 26, window=5),
    "window of one token beside itself": Case(9, 9, window=1, block_size=4),
    "window of a ring's block, dropout": Case(10, 13, causal=False, window=6, ring=True, dropout=True, block_size=4),
    "segments": Case(segments=True),
    "everything": Case(window=6, segments=True, ring=True, dropout=True, kv_heads=1),
    "segments of a full block, dropout": Case(8, 13, causal=False, segments=True, dropout=True, block_size=4),
    "fewer queries than keys": Case(5, 17, dropout=True, block_size=4),
    "more queries than keys": Case(17, 5, block_size=4),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_and_its_gradients_equal_the_dense_formula_and_its_autodiff(case):
    inputs = arrays(case)
    assert_close(computed(case, inputs), expected(case, inputs))


def test_a_query_that_sees_no_key_gives_0_and_minus_infinity_and_gradients_of_0():
    case = Case(segments=True, dropout=True)
    assert not case.visible()[0, 1].any()
    out, d_query, d_key, d_value, lse = computed(case, arrays(case))
    np.testing.assert_array_equal(out[0, 1], 0.0)
    np.testing.assert_array_equal(lse[0, :, 1], -np.inf)
    np.testing.assert_array_equal(d_query[0, 1], 0.0)
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in (d_query, d_key, d_value))


def test_in_bf16_two_masks_and_a_row_that_both_hide_stay_finite_and_near_fp32():
    """Masks that are added as large negative numbers would overflow to infinity together, and to NaN in the softmax."""
    case = Case(seq=20, seq_kv=20, window=6, segments=True)
    inputs = arrays(case, jnp.bfloat16)
    got = computed(case, inputs)
    assert_close(got, expected(case, inputs), BF16_RELATIVE)
    assert attention(*inputs[:3], causal=True)[0].dtype == jnp.bfloat16


def test_softmax_is_fp32_in_half_precision_runs():
    """1000 equal keys: bf16 sums of 1/1000 would stall at a quarter."""
    ones = jnp.ones((1, 1000, 1, 8), jnp.bfloat16)
    out, lse = attention(ones[:, :1], ones, ones, causal=False, block_size=128)
    np.testing.assert_allclose(np.asarray(out, np.float32), 1.0, atol=2**-7)
    np.testing.assert_allclose(lse, np.log(1000) + 8**0.5, rtol=1e-6)


def test_large_scores_do_not_overflow():
    case = Case()
    inputs = [200 * x for x in arrays(case)[:3]]
    out, lse = attention(*inputs, causal=True, block_size=8)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()
    assert lse.max() > 1000


def test_the_scale_is_that_which_is_given():
    case = Case(kv_heads=4)
    query, *others = arrays(case)
    doubled = computed(case, [2 * query, *others])
    got = computed(case, [query, *others], scale=2 * HEAD_DIM**-0.5)
    assert_close([got[0], got[2], got[3], got[4]], [doubled[0], doubled[2], doubled[3], doubled[4]])


def test_a_mask_of_dropout_does_not_depend_on_the_blocks():
    case = Case(dropout=True)
    inputs = arrays(case)
    assert_close(computed(case, inputs, block_size=5), computed(case, inputs, block_size=64))


def test_the_log_sum_exp_is_cut_from_the_gradient():
    query, key, value, _ = arrays(Case())
    gradient = jax.grad(lambda q: attention(q, key, value, causal=True)[1].sum())(query)
    np.testing.assert_array_equal(gradient, 0.0)


# ---- parts of a larger attention ------------------------------------------------------------------------------------
def test_backwards_of_parts_add_up_to_the_whole_with_its_output_and_log_sum_exp():
    """What a ring does: forwards of parts of the keys merged by log-sum-exp, each part's backward from the whole."""
    case = Case(12, 20, causal=False, window=9, ring=True, dropout=True, segments=True, block_size=4)
    query, key, value, d_out = inputs = arrays(case)
    keywords = case.keywords()
    key_tokens, block_size = keywords.pop("key_tokens"), keywords.pop("block_size")
    parts = [slice(0, 8), slice(8, 20)]

    def of_part(part):
        tokens = TokenIds(key_tokens.index[part], key_tokens.segments[:, part])
        mask = AttentionMask(key_tokens=tokens, **keywords)
        return {"mask": mask, "out_dtype": jnp.float32, "block_size": block_size}

    @jax.jit
    def ring(query, key, value, d_out):
        results = [attention_forward(query, key[:, p], value[:, p], **of_part(p)) for p in parts]
        lse = jnp.logaddexp(results[0][1], results[1][1])
        weights = [jnp.where(lse == -jnp.inf, 0.0, jnp.exp(part - lse)) for _, part in results]
        out = sum(o * w.transpose(0, 2, 1)[..., None] for (o, _), w in zip(results, weights, strict=True))
        gradients = [attention_backward(query, key[:, p], value[:, p], out, lse, d_out, **of_part(p)) for p in parts]
        d_key, d_value = (jnp.concatenate([g[i] for g in gradients], 1) for i in (1, 2))
        return out, gradients[0][0] + gradients[1][0], d_key, d_value, lse

    got = ring(query, key, value, d_out)
    assert_close([np.asarray(x) for x in got], expected(case, inputs))


def test_unrounded_results_of_bf16_parts_come_in_fp32():
    query, key, value, d_out = arrays(Case(), jnp.bfloat16)
    mask = AttentionMask(causal=True)
    out, lse = attention_forward(query, key, value, mask, out_dtype=jnp.float32)
    rounded, _ = attention_forward(query, key, value, mask)
    assert (out.dtype, lse.dtype, rounded.dtype) == (jnp.float32, jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(out.astype(jnp.bfloat16), rounded)
    assert (out != rounded).any()
    gradients = attention_backward(query, key, value, out, lse, d_out, mask, out_dtype=jnp.float32)
    assert {g.dtype for g in gradients} == {jnp.dtype(jnp.float32)}
    gradients = attention_backward(query, key, value, out, lse, d_out, mask)
    assert {g.dtype for g in gradients} == {jnp.dtype(jnp.bfloat16)}


def test_in_a_shard_map_ranks_draw_and_compute_their_part_whatever_varies_over_what():
    """Queries differ over samples and heads, segments, keys and values (one kv head) over samples alone."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    case = Case(kv_heads=1, segments=True, dropout=True)
    inputs = arrays(case)
    tokens = [jnp.asarray(ids) for ids in case.segment_ids()]

    def local(query, key, value, d_out, query_segments, key_segments, samples, heads):
        keywords = case.keywords() | {
            "query_tokens": TokenIds(None, query_segments),
            "key_tokens": TokenIds(None, key_segments),
            "dropout": dataclasses.replace(DROPOUT, sample_ids=samples, head_index=heads),
        }
        (out, lse), transpose = jax.vjp(lambda *p: attention(*p, **keywords), query, key, value)
        return out, *transpose((d_out, jnp.zeros_like(lse))), lse

    heads, samples = P("dp", None, "tp"), P("dp")
    sharded = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, samples, samples, heads, samples, samples, samples, P("tp")),
        out_specs=(heads, heads, samples, samples, P("dp", "tp")),
    )
    got = jax.jit(sharded)(*inputs, *tokens, SAMPLES, HEAD_INDEX)
    assert_close([np.asarray(x) for x in got], expected(case, inputs))


def test_in_a_loop_of_a_shard_map_the_carry_varies_like_the_inputs():
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    case = Case(kv_heads=4)
    query, key, value, _ = arrays(case)

    def local(query, key, value):
        body = lambda carry, _: (attention(carry, key, value, causal=True, block_size=8)[0], None)  # noqa: E731
        return lax.scan(body, query, None, length=2)[0]

    spec = P(None, None, "tp")
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))(query, key, value)
    once, *_ = expected(case, [query, key, value, query])
    twice, *_ = expected(case, [once, key, value, query])
    assert_close([np.asarray(got)], [twice])


# ---- refusals -------------------------------------------------------------------------------------------------------
def test_heads_that_are_no_multiple_of_kv_heads_stop_with_both_numbers():
    with pytest.raises(ValueError, match="4 query heads cannot be divided over 3 kv heads"):
        attention(*arrays(Case(kv_heads=3))[:3], causal=True)


def test_segments_of_queries_alone_are_refused():
    with pytest.raises(ValueError, match="segments are those of queries and of keys, or of neither"):
        attention(*arrays(Case())[:3], causal=True, query_tokens=TokenIds(None, Case().segment_ids()[0]))


def test_a_negative_window_is_refused():
    with pytest.raises(ValueError, match="got window -1"):
        attention(*arrays(Case())[:3], causal=True, window=-1)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(segments=True), "neither segments nor dropout"),
        (Case(dropout=True), "neither segments nor dropout"),
        (Case(5, 17), "equally many queries and keys, got 5 and 17"),
        (Case(window=4, ring=True), "a window for causal tokens in order alone"),
        (Case(window=4, causal=False), "a window for causal tokens in order alone"),
    ],
)
def test_the_fused_backend_refuses_what_cudnn_would_compute_otherwise(case, reason):
    with pytest.raises(ValueError, match=f"{reason}.*use unfused"):
        attention(*arrays(case)[:3], **case.keywords(), backend="fused")


# ---- which backend --------------------------------------------------------------------------------------------------
GOOD = dict(platform="gpu", dtype=jnp.dtype(jnp.bfloat16), dropout=0.0, head_dim=128)


@pytest.mark.parametrize("platform", ["gpu", "cuda"])
def test_auto_takes_the_fused_backend_where_it_serves(platform):
    assert choose_backend("auto", **GOOD | {"platform": platform}) == "fused"
    assert choose_backend("auto", **GOOD, window=128) == "fused"
    assert choose_backend("auto", **GOOD, in_order=False) == "fused"
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
        ({"packed": True}, "reset_attention_mask needs a mask"),
        ({"window": 8, "in_order": False}, "window_size needs true token indices"),
    ],
)
def test_where_fused_cannot_serve_auto_falls_back_and_asking_for_it_says_why(change, reason):
    assert choose_backend("auto", **GOOD | change) == "unfused"
    with pytest.raises(ValueError, match=f"fused cannot serve: {reason}.*use auto or unfused"):
        choose_backend("fused", **GOOD | change)


def test_every_reason_is_named_at_once():
    with pytest.raises(ValueError, match=r"cpu.*float32.*0\.5.*kv_channels is 7"):
        choose_backend("fused", platform="cpu", dtype=jnp.dtype(jnp.float32), dropout=0.5, head_dim=7)


def test_a_jax_without_the_private_interface_falls_back_or_says_what_is_missing(monkeypatch):
    monkeypatch.delattr("jax._src.cudnn.fused_attention_stablehlo._dot_product_attention_bwd_p_wrapper")
    assert "_dot_product_attention_bwd_p_wrapper" in fused_attention.missing_parts()
    assert choose_backend("auto", **GOOD) == "unfused"
    with pytest.raises(ValueError, match=r"fused cannot serve: .*has no _dot_product_attention_bwd_p_wrapper"):
        choose_backend("fused", **GOOD)
    with pytest.raises(ValueError, match="this JAX version does not offer cuDNN attention"):
        attention(*arrays(Case(), jnp.bfloat16)[:3], causal=True, backend="fused")


def test_this_jax_has_the_private_interface_and_lowers_both_ways_for_gpus_in_a_shard_map(monkeypatch):
    assert fused_attention.missing_parts() is None
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(query, key, value, d_out):
        core = lambda *arrays: attention(*arrays, causal=True, window=7, backend="fused")[0]  # noqa: E731
        return jax.vjp(core, query, key, value)[1](d_out)

    spec = P(None, None, "tp")
    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec))
    traced = step.trace(*arrays(Case(16, 16), jnp.bfloat16))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 1


def test_an_unknown_backend_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="'flash', expected auto, fused or unfused"):
        choose_backend("flash", **GOOD)
