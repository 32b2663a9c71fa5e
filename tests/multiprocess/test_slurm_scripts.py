"""The batch scripts, with an `srun` that plays one task of the job: no SLURM, no GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import OPTIONS, ROOT, environment

SCRIPTS = sorted((ROOT / "scripts" / "slurm").glob("*.sbatch"))
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "srun $1" >&2; shift; done
SLURM_JOB_ID=77 SLURM_STEP_NODELIST='n[1-2]' SLURM_STEP_NUM_NODES=2 SLURM_NTASKS=16 SLURM_PROCID=9 SLURM_LOCALID=1 "$@"
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_task_of_the_script_finds_its_place_and_its_gpu(script: Path, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(script), *OPTIONS, "--print-distributed"],
        cwd=ROOT,
        env={**environment(), "PATH": path, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "srun --kill-on-bad-exit=1" in done.stderr
    assert done.stdout == (
        "coordinator_address: n1:61517 (slurm)\nnum_processes: 16 (slurm)\nprocess_id: 9 (slurm)\n"
        "local devices: number 1 of CUDA_VISIBLE_DEVICES 0,1,2,3,4,5,6,7 (one process a device, by slurm)\n"
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_asks_for_as_many_tasks_as_gpus_and_for_a_signal_in_time(script: Path) -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"] == "8"
    assert re.fullmatch(r"TERM@\d+", options["signal"])
