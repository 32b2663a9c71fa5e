"""The manifest: what is written is read, every change is refused, and nothing that it says is believed blindly."""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import checkpoint_support as support
import numpy as np
import pytest
import xxhash

from jmegatron.checkpoint.manifest import ArrayRecord, Damaged, FileRecord, Manifest, check_files, read_manifest

FILES = {"state/a": FileRecord(3, "0" * 32), "state/d/b": FileRecord(2**40, "f" * 32)}
ARRAYS = {"parameters/kernel": ArrayRecord("float32", (4, 8), "0" * 16), "step": ArrayRecord("int32", (), "a" * 16)}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "3"
    folder.mkdir()
    (folder / "manifest.json").write_text(Manifest(support.meta(), ARRAYS, FILES).to_text())
    return folder


def content_of(step: Path) -> dict[str, Any]:
    content = json.loads((step / "manifest.json").read_text())
    del content["digest"]
    return content


def dumps(content: Any) -> str:
    """The one spelling of a content, as the module's docstring and the digest have it."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n"


def write(step: Path, content: dict[str, Any]) -> None:
    """Writes a manifest with the right digest, whatever it says."""
    text = dumps({**content, "digest": xxhash.xxh3_128_hexdigest(dumps(content).encode())})
    (step / "manifest.json").write_text(text)


# ---- what is written is read --------------------------------------------------------------------------------------
def test_a_manifest_comes_back_as_it_was_written(step: Path) -> None:
    found = read_manifest(step)
    assert (found.meta, found.arrays, found.files) == (support.meta(), ARRAYS, FILES)
    assert found.digest == xxhash.xxh3_128_hexdigest(dumps(content_of(step)).encode())


def test_names_of_any_script_and_a_config_of_several_lines_come_back(step: Path) -> None:
    meta = {**support.meta(), "config": 'a: "\\ü\n"\nb: \u2028\t'}
    arrays = {"größe/\U0001f642": ARRAYS["step"]}
    (step / "manifest.json").write_text(Manifest(meta, arrays, FILES).to_text())
    found = read_manifest(step)
    assert (found.meta, found.arrays) == (meta, arrays)


# ---- every change is refused --------------------------------------------------------------------------------------
def put(path: Path, position: int, byte: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(bytes([byte]))


def test_every_flipped_bit_of_a_manifest_is_refused(step: Path) -> None:
    path = step / "manifest.json"
    for position, byte in enumerate(path.read_bytes()):
        for bit in range(8):
            put(path, position, byte ^ 1 << bit)
            with pytest.raises(Damaged):
                read_manifest(step)
        put(path, position, byte)
    read_manifest(step)


def test_2000_random_changed_bytes_of_a_manifest_are_refused(step: Path) -> None:
    path = step / "manifest.json"
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(2000):
        position = int(random.integers(len(whole)))
        put(path, position, (whole[position] + int(random.integers(1, 256))) % 256)
        with pytest.raises(Damaged):
            read_manifest(step)
        put(path, position, whole[position])
    read_manifest(step)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text[:-1] + "\r",
        lambda text: text[:-1] + "\r\n",
        lambda text: text + "\n",
        lambda text: " " + text,
        lambda text: "\ufeff" + text,
        lambda text: text.replace('"step":3,', '"step":3.0,'),
        lambda text: text.replace('"step":3,', '"step":1,"step":3,'),
        lambda text: text.replace('"meta"', '"m\\u0065ta"'),
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "null\n",
        lambda text: "[" * 100_000,
        lambda text: '{"format":' + "9" * 5000 + "}\n",
    ],
)
def test_another_spelling_of_the_same_content_is_refused(change: Any, step: Path) -> None:
    path = step / "manifest.json"
    changed = change(path.read_bytes().decode())
    assert changed.encode() != path.read_bytes()
    path.write_bytes(changed.encode())
    with pytest.raises(Damaged, match=r"manifest\.json"):
        read_manifest(step)


# ---- content with a right digest ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/etc/passwd",
        "state/../../x",
        "state/../state/x",
        "state//x",
        "state/./x",
        "./state/x",
        "state/x/",
        "state/x\0y",
        "states/x",
        "manifest.json",
        "",
        "//state/x",
    ],
)
def test_a_path_that_leaves_the_state_or_has_another_spelling_is_refused(path: str, step: Path) -> None:
    content = content_of(step)
    content["files"][path] = [1, "0" * 32]
    write(step, content)
    with pytest.raises(Damaged, match="expected a path below state/"):
        read_manifest(step)


def _with(*keys: str, to: Any) -> Any:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return change


def _without(*keys: str) -> Any:
    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


CHECKSUM, FILE_CHECKSUM = "0" * 16, "0" * 32
HOSTILE = {
    "format 2": (_with("format", to=2), "format 2, expected 1: another version wrote it"),
    "format text": (_with("format", to="1"), "format '1', expected 1"),
    "format bool": (_with("format", to=True), "format True, expected 1"),
    "format float": (_with("format", to=1.0), "format 1.0, expected 1"),
    "no format": (_without("format"), "format None, expected 1"),
    "no meta": (_without("meta"), "'meta' is missing"),
    "no arrays": (_without("arrays"), "'arrays' is missing"),
    "no files": (_without("files"), "'files' is missing"),
    "meta list": (_with("meta", to=[]), "manifest.json"),
    "meta null": (_with("meta", to=None), "manifest.json"),
    "arrays list": (_with("arrays", to=[1]), "manifest.json"),
    "files text": (_with("files", to="state/a"), "manifest.json"),
    "no position": (_without("meta", "schedule_position"), "'schedule_position' is missing"),
    "position list": (_with("meta", "schedule_position", to=[1]), "manifest.json"),
    "no updates": (_without("meta", "schedule_position", "updates"), "'updates' is missing"),
    "updates float": (_with("meta", "schedule_position", "updates", to=2.5), "updates is 2.5"),
    "samples negative": (_with("meta", "schedule_position", "samples", to=-1), "samples is -1"),
    "no consumed": (_without("meta", "consumed_samples"), "'consumed_samples' is missing"),
    "consumed negative": (_with("meta", "consumed_samples", to=-5), "consumed_samples is -5"),
    "consumed float": (_with("meta", "consumed_samples", to=3.7), "consumed_samples is 3.7"),
    "consumed bool": (_with("meta", "consumed_samples", to=True), "consumed_samples is True"),
    "consumed NaN": (_with("meta", "consumed_samples", to=float("nan")), "consumed_samples is nan"),
    "consumed infinite": (_with("meta", "consumed_samples", to=float("inf")), "consumed_samples is inf"),
    "consumed huge": (_with("meta", "consumed_samples", to=10**400), "consumed_samples is 1000"),
    "consumed 2^63": (_with("meta", "consumed_samples", to=2**63), "consumed_samples is 9223372036854775808"),
    "step text": (_with("meta", "step", to="3"), "step is '3'"),
    "step of another": (_with("meta", "step", to=4), "the folder says step 3, the manifest step 4"),
    "no config": (_without("meta", "config"), "'config' is missing"),
    "config null": (_with("meta", "config", to=None), "config, versions or random_keys have another type"),
    "versions list": (_with("meta", "versions", to=[]), "config, versions or random_keys have another type"),
    "random keys list": (_with("meta", "random_keys", to=[]), "config, versions or random_keys have another type"),
    "array null": (_with("arrays", "step", to=None), "manifest.json"),
    "array short": (_with("arrays", "step", to=["int32", []]), "manifest.json"),
    "array text": (_with("arrays", "step", to="abc"), "an array of dtype 'a' and shape 'b'"),
    "dtype number": (_with("arrays", "step", to=[1, [], CHECKSUM]), "an array of dtype 1"),
    "shape number": (_with("arrays", "step", to=["int32", 4, CHECKSUM]), "manifest.json"),
    "shape negative": (_with("arrays", "step", to=["int32", [-1], CHECKSUM]), "shape [-1]"),
    "shape bool": (_with("arrays", "step", to=["int32", [True], CHECKSUM]), "shape [True]"),
    "shape float": (_with("arrays", "step", to=["int32", [2.0], CHECKSUM]), "shape [2.0]"),
    "shape NaN": (_with("arrays", "step", to=["int32", [float("nan")], CHECKSUM]), "shape [nan]"),
    "checksum short": (_with("arrays", "step", to=["int32", [], "0"]), "expected 16 hexadecimal digits"),
    "checksum upper": (_with("arrays", "step", to=["int32", [], "A" * 16]), "expected 16 hexadecimal digits"),
    "checksum line": (_with("arrays", "step", to=["int32", [], CHECKSUM + "\n"]), "expected 16 hexadecimal digits"),
    "checksum number": (_with("arrays", "step", to=["int32", [], 0]), "expected 16 hexadecimal digits"),
    "size negative": (_with("files", "state/a", to=[-1, FILE_CHECKSUM]), "a file of size -1"),
    "size bool": (_with("files", "state/a", to=[True, FILE_CHECKSUM]), "a file of size True"),
    "size float": (_with("files", "state/a", to=[1.0, FILE_CHECKSUM]), "a file of size 1.0"),
    "size NaN": (_with("files", "state/a", to=[float("nan"), FILE_CHECKSUM]), "a file of size nan"),
    "size text": (_with("files", "state/a", to=["1", FILE_CHECKSUM]), "a file of size '1'"),
    "file list of 3": (_with("files", "state/a", to=[1, FILE_CHECKSUM, 0]), "manifest.json"),
    "file checksum": (_with("files", "state/a", to=[1, CHECKSUM]), "expected 32 hexadecimal digits"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_content_that_no_run_would_write_is_refused_and_said(name: str, step: Path) -> None:
    change, said = HOSTILE[name]
    content = copy.deepcopy(content_of(step))
    change(content)
    write(step, content)
    with pytest.raises(Damaged) as caught:
        read_manifest(step)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_file_of_a_size_beyond_every_disk_is_damage_and_no_error(step: Path) -> None:
    content = content_of(step)
    content["files"] = {"state/a": [10**30, FILE_CHECKSUM]}
    write(step, content)
    (step / "state").mkdir()
    (step / "state" / "a").write_text("a")
    with pytest.raises(Damaged, match=f"state/a has 1 bytes, expected {10**30}"):
        check_files(step, read_manifest(step))


@pytest.mark.parametrize("where", ["format", "other"])
def test_nesting_of_any_depth_is_refused_or_read_but_ends_no_run(where: str, step: Path) -> None:
    """Reading, writing and printing each have a limit of depth of their own: all are gone through."""
    limit = sys.getrecursionlimit()
    for depth in [10, *range(limit - 150, limit + 10), 50_000]:
        text = '{"format":' + "[" * depth + "]" * depth + "}\n"
        if where == "other":
            text = text.replace('{"format":', '{"format":1,"other":')
        (step / "manifest.json").write_text(text)
        with pytest.raises(Damaged, match=r"manifest\.json"):
            read_manifest(step)


# ---- other things in its place ------------------------------------------------------------------------------------
def test_a_manifest_that_is_a_link_is_refused(step: Path) -> None:
    path = step / "manifest.json"
    path.rename(step / "other.json")
    path.symlink_to("other.json")
    with pytest.raises(Damaged, match=r"manifest\.json cannot be read: OSError: .*symbolic"):
        read_manifest(step)


def test_a_manifest_that_is_a_folder_or_a_pipe_is_refused_at_once(step: Path) -> None:
    path = step / "manifest.json"
    path.unlink()
    path.mkdir()
    with pytest.raises(Damaged, match=r"manifest\.json cannot be read: IsADirectoryError"):
        read_manifest(step)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(Damaged, match=r"manifest\.json cannot be read"):
        read_manifest(step)


def test_a_step_without_a_manifest_is_not_complete(step: Path) -> None:
    (step / "manifest.json").unlink()
    with pytest.raises(Damaged, match=r"it is not complete: no manifest\.json"):
        read_manifest(step)


def test_a_manifest_that_is_no_text_is_refused(step: Path) -> None:
    (step / "manifest.json").write_bytes(b"\xff\x00" * 40)
    with pytest.raises(Damaged, match=r"manifest\.json cannot be read: UnicodeDecodeError"):
        read_manifest(step)
