"""The log of XLA's latency hiding scheduler, and bytes of what a step keeps."""

import math

import jax
import pytest

from jmegatron.config import load_config
from jmegatron.pipeline.schedule import build_schedule, rings
from jmegatron.planner.buffers import carried_bytes
from jmegatron.planner.hlo_schedule import exposed_seconds, scheduler_statistics
from jmegatron.training.program import build_program, resolve_for_run

LOG = b"""I0000 file.cc:1] [latency-hiding-scheduler] Statistics before scheduling:
I0000 file.cc:2] For computation: body.1, module m(1):
Wasted cycles for all-gather: 100.5
Total cycles: 1e+03
I0000 file.cc:3] something else about cycles
I0000 file.cc:1] [latency-hiding-scheduler] Statistics after scheduling:
I0000 file.cc:2] For computation: body.1, module m(1):
Wasted cycles for all-gather: 20
Wasted cycles for collective-permute: 5
Total cycles: 900
I0000 file.cc:2] For computation: main, module m(1):
Wasted cycles for all-gather: 3
"""


def test_the_log_says_what_is_wasted_before_and_after_scheduling():
    found = scheduler_statistics(LOG.splitlines(keepends=True))
    assert found["before"] == {"body.1": {"all-gather": 100.5, "total": 1000.0}}
    assert found["after"]["main"] == {"all-gather": 3.0}
    # A computation that the program does not run counts for nothing.
    exposed = exposed_seconds({**found["after"], "gone": {"all-gather": 1e9}}, {"body.1": 4, "main": 1})
    assert exposed == pytest.approx({"all-gather": 83e-6, "collective-permute": 20e-6})


def test_a_traced_step_tells_the_bytes_of_its_activations_and_gradients():
    line = (
        "--num-layers 4 --hidden-size 32 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64 "
        "--vocab-size 100 "
        "--max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --mock-data --lr 1e-4 --train-iters 9 "
        "--bf16 --hidden-dropout 0 --attention-dropout 0 --recompute-activations --tensor-model-parallel-size 2 "
        "--sequence-parallel --pipeline-model-parallel-size 2"
    )
    config, _ = resolve_for_run(load_config(line.split()), 4)
    program = build_program(config, jax.devices()[:4])
    state = program.abstract_state()
    traced = program.train_step().trace(state, program.abstract_batch(), program.dropout_key())
    found = carried_bytes(traced.jaxpr)
    # 20 s b h / t of a layer and micro-batch and 4 s b a / t of log-sum-exp, two layers a stage.
    places = rings(build_schedule("1f1b", 2, 4)).residuals.size
    assert found["residuals"] == places * 2 * (20 * 64 * 32 // 2 + 4 * 64 * 4 // 2)
    local = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(state.parameters))
    assert found["gradients"] == 4 * local
