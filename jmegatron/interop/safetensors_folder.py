"""Folders of safetensors files, read and written one tensor at a time. No communication, numpy only.

    model.safetensors                                                 one file, or
    model-00001-of-00003.safetensors, ..., model.safetensors.index.json   shards, and which tensor stands in which

    file = 8 bytes: length n of the header, little endian | n bytes of JSON | the tensors, back to back
    header = {name: {"dtype": "BF16", "shape": [...], "data_offsets": [first, end]}, "__metadata__": {text: text}}

The format itself needs no library (the safetensors package can neither write a file piece by piece nor hand bfloat16
to numpy). Nothing of a header is believed: offsets must cover the file without gap or overlap, and fit the shapes.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jmegatron.config.options import problem
from jmegatron.errors import ConfigError, DataFileError, UsageError

DType = Literal["F32", "BF16", "F16"]
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
"""The format's name of each dtype that weights can have."""
_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
_LARGEST_HEADER = 100 * 10**6
_LARGEST_JSON = 100 * 10**6
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")


# ---- JSON that is not believed ------------------------------------------------------------------------------------
def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Returns the object of a JSON text: no key twice, no NaN.

    Raises:
      ConfigError: it is none.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            raise ValueError("a key that stands there twice")
        return made

    def no_constant(name: str) -> None:
        raise ValueError(f"the number {name}")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=once, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"no JSON: {error or type(error).__name__}", "a JSON object") from None
    if not isinstance(value, dict):
        raise _damaged(where, f"a JSON {type(value).__name__}", "a JSON object")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds.

    Raises:
      ConfigError: the file is missing, no plain file, too large, or not JSON.
    """
    try:
        size = _plain_size(path)
        if size > _LARGEST_JSON:
            raise _damaged(str(path), f"{size} bytes", f"at most {_LARGEST_JSON}")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise _unreadable(path, error) from None


def _plain_size(path: Path) -> int:
    """Returns the size of a plain file; asked before it is opened, since opening a pipe waits for ever."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "is no plain file")
    return found.st_size


def _damaged(where: str, got: str, expected: str) -> ConfigError:
    return problem(
        "A file of the model is damaged, or is not what its name says.",
        where=where,
        got=got,
        expected=expected,
        fix="get the file again from where it came",
    )


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return problem(
        "A file of the model cannot be read.",
        where=str(path),
        got=error.strerror or str(error),
        expected="a readable plain file",
        fix="check the path and its permissions",
    )


def _dtype_problem(where: str, got: str) -> ConfigError:
    return problem(
        "A tensor has a dtype that is not read here.",
        where=where,
        got=got,
        expected=f"one of {', '.join(DTYPES)}",
        fix="save the model in one of these, for instance with torch_dtype=bfloat16",
    )


# ---- reading ------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class TensorRecord:
    """Where a tensor lies."""

    file: str
    dtype: str
    """As the header says, such as "BF16"."""
    shape: tuple[int, ...]
    begin: int
    """First byte in the file."""
    end: int
    """Byte behind the last."""


