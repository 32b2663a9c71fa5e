"""One process's part in a job of one or several: signals, deadlines, and how all processes end together.

Talks through a key-value store that all processes share (the coordination service's), never on a mesh axis. Imports no
jax, so that signals are looked after before it has loaded. Megatron-LM training/training.py (exit signal handler, exit
duration), core/dist_signal_handler.py.

A thread of its own does all of it, whatever the main thread waits for: a compilation, a collective that a dead peer
will never enter, a write. It ends the process with `os._exit`: an orderly end would wait for those very peers.

Stopping, or saving, after the same step: whoever wants it writes a request. A process that sees one holds its main
thread at the end of a step and writes the last step it had been asked about. Once every process has written one, all go
on to the largest plus 1 and do it there: no process has begun a later one, and none can be missing from that one.
"""

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import NoReturn, Protocol, runtime_checkable

PEER_FAILED = 3
"""Exit status of a process that ends because another one of its job failed."""
POLL_SECONDS = 0.25
"""How often the thread looks at what other processes wrote; four times as rarely in jobs of more than 64."""
LINGER_SECONDS = 2.0
"""The store lives in process 0, which waits this long after a failure so that the others can read of it."""
SLOW_MINUTES = 60.0
"""Limit of what may take long without a fault: data, compilation, saving, restoring."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@runtime_checkable
class Store(Protocol):
    """Strings that all processes of a job read and write."""

    def set(self, key: str, value: str) -> None:
        """Writes a value; a later one replaces it."""

    def get(self, key: str, seconds: float) -> str:
        """Returns a value, waiting for it. Raises TimeoutError after `seconds`."""

    def list(self, prefix: str) -> dict[str, str]:
        """Returns all values whose keys begin with `prefix`/, by the rest of their keys."""

    def barrier(self, name: str, seconds: float) -> None:
        """Waits until every process is here. Raises TimeoutError after `seconds`."""

    def delete(self, prefix: str) -> None:
        """Removes all values whose keys begin with `prefix`/."""


class _Agreement:
    """After which step all processes do something that one of them asks for; again and again, in rounds."""

    def __init__(self, kind: str):
        self._kind = kind
        self._round = 0
        self.reason = ""
        self.held = False
        """Whether this process waits at the end of a step."""
        self.at: int | None = None
        """The step agreed on, 0 in a job of one."""

    @property
    def _keys(self) -> tuple[str, str]:
        return f"ask/{self._kind}/{self._round}", f"step/{self._kind}/{self._round}"

    def request(self, store: Store | None, index: int, reason: str) -> None:
        if store is None:
            self.at, self.reason = self.at or 0, self.reason or reason
        else:
            store.set(f"job/{self._keys[0]}/{index}", reason)

    def look(self, store: Store, entries: Mapping[str, str], job: "Job", asked: int) -> None:
        """Does what others' entries demand; `asked` is the last step that the main thread has ended."""
        ask, step = (f"{key}/" for key in self._keys)
        reasons = [value for key, value in sorted(entries.items()) if key.startswith(ask)]
        if not reasons or self.at is not None:
            return
        if not self.held:
            store.set(f"job/{step}{job.index}", str(asked))
            self.held = True
            return
        steps = [int(value) for key, value in entries.items() if key.startswith(step)]
        if len(steps) == job.count:
            self.at, self.reason, self.held = max(steps) + 1, reasons[0], False

    def due(self, step: int) -> bool:
        return self.at is not None and step >= self.at

    def next_round(self, store: Store | None, index: int) -> None:
        """Begins anew after what was agreed on."""
        if store is not None and index == 0 and self._round:
            # All have left the round before this one, or this one could not have been agreed on.
            for kind in ("ask", "step"):
                store.delete(f"job/{kind}/{self._kind}/{self._round - 1}")
        self._round += 1
        self.at, self.reason = None, ""


