"""Every collective: value and gradient against numpy, and what it really sends."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from layer_support import mesh_of, normal

from jmegatron import collectives

RANKS = 4
X = normal(2, 8, 3)
WHOLE, SPLIT = P(), P(None, "tp")


def run(function, x, in_spec, out_spec, factor=None):
    """Value of `function` mapped over 4 ranks, and gradient of sum(value x factor) with respect to the global x."""
    mapped = jax.shard_map(function, mesh=mesh_of(1, RANKS), in_specs=in_spec, out_specs=out_spec)

    def loss(x):
        y = mapped(x)
        return (y * (1.0 if factor is None else factor)).sum(), y

    (_, y), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    return np.asarray(y), np.asarray(gradient)


def rank_factor(x):
    """x times 1, 2, 3, 4 on ranks 0..3: makes ranks' parts differ."""
    return x * (1.0 + lax.axis_index("tp"))


def test_copy_to_keeps_the_value_and_sums_the_ranks_gradients():
    y, gradient = run(
        lambda x: collectives.reduce_from(rank_factor(collectives.copy_to(x, "tp")), "tp"), X, WHOLE, WHOLE
    )
    np.testing.assert_allclose(y, 10 * X, rtol=1e-6)
    np.testing.assert_allclose(gradient, np.full_like(X, 10.0))


def test_reduce_from_gives_the_sum_and_hands_each_rank_the_whole_gradient():
    y, gradient = run(lambda x: collectives.reduce_from(x, "tp"), X, SPLIT, WHOLE, factor=X[:, :2])
    np.testing.assert_allclose(y, np.asarray(X).reshape(2, 4, 2, 3).sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, np.tile(X[:, :2], (1, 4, 1)))


@pytest.mark.parametrize("dim", [1, -2])
def test_gather_from_joins_the_parts_and_hands_each_rank_its_slice_of_the_gradient(dim):
    y, gradient = run(lambda x: collectives.gather_from(x, "tp", dim), X, SPLIT, WHOLE, factor=X)
    np.testing.assert_array_equal(y, X)
    np.testing.assert_array_equal(gradient, X)


@pytest.mark.parametrize("dim", [1, -2])
def test_scatter_to_takes_the_own_slice_and_joins_the_gradients(dim):
    y, gradient = run(lambda x: rank_factor(collectives.scatter_to(x, "tp", dim)), X, WHOLE, SPLIT)
    factors = np.repeat([1.0, 2, 3, 4], 2)[None, :, None]
    np.testing.assert_allclose(y, X * factors)
    np.testing.assert_allclose(gradient, np.broadcast_to(factors, X.shape))


def test_gather_sequence_joins_the_parts_and_reduce_scatters_the_gradients():
    function = lambda x: collectives.reduce_from(rank_factor(collectives.gather_sequence(x, "tp")), "tp")  # noqa: E731
    y, gradient = run(function, X, SPLIT, WHOLE, factor=X)
    np.testing.assert_allclose(y, 10 * X, rtol=1e-5)
    np.testing.assert_allclose(gradient, 10 * X, rtol=1e-5)


def test_reduce_scatter_to_gives_the_own_part_of_the_sum_and_gathers_the_gradients():
    function = lambda x: collectives.reduce_scatter_to(rank_factor(collectives.copy_to(x, "tp")), "tp")  # noqa: E731
    y, gradient = run(function, X, WHOLE, SPLIT, factor=X)
    np.testing.assert_allclose(y, 10 * X, rtol=1e-5)
    np.testing.assert_allclose(gradient, 10 * X, rtol=1e-5)


def test_own_slice_takes_the_ranks_part():
    y, gradient = run(lambda x: collectives.own_slice(x, "tp", 1), X, WHOLE, SPLIT, factor=X)
    np.testing.assert_array_equal(y, X)
    np.testing.assert_array_equal(gradient, X)


