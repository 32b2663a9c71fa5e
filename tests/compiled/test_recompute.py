"""Activation memory and matmuls of the step as XLA compiled it for H100s, with each kind of recompute.

Two depths give what a layer costs: fp32 gradients and what is kept of it, in s b h / t (34 in arXiv:2205.05198). A kind
is `none`, `selective`, `full`, or full with its method and number of layers: `uniform 2`, `block 4`.
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
    method, _, number = recompute.partition(" ")
    if number:
        words += f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {number}".split()
    elif recompute != "none":
        words += ["--recompute-granularity", recompute]
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


@pytest.mark.parametrize(
    # Four layers in units of two are less than what a unit needs while it is computed again.
    ("recompute", "most", "depths"),
    [("selective", 20, DEPTHS), ("full", 2, DEPTHS), ("uniform 2", 1, (8, 12))],
)
def test_a_layer_keeps_what_was_named_and_nothing_else(recompute, most, depths):
    few, many = (hlo.memory(compiled(recompute, depth)).temp_bytes for depth in depths)
    a_layer = (many - few) / (depths[1] - depths[0])
    activations = (a_layer - 4 * layer_parameters() / TP) / UNIT
    # Norms and output biases are whole on each rank, which counts as up to 0.05; alignment is the rest.
    assert most - 0.2 <= activations <= most + 0.2


BLOCKS = ("block 4", "block 8")


def test_layers_behind_a_block_keep_what_they_do_without_recompute():
    few, many = (hlo.memory(compiled(block, DEPTHS[1])).temp_bytes for block in BLOCKS)
    # 20 + 4 t without recompute, 2 with it.
    assert (few - many) / (4 * UNIT) == pytest.approx(20 + 4 * TP - 2, abs=0.2)


def test_a_block_multiplies_its_layers_again_and_no_other():
    few, many, all_layers = (
        hlo.matmul_flops(hlo.load(compiled(kind, DEPTHS[1]))).total * TP for kind in (*BLOCKS, "full")
    )
    assert many - few == pytest.approx(all_layers - many, rel=0.001)
    shape, tokens = shape_of("full", DEPTHS[1]), SEQ * MICROBATCHES
    plain = formulas.model_flops_per_step(shape, tokens)
    forward = (formulas.executed_flops_per_step(shape, tokens, recompute="full") - plain) / DEPTHS[1]
    assert plain + 4 * forward / 2 < few <= MATMUL_FLOPS_RATIO * (plain + 4 * forward)


@pytest.mark.parametrize(("recompute", "depths"), [("selective", DEPTHS), ("full", DEPTHS), ("uniform 2", (8, 12))])
def test_a_layer_multiplies_again_what_the_kind_of_recompute_asks_for(recompute, depths):
    few, many = (hlo.matmul_flops(hlo.load(compiled(recompute, depth))) for depth in depths)
    assert many.uncounted == few.uncounted == ()
    executed = (many.total - few.total) * TP
    tokens = SEQ * MICROBATCHES
    theory, plain = (
        sum(
            sign * formulas.executed_flops_per_step(shape_of(recompute, depth), tokens, recompute=kind)
            for depth, sign in zip(depths, (-1, 1), strict=True)
        )
        for kind in (recompute.replace("uniform 2", "full"), "none")
    )
    if recompute == "selective":
        assert executed == plain  # norms and activations alone
    else:
        # Full leaves the last product of a layer out: its backward needs its operands alone.
        assert plain < executed <= MATMUL_FLOPS_RATIO * theory
