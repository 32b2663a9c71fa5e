"""Attention over cp ranks against a dense float64 formula: output and gradients, masks, and what must stop."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layer_support import QUICK_COMPILE
from tolerances import BF16_RELATIVE, GRADIENT_RELATIVE, LAYER_RELATIVE

from jmegatron.collectives import sum_over, vary
from jmegatron.context_parallel.attention import context_parallel_attention
from jmegatron.context_parallel.layout import ContextParallel
from jmegatron.mesh import build_mesh
from jmegatron.ops.attention import ATTENTION_LSE, ATTENTION_OUT, AttentionDropout

BATCH, HEADS = 2, 8
TOKENS = P("dp", "cp", "tp")
WAYS = ("p2p", "all_gather", "a2a")
Arrays = tuple[np.ndarray, ...]


# ---- the truth ----------------------------------------------------------------------------------------------------
def dense(query, key, value, d_out, visible, kept=1.0) -> Arrays:
    """(out, d_query, d_key, d_value) by the formulas; `kept`: what each probability is multiplied with."""
    query, key, value, d_out = (np.asarray(x, np.float64) for x in (query, key, value, d_out))
    group, scale = query.shape[2] // key.shape[2], query.shape[3] ** -0.5
    wide_key, wide_value = (np.repeat(x, group, 2) for x in (key, value))
    scores = np.where(visible, np.einsum("bihd,bjhd->bhij", query, wide_key) * scale, -1e300)
    p = np.exp(scores - scores.max(-1, keepdims=True)) * visible
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    d_p = np.einsum("bihd,bjhd->bhij", d_out, wide_value) * kept
    d_scores = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * scale
    of_kv_heads = lambda x: x.reshape(*key.shape[:3], group, -1).sum(3)  # noqa: E731
    return (
        np.einsum("bhij,bjhd->bihd", p * kept, wide_value),
        np.einsum("bhij,bjhd->bihd", d_scores, wide_key),
        of_kv_heads(np.einsum("bhij,bihd->bjhd", d_scores, query)),
        of_kv_heads(np.einsum("bhij,bihd->bjhd", p * kept, d_out)),
    )


def seen(seq: int, *, causal: bool = True, window: int | None = None, segments=None) -> np.ndarray:
    """[batch or 1, 1, seq, seq]: which query sees which key."""
    distance = np.arange(seq)[:, None] - np.arange(seq)
    visible = (distance >= 0) if causal else np.ones((seq, seq), bool)
    if window is not None:
        visible = visible & (distance >= 0) & (distance <= window)
    if segments is not None:
        visible = visible & (segments[:, :, None] == segments[:, None, :])
    return visible.reshape(-1, 1, seq, seq)


def held(seq: int, cp: int, order: str) -> np.ndarray:
    """True places of the tokens, rank by rank."""
    if order == "contiguous" or cp == 1:
        return np.arange(seq)
    chunks = np.arange(seq).reshape(2 * cp, -1)
    return np.concatenate([chunks[[rank, 2 * cp - 1 - rank]].reshape(-1) for rank in range(cp)])


# ---- the run ------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Case:
    cp: int
    way: str = "p2p"
    order: str = "zigzag"
    causal: bool = True
    window: int | None = None
    dropout: float = 0.0
    dp: int = 1
    tp: int = 1
    dtype: Any = jnp.float32

    def __str__(self):
        return f"cp{self.cp}-{self.way}-{self.order}-{'causal' if self.causal else 'full'}"

    def mesh(self):
        return build_mesh(jax.devices()[: self.dp * self.cp * self.tp], dp=self.dp, cp=self.cp, tp=self.tp)


@functools.cache
def mapped(case: Case, with_segments: bool = False):
    """jitted (query, key, value, d_out, sample_ids, segments) -> (out, d_query, d_key, d_value), tokens as held."""
    context = ContextParallel("cp", case.cp, case.way, case.order)  # type: ignore[arg-type]

    def body(query, key, value, d_out, sample_ids, segments):
        heads = lax.axis_index("tp") * query.shape[2] + jnp.arange(query.shape[2])
        dropout = AttentionDropout(jax.random.key(7), sample_ids, heads, case.dropout) if case.dropout else None
        function = lambda *x: context_parallel_attention(  # noqa: E731
            *x,
            context,
            causal=case.causal,
            window=case.window,
            segments=segments if with_segments else None,
            dropout=dropout,
        )
        out, backward = jax.vjp(function, query, key, value)
        return out, *backward(d_out)

    in_specs = (TOKENS,) * 4 + (P("dp"), P("dp"))
    run = jax.shard_map(body, mesh=case.mesh(), in_specs=in_specs, out_specs=(TOKENS,) * 4)
    return jax.jit(run, compiler_options=QUICK_COMPILE)


def run(case: Case, arrays: Arrays, segments: np.ndarray | None = None) -> Arrays:
    """(out, d_query, d_key, d_value) in the true order."""
    seq = arrays[0].shape[1]
    places = held(seq, case.cp, case.order)
    given = [jnp.asarray(x[:, places], case.dtype) for x in arrays]
    ids = np.arange(BATCH, dtype=np.uint32) + 5
    whole = np.zeros((BATCH, seq), np.int32) if segments is None else segments
    got = mapped(case, segments is not None)(*given, ids, whole)
    back = np.argsort(places)
    return tuple(np.asarray(x, np.float32)[:, back] for x in got)


def arrays_of(seq: int, kv_heads: int = HEADS, head_dim: int = 8, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return tuple(rng.standard_normal((BATCH, seq, count, head_dim)).astype(np.float32) for count in heads)


def check(got: Arrays, expected: Arrays, tolerance: float = LAYER_RELATIVE) -> None:
    for name, value, reference in zip(("out", "d_query", "d_key", "d_value"), got, expected, strict=True):
        error = np.abs(value - reference).max() / np.abs(reference).max()
        assert error <= tolerance, f"{name} differs by {error:.2e}"


# ---- values -------------------------------------------------------------------------------------------------------
GRID = [
    Case(1),
    Case(1, "all_gather", "contiguous", causal=False),
    *(Case(2, way, dp=2, tp=2) for way in WAYS),
    Case(2, "p2p", causal=False),
    Case(2, "all_gather", "contiguous", causal=False),
    Case(2, "a2a", "contiguous"),
    *(Case(4, way, tp=2) for way in WAYS),
    Case(3),
    Case(4, "p2p", "contiguous", causal=False),
    Case(4, "all_gather", causal=False),
    Case(4, "a2a", causal=False),
    Case(8),
    Case(8, "p2p", "contiguous", causal=False),
    Case(8, "all_gather"),
]
"""Every way and mask with 2 and 4 ranks, either order; 8 ranks: rings with loops."""


@pytest.mark.parametrize("case", GRID, ids=str)
def test_output_and_gradients_are_those_of_dense_attention(case):
    """With 2 to 4 ranks of the shortest sequence there is, chunks of one token; two query heads to a kv head."""
    seq = 2 * case.cp if case.cp in (2, 3, 4) else 16
    arrays = arrays_of(seq, kv_heads=HEADS if case.way == "a2a" else HEADS // 2)
    check(run(case, arrays), dense(*arrays, seen(seq, causal=case.causal)))


@pytest.mark.parametrize("way", ["p2p", "all_gather"])
@pytest.mark.parametrize("rank", range(4))
def test_a_head_that_one_ranks_keys_dominate_is_right_whichever_rank_it_is(way, rank):
    """A block that is used at the wrong step, or left out, shows: all other keys of the head have no weight."""
    seq, cp = 8, 4
    query, key, value, d_out = arrays_of(seq, kv_heads=HEADS // 2)
    key[:, held(seq, cp, "zigzag").reshape(cp, -1)[rank], 3] *= 10.0
    check(run(Case(cp, way, tp=2), (query, key, value, d_out)), dense(query, key, value, d_out, seen(seq)))


def test_grouped_queries_with_a2a_are_those_of_dense_attention():
    arrays = arrays_of(16, kv_heads=HEADS // 2)
    check(run(Case(4, "a2a"), arrays), dense(*arrays, seen(16)))


def test_bfloat16_differs_by_its_rounding_alone():
    arrays = tuple(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in arrays_of(16))
    check(run(Case(2, dtype=jnp.bfloat16), arrays), dense(*arrays, seen(16)), BF16_RELATIVE)


# ---- masks --------------------------------------------------------------------------------------------------------
PACKED = np.repeat([[0, 1, 2]], BATCH, 0).repeat([5, 3, 8], 1).astype(np.int32)
"""Documents of 5, 3 and 8 tokens: their borders fall within chunks of 4 tokens, and of 2."""


@pytest.mark.parametrize("way", WAYS)
def test_a_packed_document_is_bit_equal_whatever_the_others_hold(way):
    arrays = arrays_of(16)
    before = run(Case(2, way), arrays, PACKED)
    check(before, dense(*arrays, seen(16, segments=PACKED)))
    changed = tuple(x.copy() for x in arrays)
    for x in changed[:3]:
        x[:, 2] += 1.0
    after = run(Case(2, way), changed, PACKED)
    for name, old, new in zip(("out", "d_query", "d_key", "d_value"), before, after, strict=True):
        np.testing.assert_array_equal(old[:, 5:], new[:, 5:], err_msg=name)
    assert np.abs(before[0][:, 2] - after[0][:, 2]).min() > 0


def kept_by_one_device(seq: int, rate: float) -> np.ndarray:
    """What dropout multiplies each probability with, seen through values that are rows of the unit matrix."""
    zeros = np.zeros((BATCH, seq, HEADS, seq), np.float32)
    unit = np.broadcast_to(np.eye(seq, dtype=np.float32)[None, :, None], zeros.shape)
    out = run(Case(1, causal=False, dropout=rate), (zeros, zeros, unit, zeros))[0]
    return np.swapaxes(out, 1, 2) * seq


@pytest.mark.parametrize("way", ["p2p", "a2a"])
def test_dropout_keeps_the_probabilities_that_one_device_keeps_beside_a_window_and_segments(way):
    """Over dp and tp as well: the mask goes by sample and by the head's number. One block is hidden whole."""
    seq, rate, window = 16, 0.5, 3
    kept = kept_by_one_device(seq, rate)
    assert set(np.unique(kept)) == {0.0, 2.0}
    assert abs(kept.mean() - 1.0) < 0.1
    assert len(np.unique(kept.reshape(BATCH * HEADS, -1), axis=0)) == BATCH * HEADS
    arrays = arrays_of(seq)
    case = Case(2, way, window=window, dropout=rate, dp=2, tp=2)
    check(run(case, arrays, PACKED), dense(*arrays, seen(seq, window=window, segments=PACKED), kept))


