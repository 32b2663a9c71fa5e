"""Vocab-parallel cross-entropy, with and without its matmul, against recorded numbers and a dense formula."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.megatron_weights import recorded
from jax.sharding import PartitionSpec as P
from layer_support import mesh_of, normal
from tolerances import BF16_RELATIVE, LAYER_RELATIVE

from jmegatron.layers import cross_entropy, linear_cross_entropy, vocab_parallel_cross_entropy

BATCH, SEQ, HIDDEN, VOCAB, PADDED = 2, 8, 6, 29, 32
LABELS = jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, (BATCH, SEQ)), jnp.int32)
WEIGHTS = jnp.asarray(np.random.default_rng(4).uniform(size=(BATCH, SEQ)) * (np.arange(SEQ) % 3 > 0), jnp.float32)


def dense_losses(logits, labels, vocab_size: int, smoothing: float):
    """-log softmax over the first `vocab_size` columns, mixed with its mean as the reference does at tp 1."""
    log_probabilities = jax.nn.log_softmax(logits[..., :vocab_size].astype(jnp.float32), axis=-1)
    picked = jnp.take_along_axis(log_probabilities, labels[..., None].astype(jnp.int32), axis=-1)[..., 0]
    share = smoothing * vocab_size / (vocab_size - 1)
    return -(1 - share) * picked - share * log_probabilities.mean(-1)


def assert_close(got, expected, tolerance: float = LAYER_RELATIVE) -> None:
    got, expected = (np.asarray(a, np.float32) for a in (got, expected))
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


# ---- given logits -------------------------------------------------------------------------------------------------
def losses_and_gradient(logits, labels, weights, tp: int, **options):
    """Losses and d sum(loss x weight) / d logits at a mesh."""
    mapped = jax.shard_map(
        functools.partial(vocab_parallel_cross_entropy, axis="tp", **options),
        mesh=mesh_of(1, tp),
        in_specs=(P(None, None, "tp"), P()),
        out_specs=P(),
    )

    def loss(logits):
        losses = mapped(logits, labels)
        return (losses * weights).sum(), losses

    (_, losses), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(logits)
    return losses, gradient


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_gradient_equal_the_recorded_ones_at_any_tp(smoothing, tp):
    """The reference smooths over a rank's part of the vocabulary; ours gives its tp 1 numbers on every mesh."""
    table = recorded("tables", "cross_entropy")
    losses, gradient = losses_and_gradient(
        table["logits"], table["target"].astype(np.int32), table["weight"], tp, label_smoothing=smoothing
    )
    assert_close(losses, table[f"smoothing{smoothing}/loss"])
    assert_close(gradient, table[f"smoothing{smoothing}/grad"])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_columns_of_padding_take_no_part_however_large(smoothing, tp):
    logits = normal(BATCH, SEQ, PADDED).at[..., VOCAB:].set(1e4)
    losses, gradient = losses_and_gradient(logits, LABELS, WEIGHTS, tp, vocab_size=VOCAB, label_smoothing=smoothing)
    assert_close(losses, dense_losses(logits, LABELS, VOCAB, smoothing))
    assert_close(gradient, jax.grad(lambda z: (dense_losses(z, LABELS, VOCAB, smoothing) * WEIGHTS).sum())(logits))
    np.testing.assert_array_equal(gradient[..., VOCAB:], 0.0)


def test_large_logits_of_both_signs_stay_finite_and_exact():
    logits = jnp.full((1, 2, 8), -1e4).at[0, :, 5].set(1e4)
    losses, gradient = losses_and_gradient(logits, np.array([[5, 1]], np.int32), np.ones((1, 2), np.float32), 4)
    np.testing.assert_allclose(losses, [[0.0, 2e4]])
    np.testing.assert_allclose(gradient[0, 1], np.eye(8)[5] - np.eye(8)[1])


def test_bfloat16_logits_are_treated_in_fp32():
    logits = (8 * normal(BATCH, SEQ, PADDED)).astype(jnp.bfloat16)
    losses, _ = losses_and_gradient(logits, LABELS, WEIGHTS, 2)
    assert losses.dtype == jnp.float32
    assert_close(losses, dense_losses(logits, LABELS, PADDED, 0.0))


# ---- with the matmul ----------------------------------------------------------------------------------------------
X, KERNEL = normal(BATCH, SEQ, HIDDEN, seed=5), normal(HIDDEN, PADDED, seed=6)


def dense_linear(x, kernel, smoothing: float):
    losses = dense_losses((x @ kernel).astype(jnp.float32), LABELS, VOCAB, smoothing)
    return (losses * WEIGHTS).sum(), losses


