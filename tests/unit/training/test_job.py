"""Stopping at the same step, whoever asks and however far each process is; signals and deadlines in a real process."""

import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable

import pytest
from memory_store import MemoryStore, job_of
from training_runs import quick_environment

from jmegatron.training.job import PEER_FAILED, Job


# ---- one process ----------------------------------------------------------------------------------------------------
def test_one_process_stops_after_the_step_in_which_it_is_asked() -> None:
    job = Job()
    job.train(0)
    assert job.stops_after(1) is None
    job.request_stop("enough")
    assert job.stops_after(2) == "enough"


def test_the_duration_counts_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    job = Job()
    job.train(0, exit_minutes=3)
    assert job.stops_after(1) is None
    monkeypatch.setattr(time, "monotonic", lambda: now + 3 * 60 + 1)
    assert job.stops_after(2) == "--exit-duration-in-mins 3"


def test_one_process_has_no_deadline() -> None:
    job = Job()
    job.watch("step 1", 0.0)
    assert job._deadline is None


# ---- several --------------------------------------------------------------------------------------------------------
def as_processes(count: int, seed: int, train: Callable[[Job, int], bool]) -> list[int]:
    """Threads as processes, each at its own pace but at most two steps ahead of the slowest, as in a run.

    Each does train(job, step) at the end of its steps until that is true; returns the last step of each.
    """
    begun, store, rng = [0] * count, MemoryStore(count), random.Random(seed)
    paces = [rng.random() * 2e-3 for _ in range(count)]
    done = threading.Event()

    def look(job: Job) -> None:
        while not done.is_set():
            job._look_at_others(store)
            time.sleep(rng.random() * 3e-3)

    def run(job: Job) -> None:
        for step in range(1, 10_000):
            while step > min(begun) + 2:
                time.sleep(1e-4)
            begun[job.index] = step
            time.sleep(paces[job.index])
            if train(job, step):
                return

    jobs = [job_of(store, index) for index in range(count)]
    threads = [threading.Thread(target=target, args=(job,), daemon=True) for job in jobs for target in (look, run)]
    for thread in threads:
        thread.start()
    for thread in threads[1::2]:
        thread.join(timeout=30)
    done.set()
    return begun


@pytest.mark.parametrize("seed", range(8))
def test_processes_that_differ_in_speed_stop_after_the_same_step_which_none_has_passed(seed: int) -> None:
    rng = random.Random(seed)
    asks, at, stopped = rng.randrange(4), rng.randrange(1, 20), [0] * 4

    def train(job: Job, step: int) -> bool:
        if step == 1:
            job.train(0)
        if job.index == asks and step == at:
            job.request_stop("SIGTERM")
        if job.stops_after(step) != "SIGTERM":
            return False
        stopped[job.index] = step
        return True

    assert as_processes(4, seed, train) == stopped  # nobody has begun another step
    assert stopped == [stopped[0]] * 4
    assert at <= stopped[0]


@pytest.mark.parametrize("seed", range(4))
def test_processes_save_after_the_same_steps_again_and_again_when_time_has_come(seed: int) -> None:
    saved: list[list[int]] = [[], [], []]
    seconds = 0.02
    begin = time.monotonic()

    def train(job: Job, step: int) -> bool:
        if step == 1:
            job.train(0, save_minutes=seconds / 60)
        reason = job.stops_after(step)
        if job.saves_after(step, saved=False):
            saved[job.index].append(step)
        if job.index == 0 and len(saved[0]) == 6:
            job.request_stop("enough")
        return reason is not None

    last = as_processes(3, seed, train)
    assert saved[0] == saved[1] == saved[2]
    assert len(saved[0]) >= 6
    assert time.monotonic() - begin >= 6 * seconds
    assert last == [last[0]] * 3


