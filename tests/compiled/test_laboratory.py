"""The laboratory on a whole small step: counted on the optimised program, for CPU devices and for GPUs that are absent.

The step is a pipeline stage of two MLP layers (column and row parallel over tp) in a scan, in a scan over micro-batches
that hands activations on over pp, with gradients reduce-scattered over dp at the end. All counts are known by hand.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmegatron.planner import hlo
from jmegatron.planner.cards import CARDS
from jmegatron.planner.topology import compile_for, compile_only_devices, gpu_compiler_available

HIDDEN, FFN, TOKENS, LAYERS = 256, 1024, 128, 2  # tokens and layers are those of one device
AXES = ("pp", "dp", "ep", "cp", "tp")


@dataclasses.dataclass(frozen=True)
class Case:
    target: str
    mesh_shape: tuple[int, ...]
    num_microbatches: int = 3

    @property
    def mesh(self):
        return dict(zip(AXES, self.mesh_shape, strict=True))

    @property
    def wire_itemsize(self):
        # The CPU back end computes collectives of bf16 in f32.
        return 4 if self.target == "cpu" else 2


CPU = Case("cpu", (2, 2, 1, 1, 2))
GPUS = [Case("h100", (2, 2, 1, 1, 2)), Case("h100", (4, 16, 1, 1, 8))]
CASES = [
    pytest.param(CPU, id="cpu-8"),
    *(pytest.param(case, id=f"h100-{np.prod(case.mesh_shape)}", marks=pytest.mark.gpu_compiler) for case in GPUS),
]


def devices_of(case):
    num_devices = int(np.prod(case.mesh_shape))
    if case.target == "cpu":
        return jax.devices()[:num_devices]
    available, reason = gpu_compiler_available()
    if not available:
        pytest.skip(reason)
    return compile_only_devices(case.target, num_devices)


def local_step(first, second, batch, num_stages):
    """Loss and reduce-scattered gradients of one device's share."""

    def loss(weights, x):
        def layer(h, layer_weights):
            # The pcast is Megatron's f: its transpose is the all-reduce of the backward pass.
            inner = jax.nn.gelu(lax.pcast(h, "tp", to="varying") @ layer_weights[0])
            return h + lax.psum(inner @ layer_weights[1], "tp"), None

        h, _ = lax.scan(layer, x, weights)
        h = lax.ppermute(h, "pp", [(stage, stage + 1) for stage in range(num_stages - 1)])
        return jnp.sum(h.astype(jnp.float32) ** 2)

    def microbatch(carry, x):
        value, gradients = jax.value_and_grad(loss)(weights, lax.pcast(x, "pp", to="varying"))
        return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), carry, (value, gradients)), None

    weights = lax.pcast((first, second), "dp", to="varying")
    zero = lax.pcast(jnp.float32(0), ("pp", "dp"), to="varying")
    start = (zero, jax.tree.map(lambda weight: jnp.zeros_like(weight, jnp.float32), weights))
    (value, gradients), _ = lax.scan(microbatch, start, batch)
    scattered = [lax.psum_scatter(each, "dp", scatter_dimension=1, tiled=True) for each in gradients]
    return lax.psum(value, ("pp", "dp")), *scattered


@functools.cache
def compiled(case):
    mesh = Mesh(np.array(devices_of(case)).reshape(case.mesh_shape), AXES)
    specs = (P("pp", None, "tp"), P("pp", "tp"), P(None, "dp"))
    gradient_specs = (P("pp", "dp", "tp"), P("pp", ("tp", "dp")))
    step = jax.shard_map(
        functools.partial(local_step, num_stages=case.mesh["pp"]),
        mesh=mesh,
        in_specs=specs,
        out_specs=(P(), *gradient_specs),
    )
    layers = LAYERS * case.mesh["pp"]
    shapes = (
        (layers, HIDDEN, FFN),
        (layers, FFN, HIDDEN),
        (case.num_microbatches, TOKENS * case.mesh["dp"], HIDDEN),
    )
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    return compile_for(jax.jit(step), *arguments)


@pytest.mark.parametrize("case", CASES)
def test_executed_flops_are_three_times_the_forward(case):
    flops = hlo.matmul_flops(hlo.load(compiled(case)))
    forward = 2 * 2 * TOKENS * HIDDEN * FFN // case.mesh["tp"] * LAYERS * case.num_microbatches
    assert flops == hlo.MatmulFlops(dot=3 * forward)


@pytest.mark.parametrize("case", CASES)
def test_loops_have_their_trip_counts(case):
    loops = hlo.loops(hlo.load(compiled(case)))
    assert [(loop.depth, loop.trip_count) for loop in loops] == [
        (0, case.num_microbatches),
        (1, LAYERS),
        (1, LAYERS),
    ]


@pytest.mark.parametrize("case", CASES)
def test_traffic_per_axis_is_that_of_the_textbook(case):
    rows = hlo.summary(hlo.collectives(hlo.load(compiled(case)), case.mesh))
    activations = TOKENS * HIDDEN * case.wire_itemsize
    tp, dp, micro = case.mesh["tp"], case.mesh["dp"], case.num_microbatches

    reduce_tp = rows.pop((("tp",), "all-reduce"))
    assert reduce_tp.executions == 2 * LAYERS * micro  # one forward and one backward
    assert reduce_tp.wire_bytes == reduce_tp.executions * 2 * (tp - 1) / tp * activations

    permutes = rows.pop((("pp",), "collective-permute"))
    assert (permutes.executions, permutes.wire_bytes) == (2 * micro, 2 * micro * activations)

    scatter = rows.pop((("dp",), "reduce-scatter"))
    weights = 2 * LAYERS * HIDDEN * FFN // tp
    assert scatter.wire_bytes == (dp - 1) / dp * 4 * weights
    assert scatter.executions <= 2  # once a step; XLA may join the two arrays

    loss = rows.pop((("pp", "dp"), "all-reduce"))
    assert (loss.executions, loss.wire_bytes) == (1, 2 * 4 * (1 - 1 / (case.mesh["pp"] * dp)))
    assert rows == {}


