"""Which blocks of the attention matrix are computed, and the compiled program's loops, matmuls and memory."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmegatron.ops.attention import ATTENTION_LSE, ATTENTION_OUT, attention, attention_forward
from jmegatron.ops.attention_mask import AttentionMask
from jmegatron.ops.blockwise_attention import block_pairs
from jmegatron.planner import hlo

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 16, 16


def dense_visible(seq, seq_kv, causal, window):
    distance = np.arange(seq)[:, None] + seq_kv - seq - np.arange(seq_kv)[None, :]
    seen = distance >= 0 if causal or window is not None else np.ones((seq, seq_kv), bool)
    return seen if window is None else seen & (distance <= window)


@pytest.mark.parametrize("window", [None, 0, 5, 30])
@pytest.mark.parametrize("causal", [True, False])
def test_the_pairs_are_those_in_which_something_is_visible_and_own_every_visible_score_once(causal, window):
    lengths = [(16, 16), (17, 17), (10, 10), (8, 24), (40, 9), (100, 31), (1, 5)]
    for (seq, seq_kv), block_size in itertools.product(lengths, (1, 8, 12, 64)):
        blocks = block_pairs(seq, seq_kv, causal=causal, window=window, block_size=block_size)
        visible = dense_visible(seq, seq_kv, causal, window)
        owned = np.zeros((seq, seq_kv), int)
        for row, column in blocks.pairs:
            own = np.s_[row : row + blocks.num_rows, column : column + blocks.num_columns]
            assert visible[own].any(), (seq, seq_kv, block_size)
            owned[own] += 1
        assert owned.max() <= 1, (seq, seq_kv, block_size)
        assert (owned[visible] == 1).all(), (seq, seq_kv, block_size)
        assert max(blocks.num_rows, blocks.num_columns) <= block_size


@pytest.mark.parametrize(("seq", "size"), [(4096, 512), (513, 264), (512, 512), (17, 17), (600, 304), (4100, 456)])
def test_blocks_are_of_equal_size_in_whole_vectors(seq, size):
    blocks = block_pairs(seq, seq, causal=True)
    assert (blocks.num_rows, blocks.num_columns) == (size, size)


# ---- the compiled program -------------------------------------------------------------------------------------------
def compiled(seq, *, causal=True, window=None, kept=None):
    """Forward and backward of one attention; `kept`: names that a checkpoint around it keeps."""
    query = jax.ShapeDtypeStruct((1, seq, HEADS, HEAD_DIM), jnp.float32)
    key = jax.ShapeDtypeStruct((1, seq, KV_HEADS, HEAD_DIM), jnp.float32)
    run = partial(attention, causal=causal, window=window, block_size=BLOCK)
    core = lambda *arrays: run(*arrays)[0]  # noqa: E731
    if kept is not None:
        core = jax.checkpoint(core, policy=jax.checkpoint_policies.save_only_these_names(*kept))

    def both(query, key, value, d_out):
        out, transpose = jax.vjp(core, query, key, value)
        return out, transpose(d_out)

    return jax.jit(both).lower(query, key, key, query).compile()


FLOPS_OF_A_PAIR = 2 * BLOCK * BLOCK * HEADS * HEAD_DIM
"""Of one matmul of a pair of blocks."""


@pytest.mark.parametrize(
    ("causal", "window", "pairs"),
    # 6 x 6 blocks of 16: the triangle; its diagonal and the band that 20 tokens before reach; all.
    [(True, None, 21), (True, 20, 6 + 5 + 4), (False, None, 36)],
)
def test_loops_run_over_the_visible_pairs_with_2_matmuls_forward_and_5_backward(causal, window, pairs):
    module = hlo.load(compiled(6 * BLOCK, causal=causal, window=window))
    assert [loop.trip_count for loop in hlo.loops(module)] == [pairs, pairs]
    assert hlo.matmul_flops(module).total == 7 * pairs * FLOPS_OF_A_PAIR


def test_a_checkpoint_that_keeps_output_and_log_sum_exp_does_not_run_the_forward_again():
    pairs = 10
    flops = {
        kept: hlo.matmul_flops(hlo.load(compiled(4 * BLOCK, kept=kept))).total
        for kept in ((ATTENTION_OUT, ATTENTION_LSE), ())
    }
    assert flops == {
        (ATTENTION_OUT, ATTENTION_LSE): 7 * pairs * FLOPS_OF_A_PAIR,
        (): 9 * pairs * FLOPS_OF_A_PAIR,
    }


def test_no_array_has_queries_by_keys_and_memory_grows_as_the_sequence():
    few, many = compiled(8 * BLOCK), compiled(16 * BLOCK)
    for seq, program in ((8 * BLOCK, few), (16 * BLOCK, many)):
        shapes = re.findall(r"\[(\d+(?:,\d+)*)\]", program.as_text())
        dims = [[int(dim) for dim in shape.split(",")] for shape in shapes]
        assert not [shape for shape in dims if sum(dim >= seq for dim in shape) > 1]
        # Keys are [1, seq, 2, 16]; repeated for every query head they would be [1, seq, 4, 16] or [1, seq, 2, 2, 16].
    assert hlo.memory(many).temp_bytes <= 2.1 * hlo.memory(few).temp_bytes


def test_keys_and_values_are_not_repeated_for_the_query_heads_of_their_group():
    """All that has the size of 256 keys for every query head is out, and what it is summed up in."""
    seq, seq_kv = BLOCK, 16 * BLOCK
    query = jax.ShapeDtypeStruct((1, seq, HEADS, HEAD_DIM), jnp.float32)
    key = jax.ShapeDtypeStruct((1, seq_kv, KV_HEADS, HEAD_DIM), jnp.float32)
    run = (
        jax.jit(partial(attention_forward, mask=AttentionMask(causal=False), block_size=BLOCK))
        .lower(query, key, key)
        .compile()
    )
    sizes = [np.prod([int(d) for d in s.split(",")]) for s in re.findall(r"\[(\d+(?:,\d+)*)\]", run.as_text())]
    assert max(sizes) == seq_kv * KV_HEADS * HEAD_DIM
