"""Checkpoints of torch.distributed.checkpoint as Megatron-Core writes them ("torch_dist"), read without torch.

No communication. Source: torch/distributed/checkpoint/{metadata,filesystem}.py; Megatron-Core dist_checkpointing.

    latest_checkpointed_iteration.txt     the newest iteration
    iter_0000003/.metadata                pickle: shape, dtype and chunks of each tensor; where each chunk lies
    iter_0000003/__RANK_FILE.distcp       chunks one after another, each a file of torch.save (a zip of stored members)
    iter_0000003/common.pt                a file of torch.save: arguments, iteration, schedule, options of the optimizer
    iter_0000003/metadata.json            name and version of the format

The files may come from anywhere: pickles are read by `safe_pickle`, paths stay in the folder and follow no link, sizes
are compared with those of the files before memory is asked for, and a checksum that does not fit stops.
Writing needs torch (an optional dependency): its classes are what `.metadata` holds.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import re
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jmegatron.checkpoint.checksums import open_itself
from jmegatron.checkpoint.steps import sync_folder
from jmegatron.errors import DataFileError, UsageError
from jmegatron.interop import safe_pickle
from jmegatron.interop.safe_pickle import Foreign, Refused

TRACKER = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
DTYPES: Mapping[str, np.dtype] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "bool": np.dtype(np.bool_),
}
"""By torch's name."""
_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}
_METADATA = "torch.distributed.checkpoint.metadata."
_COMMON_STATE = re.compile(r"common_state/shard_0(\.0)*_1(\.1)*")
_MOST_METADATA_BYTES = 1 << 30
_MOST_COMMON_BYTES = 1 << 26
_MOST_TENSOR_OPCODES = 1 << 12
_MOST_MEMBERS = 1 << 10
_FIX = "fix: give a checkpoint that Megatron-Core wrote, or save it anew"


# ---- files --------------------------------------------------------------------------------------------------------
def _read(path: Path, most: int, start: int = 0, length: int | None = None) -> bytes:
    """Returns (a part of) a plain file, no more than `most` bytes."""
    try:
        with open(path, "rb", opener=open_itself) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{path}: got no plain file, expected one (no link, no pipe); {_FIX}")
            length = found.st_size - start if length is None else length
            if start + length > found.st_size:
                raise UsageError(f"{path}: has {found.st_size} bytes, expected at least {start + length}; {_FIX}")
            if length > most:
                raise UsageError(f"{path}: has {length} bytes, expected at most {most}; {_FIX}")
            file.seek(start)
            return file.read(length)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error}; {_FIX}") from error


def _members(data: bytes, where: str) -> dict[str, memoryview]:
    """Returns the members of a file of torch.save by their names below its root folder; they are stored as they are."""
    found: dict[str, memoryview] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
        if len(infos) > _MOST_MEMBERS:
            raise Refused(f"it has {len(infos)} members, expected at most {_MOST_MEMBERS}")
        for info in infos:
            root, _, name = info.filename.partition("/")
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
                raise Refused(f"member {info.filename!r:.100} is compressed or encrypted, expected stored bytes")
            if name in found or root != infos[0].filename.partition("/")[0]:
                raise Refused(f"member {info.filename!r:.100} is there twice, or in another folder")
            # Name and extra field of the local header may differ from those in the directory.
            lengths = struct.unpack_from("<HH", data, info.header_offset + 26)
            start = info.header_offset + 30 + sum(lengths)
            found[name] = memoryview(data)[start : start + info.file_size]
            if len(found[name]) != info.file_size or zlib.crc32(found[name]) != info.CRC:
                raise Refused(f"member {info.filename!r:.100} is damaged: its checksum does not fit")
        if found.get("byteorder", memoryview(b"little")) != b"little":
            raise Refused("its byte order is not little-endian")
        if "data.pkl" not in found:
            raise Refused("it has no data.pkl")
        return found
    except Refused as error:
        what = str(error)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError, struct.error, OSError) as error:
        what = f"it is damaged ({type(error).__name__}: {str(error)[:200]})"
    raise DataFileError(f"{where}: what torch.save wrote is not read: {what}; {_FIX}")