@functools.cache
def dense_reference(smoothing: float, dtype=jnp.float32):
    """Losses and gradients of autodiff through whole logits, in fp32 on inputs rounded to `dtype`."""
    x, kernel = (a.astype(dtype).astype(jnp.float32) for a in (X, KERNEL))
    return jax.value_and_grad(lambda x, k: dense_linear(x, k, smoothing), (0, 1), has_aux=True)(x, kernel)


def run_linear(tp: int, dp: int = 1, dtype=jnp.float32, **options):
    """Returns (weighted sum, losses, dx, dkernel [hidden, vocabulary]) at a mesh."""
    transposed = options.get("transposed", False)
    mesh = mesh_of(dp, tp)

    def body(x, kernel, labels, weights):
        total, losses = linear_cross_entropy(x, kernel, labels, weights, axis="tp", vocab_size=VOCAB, **options)
        return jax.lax.psum(total, "dp"), losses

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P("dp"), P("tp") if transposed else P(None, "tp"), P("dp"), P("dp")),
        out_specs=(P(), P("dp")),
    )
    x, kernel = X.astype(dtype), (KERNEL.T if transposed else KERNEL).astype(dtype)
    step = jax.jit(jax.value_and_grad(lambda x, k: mapped(x, k, LABELS, WEIGHTS), (0, 1), has_aux=True))
    (total, losses), (dx, dk) = step(x, kernel)
    assert (dx.dtype, dk.dtype) == (dtype, dtype)
    return total, losses, dx, dk.T if transposed else dk


@pytest.mark.parametrize(
    ("tp", "dp", "num_chunks", "transposed", "smoothing"),
    [
        (1, 1, 1, False, 0.0),
        (1, 1, 4, True, 0.1),
        (2, 1, 1, True, 0.0),
        (2, 2, 4, False, 0.1),
        (4, 1, 4, False, 0.0),
        (4, 1, 1, True, 0.1),
        (4, 2, 4, True, 0.0),
    ],
)
def test_loss_and_gradients_with_the_matmul_equal_autodiff_of_the_dense_one(tp, dp, num_chunks, transposed, smoothing):
    got = run_linear(tp, dp, num_chunks=num_chunks, transposed=transposed, label_smoothing=smoothing)
    (total, losses), (dx, dk) = dense_reference(smoothing)
    for value, expected in zip(got, (total, losses, dx, dk), strict=True):
        assert_close(value, expected)


@pytest.mark.parametrize(("num_chunks", "transposed"), [(1, False), (4, True)])
def test_bfloat16_loss_and_gradients_equal_the_dense_ones_within_rounding(num_chunks, transposed):
    got = run_linear(2, dtype=jnp.bfloat16, num_chunks=num_chunks, transposed=transposed)
    (total, losses), (dx, dk) = dense_reference(0.0, jnp.bfloat16)
    for value, expected in zip(got, (total, losses, dx, dk), strict=True):
        assert_close(value, expected, BF16_RELATIVE)


def test_without_a_gradient_the_losses_are_the_same():
    value = linear_cross_entropy(X, KERNEL, LABELS, WEIGHTS, axis=None, vocab_size=VOCAB, num_chunks=2)
    assert_close(value[1], dense_reference(0.0)[0][1])
    assert_close(value[0], dense_reference(0.0)[0][0])


def test_gradients_scale_with_the_cotangent_and_token_losses_carry_none():
    call = lambda x: linear_cross_entropy(x, KERNEL, LABELS, WEIGHTS, axis=None, vocab_size=VOCAB)  # noqa: E731
    gradient = jax.grad(lambda x: 3.0 * call(x)[0] + call(x)[1].sum())(X)
    assert_close(gradient, 3 * dense_reference(0.0)[1][0])


def largest_array(num_chunks: int | None) -> int:
    """Elements of the largest array in the compiled value and gradient."""
    loss = lambda x, k: linear_cross_entropy(  # noqa: E731
        x, k, LABELS, WEIGHTS, axis=None, num_chunks=num_chunks
    )[0]
    text = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(X, KERNEL).compile().as_text()
    return max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text))


def test_chunked_logits_never_exist_at_once():
    assert largest_array(1) == BATCH * SEQ * PADDED
    # The kernel and its gradient are now the largest arrays, not a chunk of logits (2 x 2 x 32).
    assert largest_array(4) == HIDDEN * PADDED < BATCH * SEQ * PADDED


def test_the_number_of_chunks_is_chosen_by_the_bytes_of_the_logits(monkeypatch):
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", BATCH * SEQ * PADDED * 4 // 4)
    assert largest_array(None) == HIDDEN * PADDED
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES", BATCH * SEQ * PADDED * 4)
    assert largest_array(None) == BATCH * SEQ * PADDED


def test_a_sequence_that_the_chunks_do_not_divide_stops_with_both_numbers():
    with pytest.raises(ValueError, match=r"8 tokens cannot be cut into 3"):
        linear_cross_entropy(X, KERNEL, LABELS, WEIGHTS, axis=None, num_chunks=3)
