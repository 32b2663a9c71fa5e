"""The manifest of a checkpoint: what a step holds, with a checksum for each array and each file. No communication.

    manifest.json   {"format", "meta", "arrays": {name: [dtype, shape, checksum]}, "files": {path: [bytes, checksum]},
                     "digest": of all else}

It is written last, and a folder without a whole one is no checkpoint. Reading believes nothing: the text must be what
writing its content gives (so that no changed bit passes), of the known format, with paths inside the folder alone.
"""

import dataclasses
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from jmegatron.checkpoint.checksums import file_checksum, open_itself, text_checksum

FORMAT = 1
"""Version of the layout on the disk; a later one is refused."""
MANIFEST = "manifest.json"
STATE = "state"
_LARGEST_BYTES = 1 << 30
_INTEGERS = ("step", "consumed_samples")


class Damaged(Exception):
    """A step cannot be used; the message says why."""


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
    """One array."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """One file."""

    size: int
    """Bytes."""
    checksum: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a step holds."""

    meta: dict[str, Any]
    """step, consumed_samples, schedule_position, config (YAML), versions, random_keys."""
    arrays: dict[str, ArrayRecord]
    files: dict[str, FileRecord]
    """By path in the step's folder."""

    digest: str = ""
    """Of the manifest that was read."""

    def to_text(self) -> str:
        """Returns the manifest's file."""
        content = {
            "format": FORMAT,
            "meta": self.meta,
            "arrays": {name: [a.dtype, list(a.shape), a.checksum] for name, a in self.arrays.items()},
            "files": {path: [f.size, f.checksum] for path, f in self.files.items()},
        }
        return _dumps({**content, "digest": text_checksum(_dumps(content))})


def _dumps(content: dict[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":")) + "\n"


# ---- reading ------------------------------------------------------------------------------------------------------
def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a step's folder.

    Raises:
      Damaged: it is not there, not whole, of another format, or speaks of what no run would write.
    """
    path = folder / MANIFEST
    try:
        with open(path, encoding="utf-8", newline="", opener=open_itself) as file:
            text = file.read(_LARGEST_BYTES)
        content = json.loads(text)
        assert isinstance(content, dict)
    except FileNotFoundError:
        raise Damaged(f"it is not complete: no {MANIFEST}") from None
    except (OSError, ValueError, RecursionError, AssertionError) as error:
        raise Damaged(f"{MANIFEST} cannot be read: {type(error).__name__}: {str(error)[:200]}") from error
    try:
        return _checked(content, text, folder.name)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise Damaged(f"{MANIFEST}: {_reason(error)}") from error


def _checked(content: dict[str, Any], text: str, folder: str) -> Manifest:
    version = content.get("format")
    if type(version) is not int or version != FORMAT:
        raise Damaged(f"{MANIFEST} has format {version!r:.50}, expected {FORMAT}: another version wrote it")
    digest = content.pop("digest", None)
    if digest != text_checksum(_dumps(content)) or text != _dumps({**content, "digest": digest}):
        raise Damaged(f"{MANIFEST} is damaged: its digest does not fit")
    return Manifest(
        _checked_meta(content["meta"], folder),
        {str(name): _array_record(*values) for name, values in content["arrays"].items()},
        {_inside(path): _file_record(*values) for path, values in content["files"].items()},
        digest,
    )


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _checked_meta(meta: Any, folder: str) -> dict[str, Any]:
    position = meta["schedule_position"]
    counts = {name: meta[name] for name in _INTEGERS} | {name: position[name] for name in ("updates", "samples")}
    for name, value in counts.items():
        if type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"{name} is {value!r:.50}, expected a whole number from 0 on")
    if str(meta["step"]) != folder:
        raise ValueError(f"the folder says step {folder}, the manifest step {meta['step']}")
    if not isinstance(meta["config"], str) or not all(
        isinstance(part, dict) for part in (meta["versions"], meta.get("random_keys", {}))
    ):
        raise ValueError("config, versions or random_keys have another type than a run writes")
    return meta


def _array_record(dtype: Any, shape: Any, checksum: Any) -> ArrayRecord:
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"an array of dtype {dtype!r:.50} and shape {shape!r:.50}")
    return ArrayRecord(dtype, tuple(shape), _hexadecimal(checksum, 16))


def _file_record(size: Any, checksum: Any) -> FileRecord:
    if type(size) is not int or size < 0:
        raise ValueError(f"a file of size {size!r:.50}")
    return FileRecord(size, _hexadecimal(checksum, 32))


def _hexadecimal(text: Any, digits: int) -> str:
    if not isinstance(text, str) or not re.fullmatch(rf"[0-9a-f]{{{digits}}}", text):
        raise ValueError(f"checksum {text!r:.50}, expected {digits} hexadecimal digits")
    return text


def _inside(path: str) -> str:
    """Returns a path that leads from the step's folder to a file of its state, in its one spelling."""
    parts = PurePosixPath(path).parts
    if parts[:1] != (STATE,) or ".." in parts or "/".join(parts) != path or "\0" in path:
        raise ValueError(f"file {path!r:.100}, expected a path below {STATE}/")
    return path


# ---- files --------------------------------------------------------------------------------------------------------
def list_files(folder: Path) -> dict[str, int]:
    """Returns the size of each file of a step's state, by path in the step's folder.

    Raises:
      Damaged: one is no plain file: a link might lead anywhere.
    """
    found = {}
    stack = [folder / STATE]
    if stack[0].is_symlink():
        raise Damaged(f"{STATE} is not a plain folder")
    while stack:
        with os.scandir(stack.pop()) as entries:
            for entry in entries:
                path = Path(entry.path).relative_to(folder).as_posix()
                if entry.is_dir(follow_symlinks=False):
                    stack.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    found[path] = entry.stat(follow_symlinks=False).st_size
                else:
                    raise Damaged(f"{path} is not a plain file")
    return found


def checksums_of(folder: Path, paths: list[str], *, sync: bool = False) -> dict[str, FileRecord]:
    """Returns size and checksum of files of a step's folder.

    Raises:
      OSError: one cannot be read.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "checksum") as pool:
        found = pool.map(lambda path: file_checksum(folder / path, sync=sync), paths)
        return {
            path: FileRecord((folder / path).stat().st_size, value) for path, value in zip(paths, found, strict=True)
        }


def check_files(folder: Path, manifest: Manifest, index: int = 0, count: int = 1) -> None:
    """Compares the files of a step with its manifest: all their sizes, and the checksums of every count-th one.

    Args:
      folder: the step's.
      manifest: its own.
      index: of this process, which reads the files index, index + count, ...
      count: processes that share the work.

    Raises:
      Damaged: one is missing, too many, or differs; the message names it.
    """
    try:
        found = list_files(folder)
        for path in sorted(found.keys() | manifest.files.keys()):
            if path not in found:
                raise Damaged(f"{path} is missing")
            if path not in manifest.files:
                raise Damaged(f"{path} does not belong there")
            if found[path] != manifest.files[path].size:
                raise Damaged(f"{path} has {found[path]} bytes, expected {manifest.files[path].size}")
        share = sorted(found, key=lambda path: (-found[path], path))[index::count]
        for path, record in checksums_of(folder, share).items():
            if record != manifest.files[path]:
                raise Damaged(f"{path} is damaged: its checksum does not fit")
    except OSError as error:
        raise Damaged(f"it cannot be read: {error}") from error
