"""A dry run through the real GPU compiler: its figures against closed forms, what it writes, what it proposes."""

import dataclasses
import json
import math

import pytest
from dry_run_support import PageReader
from tolerances import MATMUL_FLOPS_RATIO

from jmegatron.config import load_config
from jmegatron.planner import cards, report_html
from jmegatron.planner.topology import gpu_compiler_available
from jmegatron.training import dry_run

pytestmark = pytest.mark.gpu_compiler

MICROBATCHES, STAGES = 4, 2
SLOTS = (MICROBATCHES + STAGES - 1) / MICROBATCHES
"""Idle slots of the pipeline compute and talk as well."""
MODEL_LINE = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 1 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 4000 --bf16 --hidden-dropout 0 "
    "--attention-dropout 0 --attention-backend fused --dry-run --num-gpus 8 --gpus-per-node 4"
)
MODEL = MODEL_LINE.split()
LAYOUT_LINE = (
    f"--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size {STAGES} "
    f"--global-batch-size {2 * MICROBATCHES} --use-distributed-optimizer --recompute-activations"
)
LAYOUT = LAYOUT_LINE.split()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(exit status, lines, report.json, report.html) of one dry run."""
    available, reason = gpu_compiler_available()
    if not available:
        pytest.skip(reason)
    folder, lines = tmp_path_factory.mktemp("report"), []
    status = dry_run.run(load_config([*MODEL, *LAYOUT, "--report", str(folder)]), lines.append)
    return status, lines, json.loads((folder / "report.json").read_text()), (folder / "report.html").read_text()


def test_it_fits_says_what_it_is_doing_and_for_how_long(ran):
    status, lines, found, _ = ran
    assert status == 0
    assert found["compiled"]
    for phase in ("tracing", "lowering", "compiling", "reading"):
        assert f"{phase} ..." in lines
        assert found["compile"]["seconds"][phase] > 0
    assert any(line.startswith("compiling: done in ") for line in lines)
    assert any("xla_gpu_experimental_parallel_collective_overlap_limit=4" in line for line in lines)


def test_memory_is_that_of_the_closed_forms_part_by_part(ran):
    memory = ran[2]["memory"]
    for part in ("parameters", "optimizer_state", "gradients", "activations"):
        assert memory["parts"][part] == pytest.approx(memory["theory"][part], rel=1e-3), part
    assert sum(memory["parts"].values()) == memory["peak"]
    assert memory["peak"] == memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporaries"]
    # Arguments are the state and a batch of tokens.
    batch = memory["arguments"] - memory["parts"]["parameters"] - memory["parts"]["optimizer_state"]
    assert 0 < batch < 2 * MICROBATCHES * 513 * 8


def test_collectives_have_the_bytes_of_theory_and_idle_slots(ran):
    rows = {(tuple(row["axes"] or ()), row["kind"]): row for row in ran[2]["collectives"]}
    expected = [(("tp",), "all-gather"), (("tp",), "reduce-scatter"), (("pp",), "collective-permute")]
    for key in expected:
        assert 1 <= rows[key]["bytes"] / rows[key]["theory_bytes"] <= SLOTS * 1.02, key
    for key in ((("dp",), "reduce-scatter"), (("dp",), "all-gather")):
        assert rows[key]["bytes"] == pytest.approx(rows[key]["theory_bytes"], rel=0.02), key


def test_links_are_those_of_nodes_of_four_gpus(ran):
    # Order pp, dp, tp: a stage's four GPUs are a node.
    within = {tuple(row["axes"] or ()): row["within_node"] for row in ran[2]["collectives"]}
    assert within[("tp",)]
    assert within[("dp",)]
    assert not within[("pp",)]


def test_every_transfer_is_shown_with_what_runs_beside_it(ran):
    found = ran[2]
    total = lambda rows: math.fsum(row["bytes"] or 0 for row in rows)  # noqa: E731
    assert total(found["overlap"]) == pytest.approx(total(found["collectives"]))
    permutes = [row for row in found["overlap"] if row["kind"] == "collective-permute"]
    hidden = sum(row["executions"] for row in permutes if row["beside"] == "layers")
    # Of both permutes of a steady tick; warm-up and cool-down ticks have no other slot.
    assert hidden >= 2 * (MICROBATCHES - 1)
    assert found["exposed"]["total_s"] == pytest.approx(math.fsum(found["exposed"]["by_kind_s"].values()))
    assert found["exposed"]["total_s"] > 0


def test_flops_are_those_of_theory_and_idle_slots(ran):
    flops = ran[2]["flops"]
    assert flops["uncounted"] == []
    assert 1 <= flops["executed"] / flops["with_recompute"] <= SLOTS * MATMUL_FLOPS_RATIO


def test_every_number_of_the_page_is_that_of_the_json(ran):
    _, _, found, page = ran
    reader = PageReader(page)
    assert len(reader.data) > 80
    for key, value, _ in reader.data:
        assert float(value) == float(report_html.lookup(found, key)), key


@pytest.mark.slow
def test_what_does_not_fit_ends_with_3_and_a_proposal_that_was_compiled_and_fits(monkeypatch):
    available, reason = gpu_compiler_available()
    if not available:
        pytest.skip(reason)
    words = [*MODEL, "--global-batch-size", "16", "--recompute-activations"]
    # A card that the optimizer's state of one GPU's own copy does not fit.
    parameters = dry_run.formula_figures(dry_run.resolve_for_dry_run(load_config(words))[0])["model"]["parameters"]
    small = dataclasses.replace(cards.card("h100"), memory_bytes=16 * parameters)
    monkeypatch.setitem(cards.CARDS, "h100", small)
    monkeypatch.setattr(dry_run, "NUM_PROPOSALS", 1)
    lines: list[str] = []
    assert dry_run.run(load_config(words), lines.append) == 3
    (flags,) = [line.split(". ", 1)[1].split(" (")[0] for line in lines if line.startswith("  1. --")]
    assert any("(compiled, arguments" in line for line in lines)
    assert dry_run.run(load_config([*words, *flags.split()]), lines.append) == 0
