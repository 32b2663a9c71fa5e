"""The script for a single GPU: what it does where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_without_a_gpu_nothing_is_claimed(tmp_path):
    done = run("--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0
    assert "no GPU here" in done.stdout
    assert "nothing is claimed" in done.stdout
    assert not (tmp_path / "figures.json").exists()


@pytest.mark.slow
def test_a_rehearsal_runs_every_check_and_says_what_it_is(tmp_path):
    done = run("--rehearse", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a rehearsal" in done.stdout
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["rehearsal"]
    assert len(found["rows"]) == 5
    assert all("failed" not in row and "not_run" not in row for row in found["rows"])
