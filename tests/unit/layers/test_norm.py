"""LayerNorm and RMSNorm modules: whole or on sequence shards they equal the formulas, scale gradients summed."""

import jax.numpy as jnp
import pytest
from flax import nnx
from layer_support import SEQUENCE, WHOLE, check_module, normal

from jmegatron.layers import LayerNorm, RMSNorm, norm, norm_specs


def layer_norm(p, x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def rms_norm(p, x):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"]


@pytest.mark.parametrize(
    ("dp", "tp", "spec", "inside"), [(1, 4, SEQUENCE, False), (2, 2, SEQUENCE, True), (2, 2, WHOLE, True)]
)
@pytest.mark.parametrize(("module", "formula"), [(LayerNorm, layer_norm), (RMSNorm, rms_norm)])
def test_norm_equals_its_formula_and_sums_the_gradient_of_its_scale(module, formula, dp, tp, spec, inside):
    make = lambda axis: module(12, rngs=nnx.Rngs(0))  # noqa: E731
    check_module(make, formula, normal(2, 8, 12), dp=dp, tp=tp, x_spec=spec, y_spec=spec, inside=inside)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_zero_centered_norm_stores_its_scale_minus_one(normalization):
    x, scale = normal(2, 3, 4), normal(4, seed=2)
    plain = {"scale": jnp.asarray(scale)} | ({"bias": jnp.zeros(4)} if normalization == "LayerNorm" else {})
    centered = plain | {"scale": jnp.asarray(scale) - 1}
    difference = norm(plain, x, normalization) - norm(centered, x, normalization, zero_centered=True)
    assert abs(difference).max() < 1e-6
    assert norm_specs(4, normalization, zero_centered=True)["scale"].init(None, (4,), jnp.float32).sum() == 0
    assert norm_specs(4, normalization)["scale"].init(None, (4,), jnp.float32).sum() == 4


def test_an_unknown_normalization_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'BatchNorm', expected one of LayerNorm, RMSNorm"):
        norm_specs(4, "BatchNorm")
