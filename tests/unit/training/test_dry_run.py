"""A dry run without the GPU compiler: what it understands, refuses, assumes and says."""

import itertools
import json
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from dry_run_support import COMPILED, SMALL, report_of

import train
from jmegatron.config import load_config, parse_or_exit
from jmegatron.errors import TrainingError, UsageError
from jmegatron.training import dry_run

ROOT = Path(__file__).parents[3]
# A public guide's launch line (70 billion parameters on 512 GPUs), with Megatron-LM's own flags alone.
GUIDE_LINE = (
    "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 4096 "
    "--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4 "
    "--num-layers-per-virtual-pipeline-stage 5 --micro-batch-size 1 --global-batch-size 1024 --bf16 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --recompute-activations "
    "--attention-backend auto --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 "
    "--clip-grad 1.0 --weight-decay 0.1 --train-iters 250000 --data-path PREFIX --split 949,50,1 --save DIR --load DIR "
    "--save-interval 1000 --ckpt-format torch_dist --log-interval 10 --eval-interval 1000 --eval-iters 10"
)
GUIDE = GUIDE_LINE.split()
# 7 billion parameters of 8 layers.
LARGE_LINE = (
    "--num-layers 8 --hidden-size 8192 --num-attention-heads 64 --seq-length 2048 --max-position-embeddings 2048 "
    "--global-batch-size 8 --lr 1e-4 --train-iters 10 --mock-data --vocab-size 50000 --bf16 --recompute-activations"
)
LARGE = LARGE_LINE.split()
ON_512 = ["--dry-run", "--num-gpus", "512", "--target-gpu", "h100"]


@pytest.fixture
def no_compiler(monkeypatch):
    """A Python without the CUDA plugin."""
    monkeypatch.setattr(dry_run, "compile_elsewhere", lambda config, say: {"unavailable": "pip install X"})


def said(words):
    """(exit status, what is printed) of a dry run."""
    lines = []
    return dry_run.run(load_config(words), lines.append), "\n".join(lines)


# ---- the guide's line -----------------------------------------------------------------------------------------------
def test_the_guides_line_has_the_figures_of_the_closed_forms(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = report_of([*GUIDE, *ON_512, "--vocab-size", "50257", "--assumed-tflops", "400"], compiled=False)
    assert found["layout"] == {
        "tp": 8,
        "pp": 4,
        "cp": 1,
        "ep": 1,
        "dp": 16,
        "chunks": 4,
        "schedule": "interleaved",
        "micro_batch_size": 1,
        "num_microbatches": 64,
        "global_batch_size": 1024,
        "sequence_parallel": True,
        "distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "recompute": "selective",
    }
    layers = 80 * (12 * 8192**2 + 13 * 8192)
    parameters = layers + 51200 * 8192 + 4096 * 8192 + 2 * 8192
    assert found["model"]["parameters"] == parameters
    assert found["pipeline"]["bubble"] == pytest.approx(3 / 256)
    assert found["pipeline"]["bubble_with_one_chunk"] == pytest.approx(3 / 64)
    assert found["flops"]["six_n_d"] == 6 * parameters * 1024 * 4096
    assert found["flops"]["model"] == pytest.approx(1.76e18, rel=0.01)
    assert found["time"]["step_s"] == pytest.approx(8.6, rel=0.01)
    # 6 + 12 / d bytes a parameter, the rule, of 1/32 of the parameters (and norms, which every rank has whole).
    assert found["memory"]["state_rule"]["bytes_per_parameter"] == 6.75
    assert found["memory"]["state_rule"]["bytes"] == pytest.approx(6.75 * parameters / 32, rel=0.002)
    # With both overlaps also each rank's part of the parameters and of the reduced gradients, 6 / d.
    assert found["memory"]["state"] == pytest.approx(14.8e9, rel=0.03)
    assert found["memory"]["peak"] < 80e9
    assert os.listdir() == []


def test_without_the_distributed_optimizer_it_is_18_bytes_a_parameter():
    plain = [word for word in GUIDE if word not in ("--use-distributed-optimizer", "--overlap-param-gather")]
    plain.remove("--overlap-grad-reduce")
    found = report_of([*plain, *ON_512, "--vocab-size", "50257"], compiled=False)
    assert found["memory"]["state"] == pytest.approx(18 * found["model"]["parameters"] / 32, rel=0.002)


def test_what_the_line_leaves_open_is_assumed_and_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, notes = dry_run.resolve_for_dry_run(load_config([*GUIDE, *ON_512]))
    assert (config.model.vocab_size, config.model.padded_vocab_size) == (257, 1024)
    assert any("vocabulary: 257 (of ByteTokenizer" in note for note in notes)
    assert any("--ckpt-format" in note for note in notes)
    missing = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "nowhere/tokenizer.json"]
    config, notes = dry_run.resolve_for_dry_run(load_config([*GUIDE, *ON_512, *missing]))
    assert config.model.vocab_size == dry_run.ASSUMED_VOCABULARY
    assumed = [note for note in notes if "assumed, of GPT-2" in note and "nowhere/tokenizer.json" in note]
    assert len(assumed) == 1
    assert "fix:" not in assumed[0]
    assert assumed[0].endswith("--vocab-size gives another")
    _, notes = dry_run.resolve_for_dry_run(load_config([*GUIDE, "--dry-run"]))
    assert any("--num-gpus is not given: 32" in note for note in notes)


