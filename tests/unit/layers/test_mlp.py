"""MLP, plain and gated: sharded equals unsharded equals the dense formula, and a rank's gate meets its own up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_support import SEQUENCE, WHOLE, check_module, normal

from jmegatron import partition
from jmegatron.layers import MLP, MLPSettings, mlp_specs
from jmegatron.mesh import build_mesh

X = normal(2, 8, 12)


def plain(p, x):
    return jax.nn.relu(x @ p["up"]["kernel"] + p["up"]["bias"]) ** 2 @ p["down"]["kernel"] + p["down"]["bias"]


def gated(p, x):
    gate, up = (x @ p["up"]["kernel"][:, i] + p["up"]["bias"][i] for i in (0, 1))
    return gate * jax.nn.sigmoid(gate) * up @ p["down"]["kernel"] + p["down"]["bias"]


@pytest.mark.parametrize(
    ("dp", "tp", "sequence_parallel", "inside"),
    [(1, 2, False, False), (1, 4, True, False), (1, 4, False, True), (2, 2, True, True)],
)
@pytest.mark.parametrize(("activation", "formula"), [("squared_relu", plain), ("swiglu", gated)])
def test_mlp_equals_the_dense_formula_and_its_gradients(activation, formula, dp, tp, sequence_parallel, inside):
    settings = MLPSettings(12, 8, activation)
    make = lambda axis: MLP(settings, axis=axis, rngs=nnx.Rngs(0), sequence_parallel=sequence_parallel)  # noqa: E731
    spec = SEQUENCE if sequence_parallel else WHOLE
    check_module(make, formula, X, dp=dp, tp=tp, x_spec=spec, y_spec=spec, inside=inside)


def test_each_rank_holds_the_gate_and_up_of_the_same_columns():
    """Gate columns numbered 0..7, up columns 100..107; a slice of [gate; up] would give rank 0 the gate alone."""
    spec = mlp_specs(MLPSettings(1, 8, "swiglu"), axis="tp")["up"]["kernel"]
    numbered = jnp.stack([jnp.arange(8.0), 100 + jnp.arange(8.0)])[None]
    assert numbered.shape == spec.shape
    mesh = build_mesh(jax.devices()[:2], tp=2)
    placed = jax.device_put(numbered, partition.shardings(spec, mesh))
    parts = [np.asarray(shard.data)[0] for shard in placed.addressable_shards]
    np.testing.assert_array_equal(parts[0], [[0, 1, 2, 3], [100, 101, 102, 103]])
    np.testing.assert_array_equal(parts[1], [[4, 5, 6, 7], [104, 105, 106, 107]])


def test_an_unknown_activation_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'gelu', expected one of gelu_tanh, gelu_erf"):
        MLP(MLPSettings(4, 8, "gelu"), axis=None, rngs=nnx.Rngs(0))