@pytest.mark.parametrize("case", CASES)
def test_nothing_talks_over_dp_inside_the_microbatch_loop(case):
    records = hlo.collectives(hlo.load(compiled(case)), case.mesh)
    depths = {(record.axes, record.kind): len(record.site.loops) for record in records}
    assert depths == {
        (("tp",), "all-reduce"): 2,
        (("pp",), "collective-permute"): 1,
        (("dp",), "reduce-scatter"): 0,
        (("pp", "dp"), "all-reduce"): 0,
    }
    arrays = sum(record.operand_count for record in records if record.kind == "reduce-scatter")
    assert arrays == 2


@pytest.mark.parametrize("case", CASES)
def test_memory_of_arguments_and_results_is_that_of_the_shards(case):
    memory = hlo.memory(compiled(case))
    weights = 2 * LAYERS * HIDDEN * FFN // case.mesh["tp"]
    batch = case.num_microbatches * TOKENS * HIDDEN
    assert memory.argument_bytes == 2 * (weights + batch)
    # The results are a tuple: the loss, the scattered gradients, and a pointer (8 bytes) to each.
    results = 4 + 4 * weights // case.mesh["dp"]
    assert results <= memory.output_bytes <= results + 3 * 8 + 256
    assert memory.alias_bytes == 0
    assert memory.temp_bytes > 0


@pytest.mark.parametrize("case", CASES)
def test_more_microbatches_repeat_the_loop_and_need_no_more_temporary_memory(case):
    more = dataclasses.replace(case, num_microbatches=4 * case.num_microbatches)
    few, many = (hlo.load(compiled(each)) for each in (case, more))
    assert hlo.matmul_flops(many).total == 4 * hlo.matmul_flops(few).total
    if case.target != "cpu":  # the CPU back end of jax 0.10 converts the whole bf16 batch to f32 before the loop
        assert hlo.memory(compiled(more)).temp_bytes <= 1.01 * hlo.memory(compiled(case)).temp_bytes


# ---- what only the GPU back end has ---------------------------------------------------------------------------------


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("case", GPUS, ids=lambda case: f"h100-{np.prod(case.mesh_shape)}")
def test_asynchronous_pairs_are_those_collectives_that_are_not_synchronous(case):
    read = hlo.load(compiled(case))
    started = {record.name: record.axes for record in hlo.collectives(read, case.mesh) if record.is_async}
    pairs = {pair.start: pair.axes for pair in hlo.async_pairs(read, case.mesh)}
    assert pairs == started
    assert started


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("library", ["triton", "cublas"])
def test_both_gemm_libraries_count_the_same(library):
    (device,) = devices_of(Case("h100", (1, 1, 1, 1, 1)))
    sharding = NamedSharding(Mesh(np.array([device]), ("tp",)), P())
    left = jax.ShapeDtypeStruct((4, 256, 512), jnp.bfloat16, sharding=sharding)
    right = jax.ShapeDtypeStruct((4, 512, 128), jnp.bfloat16, sharding=sharding)
    options = {"xla_gpu_enable_triton_gemm": library == "triton"}
    step = compile_for(jax.jit(jnp.matmul), left, right, compiler_options=options)
    assert ("__cublas" in step.as_text()) == (library == "cublas")
    assert hlo.matmul_flops(hlo.load(step)).dot == 2 * 4 * 256 * 512 * 128


@pytest.mark.gpu_compiler
def test_cudnn_attention_is_counted_forward_and_backward():
    (device,) = devices_of(Case("h100", (1, 1, 1, 1, 1)))
    sharding = NamedSharding(Mesh(np.array([device]), ("tp",)), P())
    query = jax.ShapeDtypeStruct((2, 512, 8, 128), jnp.bfloat16, sharding=sharding)
    key = jax.ShapeDtypeStruct((2, 512, 2, 128), jnp.bfloat16, sharding=sharding)

    def loss(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32))

    flops = hlo.matmul_flops(hlo.load(compile_for(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), query, key, key)))
    forward = 2 * 2 * 2 * 8 * 512 * 512 * 128
    assert flops == hlo.MatmulFlops(attention=3 * forward, attention_visible=3 * forward // 2)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("target", sorted(CARDS))
def test_every_described_gpu_can_be_compiled_for(target):
    case = Case(target, (1, 2, 1, 1, 8))
    devices = devices_of(case)
    assert len(devices) == 16
    assert {device.process_index for device in devices} == {0, 1}
    mesh = Mesh(np.array(devices).reshape(2, 8), ("dp", "tp"))
    step = jax.jit(
        jax.shard_map(lambda x: lax.psum(x @ x.T, "tp"), mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp"))
    )
    x = jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("dp", "tp")))
    (record,) = hlo.collectives(hlo.load(compile_for(step, x)), {"dp": 2, "tp": 8})
    assert (record.axes, record.operand_bytes) == (("tp",), 128 * 128 * 2)
