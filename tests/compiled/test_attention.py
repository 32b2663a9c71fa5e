"""Attention as XLA compiled it for H100s inside a shard_map: cuDNN's calls, loops over blocks, matmuls and memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmegatron.ops.attention import (
    ATTENTION_LSE,
    ATTENTION_OUT,
    AttentionDropout,
    TokenIds,
    attention,
    attention_backward,
    attention_forward,
)
from jmegatron.ops.attention_mask import AttentionMask
from jmegatron.ops.blockwise_attention import BLOCK_SIZE
from jmegatron.planner import hlo
from jmegatron.planner.topology import compile_for, compile_only_devices, gpu_compiler_available

pytestmark = pytest.mark.gpu_compiler

RANKS, HEADS, KV_HEADS, HEAD_DIM, SEQ = 2, 8, 2, 128, 4096
"""Heads are those of one rank."""
FORWARD = 4 * HEADS * SEQ * SEQ * HEAD_DIM
"""FLOPs of two matmuls over all scores of a rank."""
QUERY_BYTES = 2 * SEQ * HEADS * HEAD_DIM


@functools.cache
def mesh():
    available, reason = gpu_compiler_available()
    if not available:
        pytest.skip(reason)
    return Mesh(np.array(compile_only_devices("h100", RANKS)), ("tp",))


def compiled(local, *, seq=SEQ, dtype=jnp.bfloat16, num_heads=(HEADS, KV_HEADS, KV_HEADS, HEADS)):
    """`local` of query, key, value and the gradient of out, each of a rank, heads divided over the ranks."""
    spec = P(None, None, "tp")
    function = jax.shard_map(local, mesh=mesh(), in_specs=spec, out_specs=spec)
    arrays = [
        jax.ShapeDtypeStruct((1, seq, RANKS * heads, HEAD_DIM), dtype, sharding=NamedSharding(mesh(), spec))
        for heads in num_heads
    ]
    return compile_for(jax.jit(function), *arrays)


def gradients(**keywords):
    kept = jax.checkpoint_policies.save_only_these_names(ATTENTION_OUT, ATTENTION_LSE)

    def local(query, key, value, d_out):
        core = jax.checkpoint(lambda *arrays: attention(*arrays, **keywords)[0], policy=kept)
        return jax.vjp(core, query, key, value)[1](d_out)

    return local


def calls(program):
    return re.findall(r'custom_call_target="(__cudnn\$[^"]*)"', program.as_text())


def arrays_of_scores(program, seq=SEQ):
    """Arrays with two dims of the sequence's length."""
    shapes = re.findall(r"\w+\[(\d+(?:,\d+)*)\]", program.as_text())
    return [shape for shape in shapes if sum(int(dim) >= seq for dim in shape.split(",")) > 1]


@pytest.mark.parametrize(
    ("keywords", "mask", "window"),
    [
        ({"causal": True}, "CAUSAL", 0),
        ({"causal": False}, "NO_MASK", 0),
        ({"causal": True, "window": 255}, "CAUSAL", 256),  # cuDNN counts the query itself
    ],
)
def test_fused_attention_is_one_cudnn_call_each_way_with_grouped_keys_and_linear_memory(keywords, mask, window):
    program = compiled(gradients(**keywords, backend="fused"))
    assert calls(program) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert re.findall(r'"mask_type": ?"(\w+)"', program.as_text()) == [mask] * 2
    assert re.findall(r'"sliding_window_length": ?"?(\d+)', program.as_text()) == [str(window)] * 2
    assert arrays_of_scores(program) == []
    assert hlo.memory(program).temp_bytes < 1.1 * QUERY_BYTES  # out and its log-sum-exp
    counted = hlo.matmul_flops(hlo.load(program))
    seen = 3 * FORWARD // (2 if keywords["causal"] else 1)
    assert counted == hlo.MatmulFlops(attention=3 * FORWARD, attention_visible=seen)


def test_a_rings_backward_with_a_given_log_sum_exp_is_one_cudnn_call_and_half_precision_is_all_it_rounds_to():
    def local(query, key, value, d_out):
        options = dict(mask=AttentionMask(causal=False), backend="fused", out_dtype=jnp.float32)
        out, lse = attention_forward(query, key, value, **options)
        assert (out.dtype, lse.dtype, lse.shape) == (jnp.float32, jnp.float32, (1, HEADS, SEQ))
        merged = out * 0.5, lse + 1.0
        return attention_backward(query, key, value, *merged, d_out, **options)

    program = compiled(local)
    assert calls(program) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    # The log-sum-exp never passes through bfloat16, where a probability would be per cents off.
    assert f"bf16[1,{HEADS},{SEQ}]" not in program.as_text()
    assert f"f32[1,{HEADS},{SEQ}]" in program.as_text()


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "causal, window, segments and dropout"])
def test_attention_in_blocks_runs_over_the_visible_pairs_and_its_memory_is_linear(masked):
    def local(query, key, value, d_out):
        heads = jax.lax.axis_index("tp") * HEADS + jnp.arange(HEADS)
        tokens = TokenIds(None, jnp.arange(SEQ)[None] // 1000)
        masks = {
            "query_tokens": tokens,
            "key_tokens": tokens,
            "window": 1000,
            "dropout": AttentionDropout(jax.random.key(0), jnp.arange(1), heads, 0.1),
        }
        return gradients(causal=True, **masks if masked else {})(query, key, value, d_out)

    program = compiled(local)
    module = hlo.load(program)
    blocks = SEQ // BLOCK_SIZE
    pairs = blocks + (blocks - 1) + (blocks - 2) if masked else blocks * (blocks + 1) // 2
    assert [loop.trip_count for loop in hlo.loops(module)] == [pairs] * 2
    assert hlo.matmul_flops(module).total == pairs * 7 * FORWARD // 2 // blocks**2
    assert arrays_of_scores(program) == []
    scores = 4 * HEADS * BLOCK_SIZE**2
    assert hlo.memory(program).temp_bytes < 6 * QUERY_BYTES + 4 * scores
