"""A mixture of experts as XLA compiled it for H100s that are absent: P4 for experts and the exchange over ep."""

import functools

import pytest
from compiled_support import program_of
from tolerances import EXPERT_BYTES_RATIO, EXPERT_FLOPS_RATIO

from jmegatron.planner import formulas, hlo, times
from jmegatron.planner.topology import compile_for
from jmegatron.training.build import formula_layout, formula_shape

EXPERTS, TOP_K, HIDDEN, SEQ, LAYERS, MICROBATCHES = 8, 2, 256, 1024, 3, 2
WORDS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQ} --vocab-size 1024"
    f" --position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm --mock-data --bf16"
    f" --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --train-iters 10 --lr 1e-4"
    f" --num-experts {EXPERTS} --moe-router-topk {TOP_K} --moe-ffn-hidden-size 512 --moe-aux-loss-coeff 0.01"
    " --attention-backend fused --untie-embeddings-and-output-weights"
)


@functools.cache
def compiled(devices, extra):
    words = f"{WORDS} {extra}".split()
    program = program_of(words, "h100", devices)
    step = program.train_step()
    done = compile_for(step, program.abstract_state(), program.abstract_batch(), program.dropout_key())
    return program, hlo.load(done)


def balanced_flops(module):
    """Matmul FLOPs of a step in which every conditional takes its smallest branch, as with even loads."""
    flops = hlo.matmul_flops(module)
    assert flops.uncounted == ()
    too_many = 0
    for instruction, site in hlo.walk(module):
        if instruction.opcode == "conditional" and instruction.name in flops.branches:
            sizes = flops.branches[instruction.name]
            assert site.executions is not None
            too_many += site.executions * (max(sizes) - min(sizes))
    return flops.total - too_many


LAYOUTS = {
    "ep 4": (4, "--expert-model-parallel-size 4"),
    "ep 2 tp 2": (4, "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    "ep 2 pp 2": (
        4, "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2"
    ),
}  # fmt: skip


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("layout", ["ep 4", "ep 2 tp 2"])
@pytest.mark.parametrize("recompute", ["", "--recompute-granularity selective"])
def test_executed_matmul_flops_are_theory_at_even_loads(layout, recompute):
    devices, words = LAYOUTS[layout]
    ranks = 4 if layout == "ep 4" else 2
    words = f"{words} {recompute}"
    program, module = compiled(devices, f"{words} --global-batch-size {MICROBATCHES * ranks}")
    theory = formulas.executed_flops_per_step(formula_shape(program.config), MICROBATCHES * ranks * SEQ) / devices
    assert 1 / EXPERT_FLOPS_RATIO <= balanced_flops(module) / theory <= EXPERT_FLOPS_RATIO


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("layout", ["ep 4", "ep 2 tp 2"])
@pytest.mark.parametrize("recompute", ["", "--recompute-granularity selective"])
def test_the_exchange_sends_each_row_twice_forward_and_twice_backward(layout, recompute):
    devices, words = LAYOUTS[layout]
    ranks = 4 if layout == "ep 4" else 2
    words = f"{words} {recompute}"
    program, module = compiled(devices, f"{words} --global-batch-size {MICROBATCHES * ranks}")
    records = [c for c in hlo.collectives(module, dict(program.mesh.shape)) if "all-to-all" in c.kind]
    assert {(c.kind, c.axes) for c in records} == {("ragged-all-to-all", ("ep",))}
    got = sum(c.executions * c.operand_bytes for c in records)
    rows = SEQ // program.mesh.shape["tp"] * TOP_K
    theory = 4 * LAYERS * MICROBATCHES * rows * HIDDEN * 2
    assert 1 / EXPERT_BYTES_RATIO <= got / theory <= EXPERT_BYTES_RATIO


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("layout", ["ep 4", "ep 2 tp 2"])
@pytest.mark.parametrize("recompute", ["", "--recompute-granularity selective"])
def test_the_planner_plans_what_is_sent_on_each_axis(layout, recompute):
    devices, words = LAYOUTS[layout]
    ranks = 4 if layout == "ep 4" else 2
    program, module = compiled(devices, f"{words} {recompute} --global-batch-size {MICROBATCHES * ranks}")
    mesh = dict(program.mesh.shape)
    sent = hlo.summary(hlo.collectives(module, mesh))
    planned = dict[tuple[tuple[str, ...], str], float]()
    for one in times.communication(formula_shape(program.config), formula_layout(program.config, mesh["dp"])):
        axes = ("ep",) if one.axis == "data" else (one.axis,)
        planned[axes, one.kind] = planned.get((axes, one.kind), 0.0) + one.bytes
    assert (("ep",), "ragged-all-to-all") in planned
    for key, size in planned.items():
        # Beside gradients and rows a step sums norms, counts and losses.
        assert sent[key].wire_bytes == pytest.approx(size, abs=1000), key
