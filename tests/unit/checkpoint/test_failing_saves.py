"""A save that fails says so, leaves nothing behind, and harms neither the steps that are there nor the next save."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_support as support
import pytest
from memory_store import MemoryStore

from jmegatron.checkpoint import manifest, steps, writer
from jmegatron.checkpoint.peers import Peers
from jmegatron.checkpoint.writer import CheckpointWriter, Outcome


def attempt(save: CheckpointWriter, step: int) -> Outcome:
    save.save(step, support.arrays(seed=step), support.meta(step))
    save.wait()
    (outcome,) = save.outcomes()
    assert outcome.step == step
    return outcome


def check_harmless(folder: Path, save: CheckpointWriter) -> None:
    """Step 3 is as it was, nothing else is there, and the next save works."""
    assert support.names(folder) == ["3"]
    support.assert_restores(folder, 3)
    assert attempt(save, 6).problem == ""
    support.assert_restores(folder, 6)


# ---- no space -----------------------------------------------------------------------------------------------------
LIMITED = """
import json, resource, sys, time
import checkpoint_support as support
from jmegatron.checkpoint.writer import CheckpointWriter

folder = support.Path(sys.argv[1])
found = []
for size in (64, 1500, 3500):
    for in_background in (True, False):
        save = CheckpointWriter(sys.argv[1], in_background=in_background)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        for step in (4, 5):
            save.save(step, support.arrays(seed=step), support.meta(step))
        save.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        found += [(outcome.step, outcome.problem, support.names(folder)) for outcome in save.outcomes()]
time.sleep(0.5)  # writes that nobody waits for
save.save(6, support.arrays(seed=6), support.meta(6))
found += [(outcome.step, outcome.problem, []) for outcome in save.outcomes()]
print(json.dumps(found))
"""
FULL = """
import json, os, sys, time
import checkpoint_support as support
from jmegatron.checkpoint import steps
from jmegatron.checkpoint.writer import CheckpointWriter

folder = support.Path(sys.argv[1])
save = CheckpointWriter(sys.argv[1])
found = []
free = lambda: os.statvfs(folder).f_bavail
while free():  # less and less room, so that saves fail at other places
    with open(folder / "filler", "ab") as file:
        file.write(bytes(4096 * max(free() - 24, min(2, free()))))
    save.save(4, support.arrays(seed=4), support.meta(4))
    save.wait()
    (outcome,) = save.outcomes()
    if outcome.problem:
        found.append((4, outcome.problem, support.names(folder)))
    else:
        steps.remove(folder / "4")