# ---- inside a model -----------------------------------------------------------------------------------------------
KEEP = jax.checkpoint_policies.save_only_these_names(ATTENTION_OUT, ATTENTION_LSE)
SCALES = np.array([0.5, 1.5], np.float32)


def layers(context: ContextParallel, policy):
    """x -> x + attention(x, x, x), twice, as a scan over checkpointed layers with scales."""

    def layer(x, scale):
        return x + scale * context_parallel_attention(x, scale * x, x, context), None

    return lambda x, scales: lax.scan(jax.checkpoint(layer, policy=policy), x, scales)[0]


def layer_gradients(context: ContextParallel, axes: tuple[str, ...] = ()):
    """jitted (x, scales) -> their gradients of the sum of cubes of the layers' output."""

    def gradients(x, scales):
        scales = vary(scales, axes)
        of_x, of_scales = jax.grad(lambda *a: (layers(context, KEEP)(*a) ** 3).sum(), (0, 1))(x, scales)
        return of_x, sum_over(of_scales, axes)

    return gradients


@functools.cache
def layer_gradients_of_one_device():
    run = jax.jit(layer_gradients(ContextParallel()), compiler_options=QUICK_COMPILE)
    return run(arrays_of(8)[0], SCALES)


@pytest.mark.parametrize("way", ["p2p", "a2a"])
def test_a_scan_of_checkpointed_layers_has_the_gradients_of_one_device(way):
    run = jax.shard_map(
        layer_gradients(ContextParallel("cp", 2, way), ("dp", "cp", "tp")),
        mesh=Case(2, dp=2, tp=2).mesh(),
        in_specs=(TOKENS, P()),
        out_specs=(TOKENS, P()),
    )
    places = held(8, 2, "zigzag")
    of_x, of_scales = jax.jit(run, compiler_options=QUICK_COMPILE)(arrays_of(8)[0][:, places], SCALES)
    got = of_x[:, np.argsort(places)], of_scales
    for value, reference in zip(got, layer_gradients_of_one_device(), strict=True):
        error = np.abs(np.asarray(value - reference)).max() / np.abs(np.asarray(reference)).max()
        assert error <= GRADIENT_RELATIVE