@pytest.mark.parametrize("shard", [False, True])
def test_entering_and_leaving_a_region_is_ranks_times_the_identity_either_way(shard):
    """With a function in between that each rank does in full, the sum counts it once a rank, forward and backward."""

    def function(x):
        inside = collectives.enter_region(x, "tp", sequence_parallel=shard)
        return collectives.leave_region(inside**2, "tp", sequence_parallel=shard)

    spec = SPLIT if shard else WHOLE
    y, gradient = run(function, X, spec, spec, factor=X)
    np.testing.assert_allclose(y, RANKS * X**2, rtol=1e-5)
    np.testing.assert_allclose(gradient, 2 * RANKS * X**2, rtol=1e-5)


def test_max_over_gives_the_maximum_and_no_gradient():
    y, gradient = run(lambda x: collectives.max_over(x, "tp"), X, SPLIT, WHOLE)
    np.testing.assert_array_equal(y, np.asarray(X).reshape(2, 4, 2, 3).max(1))
    np.testing.assert_array_equal(gradient, 0.0)


def test_sum_over_sums_what_varies_and_leaves_what_is_replicated():
    """An array that is the same on every rank of an axis already holds the sum there."""
    mesh = mesh_of(2, 4)

    def function(x):
        tree = {"over_both": x, "over_tp": lax.psum(x, "dp"), "everywhere": lax.psum(x, ("dp", "tp"))}
        return collectives.sum_over(tree, ("dp", "tp"))

    x = jnp.arange(8.0)
    sums = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(("dp", "tp")), out_specs=P()))(x)
    assert {name: float(value[0]) for name, value in sums.items()} == {
        "over_both": 28.0,
        "over_tp": 28.0,
        "everywhere": 28.0,
    }


def test_a_replicated_weights_gradient_is_the_sum_of_all_ranks_everywhere():
    """dp = 4, local losses w x [1, 2, 3, 4]: 10 on every device, not 1, 2, 3, 4 and not 4 x that."""
    mesh = mesh_of(4, 1)

    def body(w, factor):
        local = jax.grad(lambda v: (v * factor[0]).sum())(collectives.vary(w, ("dp",)))
        summed_late = collectives.sum_over(local, "dp")
        summed_by_autodiff = jax.grad(lambda v: lax.psum(v * factor[0], "dp"))(w)
        return local[None], summed_late, summed_by_autodiff[None] + 0 * factor

    factors = jnp.array([1.0, 2.0, 3.0, 4.0])
    local, late, everywhere = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(P(), P("dp")), out_specs=(P("dp"), P(), P("dp")))
    )(jnp.float32(2.0), factors)
    np.testing.assert_array_equal(local, factors)
    assert float(late) == 10.0
    np.testing.assert_array_equal(everywhere, 10.0)


# ---- types and names ----------------------------------------------------------------------------------------------
def test_vary_marks_only_missing_axes_and_vary_like_takes_those_of_its_references():
    seen = {}

    def body(x, y):
        seen["x"] = collectives.varying_axes(x)
        seen["both"] = collectives.varying_axes(collectives.vary(x, ("dp", "tp")))
        seen["like"] = collectives.varying_axes(collectives.vary_like(y, {"a": x}))
        return collectives.vary(x, ("dp",))

    jax.eval_shape(
        jax.shard_map(body, mesh=mesh_of(2, 2), in_specs=(P("dp"), P()), out_specs=P("dp")), jnp.zeros(2), jnp.zeros(2)
    )
    assert seen == {"x": {"dp"}, "both": {"dp", "tp"}, "like": {"dp"}}
    assert collectives.varying_axes(jnp.zeros(2)) == frozenset()