# ---- pickles ------------------------------------------------------------------------------------------------------
def _size(values: Any = ()) -> tuple[int, ...]:
    """Returns a torch.Size."""
    if type(values) not in (tuple, list) or len(values) > 16:
        raise Refused("a size is no short list")
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in values):
        raise Refused(f"a size holds other things than counts: {str(values)[:100]}")
    return tuple(values)


def _ordered_dict(*items: Any) -> dict[Any, Any]:
    if items:
        raise Refused("an OrderedDict is called with items")
    return {}


def _never(*_: Any) -> None:
    raise Refused("a type is called as a function")


_PLAIN_NAMES: safe_pickle.Known = {("torch", "Size"): _size, ("collections", "OrderedDict"): _ordered_dict}


def _tensor(data: bytes, where: str) -> np.ndarray:
    """Returns the one tensor of a file of torch.save, as a view of `data`."""
    members = _members(data, where)

    def storage(name: Any) -> np.ndarray:
        if type(name) is not tuple or len(name) != 5 or name[0] != "storage" or type(name[2]) is not str:
            raise Refused(f"a persistent id names no storage: {str(name)[:100]}")
        kind, key, count = getattr(name[1], "name", ""), name[2], name[4]
        dtype = DTYPES[_STORAGES[kind.removeprefix("torch.").removesuffix("Storage")]]
        if f"data/{key}" not in members:
            raise Refused(f"its storage {key[:50]!r} is missing")
        content = members[f"data/{key}"]
        if type(count) is not int or count * dtype.itemsize != len(content):
            raise Refused(f"its storage has {len(content)} bytes, expected {count!s:.50} numbers of {dtype.name}")
        return np.frombuffer(content, dtype)

    def rebuild(values: Any, offset: Any, size: Any, strides: Any, *_: Any) -> np.ndarray:
        size, strides = _size(size), _size(strides)
        if not isinstance(values, np.ndarray) or values.ndim != 1 or len(size) != len(strides):
            raise Refused("a tensor is not made of a storage, sizes and strides")
        if type(offset) is not int or offset < 0:
            raise Refused(f"a tensor starts at {offset!s:.50} of its storage")
        last = offset + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
        if math.prod(size) and last >= len(values):
            raise Refused(f"a tensor of size {size} and strides {strides} leaves its storage of {len(values)} numbers")
        if math.prod(size) > len(values):
            raise Refused(f"a tensor of size {size} has more numbers than its storage of {len(values)}")
        return np.lib.stride_tricks.as_strided(
            values[offset:], size, [stride * values.itemsize for stride in strides], writeable=False
        )

    known = {
        **_PLAIN_NAMES,
        **{("torch", f"{kind}Storage"): _never for kind in _STORAGES},
        ("torch._utils", "_rebuild_tensor_v2"): rebuild,
    }
    found = safe_pickle.loads(
        bytes(members["data.pkl"]),
        known,
        where=where,
        strict=True,
        persistent=storage,
        most_opcodes=_MOST_TENSOR_OPCODES,
    )
    if not isinstance(found, np.ndarray):
        raise DataFileError(f"{where}: got a {type(found).__name__}, expected a tensor; {_FIX}")
    return found


def _object(data: bytes, where: str) -> Any:
    """Returns what a file of torch.save holds, tensors and classes as `Foreign`."""
    pickle = bytes(_members(data, where)["data.pkl"])
    return safe_pickle.loads(
        pickle, _PLAIN_NAMES, where=where, persistent=lambda name: Foreign("a storage of torch", (name,))
    )


def _fields(value: Any, name: str) -> dict[Any, Any]:
    if not isinstance(value, Foreign) or value.name != name or type(value.state) is not dict:
        raise Refused(f"got {getattr(value, 'name', type(value).__name__)}, expected {name}")
    return value.state