@pytest.mark.parametrize("way", ["p2p", "all_gather"])
def test_the_program_does_not_grow_with_the_number_of_ranks(way):
    def lines(cp: int) -> int:
        context = ContextParallel("cp", cp, way)
        gradient = jax.grad(lambda *x: context_parallel_attention(*x, context).sum(), (0, 1, 2))
        mesh, tokens = AbstractMesh((cp,), ("cp",)), P(None, "cp")
        run = jax.shard_map(gradient, mesh=mesh, in_specs=(tokens,) * 3, out_specs=tokens)
        x = jax.ShapeDtypeStruct((1, 2 * cp, 1, 8), jnp.float32, sharding=NamedSharding(mesh, tokens))
        return len(str(jax.make_jaxpr(run)(x, x, x)).splitlines())

    assert lines(8) == lines(64)


# ---- what must stop -----------------------------------------------------------------------------------------------
def attempt(context: ContextParallel, seq_local: int = 4, heads: int = 4, kv_heads: int = 4, segments=None, **options):
    spec = P(None, "cp")
    run = jax.shard_map(
        lambda *x: context_parallel_attention(*x, context, segments=segments, **options),
        mesh=build_mesh(jax.devices()[: context.num_ranks], cp=context.num_ranks),
        in_specs=spec,
        out_specs=spec,
    )
    shapes = [
        jax.ShapeDtypeStruct((1, seq_local * context.num_ranks, n, 8), jnp.float32) for n in (heads, kv_heads, kv_heads)
    ]
    return jax.eval_shape(run, *shapes)