class Job:
    """This process's part in its job; a job of one process until `enter` says otherwise.

    Nothing is watched before `start`, so that a run inside another program leaves its signals alone.

    Attributes:
      index: number of this process, from 0.
      count: processes of the job.
      minutes: how long processes wait for one another.
      store: what they tell one another; None before they are connected, and in a job of one.
      hosts: name of each process's machine.
      all_know: every process ends by itself, for the same reason.
    """

    def __init__(self) -> None:
        self.index, self.count, self.minutes = 0, 1, 0.0
        self.store: Store | None = None
        self.hosts = [socket.gethostname()]
        self.all_know = False
        self._begin = time.monotonic()
        self._main = threading.main_thread().ident
        self._thread: threading.Thread | None = None
        self._done = threading.Event()
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._handlers: dict[int, object] = {}
        # What the thread and the main thread share; `_turn` guards the part about stopping.
        self._deadline: tuple[float, str, float] | None = None
        self._backup = (0.0, 0.0)
        self._longest: tuple[float, str] | None = None
        self._training = self._signalled = self._leaving = False
        self._turn = threading.Condition()
        self._printing = threading.Lock()
        self._asked = 0
        self._stop, self._save = _Agreement("stop"), _Agreement("save")
        self._save_seconds: float | None = None
        self._last_save = self._begin
        self._save_asked = False

    # ---- life ---------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Takes SIGTERM and SIGINT over and starts the thread; call it from the main thread."""
        self._wakeup = socket.socketpair()
        for end in self._wakeup:
            end.setblocking(False)
        # The C handler writes the signal's number there at once; a Python handler would wait for the main thread.
        signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            self._handlers[number] = signal.signal(number, lambda *_: None)
        self._thread = threading.Thread(target=self._look_after, name="jmegatron-job", daemon=True)
        self._thread.start()

    def enter(self, index: int, count: int, minutes: float) -> None:
        """Says which process of how many this is, and how long they wait for one another."""
        self.index, self.count, self.minutes = index, count, minutes
        if count > 1:
            # JAX aborts where a peer stops answering: Python's stacks then say what this process waited for.
            faulthandler.enable()

    def train(self, step: int, exit_minutes: int | None = None, save_minutes: float | None = None) -> None:
        """From here on, after `step` steps, a signal ends the run after a step instead of at once.

        Args:
          step: steps done.
          exit_minutes: how long after its beginning the run ends after a step, as process 0 measures it.
          save_minutes: how long after the last save all save again, as process 0 measures it.
        """
        self._asked, self._training = step, True
        self._last_save = time.monotonic()
        if save_minutes is not None and self.index == 0:
            self._save_seconds = save_minutes * 60.0
        if exit_minutes is not None and self.index == 0:
            self._longest = (exit_minutes * 60.0, f"--exit-duration-in-mins {exit_minutes}")

    def meet(self, name: str, minutes: float) -> None:
        """Waits until all processes are here; each name serves once.

        Raises:
          TimeoutError: one has not come within `minutes`.
        """
        if self.store is not None:
            self.store.barrier(name, minutes * 60)

    def close(self) -> None:
        """Waits for all processes and gives signals back."""
        self.watch(None)
        self.meet("end", self.minutes)  # else one that has left could be asked at which step it stops
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            assert self._wakeup is not None
            for end in self._wakeup:
                end.close()
        self._thread = self._wakeup = None

    # ---- stopping and saving together ---------------------------------------------------------------------------
    def request_stop(self, reason: str) -> None:
        """Asks all processes to end the run after a step, the same one."""
        with self._turn:
            self._stop.request(self.store, self.index, reason)

    def stops_after(self, step: int) -> str | None:
        """Returns why the run ends after this step, None where it goes on; to be asked once after each step."""
        if self._longest is not None and time.monotonic() - self._begin > self._longest[0]:
            self.request_stop(self._longest[1])
            self._longest = None
        with self._turn:
            self._asked = step
            self._turn.wait_for(lambda: not (self._stop.held or self._save.held))
            return self._stop.reason if self._stop.due(step) else None

    def saves_after(self, step: int, saved: bool) -> bool:
        """Returns whether the time has come to save after this step; to be asked once after `stops_after`.

        Args:
          step: the step.
          saved: the run saves now in any case.
        """
        now = time.monotonic()
        if saved:
            self._last_save = now
        with self._turn:
            self._turn.wait_for(lambda: not self._save.held)
            if self._save_seconds is not None and not self._save_asked and now - self._last_save > self._save_seconds:
                self._save.request(self.store, self.index, "time")
                self._save_asked = True
            if not self._save.due(step):
                return False
            self._save.next_round(self.store, self.index)
            self._save_asked, self._last_save = False, now
            return True

    def _agree_on_step(self, entries: Mapping[str, str]) -> None:
        assert self.store is not None
        with self._turn:
            for agreement in (self._stop, self._save):
                agreement.look(self.store, entries, self, self._asked)
            self._turn.notify_all()

    # ---- deadlines ----------------------------------------------------------------------------------------------
    def watch(self, what: str | None, minutes: float | None = None) -> None:
        """Gives what this process does now `minutes` (default: those of `enter`) from now; None: as long as it likes.

        Only in a job of several: one process waits for nobody.
        """
        if self.count == 1:
            return
        if what is None:
            self._deadline, self._backup = None, (0.0, 0.0)
            faulthandler.cancel_dump_traceback_later()
            return
        now, limit = time.monotonic(), self.minutes if minutes is None else minutes
        self._deadline = (now + limit * 60, what, limit)
        # Should the thread be held up as well (by C code that keeps Python's lock), this one is not. It costs 0.1 ms.
        if self._backup[0] != limit or now - self._backup[1] > 5:
            faulthandler.dump_traceback_later(limit * 60 + 30, exit=True)
            self._backup = (limit, now)

    def _check_deadline(self) -> None:
        deadline = self._deadline
        if deadline is None or time.monotonic() < deadline[0]:
            return
        faulthandler.dump_traceback(file=2, all_threads=True)
        self._leave(
            1,
            f"{deadline[1]} has taken more than {deadline[2]:g} min (--distributed-timeout-minutes"
            f" {self.minutes:g}); above: where this process waited",
        )

    # ---- ending -------------------------------------------------------------------------------------------------
    def await_cause(self, seconds: float) -> None:
        """Waits so long for news of another process's failure, of which an error here may be the consequence.

        Does not return if there is one: the thread then ends this process.
        """
        self._deadline = None  # what it was set for is over
        end = time.monotonic() + seconds
        while time.monotonic() < end or self._leaving:
            time.sleep(0.05)

    def print_error(self) -> None:
        """Prints the traceback of the exception being handled, before what the thread may have to say."""
        with self._printing:
            traceback.print_exc()

    def fail(self, status: int, text: str) -> NoReturn:
        """Ends this process and the others after an error that has been printed.

        Args:
          status: of this process.
          text: what the others print.
        """
        self._tell(status, text)
        os._exit(status)

    def _leave(self, status: int, text: str) -> NoReturn:
        """Ends this process and the others from the thread."""
        self._leaving = True
        self._print(text)
        self._tell(status, text)
        os._exit(status)

    def _tell(self, status: int, text: str) -> None:
        """Lets the other processes know, in bounded time."""
        if self.store is None:
            return
        timer = threading.Timer(2 * LINGER_SECONDS, os._exit, (status,))
        timer.daemon = True
        timer.start()
        try:
            if not self.all_know:
                self.store.set(f"job/failed/{self.index}", f"{self.name}: {text}"[-4000:])
        except Exception:
            return  # nobody there: then nobody waits
        if self.index == 0:
            time.sleep(LINGER_SECONDS)

    @property
    def name(self) -> str:
        """This process's number and host, for messages."""
        return f"process {self.index} ({socket.gethostname()})"

    def _print(self, text: str) -> None:
        where = f"{self.name}: " if self.count > 1 else ""
        with contextlib.suppress(OSError):  # nobody may read any more
            # Not through sys.stderr, whose lock the main thread may hold.
            os.write(2, f"train.py: {where}{text}\n".encode(errors="replace"))

    # ---- the thread ---------------------------------------------------------------------------------------------
    def _look_after(self) -> None:
        assert self._wakeup is not None
        next_look = 0.0
        while not self._done.is_set():
            ready, _, _ = select.select([self._wakeup[0]], [], [], POLL_SECONDS)
            for number in self._wakeup[0].recv(64) if ready else b"":
                self._on_signal(number)
            self._check_deadline()
            now = time.monotonic()
            if self.store is not None and now >= next_look:
                next_look = now + POLL_SECONDS * (1 if self.count <= 64 else 4)
                self._look_at_others(self.store)

    def _look_at_others(self, store: Store) -> None:
        try:
            entries = store.list("job")
            self._agree_on_step(entries)
        except Exception:
            return  # process 0 is gone; JAX's own client says so and ends this process
        failed = [value for key, value in sorted(entries.items()) if key.startswith("failed/")]
        if not failed or f"failed/{self.index}" in entries:
            return
        self._leaving = True
        self._printing.acquire(timeout=LINGER_SECONDS)  # and never released: the cause is to be last
        frame = sys._current_frames().get(self._main or 0)
        self._print("where this process was:\n" + "".join(traceback.format_stack(frame)[-12:]).rstrip())
        self._print(f"ended by the failure of {failed[0]}")
        if self.index == 0:
            time.sleep(LINGER_SECONDS)
        os._exit(PEER_FAILED)

    def _on_signal(self, number: int) -> None:
        if number not in SIGNALS:
            return
        name = signal.Signals(number).name
        if self._signalled:
            self._leave(128 + number, f"{name}, the second signal: leaving at once; what was not saved is lost")
        if not self._training:
            self._leave(128 + number, f"{name} before the first step: leaving at once")
        self._signalled = True
        self._print(f"{name}: leaving after this step, and saving where --save says so; a second signal leaves at once")
        self.request_stop(f"{name} at {self.name}" if self.count > 1 else name)