# ---- refusals -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--num-attention-heads", "63", "--kv-channels", "128"], "num_attention_heads 63"),
        (["--num-layers", "81"], "81 layers"),
        (["--global-batch-size", "1000"], "global_batch_size 1000"),
        (["--num-gpus", "500"], "num_gpus 500"),
        (["--num-gpus", "520"], "520 devices"),
        (["--target-gpu", "v100"], "one of a100, h100"),
        (["--hidden-size", "8192.5"], "an integer"),
    ],
)
def test_a_layout_with_one_error_ends_with_2_and_one_message_before_anything_is_compiled(
    change, named, capsys, monkeypatch
):
    monkeypatch.setattr(dry_run, "compile_elsewhere", lambda *_: pytest.fail("compiled"))
    with pytest.raises(SystemExit) as ended:
        parse_or_exit([*GUIDE, *ON_512, *change])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert named in message
    assert message.count("error:") == 1


def test_attention_that_cannot_be_fused_ends_with_2_before_anything_is_compiled(monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "compile_elsewhere", lambda *_: pytest.fail("compiled"))
    assert train.main([*GUIDE, *ON_512, "--attention-backend", "fused"]) == 2
    assert "attention_backend" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_ends_with_2_before_anything_is_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "compile_elsewhere", lambda *_: pytest.fail("compiled"))
    (tmp_path / "file").write_text("")
    assert train.main([*SMALL, "--report", str(tmp_path / "file" / "sub")]) == 2
    assert "--report" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--num-gpus", "8"], ["--report", "x"], ["--assumed-tflops", "400"]])
def test_options_of_a_dry_run_are_refused_without_one(words):
    plain = SMALL[: SMALL.index("--dry-run")]
    with pytest.raises(UsageError, match="an option of a dry run"):
        load_config([*plain, *words])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--report", ""], "--report"),
        (["--assumed-tflops", "1e9"], "expected at most 989, h100's dense peak"),
        (["--xla-flags", "fast=true"], "is no option of XLA"),
        (["--xla-flags", "xla_a=1 xla_a=2"], "comes twice"),
    ],
)
def test_what_cannot_be_ends_with_2_before_anything_is_compiled(words, named, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "compile_elsewhere", lambda *_: pytest.fail("compiled"))
    assert train.main([*SMALL, *words]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("name", dry_run.REPORT_FILES)
def test_a_folder_in_the_place_of_a_report_ends_with_2_before_anything_is_compiled(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(dry_run, "compile_elsewhere", lambda *_: pytest.fail("compiled"))
    (tmp_path / name).mkdir()
    assert train.main([*SMALL, "--report", str(tmp_path)]) == 2
    assert f"{name} in it is a folder" in capsys.readouterr().err


# ---- without the compiler -------------------------------------------------------------------------------------------
def test_without_the_plugin_the_closed_forms_alone_are_printed_and_labelled(no_compiler, tmp_path):
    status, text = said([*SMALL, "--report", str(tmp_path)])
    assert status == 0
    assert "closed forms alone, nothing was compiled: pip install X" in text
    assert "CLOSED FORMS ALONE" in text
    assert json.loads((tmp_path / "report.json").read_text())["compiled"] is False
    assert "Closed forms alone" in (tmp_path / "report.html").read_text()


def test_what_does_not_fit_ends_with_3_and_the_first_proposal_fits(no_compiler):
    too_large = [*LARGE, "--micro-batch-size", "1", "--dry-run", "--num-gpus", "8"]
    status, text = said(too_large)
    assert status == 3
    assert "It does not fit" in text
    proposed = re.findall(r"^  \d\. (--.*?)(?: \(.*\))?$", text, re.MULTILINE)
    assert len(proposed) == 3
    assert said([*too_large, *proposed[0].split()])[0] == 0


def test_planned_layouts_of_which_none_fits_end_with_3_as_without_a_plan(no_compiler, capsys):
    words = [*LARGE, "--num-layers", "101", "--micro-batch-size", "1", "--dry-run", "--num-gpus", "8"]
    assert train.main(words) == 3
    assert "No layout on these GPUs was found that fits" in capsys.readouterr().out
    assert train.main([*words, "--auto-parallel"]) == 3
    assert capsys.readouterr().err.startswith("train.py: error: No layout fits 8 x h100")


def test_options_of_xla_are_said_to_be_unchecked_without_the_compiler(no_compiler):
    status, text = said([*SMALL, "--xla-flags", "xla_of_next_year=1"])
    assert status == 0
    assert "--xla-flags: whether XLA knows the options is not checked without the compiler" in text


@pytest.mark.parametrize(
    ("failure", "why"), [(TrainingError("the compiler ended"), "the compiler ended"), ({"unavailable": "gone"}, "gone")]
)
def test_a_proposal_that_cannot_be_compiled_is_left_out_and_the_others_stay(failure, why, monkeypatch):
    answers = iter([failure])

    def compile_it(config, say):
        answer = next(answers, {"memory": {"peak": 1e9, "parts": {}, "arguments": 0, "temporaries": 0}})
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(dry_run, "compile_elsewhere", compile_it)
    words = [*LARGE, "--micro-batch-size", "1", "--dry-run", "--num-gpus", "8"]
    config, _ = dry_run.resolve_for_dry_run(load_config(words))
    lines = []
    found = dry_run.proposals(config, True, lines.append)
    assert len(found) == dry_run.NUM_PROPOSALS
    assert [line for line in lines if "left out" in line] == [f"  left out: {why}"]


def test_nothing_is_proposed_that_one_part_of_it_would_do():
    # With dp alone the state is too large, and sharding the optimizer is enough.
    config, _ = dry_run.resolve_for_dry_run(
        load_config([*LARGE, "--micro-batch-size", "1", "--dry-run", "--num-gpus", "8"])
    )
    found = list(itertools.islice(dry_run.candidates(config, 8, 8), 3))
    minimal = [set(one.changes) for one in found]
    assert {"sharded optimizer"} in minimal
    assert all(not one < other for one in minimal for other in minimal)


# ---- compiled figures -----------------------------------------------------------------------------------------------
def test_parts_of_the_memory_add_up_to_the_peak_and_theory_stands_beside_them():
    found = report_of()
    assert sum(found["memory"]["parts"].values()) == found["memory"]["peak"]
    gathers = [row for row in found["collectives"] if row["kind"] == "all-gather" and row["axes"] == ["tp"]]
    assert len(gathers) == 1
    assert gathers[0]["bytes"] == COMPILED["collectives"][0]["bytes"]
    assert gathers[0]["theory_bytes"] > 0
    # What theory has and the program has not is shown as well.
    assert any(row["bytes"] is None and row["theory_bytes"] for row in found["collectives"])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'F1130 file.cc:1] Check failed: no good' >&2; kill -ABRT $$", "SIGABRT.*no good"),
        (
            "echo '{\"phase\": \"compiling\"}'; echo 'E1130 out of registers' >&2; exit 7",
            "status 7 while compiling.*registers",
        ),
    ],
)
def test_a_compiler_that_dies_is_one_message_with_its_last_words(script, words, tmp_path, monkeypatch):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setattr(dry_run.sys, "executable", str(fake))
    config, _ = dry_run.resolve_for_dry_run(load_config(SMALL))
    with pytest.raises(TrainingError, match=words):
        dry_run.compile_elsewhere(config, lambda line: None)


