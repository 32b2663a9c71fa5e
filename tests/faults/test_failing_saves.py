"""Saves that fail in real runs: said at once, tried again; the exit status tells whether the last one worked."""

import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from training_runs import command, quick_environment

from jmegatron.checkpoint.steps import complete_steps

ENDLESS = ("--num-cpu-devices", "2", "--train-iters", "100000", "--lr-decay-style", "constant", "--save-interval", "1")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")
FAILED = "could not be written"
LIMITED = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""A disk that is full after 20 kB of each file."""


class Watched:
    """A run whose lines are read as they come."""

    def __init__(self, words: list[str]):
        self.process = subprocess.Popen(
            words, env=quick_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []

    def read_until(self, wanted: Callable[[str], bool]) -> str:
        """Reads on to a line of a kind and returns it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if wanted(line):
                return line
        raise AssertionError("\n".join(self.lines[-20:]) + self.process.communicate()[1])

    def end(self, seconds: float = 60.0) -> tuple[int, str]:
        """Waits and returns (status, standard error)."""
        out, err = self.process.communicate(timeout=seconds)
        self.lines += out.splitlines()
        return self.process.returncode, err


def message(err: str) -> str:
    """What says why a run failed. TensorStore's threads may print stacks (of a closed loop) between, even in a line."""
    (line,) = re.findall(r"train\.py: error: .*", err)
    return line


@pytest.fixture
def hidden(tmp_path: Path) -> Callable[[], Callable[[], None]]:
    """Puts a file where the save folder is, and returns what puts the folder back."""
    save, away = tmp_path / "save", tmp_path / "away"

    def hide() -> Callable[[], None]:
        save.rename(away)
        save.write_text("no folder")

        def show() -> None:
            save.unlink()
            away.rename(save)

        return show

    return hide


def test_a_save_that_fails_is_said_training_goes_on_and_a_later_one_succeeds(
    tmp_path: Path, hidden: Callable[[], Callable[[], None]]
) -> None:
    save = tmp_path / "save"
    run = Watched(command(*ENDLESS, *NO_DROPOUT, "--save", str(save)))
    run.read_until(lambda line: line.startswith("saved checkpoint of iteration"))
    show = hidden()
    said = run.read_until(lambda line: FAILED in line)
    assert said.startswith(f"WARNING: --save {save}: the checkpoint of iteration ")
    assert "training goes on, and the next save tries again" in said
    run.read_until(lambda line: " iteration " in line and "|" in line)
    show()
    run.read_until(lambda line: line.startswith("saved checkpoint of iteration"))
    run.process.send_signal(signal.SIGTERM)
    status, err = run.end()
    assert status == 0
    assert "train.py: error" not in err
    (exiting,) = (line for line in run.lines if line.startswith("exiting at iteration"))
    step = exiting.split()[3]
    assert (save / step / "manifest.json").is_file()
    assert not list(save.glob("*.tmp"))


def test_a_sigterm_whose_save_fails_ends_with_status_1_and_names_the_last_complete_step(
    tmp_path: Path, hidden: Callable[[], Callable[[], None]]
) -> None:
    save = tmp_path / "save"
    run = Watched(command(*ENDLESS, *NO_DROPOUT, "--save", str(save)))
    run.read_until(lambda line: line.startswith("saved checkpoint of iteration"))
    show = hidden()
    run.read_until(lambda line: FAILED in line)
    run.process.send_signal(signal.SIGTERM)
    status, err = run.end()
    assert status == 1
    last = message(err)
    assert last.startswith(f"train.py: error: --save {save}: the last checkpoint, of iteration ")
    assert "fix: " in last
    assert "there is no complete one" in last  # a file lies where the folder was
    show()
    assert max(int(path.name) for path in save.iterdir() if path.name.isdigit()) >= 1


def test_a_disk_that_fills_is_said_and_a_run_whose_last_save_failed_ends_with_status_1(tmp_path: Path) -> None:
    save = tmp_path / "save"
    words = command("--num-cpu-devices", "2", *NO_DROPOUT, "--save", str(save), "--train-iters", "2")
    done = subprocess.run(words, env=quick_environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    more = ["--load", str(save), "--train-iters", "4", "--save-interval", "1"]
    limited = [words[0], "-c", LIMITED, *words[1:], *more]
    done = subprocess.run(limited, env=quick_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert re.findall(rf"the checkpoint of iteration (\d+) {FAILED}", done.stdout) == ["3", "4"]
    assert "the last complete one is step 2" in message(done.stderr)
    assert f"--load {save} to go on" in message(done.stderr)
    # Writes under way when the first one failed may come after the removal; the next run tidies up.
    assert complete_steps(save) == [2]
    assert {path.name for path in save.iterdir()} <= {"2", "3.tmp", "4.tmp"}
