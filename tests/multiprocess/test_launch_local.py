"""The launcher's supervision, with small commands instead of training."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import ROOT

LAUNCHER = [sys.executable, str(ROOT / "scripts" / "launch_local.py")]
HEAD = "import os, signal, sys, time; index = int(sys.argv[-1]); "


def run(code: str, *options: str, count: int = 2, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Launches python -c CODE, which knows `index`."""
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        [*LAUNCHER, "-n", str(count), *options, "--", sys.executable, "-c", HEAD + code],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_lines_come_out_with_the_number_of_their_process_and_its_options() -> None:
    done = run("print(*sys.argv[1:]); print('error', file=sys.stderr)", count=3)
    assert done.returncode == 0
    lines = sorted(done.stdout.splitlines())
    assert [line.partition(" --")[0] for line in lines] == ["[0]", "[1]", "[2]"]
    for index, line in enumerate(lines):
        words = line.split()
        assert words[1] == "--coordinator-address"
        assert words[2].startswith("127.0.0.1:")
        assert words[3:] == ["--num-processes", "3", "--process-id", str(index)]
    assert len({line.split()[2] for line in lines}) == 1
    assert sorted(done.stderr.splitlines()) == ["[0] error", "[1] error", "[2] error"]


def test_the_first_failure_ends_the_others_and_is_printed_last() -> None:
    start = time.monotonic()
    done = run("time.sleep(0.5 if index else 600); sys.exit('no luck')")
    assert time.monotonic() - start < 20
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "launch_local: process 1 ended with status 1: no luck"


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_time() -> None:
    start = time.monotonic()
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN) if index else None; time.sleep(600 if index else 0.5); 1 / 0"
    done = run(code, "--grace-seconds", "1")
    assert time.monotonic() - start < 20
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("ended with status 1: ZeroDivisionError: division by zero")


def test_a_killed_process_gives_the_signal_s_status_and_name() -> None:
    done = run("time.sleep(600) if index else os.kill(os.getpid(), 9)")
    assert done.returncode == 128 + 9
    assert done.stderr.splitlines()[-1] == "launch_local: process 0 was killed by SIGKILL"


def test_the_cause_is_the_process_that_did_not_end_because_of_another() -> None:
    """Process 1 notices first and ends with status 3; process 0 lingers and fails with what happened."""
    done = run("time.sleep(0.2 if index else 1.2); print(index, file=sys.stderr); sys.exit(3 if index else 7)")
    assert done.returncode == 7
    assert done.stderr.splitlines()[-1] == "launch_local: process 0 ended with status 7: 0"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_an_orderly_end_is_status_0(number: signal.Signals) -> None:
    code = (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.signal(signal.SIGINT, lambda *_: sys.exit(0)); "
        "print('ready', flush=True); time.sleep(60)"
    )
    launcher = subprocess.Popen(
        [*LAUNCHER, "-n", "2", "--max-restarts", "2", "--", sys.executable, "-c", HEAD + code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    for _ in range(2):
        launcher.stdout.readline()
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0
    assert err == f"launch_local: passing {number.name} on\n"


def test_restarts_are_counted_and_need_no_more_once_all_goes_well(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    code = (
        f"index or open({str(marks)!r}, 'a').write('x'); sys.exit(index == 0 and len(open({str(marks)!r}).read()) < 3)"
    )
    done = run(code, "--max-restarts", "5")
    assert done.returncode == 0
    assert marks.read_text() == "xxx"
    assert [line for line in done.stderr.splitlines() if "starting again" in line] == [
        f"launch_local: starting again, {n} of at most 5 times" for n in (1, 2)
    ]


@pytest.mark.parametrize(("status", "starts"), [(1, 3), (2, 1)])
def test_restarts_end_and_a_wrong_option_is_not_tried_again(status: int, starts: int, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    done = run(f"open({str(marks)!r}, 'a').write('x'); sys.exit({status})", "--max-restarts", "2", count=1)
    assert done.returncode == status
    assert marks.read_text() == "x" * starts


@pytest.mark.parametrize(
    ("options", "visible", "shares"),
    [
        ((), "0,1,2,3", ["0,1", "2,3"]),
        ((), "4,7", ["4", "7"]),
        (("--gpus-per-process", "1"), "0,1,2,3", ["0", "1"]),
        ((), "", ["", ""]),
    ],
)
def test_gpus_are_shared_out(options: tuple[str, ...], visible: str, shares: list[str]) -> None:
    done = run("print(os.environ['CUDA_VISIBLE_DEVICES'])", *options, CUDA_VISIBLE_DEVICES=visible)
    assert sorted(done.stdout.splitlines()) == [f"[{index}] {share}" for index, share in enumerate(shares)]


def test_more_processes_than_gpus_are_refused() -> None:
    done = run("pass", "--gpus-per-process", "2", count=3, CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert done.returncode == 1
    assert "3 processes need 6 GPUs, but there are 4" in done.stderr
