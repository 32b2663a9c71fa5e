"""scripts/plan.py and --auto-parallel: what they print, write and refuse, and that a run can be started from it."""

import dataclasses
import errno
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jmegatron.config import config_from_yaml, load_config, to_yaml
from jmegatron.config.sections import PLANNED
from jmegatron.errors import ConfigError, TrainingError
from jmegatron.planner import cards, layouts
from jmegatron.training import planning
from jmegatron.training.build import formula_layout
from jmegatron.training.program import build_program, resolve_for_run

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs").glob("*.yaml"))
TINY = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --mock-data --lr 1e-3 --train-iters 5 --vocab-size 500 --bf16"
)
ONE_WAY = ["--recompute-granularity", "full", "--micro-batch-size", "1", "--use-distributed-optimizer"]
"""So that few layouts are tried."""


def script():
    spec = importlib.util.spec_from_file_location("plan_script", ROOT / "scripts" / "plan.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*words: str) -> int:
    return script().main([*words])


def line_of(text: str) -> list[str]:
    """The words behind train.py that the script printed."""
    return shlex.split(text.split("the first, behind train.py:\n")[1].splitlines()[0])


# ---- the script -----------------------------------------------------------------------------------------------------


def test_the_plan_of_a_config_is_a_table_with_reasons_and_a_line_that_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "plan.json"
    model = "configs/gpt_1b_8gpu.yaml"
    fixed = ["--tensor-model-parallel-size", "2", *ONE_WAY]
    assert run("--model", model, "--num-gpus", "16", "--global-batch-size", "32", "--json", str(path), *fixed) == 0
    text = capsys.readouterr().out
    assert "16 x h100, 8 a node" in text
    assert "why the others lost:" in text
    plan = json.loads(path.read_text())
    first = plan["ranked"][0]
    assert plan["request"]["global_batch_size"] == 32
    assert plan["request"]["fixed"]["tp"] == first["options"]["tensor_model_parallel_size"] == 2
    config, _ = resolve_for_run(load_config(line_of(text)), 16)
    given = {name: value for name, value in first["options"].items() if not name.startswith("recompute")}
    for name, value in given.items():
        section = config.training if name == "micro_batch_size" else config.parallel
        assert getattr(section, name) == value, name
    assert config.training.recompute_granularity == "full"
    seconds = [one["time"]["total"] for one in plan["ranked"]]
    assert seconds == sorted(seconds)
    assert first["memory"]["total"] <= plan["request"]["usable_bytes"]


def test_a_model_that_fits_nowhere_ends_with_3_the_nearest_miss_and_what_would_help(capsys):
    big = [*TINY, "--hidden-size", "40960", "--num-attention-heads", "320", "--global-batch-size", "8"]
    one_way = ["--pipeline-model-parallel-size", "1", "--tensor-model-parallel-size", "1"]
    assert run(*big, *one_way, "--num-gpus", "8") == 3
    text = capsys.readouterr().out
    assert "nothing fits 8 x h100" in text
    assert "nearest: tp 1 pp 1" in text
    assert "what would help:\n  take 32 GPUs and leave --tensor-model-parallel-size, --pipeline" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-gpus", "12"], "whole nodes"),
        (["--num-gpus", "0"], "num_gpus is out of range"),
        (["--num-gpus", "8", "--target-gpu", "h1000"], "did you mean 'h100'"),
        (["--num-gpus", "8", "--global-batch-size", "0"], "global_batch_size is out of range"),
        (["--num-gpus", "8", "--seq-length", "-1"], "seq_length is out of range"),
        (["--num-gpus", "8", "--headroom", "1"], "--headroom"),
        (["--num-gpus", "8", "--top", "-1"], "--top"),
        (["--num-gpus", "8", "--num-layerz", "4"], "num-layers"),
        (["--num-gpus", "8", "--assumed-tflops", "0"], "assumed_tflops is out of range"),
        (["--num-gpus", "8", "--assumed-tflops", "1e9"], "at most 989, h100's dense peak"),
        (["--num-gpus", "8", "--model", "nowhere.yaml"], "nowhere.yaml"),
        (["--num-gpus", "8", *TINY], "global_batch_size"),
    ],
)
def test_bad_input_ends_with_2_and_one_message(words, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    model = [] if "--model" in words or "--num-layers" in words else ["--model", "configs/gpt_1b_8gpu.yaml"]
    assert run(*model, *words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert not captured.out


def test_a_file_that_cannot_be_written_ends_with_2(capsys, tmp_path):
    words = [*TINY, *ONE_WAY, "--num-gpus", "8", "--global-batch-size", "8"]
    for place in (str(tmp_path / "no" / "plan.json"), str(tmp_path), ""):
        assert run(*words, "--json", place) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: --json")
        assert captured.err.count("\n") == 1
        assert not captured.out  # nothing was planned


def test_a_plan_is_written_whole_or_not_at_all(capsys, tmp_path, monkeypatch):
    words = [*TINY, *ONE_WAY, "--num-gpus", "8", "--global-batch-size", "8", "--json", str(tmp_path / "plan.json")]
    assert run(*words) == 0
    before = (tmp_path / "plan.json").read_bytes()

    def full(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", full)
    assert run(*words) == 2
    assert "cannot write" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_bytes() == before


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (TrainingError("the compiler ended"), 1, "error: the compiler ended"),
        (ConfigError("no"), 2, "error: no"),
    ],
)
def test_an_end_before_the_plan_is_one_line_and_a_status(error, status, said, capsys, monkeypatch):
    program = script()

    def fail(*_):
        raise error

    monkeypatch.setattr(program, "run", fail)
    assert program.main(["--num-gpus", "8"]) == status
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(("place", "status"), [("pipe", 141), ("/dev/full", 1)])
def test_a_plan_that_nobody_can_read_ends_without_a_traceback(place, status):
    words = [*TINY, *ONE_WAY, "--num-gpus", "8", "--global-batch-size", "8"]
    if place == "pipe":
        reader, out = os.pipe()
        os.close(reader)
    else:
        out = os.open(place, os.O_WRONLY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), *words]
    try:
        done = subprocess.run(
            command, env=environment, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    finally:
        os.close(out)
    assert done.returncode == status, done.stderr
    assert done.stderr.count("\n") <= 1


def test_what_would_help_a_number_of_gpus_that_divides_nothing_is_the_next_node(capsys):
    fixed = ["--tensor-model-parallel-size", "4"]
    assert run(*TINY, *fixed, *ONE_WAY, "--num-gpus", "7", "--global-batch-size", "8") == 3
    assert "  take 8 GPUs: tp 4" in capsys.readouterr().out


def test_without_the_gpu_compiler_one_line_says_that_nothing_is_compiled(capsys, monkeypatch):
    monkeypatch.setattr("jmegatron.planner.topology.gpu_compiler_available", lambda: (False, "not installed here"))
    words = [*TINY, *ONE_WAY, "--num-gpus", "8", "--global-batch-size", "8", "--compile-top", "2"]
    assert run(*words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing is compiled: not installed here"


# ---- options --------------------------------------------------------------------------------------------------------


def test_the_files_layout_gives_way_and_the_command_lines_stays(tmp_path):
    path = tmp_path / "run.yaml"
    parallel = "parallel: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 3, cp_comm_type: [a2a]}\n"
    path.write_text(parallel + "training: {recompute_granularity: selective, micro_batch_size: 2}\n")
    words = ["--config", str(path), *TINY, "--auto-parallel", "--context-parallel-size", "2"]
    config = load_config([word for word in words if word not in ("--micro-batch-size", "1")])
    assert config.parallel.tensor_model_parallel_size == config.parallel.pipeline_model_parallel_size == 1
    assert config.parallel.context_parallel_size == 2
    assert config.parallel.cp_comm_type == ("a2a",)
    assert config.training.recompute_granularity is None
    assert config.training.micro_batch_size == 2
    assert config.fixed_options == ("context_parallel_size",)
    path.write_text("parallel: {tensor_model_parallel_size: many}\n")
    with pytest.raises(ConfigError, match="tensor_model_parallel_size has a value of the wrong type"):
        load_config(words)


def test_auto_parallel_takes_the_first_layout_of_the_plan_and_says_so():
    words = [*TINY, "--global-batch-size", "8", "--auto-parallel", "--pipeline-model-parallel-size", "2"]
    loaded, said = load_config(words), []
    config, _ = resolve_for_run(loaded, 8, "NVIDIA H200", said.append)
    best = layouts.plan(planning.request_of(loaded, 8, cards.card("h200"))).best
    assert best is not None
    assert best.layout.pp == 2
    assert formula_layout(config, best.layout.dp) == dataclasses.replace(
        best.layout, schedule=best.layout.schedule_name, recompute_modules=config.training.recompute_modules
    )
    assert len(said) == 1
    assert "8 x h200" in said[0]
    # What is resolved is a config like any other, and gives the same layout again.
    assert not config.parallel.auto_parallel
    assert config_from_yaml(to_yaml(config)) == config
    assert build_program(config, jax.devices()).mesh.shape["pp"] == 2


def test_devices_of_no_known_kind_are_planned_for_the_target_gpu():
    words = [*TINY, "--global-batch-size", "8", "--auto-parallel", *ONE_WAY, "--target-gpu", "a100"]
    said = []
    resolve_for_run(load_config(words), 8, "cpu", said.append)
    assert said[0] == "auto-parallel: 'cpu' is no GPU that is known, so it is planned for a100 (--target-gpu)"


def test_degrees_that_do_not_fit_the_devices_are_refused_with_what_would():
    words = [*TINY, "--global-batch-size", "8", "--auto-parallel", *ONE_WAY, "--pipeline-model-parallel-size", "3"]
    with pytest.raises(ConfigError) as error:
        resolve_for_run(load_config([*words, "--num-layers", "6"]), 8, "cpu")
    text = str(error.value)
    assert "No layout fits 8 x h100" in text
    assert "pipeline_model_parallel_size 3" in text
    assert "leave --pipeline-model-parallel-size out" in text


def test_a_plan_without_a_batch_is_refused():
    with pytest.raises(ConfigError, match="A plan needs global_batch_size"):
        resolve_for_run(load_config([*TINY, "--auto-parallel"]), 8)


def test_every_option_that_is_planned_is_written_back():
    words = [*TINY, "--global-batch-size", "8", "--auto-parallel", *ONE_WAY]
    best = layouts.plan(planning.request_of(load_config(words), 8, cards.card("h100"))).best
    assert best is not None
    assert set(planning.planned_options(best)) == set(PLANNED)
    all_words = planning.option_words(best, None)
    assert planning.option_words(best, load_config([*TINY, "--global-batch-size", "8", *all_words])) == []


def test_every_planned_layout_of_an_odd_model_is_a_config_that_passes_every_check():
    words = [*TINY, "--num-layers", "6", "--group-query-attention", "--num-query-groups", "2", "--auto-parallel"]
    words += ["--global-batch-size", "24", "--seq-length", "48", "--max-position-embeddings", "48", *ONE_WAY[2:]]
    config = load_config(words)
    found = layouts.plan(planning.request_of(config, 24, cards.card("h100"), gpus_per_node=24))
    assert {one.layout.pp for one in found.ranked} == {1, 2, 3, 4, 6}
    for one in found.ranked:
        planning.with_layout(config, one)  # validates


EXPERTS = shlex.split("--num-experts 8 --moe-ffn-hidden-size 96 --expert-model-parallel-size 2 --global-batch-size 8")


@pytest.mark.parametrize(
    ("words", "over_tp"), [([], True), (["--expert-tensor-parallel-size", "1"], False)], ids=["divided", "whole"]
)
def test_expert_parallelism_stays_as_it_is_given_and_the_options_of_a_plan_say_all_of_it(words, over_tp):
    given = [*TINY, *EXPERTS, *words, *ONE_WAY, "--tensor-model-parallel-size", "2"]
    loaded, said = load_config([*given, "--auto-parallel"]), []
    config, _ = resolve_for_run(loaded, 8, "NVIDIA H200", said.append)
    best = layouts.plan(planning.request_of(loaded, 8, cards.card("h200"))).best
    assert best is not None
    assert (best.layout.ep, best.layout.tp, best.layout.num_devices) == (2, 2, 8)
    assert best.layout.experts_over_tp == over_tp
    assert config.parallel.expert_tensor_parallel_size == (2 if over_tp else 1)
    assert "expert-model-parallel-size 2 is as given" in said[1]
    again, _ = resolve_for_run(load_config([*given, *planning.option_words(best, load_config(given))]), 8)
    assert again.parallel == config.parallel


def test_another_tp_takes_the_division_of_experts_with_it():
    config, _ = resolve_for_run(load_config([*TINY, *EXPERTS, "--tensor-model-parallel-size", "2"]), 8)
    free = dataclasses.replace(config, fixed_options=())
    found = layouts.plan(planning.request_of(free, 8, cards.card("h100")))
    one = next(one for one in found.ranked if one.layout.tp == 4)
    assert planning.with_layout(config, one).parallel.expert_tensor_parallel_size == 4
    words = planning.option_words(one, config)
    assert words[words.index("--expert-tensor-parallel-size") + 1] == "4"


def test_the_script_plans_experts_and_says_that_ep_is_not_searched(capsys):
    assert run(*TINY, *EXPERTS, *ONE_WAY, "--num-gpus", "8") == 0
    text = capsys.readouterr().out
    assert text.startswith("expert-model-parallel-size 2 is as given: other numbers")
    config, _ = resolve_for_run(load_config(line_of(text)), 8)
    assert config.parallel.expert_model_parallel_size == 2


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_resolve_for_their_devices(path):
    devices = {"gpt_70b_512gpu.yaml": 512, "gpt3_175b.yaml": 1024, "llama3_70b.yaml": 64, "gpt_13b.yaml": 32}
    devices |= {"gpt_tiny.yaml": 1, "moe_tiny.yaml": 1, "mixtral_8x7b.yaml": 64}
    config, _ = resolve_for_run(load_config(["--config", str(path)]), devices.get(path.name, 8))
    assert config.model.padded_vocab_size is not None
