"""Whatever happens to the files of a step, `find` sees it, names the file, and takes the older step."""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_support as support
import numpy as np
import pytest

from jmegatron.checkpoint import reader
from jmegatron.checkpoint.manifest import checksums_of, list_files, read_manifest
from jmegatron.errors import UsageError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 3 and 8; a test puts back what it changes, or takes a copy."""
    folder = tmp_path_factory.mktemp("saved")
    support.save(folder, 3, 8)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture(autouse=True)
def _nothing_was_left_changed(saved: Path) -> Iterator[None]:
    yield
    support.assert_restores(saved, 8)


def problem(folder: Path) -> str:
    """Why step 8 is passed over; it must be, and step 3 taken."""
    said: list[str] = []
    checkpoint, passed = reader.find(str(folder), say=said.append)
    assert checkpoint is not None
    assert (checkpoint.step, passed) == (3, [8])
    (line,) = said
    return line.partition("step 8 cannot be used and is passed over: ")[2]


def put(path: Path, position: int, byte: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(bytes([byte]))


def test_200_random_flipped_bits_each_in_some_file_are_detected_and_the_file_is_named(saved: Path) -> None:
    """Half of them evenly over the files (the manifest is one), half evenly over the bytes."""
    step = saved / "8"
    paths = support.files(step)
    assert len(paths) >= 8
    assert step / "manifest.json" in paths
    sizes = np.array([path.stat().st_size for path in paths])
    random = np.random.default_rng(0)
    hit = set()
    for number in range(200):
        which = number % len(paths) if number < 100 else int(random.choice(len(paths), p=sizes / sizes.sum()))
        path, bit = paths[which], int(random.integers(8 * sizes[which]))
        byte = path.read_bytes()[bit // 8]
        put(path, bit // 8, byte ^ 1 << bit % 8)
        assert path.relative_to(step).as_posix() in problem(saved)
        put(path, bit // 8, byte)
        hit.add(path)
    assert hit == set(paths)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content[:-1], "bytes, expected"),
        (lambda content: b"", "has 0 bytes, expected"),
        (lambda content: content * 2, "bytes, expected"),
        (lambda content: content + b"\0", "bytes, expected"),
        (lambda content: b"\0" * len(content), "damaged"),
        (lambda content: content[1:] + content[:1], "damaged"),
        (None, "is missing"),
    ],
    ids=["a byte less", "emptied", "doubled", "a byte more", "zeros", "turned", "removed"],
)
def test_each_file_changed_by_itself_is_detected_and_named(change: Any, said: str, saved: Path) -> None:
    step = saved / "8"
    for path in support.files(step):
        content = path.read_bytes()
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(content))
        found = problem(saved)
        path.write_bytes(content)
        name = path.relative_to(step).as_posix()
        assert name in found
        assert name == "manifest.json" or said in found


@pytest.mark.parametrize("name", ["state/extra", "state/d/extra", "state/.hidden", "state/new/extra"])
def test_a_file_too_many_is_detected_and_named(name: str, copy: Path) -> None:
    (copy / "8" / name).parent.mkdir(exist_ok=True)
    (copy / "8" / name).write_bytes(b"")
    assert problem(copy) == f"{name} does not belong there"


def test_a_file_whose_name_is_no_text_is_named_in_text(copy: Path) -> None:
    (copy / "8" / "state" / os.fsdecode(b"\xff")).write_bytes(b"")
    said = problem(copy)
    said.encode()
    assert said == r"state/\udcff does not belong there"


def test_a_link_in_place_of_any_file_is_refused_though_its_content_is_the_same(copy: Path, tmp_path: Path) -> None:
    step = copy / "8"
    for path in support.files(step):
        aside = tmp_path / "aside"
        path.rename(aside)
        path.symlink_to(aside)
        said = problem(copy)
        path.unlink()
        aside.rename(path)
        name = path.relative_to(step).as_posix()
        assert said == f"{name} is not a plain file" or (name == "manifest.json" and "cannot be read" in said)
    support.assert_restores(copy, 8)


def test_a_link_in_place_of_any_folder_is_refused_though_its_content_is_the_same(copy: Path, tmp_path: Path) -> None:
    step = copy / "8"
    for path in [step, *(path for path in step.rglob("*") if path.is_dir())]:
        aside = tmp_path / "aside"
        path.rename(aside)
        path.symlink_to(aside, target_is_directory=True)
        said = problem(copy)
        path.unlink()
        aside.rename(path)
        assert said == "it is a symbolic link" or f"{path.relative_to(step).as_posix()} is not a plain" in said
    support.assert_restores(copy, 8)


def test_a_pipe_among_the_files_is_refused_at_once(copy: Path) -> None:
    os.mkfifo(copy / "8" / "state" / "pipe")
    assert problem(copy) == "state/pipe is not a plain file"


def test_a_folder_in_place_of_a_file_and_a_file_in_place_of_a_folder_are_refused(copy: Path) -> None:
    path = copy / "8" / "state" / "manifest.ocdbt"
    path.unlink()
    path.mkdir()
    assert problem(copy) == "state/manifest.ocdbt is missing"
    shutil.rmtree(copy / "8" / "state")
    assert "it cannot be read: " in problem(copy)
    (copy / "8" / "state").write_text("")
    assert "it cannot be read: " in problem(copy)


# ---- files that are as the manifest says --------------------------------------------------------------------------
def rewrite(step: Path, **changes: Any) -> None:
    """Writes the step's manifest anew, with a right digest."""
    manifest = dataclasses.replace(read_manifest(step), **changes)
    (step / "manifest.json").write_text(manifest.to_text())


