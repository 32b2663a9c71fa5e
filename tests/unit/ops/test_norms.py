"""LayerNorm and RMSNorm against plain numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmegatron.ops.norms import layer_norm, rms_norm

RNG = np.random.default_rng(0)
X, SCALE, BIAS = RNG.normal(3.0, 2.0, (2, 5, 16)), RNG.normal(size=16), RNG.normal(size=16)


def expected(kind: str, x: np.ndarray, eps: float) -> np.ndarray:
    if kind == "layer":
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * SCALE + BIAS
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * SCALE


def got(kind: str, x, eps: float = 1e-5):
    scale, bias = jnp.asarray(SCALE, jnp.float32), jnp.asarray(BIAS, jnp.float32)
    return layer_norm(x, scale, bias, eps) if kind == "layer" else rms_norm(x, scale, eps)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_norm_equals_its_formula_with_eps_inside_the_root(kind, eps):
    np.testing.assert_allclose(got(kind, jnp.asarray(X, jnp.float32), eps), expected(kind, X, eps), atol=1e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_half_precision_input_has_fp32_statistics_and_a_half_precision_result(kind):
    """Numbers near 300 whose squares bf16 would sum with errors of percents: one rounding of the result is allowed."""
    x = jnp.asarray(X * 100, jnp.bfloat16)
    y = got(kind, x)
    assert y.dtype == jnp.bfloat16
    exact = expected(kind, np.asarray(x, np.float64), 1e-5)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-5)


def test_a_constant_row_gives_the_bias_and_a_zero_row_gives_zero():
    np.testing.assert_allclose(got("layer", jnp.full((1, 16), 7.0)), BIAS[None], atol=1e-6)
    np.testing.assert_array_equal(got("rms", jnp.zeros((1, 16))), 0.0)


# ---- backward -----------------------------------------------------------------------------------------------------
def plain(kind: str, eps: float, x, scale, bias):
    """The formula in fp32, for autodiff."""
    x, scale, bias = (a.astype(jnp.float32) for a in (x, scale, bias))
    if kind == "rms":
        return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps) * scale
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + eps) * scale + bias


def ours(kind: str, eps: float, x, scale, bias):
    return layer_norm(x, scale, bias, eps) if kind == "layer" else rms_norm(x, scale, eps)


def arrays(shape: tuple[int, ...], dtype):
    """Input, scale, bias and a gradient of the result."""
    rng = np.random.default_rng(1)
    x = rng.normal(3.0, 2.0, shape)
    return [jnp.asarray(a, dtype) for a in (x, SCALE, BIAS, rng.normal(size=shape))]


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(("shape", "eps"), [((16,), 1e-5), ((5, 16), 0.5), ((2, 3, 4, 16), 1e-5)])
def test_gradients_are_those_of_autodiff_whatever_the_leading_dims(kind, shape, eps):
    *inputs, cotangent = arrays(shape, jnp.float32)
    got = jax.vjp(lambda *a: ours(kind, eps, *a), *inputs)[1](cotangent)
    expected = jax.vjp(lambda *a: plain(kind, eps, *a), *inputs)[1](cotangent)
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_half_precision_gradients_are_summed_in_fp32_and_rounded_once(kind):
    """4096 tokens: sums in bf16 would stop growing after some hundreds."""
    *inputs, cotangent = arrays((4096, 16), jnp.bfloat16)
    cotangent = jnp.abs(cotangent)
    got = jax.vjp(lambda *a: ours(kind, 1e-5, *a), *inputs)[1](cotangent)
    wide = [a.astype(jnp.float32) for a in inputs]
    expected = jax.vjp(lambda *a: plain(kind, 1e-5, *a), *wide)[1](cotangent.astype(jnp.float32))
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(one, np.float32), other, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_backward_needs_the_input_in_its_own_dtype_and_statistics_alone(kind):
    x, scale, bias, _ = arrays((4, 8, 16), jnp.bfloat16)
    kept = jax.tree.leaves(jax.vjp(lambda *a: ours(kind, 1e-5, *a), x, scale, bias)[1])
    # Parameters, which are kept anyway, aside.
    tokens = sorted((a.shape, a.dtype.name) for a in kept if a.ndim > 1)
    statistics = 2 if kind == "layer" else 1
    assert tokens == [((4, 8, 1), "float32")] * statistics + [((4, 8, 16), "bfloat16")]