def test_a_reader_that_has_gone_ends_the_progress_quietly_and_the_next_line_says_so(monkeypatch):
    monkeypatch.setattr(dry_run, "_SAY_EVERY", 0.01)
    died = []
    monkeypatch.setattr(threading, "excepthook", died.append)

    def closed(line):
        raise BrokenPipeError

    progress = dry_run._Progress(closed)
    progress._thread.join(10)
    assert not progress._thread.is_alive()
    assert died == []
    with pytest.raises(BrokenPipeError):
        progress.begin("compiling")


def test_a_full_disk_behind_standard_output_is_one_message():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "train.py"), *SMALL]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("train.py: error: standard output cannot be written")
    assert "Traceback" not in done.stderr


# ---- experts --------------------------------------------------------------------------------------------------------
def test_experts_have_their_rows_and_no_figure_that_knows_none(no_compiler):
    words = [
        "--config",
        str(ROOT / "configs" / "moe_tiny.yaml"),
        "--dry-run",
        "--num-gpus",
        "8",
        "--expert-model-parallel-size",
        "4",
    ]
    words += ["--global-batch-size", "32", "--use-distributed-optimizer"]
    found = report_of(words, compiled=False)
    model = found["model"]
    idle = 4 * 6 * (2 * 128 * 256 + 128 + 256)
    assert model["parameters"] - model["parameters_of_token"] == idle
    assert found["flops"]["six_n_d"] == 6 * model["parameters_of_token"] * 32 * 128
    memory = found["memory"]
    assert memory["textbook_activations_per_layer"] is None
    assert memory["state_rule"]["bytes"] == pytest.approx(memory["state"], rel=1e-3)
    assert memory["stages"][0]["state"] == pytest.approx(memory["state"], rel=1e-3)
    rows = {(tuple(row["axes"]), row["kind"]) for row in found["collectives"]}
    assert (("ep",), "ragged-all-to-all") in rows
    assert {axes for axes, kind in rows if kind == "reduce-scatter"} == {("dp", "ep"), ("dp",)}
    assert found["time"]["parts"]["ep"] > 0
    _, text = said(words)
    assert "the textbook knows none" in " ".join(text.split())
    assert "parameters that a token needs" in text
    assert "experts: memory is that of the most rows that a GPU may receive, 4096 a layer" in text
    assert "exposed on ep" in text