def refusal(folder: Path, *names: str) -> str:
    """Why step 8, whose files are as the manifest says, is not read: these of its arrays, default all on four devices.

    Where the files are at fault one array on one device does: Orbax leaves other reads behind, whose errors nobody
    asks for.
    """
    checkpoint, passed = reader.find(str(folder))
    assert checkpoint is not None
    assert (checkpoint.step, passed) == (8, [])
    whole = support.values()
    wanted = support.layout(1, 1, {name: whole[name] for name in names}) if names else support.layout(2, 2, whole)
    with pytest.raises(UsageError) as caught:
        checkpoint.read(wanted)
    said = str(caught.value)
    assert "the checkpoint of step 8 cannot be restored into this run: " in said
    assert "; fix: " in said
    assert len(said) < 1000
    return said


@pytest.mark.parametrize("name", sorted(support.values()))
def test_an_array_that_comes_out_with_another_checksum_is_named(name: str, copy: Path) -> None:
    arrays = read_manifest(copy / "8").arrays
    text = arrays[name].checksum
    changed = dataclasses.replace(arrays[name], checksum=f"{int(text, 16) ^ 1:016x}")
    rewrite(copy / "8", arrays={**arrays, name: changed})
    assert f": {name} came out with another checksum than what was saved" in refusal(copy)


def test_another_steps_payload_whose_files_the_manifest_vouches_for_does_not_pass(copy: Path) -> None:
    shutil.rmtree(copy / "8" / "state")
    shutil.copytree(copy / "3" / "state", copy / "8" / "state")
    rewrite(copy / "8", files=checksums_of(copy / "8", list(list_files(copy / "8"))))
    three, eight = support.values(3), support.values(8)
    differing = [name for name in sorted(three) if support.bits_of(three[name]) != support.bits_of(eight[name])]
    assert f": {differing[0]} and {len(differing) - 1} more came out with another checksum" in refusal(copy)


def test_a_payload_that_cannot_be_read_though_its_files_are_as_the_manifest_says_is_refused(copy: Path) -> None:
    step = copy / "8"
    for path in (step / "state").glob("d/*"):
        path.write_bytes(b"nothing")
    rewrite(step, files=checksums_of(step, list(list_files(step))))
    refusal(copy, "parameters/kernel")


@pytest.mark.parametrize(
    "change", [{"dtype": "object"}, {"dtype": "nothing"}, {"dtype": "float64"}, {"dtype": "int32"}, {"shape": (16, 25)}]
)
def test_an_array_of_which_the_manifest_says_another_dtype_or_shape_is_refused(change: Any, copy: Path) -> None:
    arrays = read_manifest(copy / "8").arrays
    name = "parameters/kernel"
    rewrite(copy / "8", arrays={**arrays, name: dataclasses.replace(arrays[name], **change)})
    refusal(copy, "parameters/kernel")
