"""Processes that tokenise chunks, and a parent that keeps their order (no communication).

    parent   ---- chunk 7 ---->   worker: reads, tokenises, keeps the tokens
             <--- counts 7 ----
             ---- place 7 ---->   worker: writes the tokens there

A worker goes on with its next chunk while an earlier one has no place yet. Messages to the parent are small and it
reads them always, so neither side waits for the other for ever; a worker that dies closes its pipe, which ends the run,
and so does a parent that dies.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np

from jmegatron.data.preprocess_encode import Counts, EncodeOptions, encode_chunk
from jmegatron.data.preprocess_input import Chunk
from jmegatron.data.preprocess_output import TokenFiles
from jmegatron.data.tokenizers import Tokenizer, build_tokenizer
from jmegatron.errors import UsageError

Reserve = Callable[[Counts], list[int]]

# Chunks a worker may hold before the first of them has a place; bounds the memory.
_CHUNKS_HELD = 4


class Job(NamedTuple):
    """What a worker needs to know.

    tokenizer: arguments of `build_tokenizer`. options: see EncodeOptions. paths: an unfinished file per JSON key.
    """

    tokenizer: dict[str, Any]
    options: EncodeOptions
    paths: tuple[str, ...]


def encode_here(chunks: Iterable[Chunk], job: Job, reserve: Reserve, tokenizer: Tokenizer) -> Iterator[Counts]:
    """Tokenise and write the chunks in this process, and yield the counts of each."""
    files = TokenFiles(job.paths)
    try:
        for chunk in chunks:
            counts, tokens = encode_chunk(chunk, tokenizer, job.options)
            files.write(tokens, reserve(counts))
            yield counts
    finally:
        files.close()


def encode_in_workers(chunks: Iterable[Chunk], job: Job, reserve: Reserve, num_workers: int) -> Iterator[Counts]:
    """Tokenise and write the chunks in `num_workers` processes, and yield the counts of each, in order.

    Raises:
        UsageError: what a worker raised, the first in order; or a worker died.
    """
    # spawn: a fork of a process with threads (the tokenizer's) can hang.
    context = multiprocessing.get_context("spawn")
    team: list[_Worker] = []
    try:
        for _ in range(num_workers):
            with without_interrupts():
                team.append(_Worker.start(context, job))
        yield from _run(iter(chunks), team, reserve)
        for worker in team:
            worker.send(None)
        for worker in team:
            worker.expect_end()
    finally:
        for worker in team:
            worker.stop()


def _run(chunks: Iterator[Chunk], team: Sequence["_Worker"], reserve: Reserve) -> Iterator[Counts]:
    """Hand out chunks and places until all chunks have one."""
    arrived: dict[int, tuple[_Worker, Counts]] = {}
    chunk = next(chunks, None)
    sent = placed = 0
    while chunk is not None or placed < sent:
        while chunk is not None and sent - placed < _CHUNKS_HELD * len(team):
            worker = min(team, key=lambda one: one.running)
            if worker.running >= (1 if chunk.is_heavy else 2):
                break
            worker.send((sent, chunk))
            worker.running += 1
            sent += 1
            chunk = next(chunks, None)
        for worker in _with_messages(team):
            number, counts = worker.receive()
            if number < placed and isinstance(counts, Exception):  # in writing a chunk, or before the first one
                raise counts
            worker.running -= 1
            arrived[number] = worker, counts
        while placed in arrived:
            worker, counts = arrived.pop(placed)
            if isinstance(counts, Exception):
                raise counts
            worker.send((placed, reserve(counts)))
            placed += 1
            yield counts


def _with_messages(team: Sequence["_Worker"]) -> list["_Worker"]:
    """Wait for a worker to say something and return those that do."""
    ready = wait([worker.pipe for worker in team])
    return [worker for worker in team if worker.pipe in ready]


@dataclass
class _Worker:
    """A process, its pipe, and how many chunks it has been given and not answered."""

    process: BaseProcess
    pipe: Connection
    running: int = 0

    @classmethod
    def start(cls, context: Any, job: Job) -> "_Worker":
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, job), daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends when the worker does
        return cls(process, ours)

    def send(self, message: Any) -> None:
        try:
            self.pipe.send(message)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error

    def expect_end(self) -> None:
        """Wait for the worker to write what it holds."""
        with contextlib.suppress(EOFError, OSError):
            _, error = self.pipe.recv()
            raise error
        self.process.join()
        if self.process.exitcode:
            raise self._died()

    def stop(self) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.terminate()
        self.process.join()

    def _died(self) -> UsageError:
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():  # it may have said why
                _, answer = self.pipe.recv()
                if isinstance(answer, UsageError):
                    return answer
        return UsageError("--workers: a worker process died, perhaps for want of memory; fix: fewer workers")


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Let processes that start in the block take no Ctrl-C, from their first instruction on: the parent ends them.

    One that comes during the block waits for its end: half started, a process would end with a traceback.
    """
    resource_tracker.ensure_running()  # starting it would let the signal through again
    came: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if in_main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # processes inherit this, not the handler
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if in_main:
            signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)


def _work(pipe: Connection, job: Job) -> None:
    """Be a worker until the parent says None or is gone."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are the parallelism
    _keep_freed_memory()
    number = -1
    try:
        tokenizer = build_tokenizer(**job.tokenizer)
        files = TokenFiles(job.paths)
        held: dict[int, list[np.ndarray]] = {}
        while (message := pipe.recv()) is not None:
            number, content = message
            if isinstance(content, Chunk):
                counts, held[number] = encode_chunk(content, tokenizer, job.options)
                pipe.send((number, counts))
            else:
                files.write(held.pop(number), content)
        files.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        _report(pipe, number, error)


def _keep_freed_memory() -> None:
    """Let the C library keep the arrays of a chunk for the next one, instead of asking the system for pages anew.

    glibc raises its thresholds to the size of the largest block freed so far, up to 32 MiB; saves a tenth of the time.
    """
    block = np.empty(31 << 20, np.uint8)
    del block


def _report(pipe: Connection, number: int, error: Exception) -> None:
    """Tell the parent what went wrong; what cannot travel goes as its description."""
    plain: Exception = error
    if type(error).__init__ is not Exception.__init__ and not isinstance(error, UsageError):
        plain = RuntimeError(f"{type(error).__name__}: {error}")
    with contextlib.suppress(OSError, EOFError):
        pipe.send((number, plain))
        while True:  # keep the pipe open until the parent has read it and closes its end
            pipe.recv()
