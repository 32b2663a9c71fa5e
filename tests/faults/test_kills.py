"""A training process killed forty times, among them while it saves, ends where one that was never killed ends."""

import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from training_runs import command, quick_environment, saved_arrays

from jmegatron.checkpoint.steps import complete_steps

pytestmark = pytest.mark.slow

_MODEL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8"
    " --micro-batch-size 1 --global-batch-size 2 --lr 1e-2 --log-interval 1 --mock-data --eval-iters 0"
    # Several megabytes of embedding: a save takes a while.
    " --vocab-size 20011 --make-vocab-size-divisible-by 1 --num-cpu-devices 1 --hidden-dropout 0.1"
    " --lr-decay-style constant --train-iters 100000"
)
MODEL = _MODEL.split()
EVERY_STEP = ("--save-interval", "1")
KEEP_TWO = (*EVERY_STEP, "--keep-latest", "2")
KILLS = [True] * 10 + [False] * 10
"""Whether a kill waits for a step that is being written; of each of the two runs."""


class Chain:
    """One run that is killed and started again, over and over, in one folder."""

    def __init__(self, folder: Path, options: tuple[str, ...], rng: random.Random):
        folder.mkdir()
        self.save, self.options, self.rng = folder / "save", options, rng
        self.newest, self.inside = 0, 0

    def start(self, *more: str) -> subprocess.Popen[str]:
        both = ("--save", str(self.save), "--load", str(self.save))
        return subprocess.Popen(
            command(*both, *self.options, *more, defaults=MODEL),
            env=quick_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def building(self, since: float) -> bool:
        """Whether a step is half written by a process that started at `since`; older ones are left by kills."""
        for path in self.save.glob("*.tmp"):
            try:
                if path.stat().st_ctime > since:
                    return True
            except FileNotFoundError:  # just committed, or removed
                continue
        return False

    def kill_once(self, while_saving: bool) -> None:
        """Starts, kills with SIGKILL at a random moment, and checks what was said and what is left."""
        since = time.time()
        process = self.start()
        if while_saving:
            # Not always the first save of the process: that one also waits for a compilation.
            saves = self.rng.randint(0, 2)
            wait_for(lambda: self.newest_step() >= self.newest + saves, process)
            wait_for(lambda: self.building(since), process)
            time.sleep(self.rng.uniform(0.0, 0.1))
        else:
            time.sleep(self.rng.uniform(0.5, 6.0))
        process.send_signal(signal.SIGKILL)
        text, _ = process.communicate(timeout=60)
        self.inside += self.building(since)
        self.check(text)
        assert self.newest_step() >= self.newest, "a complete step is gone"
        self.newest = self.newest_step()

    def check(self, text: str) -> None:
        """A process that came that far went on from the newest complete step, and nothing went wrong."""
        assert "Traceback" not in text, text[-3000:]
        assert "error" not in text.lower(), text[-3000:]
        assert "passed over" not in text, text[-3000:]
        if found := re.search(r"resumed from \S+, step (\d+),", text):
            assert int(found.group(1)) == self.newest
        if found := re.search(r"\] iteration +(\d+)/", text):
            assert int(found.group(1)) == self.newest + 1

    def newest_step(self) -> int:
        return max(complete_steps(self.save), default=0)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < end
        time.sleep(0.002)


def run_to(save: Path, step: int, *options: str) -> None:
    """Trains on, or from the start, to a step, and leaves orderly."""
    both = ("--save", str(save), "--load", str(save), "--exit-interval", str(step))
    done = subprocess.run(
        command(*both, *options, defaults=MODEL), env=quick_environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"exiting at iteration {step} " in done.stdout


def killed_twenty_times(folder: Path, options: tuple[str, ...], seed: int) -> Chain:
    rng = random.Random(seed)
    chain = Chain(folder, options, rng)
    for while_saving in rng.sample(KILLS, len(KILLS)):
        chain.kill_once(while_saving)
    return chain


def test_forty_kills_lose_no_complete_step_and_change_no_bit(tmp_path: Path) -> None:
    run_to(tmp_path / "warm", 2, *EVERY_STEP)  # fills the compilation cache
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(killed_twenty_times, tmp_path / name, options, seed)
            for seed, (name, options) in enumerate((("all", EVERY_STEP), ("two", KEEP_TWO)))
        ]
        chains = [run.result() for run in runs]
    assert sum(chain.inside for chain in chains) >= 15
    assert min(chain.newest for chain in chains) >= 5
    step = max(chain.newest for chain in chains) + 3
    run_to(tmp_path / "never", step)
    expected = saved_arrays(tmp_path / "never", step)
    for chain in chains:
        run_to(chain.save, step, *chain.options)
        names = {path.name for path in chain.save.iterdir()}
        kept = range(step - 1, step + 1) if chain.options == KEEP_TWO else range(1, step + 1)
        assert names == set(map(str, kept))
        got = saved_arrays(chain.save, step)
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            assert got[name].tobytes() == array.tobytes(), name
