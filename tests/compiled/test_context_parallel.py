"""Attention over cp as XLA compiled it, for CPU devices and for H100s that are absent: bytes, FLOPs, overlap.

Nothing runs. n: ranks of cp; c: tokens of a chunk (a rank holds two); KV: bytes of a rank's keys and values. Units of
FLOPs: one matmul of c x c scores, of which attention has 2 forward and 5 backward (hlo.py counts 4 of a flash kernel).
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from compiled_support import program_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tolerances import MATMUL_FLOPS_RATIO

from jmegatron.context_parallel.attention import context_parallel_attention
from jmegatron.context_parallel.layout import ContextParallel
from jmegatron.mesh import build_mesh
from jmegatron.ops.attention import ATTENTION_LSE, ATTENTION_OUT
from jmegatron.planner import hlo
from jmegatron.planner.topology import compile_for, compile_only_devices, gpu_compiler_available
from jmegatron.training.xla_flags import recommended

WAYS = ("p2p", "all_gather", "a2a")
LAYERS = 3
"""Of a scan, as in a model: forward and backward are loops, between which XLA cannot share what is equal."""
SMALL = dict(chunk=512, heads=4, kv_heads=4, head_dim=8)
"""A chunk is what plain XLA computes as one block."""
H100 = dict(chunk=4096, heads=8, kv_heads=8, head_dim=128)


FORWARD, BACKWARD = slice(0, 1), slice(1, 2)
POLICIES = {
    "names": jax.checkpoint_policies.save_only_these_names(ATTENTION_OUT, ATTENTION_LSE),
    "nothing": jax.checkpoint_policies.nothing_saveable,
}


@functools.cache
def _compiled(way, cp, keeps, target, options, chunk, heads, kv_heads, head_dim, causal):
    fused = target != "cpu"
    context = ContextParallel("cp", cp, way, "zigzag" if causal else "contiguous")
    attend = functools.partial(
        context_parallel_attention, context=context, causal=causal, backend="fused" if fused else "unfused"
    )
    if keeps != "all":
        attend = jax.checkpoint(attend, policy=POLICIES[keeps])

    def layers(query, key_value):
        layer = lambda query, key_value: (attend(query, *key_value), None)  # noqa: E731
        return lax.scan(layer, query, key_value)[0]

    def body(query, key, value, d_out):
        key_value = key, value
        out, backward = jax.vjp(layers, query, key_value)
        d_query, d_key_value = backward(d_out)
        return out, d_query, *d_key_value

    devices = compile_only_devices(target, cp) if fused else jax.devices()[:cp]
    mesh = build_mesh(devices, cp=cp)
    tokens, of_layers = P(None, "cp"), P(None, None, "cp")
    run = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(tokens, of_layers, of_layers, tokens),
        out_specs=(tokens, tokens, of_layers, of_layers),
    )
    shape = lambda spec, *dims: jax.ShapeDtypeStruct(  # noqa: E731
        dims, jnp.bfloat16 if fused else jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    query = shape(tokens, 1, 2 * chunk * cp, heads, head_dim)
    key = shape(of_layers, LAYERS, 1, 2 * chunk * cp, kv_heads, head_dim)
    chosen = recommended(dict(mesh.shape), on_gpu=True) if options == "run" else {}
    return hlo.load(compile_for(jax.jit(run), query, key, key, query, compiler_options=chosen)), dict(mesh.shape)


def compiled(way, cp, keeps="all", target="cpu", options="run", sizes=SMALL, causal=True):
    """(module, mesh shape); keeps: what a checkpoint keeps, all: there is none."""
    return _compiled(way, cp, keeps, target, options, **sizes, causal=causal)


def kv_bytes(sizes, itemsize=4):
    return 2 * (2 * sizes["chunk"]) * sizes["kv_heads"] * sizes["head_dim"] * itemsize


def traffic(module, mesh_shape, which=slice(None)) -> dict[str, float]:
    """Bytes that a rank sends over cp for one layer, by kind; `which`: of the loops over layers (forward, backward)."""
    records = hlo.collectives(module, mesh_shape)
    assert all(each.site.loops and each.axes == ("cp",) for each in records)
    loops = list(dict.fromkeys(each.site.loops[0] for each in records))
    assert len(loops) == 2
    rows = hlo.summary(each for each in records if each.site.loops[0] in loops[which])
    return {kind: row.wire_bytes / LAYERS for (_, kind), row in rows.items()}


def flops_of_layer(module) -> float:
    flops = hlo.matmul_flops(module)
    assert flops.uncounted == ()
    return flops.total / LAYERS


# ---- bytes --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("cp", "causal"), [(2, True), (4, True), (4, False), (8, True)])
def test_a_ring_sends_n_minus_1_kv_forward_and_as_often_kv_and_its_gradient_backward(cp, causal):
    kv, module = kv_bytes(SMALL), compiled("p2p", cp, causal=causal)
    assert traffic(*module, FORWARD) == {"collective-permute": (cp - 1) * kv}
    assert traffic(*module, BACKWARD) == {"collective-permute": (cp - 1) * (kv + kv)}


def test_all_gather_sends_kv_twice_and_its_gradient_once():
    kv, cp = kv_bytes(SMALL), 4
    module = compiled("all_gather", cp)
    assert traffic(*module, FORWARD) == {"all-gather": (cp - 1) * kv}
    assert traffic(*module, BACKWARD) == {"all-gather": (cp - 1) * kv, "reduce-scatter": (cp - 1) * kv}


def test_a2a_sends_its_share_of_query_key_value_and_output_in_two_collectives_each_way():
    kv, cp = kv_bytes(SMALL), 4
    module = compiled("a2a", cp)
    for which in (FORWARD, BACKWARD):
        assert traffic(*module, which) == {"all-to-all": (cp - 1) / cp * 2 * kv}
    assert len(hlo.collectives(*module)) == 4


def test_a_checkpoint_that_keeps_the_names_runs_the_ring_no_third_time():
    without, names, nothing = (compiled("p2p", 2, keeps) for keeps in ("all", "names", "nothing"))
    assert traffic(*names) == traffic(*without)
    assert flops_of_layer(names[0]) == flops_of_layer(without[0])
    assert flops_of_layer(nothing[0]) == pytest.approx(9 / 7 * flops_of_layer(without[0]))


# ---- FLOPs --------------------------------------------------------------------------------------------------------
def unit_flops(sizes) -> int:
    return 2 * sizes["chunk"] ** 2 * sizes["head_dim"] * sizes["heads"]


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_multiplies_half_of_full_attention_and_the_diagonal_without_a_branch(way):
    cp = 4
    module, _ = compiled(way, cp)
    executed = flops_of_layer(module) / (7 * unit_flops(SMALL))
    half_and_diagonal = 2 * cp + 1  # of the 4 cp blocks c x c; the diagonal's two hide half of themselves
    assert 2 * cp <= executed <= MATMUL_FLOPS_RATIO * half_and_diagonal
    assert not [each for each, _ in hlo.walk(module) if each.opcode == "conditional"]


def test_full_attention_multiplies_every_block_once():
    assert flops_of_layer(compiled("p2p", 4, causal=False)[0]) == 7 * unit_flops(SMALL) * 4 * 4


# ---- H100 ---------------------------------------------------------------------------------------------------------
def on_h100(way, cp, **more):
    available, reason = gpu_compiler_available()
    if not available:
        pytest.skip(reason)
    return compiled(way, cp, target="h100", sizes=H100, **more)


def hidden_under(module, mesh_shape) -> list[tuple[str, str, list[str]]]:
    """(kind, element type, attention calls between start and done) of each collective, in schedule order."""
    pairs = {pair.operation: pair for pair in hlo.async_pairs(module, mesh_shape)}
    calls = lambda name: [work.name for work in pairs[name].between if work.opcode == "custom-call" and work.flops]  # noqa: E731
    return [
        (each.kind, each.dtype, calls(each.name) if each.name in pairs else [])
        for each in hlo.collectives(module, mesh_shape)
    ]


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_every_permute_of_the_ring_runs_beside_an_attention_kernel(cp):
    module, mesh_shape = on_h100("p2p", cp)
    permutes = hidden_under(module, mesh_shape)
    assert [each for each in permutes if not each[2]] == []
    kv = kv_bytes(H100, itemsize=2)
    assert traffic(module, mesh_shape, FORWARD) == {"collective-permute": (cp - 1) * kv}
    assert traffic(module, mesh_shape, BACKWARD) == {"collective-permute": (cp - 1) * (kv + 2 * kv)}
    flops = hlo.matmul_flops(module)
    assert flops.dot == 0
    assert flops.attention_visible == (2 + 4) * unit_flops(H100) * 2 * cp * LAYERS


@pytest.mark.gpu_compiler
def test_the_forward_ring_is_hidden_with_xlas_default_options_as_well():
    permutes = hidden_under(*on_h100("p2p", 4, options="none"))[:3]
    assert [each for each in permutes if each[:2] != ("collective-permute", "bf16") or not each[2]] == []


@pytest.mark.gpu_compiler
def test_in_a_whole_step_every_permute_of_the_ring_is_hidden_and_none_is_sent_twice():
    cp, layers = 4, 2
    words = (
        f"--num-layers {layers} --hidden-size 1024 --num-attention-heads 8 --seq-length 16384"
        " --max-position-embeddings 16384 --position-embedding-type rope --vocab-size 1024 --micro-batch-size 1"
        f" --global-batch-size 1 --lr 1e-4 --train-iters 2 --mock-data --hidden-dropout 0 --attention-dropout 0 --bf16"
        f" --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size {cp} --attention-backend fused"
        " --recompute-granularity selective"
    )
    program = program_of(words.split(), "h100", 8)
    step = program.train_step()
    module = hlo.load(compile_for(step, program.abstract_state(), program.abstract_batch(), program.dropout_key()))
    permutes = [pair for pair in hlo.async_pairs(module, dict(program.mesh.shape)) if pair.kind == "collective-permute"]
    assert [pair for pair in permutes if pair.axes != ("cp",) or not pair.is_hidden] == []
    # KV forward; KV and its gradient in fp32 backward: recompute keeps the ring's result. XLA may join two of them.
    sent = [each for each in hlo.collectives(module, dict(program.mesh.shape)) if each.kind == "collective-permute"]
    kv = 2 * 4096 * 4 * 128 * 2  # keys and values, tokens of a rank, heads of a tp rank, head_dim, bytes
    assert sum(each.operand_bytes * each.site.executions for each in sent) == layers * (cp - 1) * (kv + kv + 2 * kv)
