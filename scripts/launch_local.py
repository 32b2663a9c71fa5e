"""Starts one command as several processes of a job on this machine, and ends them together.

    python scripts/launch_local.py -n 2 -- python train.py --config configs/gpt_tiny.yaml --num-cpu-devices 2
    python scripts/launch_local.py -n 8 --max-restarts 3 -- python train.py ... --save runs/a --load runs/a

Each process gets `--coordinator-address`, `--num-processes` and `--process-id` behind its command, and its share of the
GPUs of this machine (CUDA_VISIBLE_DEVICES). Its lines come out with its number in front.

When one ends with an error, the others get SIGTERM, SIGKILL after the grace time, and the first cause is the last thing
printed. SIGTERM and SIGINT are passed on: a run then finishes its step, saves and ends with status 0. A restart is
another start of all processes: the command needs `--load` and `--save` of the same folder to go on where it was.

Exit status: 0 if all ended so; that of the first process that failed, 128 + the signal's number if a signal ended it.
"""

import argparse
import collections
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

PEER_FAILED = 3
"""Exit status of train.py where another process failed first (jmegatron/training/job.py)."""
SETTLE_SECONDS = 5.0
"""How long to wait for the first cause where a process ended as its consequence."""
POLL_SECONDS = 0.05
LINES_KEPT = 40


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job, as often as allowed, and returns the exit status."""
    options = _parse(argv)
    stop = _Stop()
    for attempt in range(options.max_restarts + 1):
        job = _Job(options, stop)
        status = job.run()
        # Another start does not mend a wrong option.
        if status in (0, 2) or stop.signals or attempt == options.max_restarts:
            return status
        _say(f"starting again, {attempt + 1} of at most {options.max_restarts} times")
        time.sleep(1.0)
    raise AssertionError("the last attempt returns")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Starts one command as several processes of a job on this machine, and ends them together.",
        usage="%(prog)s -n N [options] -- COMMAND ...",
    )
    parser.add_argument("-n", "--num-processes", type=int, required=True, help="processes to start")
    parser.add_argument(
        "--gpus-per-process", type=int, help="GPUs of each process (default: all of this machine, shared evenly)"
    )
    parser.add_argument("--max-restarts", type=int, default=0, help="how often to start again after a failure")
    parser.add_argument(
        "--grace-seconds", type=float, default=5.0, help="between SIGTERM and SIGKILL after a failure (default: 5)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to start, after --")
    options = parser.parse_args(argv)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.num_processes < 1 or options.max_restarts < 0 or not options.command:
        parser.error("needs -n of at least 1 and a command after --")
    return options


class _Stop:
    """Signals that this launcher got, to be passed on."""

    def __init__(self) -> None:
        self.signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self.signals.append(number))


class _Job:
    """One start of all processes."""

    def __init__(self, options: argparse.Namespace, stop: _Stop):
        self._options, self._stop, self._passed_on = options, stop, len(stop.signals)
        count = options.num_processes
        address = f"127.0.0.1:{_free_port()}"
        shares = _gpu_shares(count, options.gpus_per_process)
        self._children = [
            _Child(
                [
                    *options.command,
                    *("--coordinator-address", address, "--num-processes", str(count), "--process-id", str(index)),
                ],
                index,
                shares[index],
            )
            for index in range(count)
        ]

    def run(self) -> int:
        """Waits for the end of all; returns the status of the first that failed, 0 if none did."""
        ended: list[_Child] = []
        kill_at: float | None = None
        settle_until: float | None = None
        while len(ended) < len(self._children):
            time.sleep(POLL_SECONDS)
            self._pass_on_signals()
            ended += [child for child in self._children if child not in ended and child.poll() is not None]
            failed = [child for child in ended if child.poll() != 0]
            now = time.monotonic()
            if failed and kill_at is None:
                settle_until = settle_until or now + SETTLE_SECONDS
                if _cause(failed).poll() != PEER_FAILED or now > settle_until:
                    self._send(signal.SIGTERM)
                    kill_at = now + self._options.grace_seconds
            if kill_at is not None and now > kill_at:
                self._send(signal.SIGKILL)
                kill_at = float("inf")
        for child in self._children:
            child.join()
        if not failed:
            return 0
        cause = _cause(failed)
        cause.print_end()
        status = cause.poll()
        assert status is not None
        return status if status > 0 else 128 - status

    def _pass_on_signals(self) -> None:
        for number in self._stop.signals[self._passed_on :]:
            _say(f"passing {signal.Signals(number).name} on")
            self._send(number)
            self._passed_on += 1

    def _send(self, number: int) -> None:
        for child in self._children:
            child.send(number)


def _cause(failed: "list[_Child]") -> "_Child":
    """Returns the process that failed first, leaving out those that ended because of another."""
    return next((child for child in failed if child.poll() != PEER_FAILED), failed[0])


class _Child:
    """A process, and two threads that print its lines."""

    def __init__(self, command: Sequence[str], index: int, devices: str | None):
        environment = os.environ if devices is None else {**os.environ, "CUDA_VISIBLE_DEVICES": devices}
        self.index = index
        # In a group of its own: what a terminal sends to this launcher must not reach it twice.
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
        self._last: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)
        self._errors: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)
        streams = ((self._process.stdout, sys.stdout, None), (self._process.stderr, sys.stderr, self._errors))
        self._threads = [threading.Thread(target=self._copy, args=stream, daemon=True) for stream in streams]
        for thread in self._threads:
            thread.start()

    def _copy(self, source: IO[bytes], target: IO[str], kept: "collections.deque[str] | None") -> None:
        for raw in source:
            line = raw.decode(errors="replace").rstrip("\n")
            self._last.append(line)
            if kept is not None:
                kept.append(line)
            try:
                print(f"[{self.index}] {line}", file=target, flush=True)
            except OSError:  # nobody reads any more; the process must not stand still for that
                continue

    def poll(self) -> int | None:
        """Returns the exit status, negative for a signal, None while it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Sends a signal if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def join(self) -> None:
        """Waits until its last lines are printed; a grandchild may keep the pipe open for ever."""
        for thread in self._threads:
            thread.join(timeout=2.0)

    def print_end(self) -> None:
        """Prints how it ended, after its last lines; what it wrote as an error comes last."""
        lines = list(self._errors or self._last)
        status = self._process.returncode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        _say(f"process {self.index} failed first; its last lines:")
        for line in lines[-20:]:
            print(f"    {line}", file=sys.stderr)
        reason = next((line.strip() for line in reversed(self._errors) if line.strip()), "") if status > 0 else ""
        _say(f"process {self.index} {how}" + (f": {reason}" if reason else ""))


def _gpu_shares(count: int, each: int | None) -> list[str | None]:
    """Returns CUDA_VISIBLE_DEVICES of each process; None leaves it as it is, where there are no GPUs to share."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name for name in visible.split(",") if name]
    else:
        names = [str(number) for number in range(sum(1 for p in Path("/dev").glob("nvidia*") if _is_gpu(p.name)))]
    if each is None:
        if not names:
            return [None] * count
        each = len(names) // count
    if each < 1 or (names and each * count > len(names)):
        raise SystemExit(
            f"launch_local: error: {count} processes need {max(each, 1) * count} GPUs, but there are {len(names)};"
            " fix: fewer processes, a smaller --gpus-per-process, or CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    names = names or [str(number) for number in range(each * count)]
    return [",".join(names[index * each : (index + 1) * each]) for index in range(count)]


def _is_gpu(name: str) -> bool:
    return re.fullmatch(r"nvidia\d+", name) is not None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _say(text: str) -> None:
    print(f"launch_local: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
