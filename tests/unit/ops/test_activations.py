"""Activations against their formulas, number by number with Python's math in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jmegatron.ops.activations import ACTIVATIONS, activate, is_gated

POINTS = np.linspace(-6, 6, 41)


def gelu_tanh(x):
    return 0.5 * x * (1 + math.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def gelu_erf(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def silu(x):
    return x / (1 + math.exp(-x))


FORMULAS = {
    "gelu_tanh": gelu_tanh,
    "gelu_erf": gelu_erf,
    "squared_relu": lambda x: max(x, 0.0) ** 2,
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "swiglu": silu,
    "geglu": gelu_tanh,
    "geglu_erf": gelu_erf,
}


def test_every_activation_has_a_formula_here():
    assert set(FORMULAS) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if not is_gated(name)])
def test_plain_activation_equals_its_formula(name):
    expected = [FORMULAS[name](x) for x in POINTS]
    np.testing.assert_allclose(activate(name, jnp.asarray(POINTS, jnp.float32)), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if is_gated(name)])
def test_gated_activation_multiplies_the_activated_gate_with_the_second_half(name):
    up = POINTS[::-1] + 0.3
    expected = [FORMULAS[name](gate) * other for gate, other in zip(POINTS, up, strict=True)]
    got = activate(name, jnp.asarray(np.stack([POINTS, up])[None], jnp.float32))
    assert got.shape == (1, len(POINTS))
    np.testing.assert_allclose(got[0], expected, rtol=1e-5, atol=2e-5)


def test_the_two_gelus_differ():
    x = jnp.asarray(POINTS, jnp.float32)
    assert 1e-4 < jnp.abs(activate("gelu_tanh", x) - activate("gelu_erf", x)).max() < 1e-3


def test_a_gated_activation_refuses_an_array_without_its_two_halves():
    with pytest.raises(ValueError, match=r"swiglu: expected shape \[..., 2, ffn\].*\(3, 4\)"):
        activate("swiglu", jnp.zeros((3, 4)))


def test_an_unknown_activation_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'relu', expected one of gelu_tanh"):
        activate("relu", jnp.zeros(3))
