"""Keeps built sample indices on disk, so that a restart does not build them again (no communication).

The key is a hash of everything the index depends on, including the sequence lengths themselves: a changed corpus, seed,
length or split can never meet a stale entry, and equal copies of a corpus share one. (The reference keys on the path,
core/datasets/megatron_dataset.py:57-71, and serves a stale index when the file behind it changes.)

Per key: `<key>.json`, written last, lists shape, type and checksum of `<key>.<array>.npy`. Whatever does not match, or
holds numbers that the corpus has no place for, is built anew; nothing but plain arrays is ever read (no pickles, no
archives). A folder that cannot be written costs a log line, nothing else.
"""

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jmegatron.data.files import atomic_output, folder_lock
from jmegatron.errors import DataFileError

logger = logging.getLogger(__name__)

# Raise when the meaning of the arrays changes.
FORMAT = 2

Index = TypeVar("Index")
"""A NamedTuple of arrays."""


def content_key(settings: Mapping[str, Any], sequence_lengths: np.ndarray) -> str:
    """Return a hexadecimal key of the settings and of the lengths, 32 characters."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps({"format": FORMAT, **settings}, sort_keys=True).encode())
    digest.update(np.ascontiguousarray(sequence_lengths).data)
    return digest.hexdigest()


def in_range(values: np.ndarray, low: int, stop: int) -> bool:
    """Return whether an array holds integers in low .. stop - 1 along one axis."""
    return (
        values.ndim == 1
        and values.dtype.kind in "iu"
        and np.can_cast(values.dtype, np.int64)
        and low <= int(values.min(initial=low))
        and int(values.max(initial=low)) < stop
    )


def load_or_build(
    folder: str | os.PathLike[str], key: str, kind: type, build: Callable[[], Index], fits: Callable[[Index], bool]
) -> Index:
    """Return the index stored under `key`, memory mapped; build and store it if it is missing or damaged.

    Of several processes that ask at once, one builds and the others wait and read (where the file system has locks).

    Args:
        folder: the cache folder; made if it is missing.
        key: see `content_key`.
        kind: NamedTuple of the arrays, such as `GPTIndex`.
        build: makes the index.
        fits: says whether every number of a stored index has a place in the corpus.
    """
    folder = Path(folder)
    stored = _load(folder, key, kind, fits)
    if stored is not None:
        return stored
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("index cache %s cannot be made (%s): building the index without it", folder, error)
        return build()
    with folder_lock(folder):
        stored = _load(folder, key, kind, fits, logging.DEBUG)  # what is wrong with it has been said
        if stored is not None:
            return stored
        index = build()
        _store(folder, key, index)
    return index


def _store(folder: Path, key: str, index: Any) -> None:
    """Write the arrays, then the description that makes them count."""
    try:
        for name, values in index._asdict().items():
            with atomic_output(_array_path(folder, key, name)) as file:
                np.save(file, values, allow_pickle=False)
        with atomic_output(folder / f"{key}.json") as file:
            file.write(json.dumps({name: _describe(values) for name, values in index._asdict().items()}).encode())
    except (OSError, DataFileError) as error:
        logger.warning("index cache %s cannot be written (%s): going on without it", folder, error)


def _load(folder: Path, key: str, kind: type, fits: Callable[[Any], bool], level: int = logging.WARNING) -> Any:
    """Return the stored index, or None if it is not there or not whole, which is logged with `level`."""
    description_path = folder / f"{key}.json"
    try:
        content = description_path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        logger.log(level, "index cache %s cannot be read (%s): building the index", description_path, error)
        return None
    try:
        description = json.loads(content)
        arrays = {name: _map_array(_array_path(folder, key, name)) for name in _fields(kind)}
    except Exception as error:  # a file of another make ends numpy's reader in errors of many families
        logger.log(level, "index cache %s is damaged (%s): building the index again", description_path, error)
        return None
    if description != {name: _describe(values) for name, values in arrays.items()}:
        logger.log(level, "index cache %s does not match its checksums: building the index again", description_path)
        return None
    index = kind(*arrays.values())
    if not fits(index):
        logger.log(level, "index cache %s leaves the corpus: building the index again", description_path)
        return None
    return index


def _map_array(path: Path) -> np.ndarray:
    """Return a stored array, memory mapped; `np.load` would also open archives, and pickles if it were told to."""
    # A plain view of the map: indexing numpy's memmap class is several times slower.
    values = np.asarray(np.lib.format.open_memmap(path, mode="r"))
    if not values.flags.c_contiguous:
        raise ValueError(f"{path.name} is not in C order")  # its checksum would need a copy in memory
    return values


def _fields(kind: Any) -> tuple[str, ...]:
    return kind._fields


def _array_path(folder: Path, key: str, name: str) -> Path:
    return folder / f"{key}.{name}.npy"


def _describe(values: np.ndarray) -> dict[str, Any]:
    """Return what a stored array must match."""
    return {"shape": list(values.shape), "dtype": values.dtype.str, "crc32": zlib.crc32(np.ascontiguousarray(values))}
