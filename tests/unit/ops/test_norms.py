"""LayerNorm and RMSNorm against plain numpy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

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
