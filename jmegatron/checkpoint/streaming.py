"""Writes and reads a step piece by piece on the host, for converters: a model larger than memory is a loop.

The files are those that Orbax writes (zarr arrays in an OCDBT store), so that runs restore what converters wrote and
the other way round. No communication, no devices.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
import tensorstore as ts

from jmegatron.checkpoint import steps
from jmegatron.checkpoint.arrays import CHUNK_BYTES
from jmegatron.checkpoint.checksums import checksum_text, region_checksum
from jmegatron.checkpoint.manifest import STATE, ArrayRecord, Manifest, checksums_of, list_files
from jmegatron.checkpoint.reader import Checkpoint
from jmegatron.errors import ConfigError, DataFileError, UsageError

Layout = Mapping[str, tuple[Sequence[int], Any]]
"""Shape and dtype of each array by name."""
_PROGRESS = "progress.jsonl"


class StreamingWriter:
    """Writes one step; what a killed converter has written is there for the next one.

    Use as a context manager; nothing is a checkpoint before `commit`.

    Args:
      path: folder of steps.
      step: the step.
      layout: all arrays.
      source: what is converted; a step left behind by another source is begun anew.

    Raises:
      UsageError: the step is already there, or the folder cannot be written.
    """

    def __init__(self, path: str, step: int, layout: Layout, source: str = ""):
        self._target = Path(path).absolute() / str(step)
        self._building = self._target.with_name(f"{step}{steps.BUILDING}")
        self._layout = {name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in layout.items()}
        if self._target.exists():
            raise UsageError(
                f"{self._target}: is already there, expected a step that is not; fix: give another folder, or remove it"
            )
        self._made = not self._target.parent.exists()
        self._progress: Any = None
        head = json.dumps({"source": source, "layout": {n: [list(s), d.name] for n, (s, d) in self._layout.items()}})
        try:
            self._written = self._resumed(head)
            (self._building / STATE).mkdir(parents=True, exist_ok=True)
            self._progress = open(self._building / _PROGRESS, "a", encoding="utf-8")  # noqa: SIM115 (see __exit__)
            if not self._written:
                self._start(head)
        except OSError as error:
            self._stop()
            raise UsageError(f"{path}: cannot be written: {error}; fix: make room, or give another folder") from error
        self._stores: dict[str, Any] = {}

    def _resumed(self, head: str) -> dict[tuple[str, int | None], tuple[int, int]]:
        """Returns what has been written, with its checksums; removes what another conversion has left."""
        found: dict[tuple[str, int | None], tuple[int, int]] = {}
        path = self._building / _PROGRESS
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []  # the last may be torn
        if lines[:1] == [head]:
            for line in lines[1:]:
                name, layer, first, second = json.loads(line)
                found[name, layer] = (first, second)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        elif self._building.exists():
            steps.remove(self._building)
        return found

    def _start(self, head: str) -> None:
        key = lambda name: {"key_metadata": [{"key": name, "key_type": 2}]}  # noqa: E731
        value = {"value_metadata": {"value_type": "jax.Array", "skip_deserialize": False}}
        metadata = {
            "tree_metadata": {str((name,)): {**key(name), **value} for name in self._layout},
            "use_ocdbt": True,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        steps.write_synced(self._building / STATE / "_METADATA", json.dumps(metadata))
        self._progress.seek(0)
        self._progress.truncate()
        self._note(head)

    def __enter__(self) -> "StreamingWriter":
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes its files; what was written stays for another try, unless that would find the same mistake."""
        self._stop()
        if isinstance(error, (ConfigError, DataFileError)):
            shutil.rmtree(self._building, ignore_errors=True)
            if self._made:
                with contextlib.suppress(OSError):  # another converter's step is there
                    self._target.parent.rmdir()

    def _stop(self) -> None:
        if self._progress is not None:
            with contextlib.suppress(OSError):  # a full disk, which has been said already
                self._progress.close()

    def is_written(self, name: str, layer: int | None = None) -> bool:
        """Returns whether a part has been written, perhaps by a converter that was killed."""
        return (name, layer) in self._written

    def write(self, name: str, value: np.ndarray, layer: int | None = None) -> None:
        """Writes an array, or one index of its leading dim; each part once.

        Raises:
          ValueError: another shape or dtype than in the layout; the part is already there.
          UsageError: it cannot be written.
        """
        shape, dtype = self._layout[name]
        expected = shape if layer is None else shape[1:]
        if value.shape != expected or value.dtype != dtype:
            raise ValueError(f"{name}: got {value.dtype}{list(value.shape)}, expected {dtype}{list(expected)}")
        if self.is_written(name, layer) or (layer is not None and not 0 <= layer < shape[0]):
            raise ValueError(f"{name}: part {layer} of {shape[:1]} is already there, or is none")
        try:
            store = self._open(name)
            (store if layer is None else store[layer]).write(value).result()
            start = [0] * value.ndim if layer is None else [layer, *[0] * value.ndim]
            sums = region_checksum(value if layer is None else value[None], start)
            self._note(json.dumps([name, layer, *sums]))
        except (OSError, ValueError) as error:  # TensorStore says ValueError of a full disk as well
            what = " ".join(str(error).split())[:300]
            raise UsageError(f"{self._building}: cannot be written: {what}; fix: make room and start again") from error
        self._written[name, layer] = sums

    def commit(self, meta: dict[str, Any]) -> None:
        """Makes the step a checkpoint.

        Raises:
          ValueError: a part is missing.
          UsageError: it cannot be written.
        """
        records = {}
        for name, (shape, dtype) in self._layout.items():
            parts = [(name, None)] if self.is_written(name) else [(name, layer) for layer in range(*shape[:1])]
            missing = [part for part in parts if part not in self._written]
            if missing or not parts:
                raise ValueError(f"{name}: {len(missing)} of {len(parts)} parts are missing")
            checksum = checksum_text(self._written[part] for part in parts)
            records[name] = ArrayRecord(dtype.name, shape, checksum)
        self._progress.close()
        try:
            (self._building / _PROGRESS).unlink()
            files = checksums_of(self._building, list(list_files(self._building)), sync=True)
            steps.complete(self._building, self._target, Manifest(meta, records, files))
        except OSError as error:
            raise UsageError(f"{self._target}: cannot be written: {error}; fix: make room and start again") from error

    def _note(self, line: str) -> None:
        self._progress.write(line + "\n")
        self._progress.flush()
        os.fsync(self._progress.fileno())

    def _open(self, name: str) -> Any:
        if name not in self._stores:
            shape, dtype = self._layout[name]
            spec = _spec(self._building / STATE, name)
            spec["metadata"] = {
                "shape": list(shape),
                "chunks": _chunks(shape, dtype.itemsize),
                "dtype": "bfloat16" if dtype.name == "bfloat16" else dtype.str,
                "compressor": None,
                "fill_value": None,
                "filters": None,
                "order": "C",
                "dimension_separator": ".",
                "zarr_format": 2,
            }
            self._stores[name] = ts.open(spec, open=True, create=True).result()
        return self._stores[name]


