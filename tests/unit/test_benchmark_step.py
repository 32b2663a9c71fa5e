"""The step benchmark at toy size: it runs, both steps compute the same, and its report holds every number."""

import importlib.util
import json
import pathlib

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "benchmark_step.py"
TOY = (
    *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2"),
    *("--vocab-size", "32", "--seq-length", "8", "--steps", "2", "--no-torch"),
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmark_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_steps_give_the_same_losses_and_the_report_is_written(script, tmp_path, capsys):
    path = tmp_path / "result.json"
    assert script.main([*TOY, "--json", str(path)]) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["losses"]["jmegatron"] == pytest.approx(result["losses"]["hand-written"], rel=script.LOSS_TOLERANCE)
    assert set(result["steps"]) == {"jmegatron", "hand-written"}
    assert all(number > 0 for row in result["steps"].values() for number in row.values())
    assert result["num_parameters"] == 2 * (12 * 16**2 + 13 * 16) + 2 * 16 + (32 + 8) * 16
    assert "ratio" in capsys.readouterr().out


def test_contenders_that_compute_something_else_are_refused(script):
    losses = iter([1.0, 1.0, 1.0, 1.0, 1.0, 1.1])

    def run(batch):
        return 0.0, 0.0, next(losses)

    with pytest.raises(ValueError, match="differ by"):
        script.check_losses({"hand-written": run, "jmegatron": run}, [{}] * 3)