def test_rank_and_size_of_one_axis_and_of_several():
    def body(x):
        return x + collectives.axis_rank(("dp", "tp")) * 100 + collectives.axis_size(("dp", "tp"))

    got = jax.shard_map(body, mesh=mesh_of(2, 4), in_specs=P(("dp", "tp")), out_specs=P(("dp", "tp")))(jnp.zeros(8))
    np.testing.assert_array_equal(got, 100 * np.arange(8) + 8)
    assert (collectives.axis_size(None), collectives.axis_rank(None)) == (1, 0)


def test_without_an_axis_every_function_is_the_identity():
    c = collectives
    for y in (
        c.copy_to(X, None),
        c.reduce_from(X, None),
        c.gather_from(X, None, 1),
        c.scatter_to(X, None, 1),
        c.gather_sequence(X, None),
        c.reduce_scatter_to(X, None),
        c.own_slice(X, None, 1),
        c.enter_region(X, None, sequence_parallel=True),
        c.leave_region(X, None, sequence_parallel=True),
        c.sum_over(X, None),
        c.max_over(X, None),
    ):
        np.testing.assert_array_equal(y, X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: collectives.scatter_to(x, "tp", 1),
        lambda x: collectives.reduce_scatter_to(collectives.copy_to(x, "tp"), "tp"),
        lambda x: collectives.own_slice(x, "tp", 1),
    ],
)
def test_a_dim_that_the_ranks_do_not_divide_stops_with_its_shape_and_their_number(function):
    with pytest.raises(ValueError, match=r"dimension 1 .*\(2, 6, 3\) must be divisible by the 4 ranks of axis 'tp'"):
        jax.eval_shape(jax.shard_map(function, mesh=mesh_of(1, 4), in_specs=P(), out_specs=SPLIT), jnp.zeros((2, 6, 3)))


# ---- what is sent -------------------------------------------------------------------------------------------------
def sent(function, in_spec, out_spec) -> dict[str, int]:
    """Number of each collective in the compiled gradient of sum(function(x)^2)."""
    mapped = jax.shard_map(function, mesh=mesh_of(1, RANKS), in_specs=in_spec, out_specs=out_spec)
    gradient = jax.jit(jax.grad(lambda x: (mapped(x) ** 2).sum()))
    shardings = jax.NamedSharding(mesh_of(1, RANKS), in_spec)
    text = gradient.lower(jax.device_put(X, shardings)).compile().as_text()
    kinds = ("all-reduce", "all-gather", "reduce-scatter")
    return {kind: len(re.findall(rf"= \S+ {kind}(?:-start)?\(", text)) for kind in kinds}


def test_the_gradient_of_scatter_to_is_one_all_gather_and_no_all_reduce():
    assert sent(lambda x: collectives.scatter_to(x, "tp", 1), WHOLE, SPLIT) == {
        "all-reduce": 0,
        "all-gather": 1,
        "reduce-scatter": 0,
    }


def test_the_gradient_of_gather_sequence_is_one_reduce_scatter():
    function = lambda x: rank_factor(collectives.gather_sequence(x, "tp"))  # noqa: E731
    counts = sent(function, SPLIT, P(None, None, "tp"))
    assert counts == {"all-reduce": 0, "all-gather": 1, "reduce-scatter": 1}


def test_the_gradient_of_reduce_from_sends_nothing_more_than_its_forward():
    assert sent(lambda x: collectives.reduce_from(x, "tp"), SPLIT, WHOLE)["all-reduce"] == 1


@pytest.mark.parametrize("region", [collectives.enter_region, collectives.leave_region])
def test_a_region_without_replication_types_or_without_its_axis_is_refused(region):
    mesh = mesh_of(1, 4)
    mapped = jax.shard_map(
        lambda x: region(x, "tp", sequence_parallel=False), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match="check_vma=True"):
        mapped(jnp.ones((1, 4, 2)))
    with pytest.raises(ValueError, match="inside jax"):
        region(jnp.ones((1, 4, 2)), "tp", sequence_parallel=False)
    assert region(jnp.ones((1, 4, 2)), None, sequence_parallel=False).shape == (1, 4, 2)
