"""The comparison of a mixture of experts with its dense twin: how its figures are made, and that they hold."""

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest
from training_runs import environment

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "benchmark_moe.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmark_moe", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines(loss, loads):
    steps = [{"step": i, "loss": 9.0, "expert_load_max": load} for i, load in enumerate(loads, start=1)]
    return [*steps, {"step": len(steps), "split": "valid", "loss": loss}, {"split": "test", "loss": 7.0}]


def test_figures_are_those_of_the_last_validation_and_of_settled_steps(script):
    loads = [3.0, *[2.5] * (script.SETTLED - 1), 1.5, 1.0, 1.25]
    figures = script.compare(lines(2.02, loads), lines(2.0, [1.0]))
    assert figures["loss_ratio"] == pytest.approx(1.01)
    load = figures["load"]
    assert (load["first"], load["largest"], load["settled"], load["settled_mean"]) == (3.0, 3.0, 1.5, 1.25)
    assert (load["steps_above"], load["last_step_above"], load["last"]) == (script.SETTLED, script.SETTLED, 1.25)
    assert "| largest after step 60 | 1.50 |" in script.table(figures)


@pytest.mark.parametrize(("loss", "load", "status"), [(2.02, 2.0, 0), (2.03, 1.0, 1), (1.0, 2.1, 1)])
def test_the_status_says_whether_both_bounds_are_kept(loss, load, status, script, monkeypatch, capsys):
    runs = {"moe": lines(loss, [3.0] * script.SETTLED + [load]), "gpt": lines(2.0, [])}
    monkeypatch.setattr(script, "train", lambda path, options, given: runs["moe" if "moe" in options[1] else "gpt"])
    assert script.main([]) == status
    assert ("not met" in capsys.readouterr().err) == bool(status)


@pytest.mark.slow
def test_a_mixture_trained_300_steps_is_better_than_its_dense_twin_and_stays_balanced(tmp_path):
    path = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--json", str(path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert figures["iterations"] == 300
    assert figures["loss_ratio"] < 1.01
    assert figures["load"]["settled"] < 2.0
