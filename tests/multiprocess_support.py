"""Jobs of several real processes that train a tiny model on CPU devices over gloo."""

import dataclasses
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from training_runs import ROOT, quick_environment

_MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 --lr 1e-2"
    " --lr-decay-style constant --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size 4"
    " --log-interval 1 --train-iters 4"
)
_MOCK = "--vocab-size 31 --padded-vocab-size 32 --mock-data --eval-iters 0"
TINY, MOCK = _MODEL.split(), _MOCK.split()
FAULTY = str(Path(__file__).parent / "multiprocess" / "faulty_train.py")
SECONDS = 240.0
"""Limit of a whole job; a machine with much else to do may need a minute."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int
    out: str
    err: str
    at: float
    """Time of its end."""

    @property
    def last_error(self) -> str:
        return self.err.rstrip().splitlines()[-1]


def command(*options: str, fault: str | None = None, devices: int = 1) -> list[str]:
    """A training command with `devices` CPU devices a process; `fault`: PROCESS STEP KIND of faulty_train.py."""
    program = [FAULTY, *fault.split()] if fault else [str(ROOT / "train.py")]
    return [sys.executable, *program, *TINY, "--num-cpu-devices", str(devices), *options]


def launch(
    folder: Path, count: int, *options: str, launcher: Sequence[str] = (), fault: str | None = None, devices: int = 1
) -> Ended:
    """Runs a job to its end through scripts/launch_local.py."""
    start = [sys.executable, str(ROOT / "scripts" / "launch_local.py"), "-n", str(count), *launcher, "--"]
    done = subprocess.run(
        [*start, *command(*options, fault=fault, devices=devices)],
        env=quick_environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr, time.time())


def run_alone(
    folder: Path, count: int, *options: str, own: Sequence[Sequence[str]] = (), fault: str | None = None
) -> list[Ended]:
    """Runs a job without launcher or supervisor to the end of all; `own`: further options of each process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    job = ("--coordinator-address", address, "--num-processes", str(count), "--process-id")
    files = [tuple((folder / f"{index}.{kind}").open("w+") for kind in ("out", "err")) for index in range(count)]
    processes = [
        subprocess.Popen(
            [*command(*options, *(own[index] if own else ()), fault=fault), *job, str(index)],
            env=quick_environment(),
            cwd=folder,
            stdout=files[index][0],
            stderr=files[index][1],
        )
        for index in range(count)
    ]
    ends: dict[int, float] = {}
    limit = time.monotonic() + SECONDS
    try:
        while len(ends) < count and time.monotonic() < limit:
            ends.update({i: time.time() for i, p in enumerate(processes) if i not in ends and p.poll() is not None})
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = []
    for index, process in enumerate(processes):
        texts = []
        for file in files[index]:
            file.seek(0)
            texts.append(file.read())
            file.close()
        assert index in ends, f"process {index} did not end:\n{texts[0][-2000:]}\n{texts[1][-2000:]}"
        results.append(Ended(process.returncode, texts[0], texts[1], ends[index]))
    return results


def fault_time(text: str) -> float:
    """When the fault came, as faulty_train.py says."""
    found = re.search(r"fault [\w-]+ at ([\d.]+)", text)
    assert found, text[-3000:]
    return float(found.group(1))


def steps_saved(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder."""
    return sorted(int(name) for name in os.listdir(folder) if name.isdigit())
