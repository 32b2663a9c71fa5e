"""Analysis of programs compiled here for 8 virtual CPU devices, with counts known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmegatron.planner import hlo

MESH_SHAPE = {"pp": 2, "dp": 2, "ep": 1, "cp": 1, "tp": 2}


@pytest.fixture(scope="module")
def mesh():
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    return Mesh(np.array(jax.devices()[:8]).reshape(tuple(MESH_SHAPE.values())), tuple(MESH_SHAPE))


def compiled(function, *shapes):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()


def sharded(mesh, function, *arguments, out_specs):
    """Module of a shard_map; each argument is (shape, spec)."""
    body = jax.shard_map(function, mesh=mesh, in_specs=tuple(spec for _, spec in arguments), out_specs=out_specs)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec)) for shape, spec in arguments]
    return hlo.load(jax.jit(body).lower(*shapes).compile())


def test_a_scan_of_matmuls_counts_every_step():
    def function(x, weights):
        return lax.scan(lambda carry, weight: (jnp.tanh(carry @ weight), None), x, weights)[0]

    read = hlo.load(compiled(function, (64, 96), (10, 96, 96)))
    assert hlo.matmul_flops(read) == hlo.MatmulFlops(dot=10 * 2 * 64 * 96 * 96)
    assert [each.trip_count for each in hlo.loops(read)] == [10]


def test_the_gradient_of_a_scan_of_matmuls_costs_three_times_as_much():
    def loss(weights, x):
        return jnp.sum(lax.scan(lambda carry, weight: (jnp.tanh(carry @ weight), None), x, weights)[0])

    read = hlo.load(compiled(jax.grad(loss, argnums=(0, 1)), (10, 96, 96), (64, 96)))
    assert hlo.matmul_flops(read).dot == 3 * 10 * 2 * 64 * 96 * 96


def test_batched_dots_count_their_batch():
    def scores(q, k):
        return jnp.einsum("bsnh,btnh->bnst", q, k)

    read = hlo.load(compiled(scores, (2, 48, 3, 32), (2, 64, 3, 32)))
    assert hlo.matmul_flops(read).dot == 2 * 2 * 3 * 48 * 64 * 32


def test_both_forms_of_the_text_give_the_same():
    step = compiled(lambda a, b: jnp.tanh(a @ b), (64, 64), (64, 64))
    (other,) = step.runtime_executable().hlo_modules()
    assert hlo.matmul_flops(hlo.load(step)) == hlo.matmul_flops(hlo.load(other.to_string()))
    assert hlo.matmul_flops(hlo.load(step)).dot == 2 * 64**3


def test_a_loop_with_a_bound_from_outside_is_unknown_not_one():
    def function(x, n):
        return lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, jnp.tanh(s[1] @ s[1])), (0, x))[1]

    arguments = (jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    read = hlo.load(jax.jit(function).lower(*arguments).compile())
    (loop,) = hlo.loops(read)
    assert loop.trip_count is None
    with pytest.raises(hlo.UnknownTripCountError, match=loop.name):
        hlo.matmul_flops(read)
    assert hlo.matmul_flops(read, {loop.name: 6}).dot == 6 * 2 * 64**3


def test_sums_in_nested_scans_are_counted_per_axis(mesh):
    def function(x):
        def inner(h, _):
            return lax.pcast(lax.psum(jnp.sin(h), "tp"), "tp", to="varying"), None

        def outer(h, _):
            h, _ = lax.scan(inner, h, None, length=5)
            return lax.pcast(lax.psum(jnp.cos(h), "dp"), "dp", to="varying"), None

        return lax.scan(outer, x, None, length=3)[0]

    read = sharded(mesh, function, ((64, 32), P(("dp", "tp"))), out_specs=P(("dp", "tp")))
    rows = hlo.summary(hlo.collectives(read, MESH_SHAPE))
    assert set(rows) == {(("tp",), "all-reduce"), (("dp",), "all-reduce")}
    local_bytes = 16.0 * 32 * 4
    assert rows[("tp",), "all-reduce"] == hlo.AxisTraffic(("tp",), "all-reduce", 1, 15, 15 * local_bytes)
    assert rows[("dp",), "all-reduce"] == hlo.AxisTraffic(("dp",), "all-reduce", 1, 3, 3 * local_bytes)
    depth = {record.axes: len(record.site.loops) for record in hlo.collectives(read, MESH_SHAPE)}
    assert depth == {("tp",): 2, ("dp",): 1}


def test_gather_and_scatter_bytes_are_those_of_the_local_arrays(mesh):
    def function(x):
        whole = lax.all_gather(x, "tp", axis=0, tiled=True)
        return lax.psum_scatter(jnp.sin(whole), "dp", scatter_dimension=1, tiled=True)

    read = sharded(mesh, function, ((64, 32), P("tp", None)), out_specs=P("tp", "dp"))
    gather, scatter = hlo.collectives(read, MESH_SHAPE)
    assert (gather.kind, gather.axes, gather.operand_bytes, gather.result_bytes) == ("all-gather", ("tp",), 4096, 8192)
    assert (scatter.kind, scatter.axes, scatter.operand_bytes, scatter.result_bytes) == (
        "reduce-scatter",
        ("dp",),
        8192,
        4096,
    )
    assert (gather.wire_bytes, scatter.wire_bytes) == (4096, 4096)
    assert "all_gather" in gather.op_name


def test_a_permute_names_the_axis_it_moves_along(mesh):
    def function(x):
        return lax.ppermute(x, "pp", [(0, 1)])

    read = sharded(mesh, function, ((64, 32), P("pp")), out_specs=P("pp"))
    (record,) = hlo.collectives(read, MESH_SHAPE)
    assert (record.kind, record.axes, record.wire_bytes) == ("collective-permute", ("pp",), 32 * 32 * 4)
    assert record.pairs == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_all_to_all_and_sums_over_several_axes_are_named(mesh):
    def function(x):
        return lax.psum(lax.all_to_all(jnp.sin(x), "tp", 0, 1, tiled=True), ("pp", "dp"))

    read = sharded(mesh, function, ((64, 32), P(("pp", "dp", "tp"))), out_specs=P(None, "tp"))
    swap, total = hlo.collectives(read, MESH_SHAPE)
    assert (swap.kind, swap.axes, swap.wire_bytes) == ("all-to-all", ("tp",), 8 * 32 * 4 / 2)
    assert (total.axes, total.group_size) == (("pp", "dp"), 4)


def test_a_conditional_counts_its_larger_branch():
    def function(flag, x):
        return lax.cond(flag[0] > 0, lambda a: jnp.tanh(a @ a) @ a, lambda a: a, x)

    flops = hlo.matmul_flops(hlo.load(compiled(function, (1,), (64, 64))))
    assert flops.dot == 2 * 2 * 64**3
    assert [sorted(branch) for branch in flops.branches.values()] == [[0, 2 * 2 * 64**3]]


def test_donated_memory_is_seen_as_alias():
    def function(a, b):
        return jnp.tanh(a @ b)

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    plain = hlo.memory(jax.jit(function).lower(shape, shape).compile())
    donated = hlo.memory(jax.jit(function, donate_argnums=0).lower(shape, shape).compile())
    assert (plain.argument_bytes, plain.output_bytes, plain.alias_bytes) == (2 * 16384, 16384, 0)
    assert donated.alias_bytes == 16384
    assert donated.total_bytes - donated.temp_bytes == 2 * 16384
