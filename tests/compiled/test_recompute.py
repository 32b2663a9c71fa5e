"""Activation memory and matmuls of the step as XLA compiled it for H100s, with each kind of recompute.

Two depths give what a layer costs: fp32 gradients and what is kept of it, in s b h / t (34 in arXiv:2205.05198).
"""

import functools

import pytest
from tolerances import MATMUL_FLOPS_RATIO

from jmegatron.config import load_config
from jmegatron.planner import formulas, hlo
from jmegatron.planner.topology import compile_for, compile_only_devices, gpu_compiler_available
from jmegatron.training.build import formula_shape
from jmegatron.training.program import build_program, resolve_for_run

pytestmark = pytest.mark.gpu_compiler

HIDDEN, SEQ, TP, MICROBATCHES = 1024, 2048, 2, 2
DEPTHS = (4, 12)
UNIT = SEQ * HIDDEN / TP
"""s b h / t with one sequence a micro-batch."""


@functools.cache
def program(recompute: str, num_layers: int):
    available, reason = gpu_compiler_available()
    if not available:
        pytest.skip(reason)
    words = (
        f"--num-layers {num_layers} --hidden-size {HIDDEN} --ffn-hidden-size {4 * HIDDEN} --num-attention-heads 8 "
        f"--seq-length {SEQ} --max-position-embeddings {SEQ} --vocab-size 1000 --micro-batch-size 1 "
        f"--global-batch-size {MICROBATCHES} --mock-data --lr 1e-4 --train-iters 10 --bf16 --attention-backend fused "
        f"--hidden-dropout 0 --attention-dropout 0 --tensor-model-parallel-size {TP} --sequence-parallel"
    ).split()
    words += [] if recompute == "none" else ["--recompute-granularity", recompute]
    config, _ = resolve_for_run(load_config(words), TP)
    return build_program(config, compile_only_devices("h100", TP))


@functools.cache
def compiled(recompute: str, num_layers: int):
    one = program(recompute, num_layers)
    return compile_for(one.train_step(), one.abstract_state(), one.abstract_batch(), one.dropout_key())


def shape_of(recompute: str, num_layers: int) -> formulas.GPTShape:
    return formula_shape(program(recompute, num_layers).config)


def layer_parameters() -> int:
    few, more = (formulas.parameters(shape_of("full", depth)).total for depth in DEPTHS)
    return (more - few) // (DEPTHS[1] - DEPTHS[0])


@pytest.mark.parametrize(("recompute", "most"), [("selective", 18), ("full", 2)])
def test_a_layer_keeps_what_was_named_and_nothing_else(recompute, most):
    few, many = (hlo.memory(compiled(recompute, depth)).temp_bytes for depth in DEPTHS)
    a_layer = (many - few) / (DEPTHS[1] - DEPTHS[0])
    activations = (a_layer - 4 * layer_parameters() / TP) / UNIT
    # Norms and output biases are whole on each rank, which counts as up to 0.05; alignment is the rest.
    assert most - 0.2 <= activations <= most + 0.2


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_layer_multiplies_again_what_the_kind_of_recompute_asks_for(recompute):
    few, many = (hlo.matmul_flops(hlo.load(compiled(recompute, depth))) for depth in DEPTHS)
    assert many.uncounted == few.uncounted == ()
    executed = (many.total - few.total) * TP
    tokens = SEQ * MICROBATCHES
    theory, plain = (
        sum(
            sign * formulas.executed_flops_per_step(shape_of(recompute, depth), tokens, recompute=kind)
            for depth, sign in zip(DEPTHS, (-1, 1), strict=True)
        )
        for kind in (recompute, "none")
    )
    # Full leaves the last product of a layer out: its backward needs its operands alone.
    assert plain < executed <= MATMUL_FLOPS_RATIO * theory
