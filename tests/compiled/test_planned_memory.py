"""A step's memory by the closed forms against what XLA needs for H100s."""

import pytest
from compiled_support import program_of

from jmegatron.planner import hlo, memory
from jmegatron.planner.topology import compile_for
from jmegatron.training.build import formula_layout, formula_shape

pytestmark = pytest.mark.gpu_compiler

MODEL = (
    "--num-layers 16 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --position-embedding-type rope "
    "--vocab-size 32768 --untie-embeddings-and-output-weights --mock-data --lr 1e-4 --train-iters 10 --bf16 "
    "--hidden-dropout 0 --attention-dropout 0 --attention-backend fused"
)


@pytest.mark.parametrize(
    "layout",
    [
        "--global-batch-size 8 --micro-batch-size 1 --recompute-granularity full --use-distributed-optimizer",
        "--global-batch-size 16 --micro-batch-size 4 --tensor-model-parallel-size 8 --sequence-parallel "
        "--recompute-granularity selective",
    ],
    ids=["dp 8", "tp 8"],
)
def test_the_peak_is_estimated_within_a_tenth(layout):
    program = program_of(f"{MODEL} {layout}".split(), "h100", 8)
    step = compile_for(program.train_step(), program.abstract_state(), program.abstract_batch(), program.dropout_key())
    found = hlo.memory(step)
    estimate = memory.memory_of_step(
        formula_shape(program.config), formula_layout(program.config, program.mesh.shape["dp"])
    )
    assert estimate.state.between_steps == pytest.approx(found.argument_bytes, rel=1e-3)
    assert estimate.total == pytest.approx(found.argument_bytes + found.temp_bytes, rel=0.1)