time.sleep(0.5)  # writes that nobody waits for
(folder / "filler").unlink()
save.save(6, support.arrays(seed=6), support.meta(6))
save.wait()
found += [(outcome.step, outcome.problem, []) for outcome in save.outcomes()]
print(json.dumps(found))
"""


def run(script: str, folder: Path) -> list[Any]:
    """Runs it in a process of its own, where threads of Orbax may complain of what their others left."""
    paths = [str(Path(support.__file__).parent), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_where_files_can_no_longer_grow_a_save_fails_with_the_systems_words_and_the_next_works(tmp_path: Path) -> None:
    """At the first file, and at later ones; in the background and not."""
    folder = tmp_path / ("long" * 50)  # what the system says stands behind the path, twice
    support.save(folder, 3)
    *failed, (last, problem, _) = run(LIMITED, folder)
    assert [step for step, _, _ in failed] == [4, 5] * 6
    for _, said, names in failed:
        assert "File too large" in said
        assert len(said) < 600
        assert "\n" not in said
        assert set(names) <= {"3", "4.tmp", "5.tmp"}  # a write that goes on may make its folder anew
    assert (last, problem) == (6, "")
    support.assert_restores(folder, 6)
    assert support.names(folder) == ["3", "6"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError as error:
        pytest.skip(f"needs mount: {error}")
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=20)


def test_on_a_full_disk_a_save_fails_and_the_next_gives_its_space_back(small_disk: Path) -> None:
    support.save(small_disk, 3)
    *failed, (last, problem, _) = run(FULL, small_disk)
    assert len(failed) > 3
    for _, said, names in failed:
        assert "No space left on device" in said
        assert set(names) <= {"3", "4.tmp", "filler"}
    assert (last, problem) == (6, "")
    support.assert_restores(small_disk, 6)
    assert support.names(small_disk) == ["3", "6"]


# ---- the folder ---------------------------------------------------------------------------------------------------
def test_a_file_in_place_of_the_folder_fails_the_save_and_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    support.save(folder, 3)
    save = CheckpointWriter(str(folder))
    folder.rename(tmp_path / "aside")
    folder.write_text("mine")
    assert attempt(save, 4).problem.startswith(("NotADirectoryError: ", "FileExistsError: "))
    assert folder.read_text() == "mine"
    folder.unlink()
    (tmp_path / "aside").rename(folder)
    check_harmless(folder, save)


def test_a_file_in_place_of_the_folder_that_is_written_to_fails_the_save(tmp_path: Path) -> None:
    support.save(tmp_path, 3)
    (tmp_path / "4.tmp").write_text("mine")
    save = CheckpointWriter(str(tmp_path))
    assert attempt(save, 4).problem.startswith("FileExistsError: ")
    (tmp_path / "4.tmp").unlink()
    check_harmless(tmp_path, save)


@pytest.mark.parametrize(
    ("owner", "moment"), [(writer, "start_writing"), (writer, "finish_writing"), (steps, "complete")]
)
def test_the_folder_removed_meanwhile_fails_the_save_and_the_next_makes_it_anew(
    owner: Any, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    save = CheckpointWriter(str(folder))
    real = getattr(owner, moment)

    def after_removal(*arguments: Any) -> Any:
        shutil.rmtree(folder)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, moment, after_removal)
        outcome = attempt(save, 4)
    if outcome.problem:
        assert not folder.exists() or support.names(folder) == []
    else:  # TensorStore makes the folders that it needs
        support.assert_restores(folder, 4)
    assert attempt(save, 5).problem == ""
    support.assert_restores(folder, 5)


def test_a_folder_that_may_not_be_written_to_fails_the_save(tmp_path: Path) -> None:
    support.save(tmp_path, 3)
    tmp_path.chmod(0o500)
    as_root = os.geteuid() == 0
    save = CheckpointWriter(str(tmp_path))
    try:
        if as_root:  # who may write everywhere
            os.seteuid(65534)
        assert attempt(save, 4).problem.startswith("PermissionError: ")
    finally:
        if as_root:
            os.seteuid(0)
        tmp_path.chmod(0o700)
    check_harmless(tmp_path, save)


# ---- errors on the way --------------------------------------------------------------------------------------------
def failing(*arguments: Any, **options: Any) -> Any:
    # TensorStore's errors are long, of several lines, and often bare Exceptions.
    raise Exception("the disk\n   is on fire. See full TensorStore details: " + "x" * 5000)


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (writer, "start_writing"),
        (writer, "finish_writing"),
        (writer, "checksums_of"),
        (writer, "as_text"),
        (steps, "write_synced"),
        (steps, "sync_folder"),
        (Path, "rename"),
    ],
)
def test_an_error_anywhere_is_the_outcome_in_one_line_and_leaves_nothing(
    owner: Any, name: str, in_background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support.save(tmp_path, 3)
    save = CheckpointWriter(str(tmp_path), in_background=in_background)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        assert attempt(save, 4).problem == "Exception: the disk is on fire."
    check_harmless(tmp_path, save)


def test_a_write_that_fails_in_the_background_is_the_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def result(self, timeout: float) -> None:
            assert 0 < timeout <= writer.LONGEST_SECONDS
            raise TimeoutError("the shards have not been written")

    support.save(tmp_path, 3)
    save = CheckpointWriter(str(tmp_path))
    real = writer.start_writing
    with monkeypatch.context() as patch:
        patch.setattr(writer, "start_writing", lambda *a: [*real(*a), Failing()])
        assert attempt(save, 4).problem == "TimeoutError: the shards have not been written"
    check_harmless(tmp_path, save)


def test_a_step_that_cannot_be_removed_does_not_fail_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    support.save(tmp_path, 3)
    save = CheckpointWriter(str(tmp_path), retention=writer.Retention(latest=1))

    def busy(path: Path) -> None:
        raise OSError("Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(steps, "remove", busy)
        outcome = attempt(save, 4)
    assert (outcome.problem, outcome.removed) == ("", ())
    assert attempt(save, 5).removed == (3, 4)


# ---- other processes ----------------------------------------------------------------------------------------------
def with_another(
    folder: Path, said: dict[str, str], seconds: float = 30.0
) -> tuple[CheckpointWriter, threading.Thread]:
    """The writer of process 0 of two, and process 1, which has these problems, or does not come where None."""
    store = MemoryStore(2)
    other = Peers(1, 2, store, seconds)

    def take_part() -> None:
        for name in ("save", "written", "committed"):
            if name not in said or other.collect(name, said[name]):
                return

    return CheckpointWriter(str(folder), Peers(0, 2, store, seconds)), threading.Thread(target=take_part)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"save": "OSError: no such folder here"}, "process 1: OSError: no such folder here"),
        ({"save": "", "written": "OSError: full"}, "process 1: OSError: full"),
        ({"save": "", "written": "", "committed": ""}, "FileNotFoundError: "),  # of process 1's list of files
        ({}, "process 1: has not come within 1 s"),
        ({"save": ""}, "process 1: has not come within 1 s"),
    ],
)
def test_one_processs_failure_is_everybodys(said: dict[str, str], problem: str, tmp_path: Path) -> None:
    support.save(tmp_path, 3)
    save, other = with_another(tmp_path, said, seconds=1.0)
    other.start()
    assert problem in attempt(save, 4).problem
    other.join()
    assert support.names(tmp_path) == ["3"]
    support.assert_restores(tmp_path, 3)


def test_a_store_that_fails_is_an_outcome_also_in_the_background(tmp_path: Path) -> None:
    class Gone(MemoryStore):
        def get(self, key: str, seconds: float) -> str:
            if "written" in key:
                raise RuntimeError("UNAVAILABLE: connection reset")
            return super().get(key, seconds)

    store = Gone(2)
    store.set("checkpoint/save/0/1", "")
    save = CheckpointWriter(str(tmp_path), Peers(0, 2, store, 1.0))
    assert attempt(save, 4).problem == "RuntimeError: UNAVAILABLE: connection reset"
    assert steps.all_steps(tmp_path) == []


def test_a_manifest_that_cannot_be_written_whole_is_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full after all shards have been written."""
    support.save(tmp_path, 3)
    save = CheckpointWriter(str(tmp_path))

    def half(path: Path, text: str) -> None:
        path.write_text(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(steps, "write_synced", half)
        assert attempt(save, 4).problem == "OSError: [Errno 28] No space left on device"
    assert manifest.MANIFEST not in support.names(tmp_path)
    check_harmless(tmp_path, save)
