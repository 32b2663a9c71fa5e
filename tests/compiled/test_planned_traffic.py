"""Bytes that the closed forms say a step sends, against the compiled step's, axis by axis (fp32 on CPU devices)."""

import collections

import pytest
from compiled_support import program_of

from jmegatron.planner import costs, hlo, times
from jmegatron.planner.topology import compile_for
from jmegatron.training.build import formula_layout, formula_shape

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --micro-batch-size 2 --mock-data --lr 1e-3 --train-iters 5 --vocab-size 512 "
    "--hidden-dropout 0 --attention-dropout 0"
)
AXES = {("tp",): "tp", ("cp",): "cp", ("pp",): "pp", ("dp", "cp"): "data", ("dp",): "data"}
SMALL = 1000
"""Bytes of the step's own sums: norms of gradients, counts of tokens, losses."""


def compiled_and_planned(words):
    """({(axis, kind): bytes} of the compiled step, of the closed forms, the layout)."""
    program = program_of(f"{MODEL} {words}".split(), "cpu", 8)
    step = compile_for(program.train_step(), program.abstract_state(), program.abstract_batch(), program.dropout_key())
    found, planned = collections.Counter(), collections.Counter()
    for (axes, kind), traffic in hlo.summary(hlo.collectives(hlo.load(step), dict(program.mesh.shape))).items():
        if axes in AXES:
            found[AXES[axes], kind.removeprefix("collective-")] += traffic.wire_bytes
    layout = formula_layout(program.config, program.mesh.shape["dp"])
    for one in times.communication(formula_shape(program.config), layout):
        planned[one.axis, one.kind] += one.bytes
    return found, planned, layout


def test_without_stages_every_axis_sends_what_is_planned():
    found, planned, _ = compiled_and_planned(
        "--global-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 "
        "--use-distributed-optimizer --recompute-granularity selective"
    )
    large = {key: size for key, size in found.items() if key != ("tp", "all-reduce") and size > SMALL}
    assert large == dict(planned)
    # Norms and output biases, whose gradients are parts over tp, and one number of each token's loss.
    assert found["tp", "all-reduce"] < 0.02 * sum(planned.values())


def test_with_stages_idle_slots_send_as_much_as_full_ones():
    found, planned, layout = compiled_and_planned(
        "--global-batch-size 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    )
    executed = costs.slots(layout) / (layout.num_microbatches * layout.num_chunks)
    assert executed == 5 / 4
    assert found["pp", "permute"] == executed * planned["pp", "permute"]
    assert found["data", "all-reduce"] == pytest.approx(planned["data", "all-reduce"], abs=SMALL)
    for key in (("tp", "all-reduce"), ("pp", "all-reduce")):
        # Embeddings are looked up in p + m ticks, the rest of both ends runs once a micro-batch.
        assert planned[key] < found[key] <= executed * planned[key] + SMALL