# ---- reading ------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A block of a tensor and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class TorchDistReader:
    """Reads one checkpoint, a tensor or one index of its leading dim at a time.

    Args:
      folder: that of all iterations, of which the newest is taken, or that of one.

    Raises:
      UsageError: it is no such checkpoint, is damaged, or asks for what is not allowed.
    """

    tensors: dict[str, tuple[tuple[int, ...], np.dtype]]
    """Shape and dtype by name."""
    objects: dict[str, str]
    """Where each entry lies that is no tensor, such as "decoder....linear_fc1._extra_state/shard_0_4", by name."""
    common: dict[str, Any]
    """What all ranks share: "args" (a dict of the arguments), "iteration", "checkpoint_version",
    "opt_param_scheduler", "optimizer". What is no plain value is a `Foreign`."""

    def __init__(self, folder: str | Path):
        self.folder = _iteration_folder(Path(folder).absolute())
        self._check_format()
        path = self.folder / ".metadata"
        content = safe_pickle.loads(_read(path, _MOST_METADATA_BYTES), _PLAIN_NAMES, where=str(path))
        try:
            self._index(_fields(content, f"{_METADATA}Metadata"))
        except (Refused, KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path}: does not describe a checkpoint: {what[:300]}; {_FIX}") from error
        self.common = self._read_common()

    def _check_format(self) -> None:
        path = self.folder / "metadata.json"
        try:
            found = json.loads(_read(path, 1 << 16))
            backend, version = found["sharded_backend"], found["sharded_backend_version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{path}: does not say what the checkpoint's format is; {_FIX}") from error
        if backend != "torch_dist" or version != 1:
            raise UsageError(
                f"{path}: got sharded_backend {backend!r:.50} version {version!r:.20}, expected 'torch_dist' version 1;"
                " fix: save it with --ckpt-format torch_dist"
            )

    def _index(self, metadata: dict[str, Any]) -> None:
        places: dict[str, dict[Any, dict[str, Any]]] = {}
        for index, info in metadata["storage_data"].items():
            key = _fields(index, f"{_METADATA}MetadataIndex")
            place = _fields(info, "torch.distributed.checkpoint.filesystem._StorageInfo")
            offset = None if key.get("offset") is None else _size(key["offset"])
            if offset in places.setdefault(str(key["fqn"]), {}):
                raise Refused(f"{key['fqn']} at {offset} is there twice")
            places[key["fqn"]][offset] = place
        self.tensors, self.objects, self._chunks = {}, {}, {}
        for name, entry in metadata["state_dict_metadata"].items():
            own = places.pop(name, {})
            if isinstance(entry, Foreign) and entry.name == f"{_METADATA}BytesStorageMetadata":
                if list(own) != [None]:
                    raise Refused(f"{name} has {len(own)} places, expected one")
                self.objects[name] = name
                self._chunks[name] = [_chunk((), (), own[None])]
            else:
                self._add_tensor(name, _fields(entry, f"{_METADATA}TensorStorageMetadata"), own)
        if places:
            raise Refused(f"{next(iter(places))} lies in a file, but is not described")
        self._check_places()

    def _check_places(self) -> None:
        """Checks that each byte of the files belongs to one chunk at most, so that no more memory is asked for."""
        by_file: dict[str, list[tuple[int, int]]] = {}
        for chunk in itertools.chain.from_iterable(self._chunks.values()):
            by_file.setdefault(chunk.file, []).append((chunk.start, chunk.length))
        for file, places in by_file.items():
            path = self.folder / file
            if path.is_symlink() or not path.is_file():
                raise Refused(f"{file} is missing, or no plain file")
            end = 0
            for start, length in sorted(places):
                if start < end:
                    raise Refused(f"two chunks lie at byte {start} of {file}")
                end = start + length
            if end > (size := path.stat().st_size):
                raise Refused(f"{file} has {size} bytes, but a chunk ends at {end}")

    def _add_tensor(self, name: str, entry: dict[str, Any], places: dict[Any, dict[str, Any]]) -> None:
        shape, kind = _size(entry["size"]), _dtype_name(entry["properties"])
        if kind not in DTYPES:
            raise Refused(f"{name} has dtype {kind!r:.100}, expected one of {', '.join(DTYPES)}")
        chunks = []
        for value in entry["chunks"]:
            block = _fields(value, f"{_METADATA}ChunkStorageMetadata")
            offsets, sizes = _size(block["offsets"]), _size(block["sizes"])
            place = places.pop(offsets, None)
            if place is None:
                raise Refused(f"{name} has no place for its chunk at {offsets}")
            chunks.append(_chunk(offsets, sizes, place))
            if chunks[-1].length < math.prod(sizes) * DTYPES[kind].itemsize:
                raise Refused(f"{name} has {chunks[-1].length} bytes for its chunk of {sizes}")
        if places:
            raise Refused(f"{name} has a place at {next(iter(places))}, where it has no chunk")
        _check_cover(name, shape, chunks)
        self.tensors[name] = (shape, DTYPES[kind])
        self._chunks[name] = chunks

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Returns a tensor, or one index of its leading dim; of the files only the chunks that it needs are read.

        Raises:
          UsageError: it cannot be read, or is not what `.metadata` says.
        """
        shape, dtype = self.tensors[name]
        ranges = [(0, n) for n in shape]
        if index is not None:
            if not shape or not 0 <= index < shape[0]:
                raise ValueError(f"{name} of shape {shape} has no index {index}")
            ranges[0] = (index, index + 1)
        result = np.empty([end - start for start, end in ranges], dtype)
        for chunk in self._chunks[name]:
            low = [max(start, o) for (start, _), o in zip(ranges, chunk.offsets, strict=True)]
            high = [min(end, o + n) for (_, end), o, n in zip(ranges, chunk.offsets, chunk.sizes, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            block = _tensor(self._bytes(chunk), f"{self.folder / chunk.file}: {name}")
            if block.shape != chunk.sizes or block.dtype != dtype:
                raise UsageError(
                    f"{self.folder / chunk.file}: {name}: got {block.dtype}{list(block.shape)}, expected"
                    f" {dtype}{list(chunk.sizes)} as .metadata says; {_FIX}"
                )
            there = tuple(slice(a - s, b - s) for a, b, (s, _) in zip(low, high, ranges, strict=True))
            here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True))
            result[there] = block[here]
        return result if index is None else result.reshape(shape[1:])

    def _bytes(self, chunk: _Chunk) -> bytes:
        return _read(self.folder / chunk.file, chunk.length, chunk.start, chunk.length)

    def _read_common(self) -> dict[str, Any]:
        """Returns what all ranks share, which lies in a file of its own, or (later versions) in one of the chunks."""
        path = self.folder / COMMON
        if path.exists() or path.is_symlink():
            found = _object(_read(path, _MOST_COMMON_BYTES), str(path))
        else:
            names = [name for name in self.objects if _COMMON_STATE.fullmatch(name)]
            if len(names) != 1:
                raise UsageError(f"{path}: is missing, and so is an entry common_state; {_FIX}")
            (chunk,) = self._chunks[names[0]]
            where = f"{self.folder / chunk.file}: {names[0]}"
            found = _object(_read(self.folder / chunk.file, _MOST_COMMON_BYTES, chunk.start, chunk.length), where)
            found = found[0] if type(found) is list and len(found) == 1 else found
            del self.objects[names[0]]
        if type(found) is not dict or not all(type(name) is str for name in found):
            raise UsageError(f"{path}: got a {type(found).__name__}, expected a dict of what all ranks share; {_FIX}")
        arguments = found.get("args")
        if isinstance(arguments, Foreign) and type(arguments.state) is dict:
            found["args"] = arguments.state
        return found


def _iteration_folder(path: Path) -> Path:
    if (path / ".metadata").is_file():
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        legacy = path.is_dir() and any(entry.name.startswith("mp_rank_") for entry in path.iterdir())
        what = "a checkpoint of the old format torch (mp_rank_*)" if legacy else "no checkpoint"
        raise UsageError(
            f"{path}: got {what}, expected {TRACKER} or .metadata in it; fix: give the folder that Megatron-Core saved"
            " to with --ckpt-format torch_dist"
        )
    text = _read(tracker, 64).decode("ascii", "replace").strip()
    if text != "release" and not re.fullmatch("[0-9]{1,12}", text):
        raise UsageError(f"{tracker}: got {text!r}, expected the number of an iteration; fix: give the folder iter_*")
    folder = path / (text if text == "release" else f"iter_{int(text):07d}")
    if not (folder / ".metadata").is_file():
        raise UsageError(f"{folder}: has no .metadata, though {tracker} names it; fix: give the folder iter_*")
    return folder


def _dtype_name(properties: Any) -> str:
    if not isinstance(properties, Foreign) or properties.name != f"{_METADATA}TensorProperties":
        raise Refused("the properties of a tensor are no TensorProperties")
    state = properties.state
    dtype = state[0] if type(state) is tuple and state else state.get("dtype") if type(state) is dict else None
    return dtype.name.removeprefix("torch.") if isinstance(dtype, Foreign) else ""


def _chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], place: dict[str, Any]) -> _Chunk:
    file, start, length = place["relative_path"], place["offset"], place["length"]
    # One name in the folder itself: what leads elsewhere is no part of the checkpoint.
    if type(file) is not str or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", file):
        raise Refused(f"a chunk lies in {file!r:.100}, expected the name of a file in the folder")
    if type(start) is not int or type(length) is not int or start < 0 or length < 0:
        raise Refused(f"a chunk lies at {start!r:.50} with {length!r:.50} bytes")
    if place.get("transform_descriptors"):
        raise Refused(f"chunks are packed by {place['transform_descriptors']!r:.100}, expected none")
    return _Chunk(offsets, sizes, file, start, length)


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[_Chunk]) -> None:
    """Checks that each element lies in one chunk: counts chunks in the cells of the grid that their borders make."""
    for chunk in chunks:
        ends = [o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(shape) or any(end > n for end, n in zip(ends, shape, strict=True)):
            raise Refused(f"{name} of {shape} has a chunk of {chunk.sizes} at {chunk.offsets}, which leaves it")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise Refused(f"{name} of {shape} has chunks that overlap or leave holes")
    borders = []
    for dim in range(len(shape)):
        points = {c.offsets[dim] for c in chunks} | {c.offsets[dim] + c.sizes[dim] for c in chunks}
        borders.append({point: n for n, point in enumerate(sorted(points))})
    grid = [max(0, len(points) - 1) for points in borders]
    if math.prod(grid) > 64 * len(chunks) + 4096:
        raise Refused(f"{name} has {len(chunks)} chunks that make no grid")
    count = np.zeros(grid, np.int8)
    for chunk in chunks:
        cells = count[
            tuple(
                slice(points[o], points[o + n])
                for points, o, n in zip(borders, chunk.offsets, chunk.sizes, strict=True)
            )
        ]
        if cells.any():
            raise Refused(f"{name} of {shape} has chunks that overlap, one of them at {chunk.offsets}")
        cells += 1


# ---- writing ------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int | None], np.ndarray]
    """Returns one index of the leading dim (stacked), or, of None, the whole."""
    stacked: bool = False
    """Whether it is written one index of the leading dim at a time, each a chunk."""


def write(
    folder: str | Path,
    iteration: int,
    tensors: Iterable[StoredTensor],
    common: Mapping[str, Any],
    objects: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a checkpoint that torch.distributed.checkpoint and Megatron-Core load, and returns its folder.

    No more than one chunk is in memory. The folder has its name only when all of it is on the disk.

    Args:
      folder: of all iterations; made if it is not there.
      iteration: this one.
      tensors: what is in it.
      common: what all ranks share; "args" is a dict.
      objects: entries that are no tensors, by name.

    Raises:
      UsageError: torch is missing; the folder holds a checkpoint; it cannot be written.
    """
    torch = _torch()
    folder = Path(folder).absolute()
    target = folder / f"iter_{iteration:07d}"
    building = folder / f"{target.name}.tmp"
    for path in (target, folder / TRACKER):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path}: is already there, expected a folder without it; fix: give another folder")
    try:
        if building.exists():
            shutil.rmtree(building)  # of a writer that was killed
        building.mkdir(parents=True)
        with _removed_on_error(building):
            _write_files(torch, building, tensors, objects or {})
            arguments = argparse.Namespace(**common.get("args", {}))
            _write_bytes(building / COMMON, lambda file: torch.save({**common, "args": arguments}, file))
            content = {
                "sharded_backend": "torch_dist",
                "sharded_backend_version": 1,
                "common_backend": "torch",
                "common_backend_version": 1,
            }
            _write_bytes(building / "metadata.json", lambda file: file.write(json.dumps(content).encode()))
            sync_folder(building)
            building.rename(target)
        sync_folder(folder)
        tracker = folder / f"{TRACKER}.tmp"
        _write_bytes(tracker, lambda file: file.write(str(iteration).encode()))
        tracker.rename(folder / TRACKER)
        sync_folder(folder)
    except OSError as error:
        raise UsageError(f"{target}: cannot be written: {error}; fix: make room, or give another folder") from error
    return target