class SafetensorsFolder:
    """The tensors of a folder, by name; opening it reads the headers only.

    Links are followed, since the cache of Hugging Face's hub consists of them; names in the index that lead out of the
    folder are refused.

    Raises:
      ConfigError: there is no model in the folder, or a header or the index does not fit the files.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.tensors: dict[str, TensorRecord] = {}
        has_single, has_index = ((self.path / name).is_file() for name in (SINGLE, INDEX))
        if has_single == has_index:
            raise problem(
                "The folder holds two models." if has_index else "The folder holds no model in safetensors files.",
                where=str(self.path),
                got=f"{SINGLE} and {INDEX}" if has_index else _what_is_there(self.path),
                expected=f"either {SINGLE}, or {INDEX} with its shards",
                fix="remove the one that does not belong there" if has_index else "save the model in this format",
            )
        if has_single:
            self.tensors = _read_header(self.path, SINGLE)
        else:
            self._read_shards()

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> "SafetensorsFolder":
        """Returns the tensors of one file, whatever its name.

        Raises:
          ConfigError: its header does not fit the file.
        """
        found = cls.__new__(cls)
        found.path = Path(path).parent
        found.tensors = _read_header(found.path, Path(path).name)
        return found

    def _read_shards(self) -> None:
        where = str(self.path / INDEX)
        files = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise _damaged(where, "no usable weight_map", '"weight_map": {tensor: file}')
        for file in sorted(set(files.values())):
            if not _PLAIN_NAME.fullmatch(file):
                raise _damaged(where, f"the file name {file!r}", "names of .safetensors files in the folder itself")
            there = _read_header(self.path, file)
            listed = {name for name, its_file in files.items() if its_file == file}
            if there.keys() != listed:
                got = f"{file} without {_some(listed - there.keys())}" if listed - there.keys() else ""
                got = got or f"{_some(there.keys() - listed)} in {file}, which the index does not list there"
                raise _damaged(where, got, "each tensor in the file that the index names")
            self.tensors |= there

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: record.shape for name, record in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor in fp32, which holds every value of bfloat16 and fp16.

        Raises:
          ConfigError: its dtype is none of weights.
          UsageError: as `read_bytes`.
        """
        record = self.tensors[name]
        if record.dtype not in DTYPES:
            raise _dtype_problem(f"{self.path / record.file}, tensor {name}", record.dtype)
        values = self.read_bytes(name).view(DTYPES[record.dtype]).reshape(record.shape)
        return values.astype(np.float32, copy=False)

    def read_bytes(self, name: str) -> np.ndarray:
        """Returns the bytes of a tensor, uint8 [bytes].

        Raises:
          UsageError: the file has changed, or cannot be read any more.
        """
        record = self.tensors[name]
        buffer = np.empty(record.end - record.begin, np.uint8)
        try:
            with open(self.path / record.file, "rb") as file:
                file.seek(record.begin)
                if file.readinto(buffer.data) != buffer.size:
                    raise OSError(0, "it has become shorter")
        except OSError as error:
            # No ConfigError: the file could be read before, and may be again; what has been converted is worth keeping.
            raise UsageError(
                f"{self.path / record.file}: cannot be read: {error.strerror or error}; fix: start again when it can"
            ) from error
        return buffer


def _what_is_there(path: Path) -> str:
    if not path.is_dir():
        return "no folder"
    if any(path.glob("*.bin")) or any(path.glob("*.pth")):
        return "pickled weights alone (.bin, .pth), which are not read: they may run code"
    return "none of these files"


def _some(names: Any) -> str:
    """Returns names in words, the first ones where there are many."""
    names = sorted(names)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _read_header(folder: Path, file: str) -> dict[str, TensorRecord]:
    """Returns the tensors of a file."""
    path = folder / file
    try:
        size = _plain_size(path)
        with open(path, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                got = f"{size} bytes, of which the header would take {length}"
                raise _damaged(str(path), got, f"a header that fits in the file and in {_LARGEST_HEADER} bytes")
            header = parse_json(handle.read(length), f"{path}, header")
    except OSError as error:
        raise _unreadable(path, error) from None
    header.pop("__metadata__", None)
    records = {name: _record(entry, name, file, path, 8 + length) for name, entry in header.items()}
    place = 8 + length
    for name, record in sorted(records.items(), key=lambda item: (item[1].begin, item[1].end)):
        if record.begin != place:
            got = f"tensor {name} begins at byte {record.begin} and the one before it ends at {place}"
            raise _damaged(str(path), got, "tensors back to back, none over another")
        place = record.end
    if place != size:
        raise _damaged(str(path), f"{size} bytes", f"the {place} bytes that its header speaks of")
    return records


def _record(entry: Any, name: str, file: str, path: Path, start: int) -> TensorRecord:
    def is_counts(value: Any) -> bool:
        return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)

    where = f"{path}, header, tensor {name}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _damaged(where, "another entry", "dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise _dtype_problem(where, repr(dtype))
    if not is_counts(shape) or not is_counts(offsets) or len(offsets) != 2:
        raise _damaged(where, f"shape {shape}, data_offsets {offsets}", "lists of counts, two of them as offsets")
    if offsets[1] - offsets[0] != math.prod(shape) * _SIZES[dtype]:
        got = f"data_offsets {offsets} for {dtype}{shape}"
        raise _damaged(where, got, f"a difference of {math.prod(shape) * _SIZES[dtype]} bytes")
    return TensorRecord(file, dtype, tuple(shape), start + offsets[0], start + offsets[1])