class StreamingReader:
    """Reads the arrays of a complete step, whole or one index of the leading dim at a time."""

    def __init__(self, checkpoint: Checkpoint):
        self._folder = checkpoint.path / STATE
        self._arrays = checkpoint.manifest.arrays
        self._stores: dict[str, Any] = {}

    @property
    def arrays(self) -> Mapping[str, ArrayRecord]:
        """The arrays by name."""
        return self._arrays

    def read(self, name: str, layer: int | None = None) -> np.ndarray:
        """Returns an array, or one index of its leading dim.

        Raises:
          UsageError: it cannot be read.
        """
        try:
            if name not in self._stores:
                self._stores[name] = ts.open(_spec(self._folder, name), open=True, read=True).result()
            store = self._stores[name]
            return np.asarray((store if layer is None else store[layer]).read().result())
        except (OSError, ValueError, IndexError) as error:
            what = " ".join(str(error).split())[:300]
            raise UsageError(f"{self._folder}: {name} cannot be read: {what}; fix: another checkpoint") from error


def _spec(folder: Path, name: str) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}}


def _chunks(shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Returns pieces of one layer each where there are several dims, cut from the front until they are small."""
    chunks = list(shape)
    if len(shape) > 2:
        chunks[0] = 1
    for dim in range(len(shape)):
        size = int(np.prod(chunks, dtype=np.int64)) * itemsize
        if size > CHUNK_BYTES:
            chunks[dim] = max(1, chunks[dim] * CHUNK_BYTES // size)
    return [max(1, n) for n in chunks]