@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_that_cannot_be_cut_stops_with_its_length(way):
    with pytest.raises(ValueError, match="10 tokens cannot be cut into 4 equal chunks for context_parallel_size 2"):
        attempt(ContextParallel("cp", 2, way), seq_local=5)


@pytest.mark.parametrize("way", ["p2p", "all_gather"])
def test_a_causal_mask_over_contiguous_tokens_stops(way):
    with pytest.raises(ValueError, match=f"{way} with a causal mask needs zigzag order, got contiguous"):
        attempt(ContextParallel("cp", 2, way, "contiguous"))


@pytest.mark.parametrize("way", ["p2p", "all_gather"])
def test_a_window_in_blocks_of_the_fused_kernel_stops(way):
    with pytest.raises(ValueError, match=r"counts a window by place in a block.*use attention_backend unfused"):
        attempt(ContextParallel("cp", 2, way), window=2, backend="fused")


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (4, 2), (4, 1)])
def test_heads_that_a2a_cannot_divide_stop_with_all_three_numbers(heads, kv_heads):
    with pytest.raises(ValueError, match=f"a2a divides the {heads} query heads and {kv_heads} kv heads .*_size 4"):
        attempt(ContextParallel("cp", 4, "a2a"), heads=heads, kv_heads=kv_heads)


def test_segments_of_a_part_of_the_sequence_stop():
    with pytest.raises(ValueError, match="segments of the whole sequence must be given: expected 8 tokens, got 4"):
        attempt(ContextParallel("cp", 2), segments=jnp.zeros((1, 4), jnp.int32))
