"""ColumnParallelLinear and RowParallelLinear: sharded equals unsharded equals the dense formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from layer_support import FEATURES, SEQUENCE, WHOLE, assert_equal_results, check_module, dense, mesh_of, normal, sharded

from jmegatron import partition
from jmegatron.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel_linear,
    column_parallel_specs,
    row_parallel_linear,
    row_parallel_specs,
)

X = normal(2, 8, 12)


def linear(parameters, x):
    return x @ parameters["kernel"] + parameters.get("bias", 0)


@pytest.mark.parametrize(
    ("dp", "tp", "sequence_parallel", "gather_output", "inside"),
    [
        (1, 2, False, False, False),
        (1, 4, True, False, False),
        (1, 4, False, True, False),
        (2, 2, True, True, False),
        (2, 2, True, False, True),
        (2, 4, False, False, True),
    ],
)
def test_column_parallel_equals_the_dense_layer_and_its_gradients(dp, tp, sequence_parallel, gather_output, inside):
    def make(axis):
        return ColumnParallelLinear(
            12, 16, axis=axis, rngs=nnx.Rngs(0), sequence_parallel=sequence_parallel, gather_output=gather_output
        )

    check_module(
        make,
        linear,
        X,
        dp=dp,
        tp=tp,
        x_spec=SEQUENCE if sequence_parallel else WHOLE,
        y_spec=WHOLE if gather_output else FEATURES,
        inside=inside,
    )


@pytest.mark.parametrize(
    ("dp", "tp", "sequence_parallel", "input_is_parallel", "inside"),
    [
        (1, 2, False, True, False),
        (1, 4, True, True, False),
        (1, 4, False, False, False),
        (2, 2, True, False, False),
        (2, 2, True, True, True),
        (2, 4, False, True, True),
    ],
)
def test_row_parallel_equals_the_dense_layer_and_its_gradients(dp, tp, sequence_parallel, input_is_parallel, inside):
    def make(axis):
        return RowParallelLinear(
            12,
            16,
            axis=axis,
            rngs=nnx.Rngs(0),
            sequence_parallel=sequence_parallel,
            input_is_parallel=input_is_parallel,
        )

    check_module(
        make,
        linear,
        X,
        dp=dp,
        tp=tp,
        x_spec=FEATURES if input_is_parallel else WHOLE,
        y_spec=SEQUENCE if sequence_parallel else WHOLE,
        inside=inside,
    )


@pytest.mark.parametrize("module", [ColumnParallelLinear, RowParallelLinear])
def test_without_bias_there_is_one_parameter(module):
    layer = module(4, 6, axis=None, rngs=nnx.Rngs(0), use_bias=False)
    assert set(layer.tree()) == {"kernel"}
    np.testing.assert_allclose(layer(X[..., :4]), X[..., :4] @ layer.tree()["kernel"], rtol=1e-5, atol=1e-6)


def test_compute_dtype_is_that_of_the_output_and_parameters_stay_fp32():
    layer = ColumnParallelLinear(12, 4, axis=None, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    assert layer(X).dtype == jnp.bfloat16
    assert layer.tree()["kernel"].dtype == jnp.float32


# ---- the pure functions, with more output and input dims than a module declares -----------------------------------
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_parallel_function_divides_the_named_dim_of_many(sequence_parallel):
    specs = column_parallel_specs(12, (4, 3), axis="tp", sharded_dim=0)
    parameters = {"kernel": normal(12, 4, 3), "bias": normal(4, 3, seed=2)}
    got = sharded(
        lambda p, x: column_parallel_linear(p, x, axis="tp", sequence_parallel=sequence_parallel),
        parameters,
        partition.partition_specs(specs),
        X,
        tp=4,
        x_spec=SEQUENCE if sequence_parallel else WHOLE,
        y_spec=P("dp", None, "tp"),
    )
    formula = lambda p, x: jnp.einsum("bsi,ijk->bsjk", x, p["kernel"]) + p["bias"]  # noqa: E731
    assert_equal_results(got, dense(formula, parameters, X))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_row_parallel_function_sums_over_all_input_dims(sequence_parallel):
    specs = row_parallel_specs((4, 3), 5, axis="tp", sequence_parallel=sequence_parallel)
    parameters = {"kernel": normal(4, 3, 5), "bias": normal(5, seed=2)}
    got = sharded(
        lambda p, x: row_parallel_linear(p, x, axis="tp", sequence_parallel=sequence_parallel),
        parameters,
        partition.partition_specs(specs),
        X.reshape(2, 8, 4, 3),
        tp=4,
        x_spec=P("dp", None, "tp"),
        y_spec=SEQUENCE if sequence_parallel else WHOLE,
    )
    formula = lambda p, x: jnp.einsum("bsij,ijo->bso", x, p["kernel"]) + p["bias"]  # noqa: E731
    assert_equal_results(got, dense(formula, parameters, X.reshape(2, 8, 4, 3)))


# ---- the bias -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_row_parallel_adds_its_bias_once_and_counts_each_token_once_in_its_gradient(sequence_parallel):
    """W = 0, bias = 1, tp = 4: the output is 1, not 4; the gradient of a sum over 3 tokens of 4 is 3, not 12."""
    x, counted = np.ones((1, 4, 8), np.float32), np.array([1, 1, 1, 0], np.float32)[None, :, None]

    def function(bias, x):
        parameters = {"kernel": jnp.zeros((2, 5)), "bias": bias}
        return row_parallel_linear(parameters, x, axis="tp", sequence_parallel=sequence_parallel)

    mapped = jax.shard_map(
        function, mesh=mesh_of(1, 4), in_specs=(P(), FEATURES), out_specs=SEQUENCE if sequence_parallel else WHOLE
    )
    y, gradient = jax.jit(lambda b: (mapped(b, x), jax.grad(lambda b: (mapped(b, x) * counted).sum())(b)))(jnp.ones(5))
    np.testing.assert_array_equal(y, np.ones((1, 4, 5)))
    np.testing.assert_array_equal(gradient, np.full(5, 3.0))


# ---- declarations -------------------------------------------------------------------------------------------------
def test_only_under_sequence_parallelism_is_the_row_bias_gradient_a_part():
    assert row_parallel_specs(4, 4, axis="tp")["bias"].partial_axes == ()
    assert row_parallel_specs(4, 4, axis="tp", sequence_parallel=True)["bias"].partial_axes == ("tp",)
    assert row_parallel_specs(4, 4, axis=None, sequence_parallel=True)["bias"].partial_axes == ()


def test_biases_do_not_decay_and_kernels_do():
    for specs in (column_parallel_specs(4, 4, axis="tp"), row_parallel_specs(4, 4, axis="tp")):
        assert specs["kernel"].weight_decay
        assert not specs["bias"].weight_decay


def test_features_that_the_ranks_cannot_share_stop_with_both_numbers():
    layer = RowParallelLinear(6, 4, axis="tp", rngs=nnx.Rngs(0), use_bias=False, input_is_parallel=False)
    function = jax.shard_map(lambda x: layer(x), mesh=mesh_of(1, 4), in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"6\).*divisible by the 4 ranks"):
        jax.eval_shape(function, jnp.zeros((1, 2, 6)))
