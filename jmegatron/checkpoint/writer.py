"""Writes checkpoints: in the background, whole or not at all, and says how each one ended.

    <folder>/<step>.tmp/state      what Orbax writes, each process its shards, while training goes on
    <folder>/<step>.tmp/manifest.json   last, once every process has written and hashed
    <folder>/<step>                the same, renamed: the commit

Communication: on the devices two integers an array (checksums); through the store three short values a process.
Megatron-LM training/checkpointing.py, core/dist_checkpointing/strategies/async_utils.py.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jmegatron.checkpoint import steps
from jmegatron.checkpoint.arrays import finish_writing, start_writing
from jmegatron.checkpoint.checksums import array_checksums, as_text
from jmegatron.checkpoint.manifest import (
    STATE,
    ArrayRecord,
    FileRecord,
    Manifest,
    checksums_of,
    list_files,
)
from jmegatron.checkpoint.peers import Peers

LONGEST_SECONDS = 3600.0
"""How long a process may take to write its shards."""


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which complete steps stay."""

    latest: int | None = None
    """So many of the newest; None: all."""
    every: int | None = None
    """And those that this divides."""

    def dropped(self, complete: list[int]) -> list[int]:
        """Returns the steps to remove among the complete ones, in ascending order."""
        if self.latest is None:
            return []
        old = sorted(complete)[: -self.latest]
        return [step for step in old if not self.every or step % self.every]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a save ended."""

    step: int
    problem: str
    """Why there is no checkpoint of this step; "": there is one."""
    seconds: float
    """From its beginning to the commit."""
    removed: tuple[int, ...] = ()
    """Older steps that made room."""


class CheckpointWriter:
    """Writes the steps of one folder; one save at a time.

    Args:
      path: the folder.
      peers: the processes that write.
      in_background: return from `save` as soon as the arrays are copied.
      retention: which older steps stay.
    """

    def __init__(
        self,
        path: str,
        peers: Peers | None = None,
        *,
        in_background: bool = True,
        retention: Retention | None = None,
    ):
        self._folder = Path(path).absolute()
        self._peers = peers or Peers()
        self._in_background = in_background
        self._retention = retention or Retention()
        self._thread: threading.Thread | None = None
        self._outcomes: list[Outcome] = []

    def save(self, step: int, arrays: Mapping[str, jax.Array], meta: dict[str, Any]) -> None:
        """Starts writing a step; the arrays may be donated as soon as this returns. Waits for the save before.

        What goes wrong is not raised: see `outcomes`.
        """
        self.wait()
        begin = time.monotonic()
        building = self._folder / f"{step}{steps.BUILDING}"
        problem = self._peers.collect("save", _attempt(self._prepare, building) if self._peers.index == 0 else "")
        if problem:
            if self._peers.index == 0:
                shutil.rmtree(building, ignore_errors=True)
            self._outcomes.append(Outcome(step, problem, time.monotonic() - begin))
            return
        checksums = array_checksums(arrays)
        records = {name: ArrayRecord(str(a.dtype), tuple(a.shape), "") for name, a in arrays.items()}
        futures: list[Any] = []
        problem = _attempt(lambda: futures.extend(start_writing(building / STATE, arrays)))

        def finish() -> None:
            # Nobody sees what a thread raises, and a save without an outcome would pass for a good one.
            said = _attempt(self._finish, step, building, futures, problem, checksums, records, meta, begin)
            if said:
                self._outcomes.append(Outcome(step, said, time.monotonic() - begin))

        if not self._in_background:
            finish()
            return
        self._thread = threading.Thread(target=finish, name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last save has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def outcomes(self) -> list[Outcome]:
        """Returns how saves have ended since the last call, in order; whether well, all processes say the same."""
        # Not by another list in its place: a save that ends just now would go on to the old one.
        found = list(self._outcomes)
        del self._outcomes[: len(found)]
        return found

    # ---- the steps of a save ------------------------------------------------------------------------------------
    def _prepare(self, building: Path) -> None:
        # Of a save that failed, writes may have gone on that nobody waits for, and come after it had been removed.
        steps.tidy(self._folder)
        building.mkdir(parents=True)
        (building / STATE).mkdir()

    def _finish(
        self,
        step: int,
        building: Path,
        futures: list[Any],
        problem: str,
        checksums: jax.Array,
        records: dict[str, ArrayRecord],
        meta: dict[str, Any],
        begin: float,
    ) -> None:
        removed: list[int] = []
        problem = problem or _attempt(self._write_own, building, futures)
        problem = self._peers.collect("written", problem)
        if not problem:
            if self._peers.index == 0:
                problem = _attempt(self._commit, step, building, checksums, records, meta)
            problem = self._peers.collect("committed", problem)
        if self._peers.index == 0:
            if problem:
                shutil.rmtree(building, ignore_errors=True)
            else:
                removed = self._make_room()
        self._outcomes.append(Outcome(step, problem, time.monotonic() - begin, tuple(removed)))

    def _write_own(self, building: Path, futures: list[Any]) -> None:
        end = time.monotonic() + LONGEST_SECONDS
        for future in futures:
            future.result(timeout=max(end - time.monotonic(), 1.0))
        index = self._peers.index
        if index:
            own = [path for path in list_files(building) if _writer_of(path) == index]
            content = {path: dataclasses.astuple(f) for path, f in checksums_of(building, own, sync=True).items()}
            steps.write_synced(building / _part(index), json.dumps(content))

    def _commit(
        self,
        step: int,
        building: Path,
        checksums: jax.Array,
        records: dict[str, ArrayRecord],
        meta: dict[str, Any],
    ) -> None:
        finish_writing(building / STATE)
        files: dict[str, FileRecord] = {}
        for index in range(1, self._peers.count):
            part = building / _part(index)
            files |= {path: FileRecord(*values) for path, values in json.loads(part.read_text()).items()}
            part.unlink()
        rest = [path for path in list_files(building) if path not in files]
        files |= checksums_of(building, rest, sync=True)
        texts = dict(zip(sorted(records), as_text(checksums), strict=True))
        arrays = {name: dataclasses.replace(record, checksum=texts[name]) for name, record in records.items()}
        steps.complete(building, self._folder / str(step), Manifest(meta, arrays, files))

    def _make_room(self) -> list[int]:
        removed: list[int] = []
        # What cannot be removed does no harm to what was saved, nor to what can be.
        with contextlib.suppress(OSError):
            for step in self._retention.dropped(steps.complete_steps(self._folder)):
                with contextlib.suppress(OSError):
                    steps.remove(self._folder / str(step))
                    removed.append(step)
        return removed


def _attempt(action: Any, *arguments: Any) -> str:
    """Returns what went wrong in an action, in one line; "" if nothing did."""
    try:
        action(*arguments)
    except Exception as error:  # TensorStore and Orbax raise many types, also bare Exception
        # TensorStore's messages go on with pages of its own settings. What the system said stands behind long paths.
        text = re.split(r" See full| \[\w+='", re.sub(r"\s+", " ", str(error)))[0]
        reasons = (os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG))
        text = next((f"{reason}: {text}" for reason in reasons if reason in text[40:]), text)
        return f"{type(error).__name__}: {text if len(text) <= 500 else f'{text[:200]} ... {text[-300:]}'}"
    return ""


def _writer_of(path: str) -> int:
    """Returns the process that wrote a file."""
    found = re.match(rf"{STATE}/ocdbt\.process_(\d+)/", path)
    return int(found.group(1)) if found else 0


def _part(index: int) -> str:
    return f"files.{index}.json"