def _torch() -> Any:
    try:
        import torch
        import torch.distributed.checkpoint
    except ImportError as error:
        raise UsageError(
            "writing a checkpoint of Megatron-Core needs torch, which is not installed; fix: pip install"
            " jmegatron[torch]"
        ) from error
    return torch


def _write_files(torch: Any, folder: Path, tensors: Iterable[StoredTensor], objects: Mapping[str, Any]) -> None:
    from torch.distributed.checkpoint import filesystem, metadata
    from torch.distributed.checkpoint.storage import WriteResult

    file_name = "__0_0.distcp"
    entries: dict[str, Any] = {}
    results = []

    def fill(file: Any) -> None:
        def put(value: Any, index: Any) -> None:
            start = file.tell()
            torch.save(value, file)
            length = file.tell() - start
            results.append(WriteResult(index, length, filesystem._StorageInfo(file_name, start, length)))

        for name, value in objects.items():
            put(value, metadata.MetadataIndex(name))
            entries[name] = metadata.BytesStorageMetadata()
        for tensor in tensors:
            chunks = []
            for n in range(tensor.shape[0]) if tensor.stacked else [None]:
                offsets = torch.Size([0 if n is None else n, *[0] * (len(tensor.shape) - 1)][: len(tensor.shape)])
                sizes = torch.Size(tensor.shape if n is None else (1, *tensor.shape[1:]))
                value = _to_torch(torch, tensor, n, sizes)
                put(value, metadata.MetadataIndex(tensor.name, offsets))
                chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
            properties = metadata.TensorProperties(dtype=getattr(torch, tensor.dtype.name))
            entries[tensor.name] = metadata.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)

    _write_bytes(folder / file_name, fill)
    # Torch's own writer makes .metadata of its own classes.
    filesystem.FileSystemWriter(folder).finish(metadata.Metadata(entries), [results])


def _to_torch(torch: Any, tensor: StoredTensor, index: int | None, sizes: tuple[int, ...]) -> Any:
    value = tensor.read(index)
    expected = tensor.shape if index is None else tensor.shape[1:]
    if value.shape != tuple(expected) or value.dtype != tensor.dtype:
        raise ValueError(f"{tensor.name}: got {value.dtype}{value.shape}, expected {tensor.dtype}{expected}")
    value = np.require(value, requirements=["C", "W"]).reshape(sizes)
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def _write_bytes(path: Path, fill: Callable[[Any], Any]) -> None:
    """Writes a file, through to the disk."""
    with open(path, "xb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _removed_on_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