# ---- writing ------------------------------------------------------------------------------------------------------
class SafetensorsWriter:
    """Writes a folder of safetensors files tensor by tensor; sizes are known before, so that headers come first.

    All is written in `<path>.tmp`, which takes its name at `commit`. A shard takes its own name there when it is
    complete: of what a killed converter has written, complete shards stay, and others are written again. Tensors are
    best written in the order of the layout: each shard is then open once. Use as a context manager.

    Args:
      path: the folder to be; must not be there, or be empty.
      shapes: all tensors, in the order in which they stand in the files.
      dtype: of all of them.
      source: what is converted; what a conversion of another source has left is begun anew.
      max_shard_bytes: of tensors in one file; a larger tensor has a file of its own.

    Raises:
      UsageError: the folder is there, or cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        shapes: Mapping[str, Sequence[int]],
        dtype: DType,
        *,
        source: str = "",
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ):
        self.path = Path(path).absolute()
        self._building = self.path.with_name(self.path.name + ".tmp")
        self._dtype = DTYPES[dtype]
        self._shards = _planned(shapes, dtype, max_shard_bytes)
        self._shard_of = {name: shard for shard in self._shards for name in shard.records}
        self._handles: dict[str, Any] = {}
        self._written: set[str] = set()
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise UsageError(
                f"{self.path}: is already there, expected a folder that is not; fix: give another one, or remove it"
            )
        headers = {shard.file: shard.header[8:].decode() for shard in self._shards}
        try:
            self._resume(json.dumps({"source": source, "headers": headers}))
        except OSError as error:
            raise self._cannot_write(error) from error

    @property
    def _note(self) -> Path:
        return self._building / ".conversion.json"

    def _resume(self, note: str) -> None:
        """Removes what another conversion has left, and notes which one this is."""
        if self._building.exists() and not self._note.is_file() and any(self._building.iterdir()):
            raise UsageError(
                f"{self._building}: is already there and was not left by a conversion; fix: give another folder, or "
                "remove it"
            )
        if self._note.is_file() and self._note.read_text(encoding="utf-8") != note:
            shutil.rmtree(self._building)
        self._building.mkdir(parents=True, exist_ok=True)
        self._note.write_text(note, encoding="utf-8")
        for shard in self._shards:
            path = self._building / shard.file
            shard.was_complete = path.is_file() and path.stat().st_size == shard.size

    def __enter__(self) -> "SafetensorsWriter":
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes its files; complete shards stay for another try, unless that would find the same mistake."""
        for handle in self._handles.values():
            with contextlib.suppress(OSError):  # a full disk, which has been said already
                handle.close()
        if isinstance(error, (ConfigError, DataFileError)):
            shutil.rmtree(self._building, ignore_errors=True)

    def is_written(self, name: str) -> bool:
        """Returns whether a tensor has been written, by this converter or in a complete shard of a killed one."""
        return name in self._written or self._shard_of[name].was_complete

    def write(self, name: str, value: np.ndarray) -> None:
        """Writes a tensor, rounded to the dtype of the files; one that a killed converter has written is passed over.

        Raises:
          ValueError: another shape than in the layout, or the tensor has been written by this converter.
          ConfigError: a value is too large for the dtype.
          UsageError: the file cannot be written.
        """
        shard = self._shard_of[name]
        record = shard.records[name]
        if value.shape != record.shape:
            raise ValueError(f"{name}: got {list(value.shape)}, expected {list(record.shape)}")
        if name in self._written:
            raise ValueError(f"{name}: is written already")
        if not shard.was_complete:
            self._put(shard, record, self._rounded(name, value))
        self._written.add(name)
        if not shard.was_complete and self._written >= shard.records.keys():
            self._finish(shard)

    def _rounded(self, name: str, value: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            rounded = np.ascontiguousarray(value, self._dtype)
        if self._dtype != value.dtype and np.any(np.isinf(rounded) & np.isfinite(value)):
            raise problem(
                "A weight is too large for the dtype of the files.",
                where=f"{self.path}, tensor {name}",
                got=f"{np.abs(value[np.isfinite(value)]).max():.4g}",
                expected=f"at most {ml_dtypes.finfo(self._dtype).max} for {self._dtype.name}",
                fix="export in float32 or bfloat16",
            )
        return rounded

    def _put(self, shard: "_Shard", record: TensorRecord, value: np.ndarray) -> None:
        try:
            if shard.file not in self._handles:
                handle = open(self._building / f"{shard.file}.partial", "wb")  # noqa: SIM115 (see __exit__)
                self._handles[shard.file] = handle
                handle.write(shard.header)
            self._handles[shard.file].seek(record.begin)
            self._handles[shard.file].write(value.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _finish(self, shard: "_Shard") -> None:
        try:
            handle = self._handles.pop(shard.file)
            handle.flush()
            os.fsync(handle.fileno())
            handle.close()
            os.replace(self._building / f"{shard.file}.partial", self._building / shard.file)
        except OSError as error:
            raise self._cannot_write(error) from error

    def add_file(self, name: str, content: bytes) -> None:
        """Writes a small file beside the tensors, such as config.json.

        Raises:
          UsageError: it cannot be written.
        """
        assert name == os.path.basename(name), name
        try:
            with open(self._building / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from error

    def commit(self) -> None:
        """Writes the index where there are several files, and gives the folder its name.

        Raises:
          ValueError: tensors are missing.
          UsageError: it cannot be written.
        """
        missing = [name for name in self._shard_of if not self.is_written(name)]
        if missing:
            raise ValueError(f"not written yet: {_some(missing)}")
        if len(self._shards) > 1:
            total = sum(shard.size - len(shard.header) for shard in self._shards)
            files = {name: shard.file for name, shard in self._shard_of.items()}
            index = {"metadata": {"total_size": total}, "weight_map": files}
            self.add_file(INDEX, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
        try:
            # In this order: a folder without the note is none that a killed converter may go on with.
            os.replace(self._building, self.path)
            (self.path / self._note.name).unlink()
            descriptor = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> UsageError:
        what = error.strerror or str(error)
        return UsageError(f"{self._building}: cannot be written: {what}; fix: make room, or give another folder")


@dataclasses.dataclass
class _Shard:
    file: str
    header: bytes
    """With its length before it."""
    size: int
    """Bytes of the whole file."""
    records: dict[str, TensorRecord]
    was_complete: bool = False


def _planned(shapes: Mapping[str, Sequence[int]], dtype: DType, max_bytes: int) -> list[_Shard]:
    """Returns the files that hold tensors of these shapes, in order."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if groups[-1] and filled + size > max_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = tuple(shape)
        filled += size
    if len(groups) == 1:
        return [_shard(SINGLE, groups[0], dtype)]
    return [_shard(f"model-{i:05}-of-{len(groups):05}.safetensors", group, dtype) for i, group in enumerate(groups, 1)]


def _shard(file: str, shapes: Mapping[str, tuple[int, ...]], dtype: DType) -> _Shard:
    # transformers reads nothing without this entry, which says that layouts are torch's.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place, places = 0, {}
    for name, shape in shapes.items():
        end = place + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        places[name] = (place, end)
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned when the file is mapped
    start = 8 + len(text)
    records = {
        n: TensorRecord(file, dtype, shapes[n], start + begin, start + end) for n, (begin, end) in places.items()
    }
    return _Shard(file, len(text).to_bytes(8, "little") + text, start + place, records)