def test_one_process_saves_when_time_has_come_since_the_last_save(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    at = lambda seconds: monkeypatch.setattr(time, "monotonic", lambda: now + seconds)  # noqa: E731
    job = Job()
    at(0)
    job.train(0, save_minutes=1.0)
    for seconds, saved, expected in ((59, False, False), (61, False, True), (100, False, False), (119, True, False)):
        at(seconds)
        assert job.saves_after(1, saved) == expected
    at(178)
    assert not job.saves_after(2, False)
    at(180)
    assert job.saves_after(3, False)


def test_two_requests_at_once_are_one_stop() -> None:
    store = MemoryStore(2)
    jobs = [job_of(store, index) for index in range(2)]
    for job in jobs:
        job.train(7)
        job.request_stop(f"from {job.index}")
    for job in [*jobs, *jobs]:
        job._look_at_others(store)
    assert [job.stops_after(8) for job in jobs] == ["from 0", "from 0"]


def test_the_duration_is_that_of_process_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    store = MemoryStore(2)
    jobs = [job_of(store, index) for index in range(2)]
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    for job in reversed(jobs):
        job.train(0, exit_minutes=1)
        job.stops_after(1)
        assert bool(store.list("job")) == (job.index == 0)


# ---- real processes, without jax ------------------------------------------------------------------------------------
def start(code: str) -> "subprocess.Popen[str]":
    head = "import os, signal, sys, threading, time\nfrom jmegatron.training.job import Job\njob = Job()\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(code)],
        env=quick_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: "subprocess.Popen[str]", seconds: float = 30.0) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def wait_for_line(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_ends_at_once_whatever_the_main_thread_does(number: signal.Signals) -> None:
    # A lock that is never released: the main thread runs no Python code any more, as in a compilation.
    process = start("job.start(); print('ready', flush=True); threading.Lock().acquire(); os.read(os.pipe()[0], 1)")
    wait_for_line(process)
    process.send_signal(number)
    status, _, err = end(process)
    assert status == 128 + number
    assert err == f"train.py: {number.name} before the first step: leaving at once\n"


def test_the_first_signal_is_a_request_and_the_second_ends_at_once() -> None:
    process = start(
        """
        job.start()
        job.train(0)
        print("in the first step", flush=True)
        while job.stops_after(1) is None:
            time.sleep(0.01)
        print(job.stops_after(2), flush=True)
        time.sleep(60)
        """
    )
    wait_for_line(process)
    process.send_signal(signal.SIGTERM)
    wait_for_line(process)
    process.send_signal(signal.SIGINT)
    status, _, err = end(process)
    assert status == 128 + signal.SIGINT
    assert err.splitlines() == [
        "train.py: SIGTERM: leaving after this step, and saving where --save says so; a second signal leaves at once",
        "train.py: SIGINT, the second signal: leaving at once; what was not saved is lost",
    ]


def test_signals_are_given_back_at_the_end() -> None:
    code = "job.start(); job.train(0); job.close(); print('closed', flush=True); time.sleep(60)"
    process = start(code)
    wait_for_line(process)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == -signal.SIGTERM


def test_a_step_over_its_limit_ends_with_the_stack_and_its_name() -> None:
    process = start(
        """
        def waits_for_a_peer():
            os.read(os.pipe()[0], 1)
        job.start()
        job.enter(1, 2, 10.0)
        job.watch("step 17", 0.01)
        waits_for_a_peer()
        """
    )
    status, _, err = end(process)
    assert status == 1
    assert "in waits_for_a_peer" in err
    assert "step 17 has taken more than 0.01 min (--distributed-timeout-minutes 10)" in err.splitlines()[-1]


def test_the_failure_of_another_process_ends_this_one_with_its_text_last() -> None:
    process = start(
        """
        class Store:
            def list(self, prefix):
                return {"failed/0": "process 0 (elsewhere): ValueError: boom"}
        def waits_for_a_peer():
            os.read(os.pipe()[0], 1)
        job.start()
        job.enter(1, 2, 10.0)
        job.store = Store()
        waits_for_a_peer()
        """
    )
    status, _, err = end(process)
    assert status == PEER_FAILED
    assert "in waits_for_a_peer" in err
    assert err.splitlines()[-1].endswith("ended by the failure of process 0 (elsewhere): ValueError: boom")
