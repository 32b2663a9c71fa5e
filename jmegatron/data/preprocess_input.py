"""What preprocessing reads: files found and cut into chunks of two megabytes (no communication).

    .jsonl, .json       a document a line; cut by bytes, and the worker reads its range itself
    .jsonl.gz, .zst     the same, but unpacked by one process, which hands blocks of whole lines on
    .parquet            a document a row (needs pyarrow)
    .txt, .md and so on  a document a file (also .gz, .zst), several small files a chunk

A line belongs to the range that holds its first byte, so ranges can be cut anywhere.
"""

import glob
import gzip
import importlib
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jmegatron.errors import DataFileError, UsageError

StrPath = str | os.PathLike[str]

PARQUET_ENDING = ".parquet"
_PACKED = (".gz", ".zst")
_JSON = (".jsonl", ".json")
_TEXT = (".txt", ".md", ".py", ".rst")
_JSON_ENDINGS = _JSON + tuple(ending + packed for ending in _JSON for packed in _PACKED)
_TEXT_ENDINGS = _TEXT + tuple(f".txt{packed}" for packed in _PACKED)
_ENDINGS = (*_JSON_ENDINGS, *_TEXT_ENDINGS, PARQUET_ENDING)

CHUNK_BYTES = 1 << 21
_CHUNK_ROWS = 1024
_CHUNK_FILES = 64


class Piece(NamedTuple):
    """Bytes `begin` .. `end` - 1 of a file; all of it where it can only be read as a whole."""

    path: str
    begin: int
    end: int


class Chunk(NamedTuple):
    """Some documents, or where they are to be read.

    Attributes:
        path: the file.
        lines: whole lines of JSON; None where the worker reads the bytes `first` .. `end` - 1 itself.
        rows: rows of a parquet file, a value per JSON key.
        texts: paths of plain text files, read by the worker.
        first: number of the first line or row, from 1; the first byte of a range.
        end: byte after a range.
    """

    path: str
    lines: bytes | None = None
    rows: list[list[Any]] | None = None
    texts: tuple[str, ...] = ()
    first: int = 1
    end: int = 0

    @property
    def is_heavy(self) -> bool:
        """Whether it carries documents instead of saying where they are."""
        return self.lines is not None or self.rows is not None


# ---------------------------------------------------------------------------------------------------------- finding


def find_input_files(inputs: Sequence[StrPath]) -> list[Path]:
    """Return the files that files, patterns and folders name: sorted within each, none twice.

    Folders are searched to the bottom for files with a known ending.

    Raises:
        UsageError: one of them names nothing.
    """
    found: dict[Path, None] = {}
    for given in inputs:
        matches = _expand(os.fspath(given))
        if not matches:
            raise UsageError(
                f"--input {given}: no such file, no match, or a folder without files that end in "
                f"{', '.join(_ENDINGS)}; fix: check the path, put patterns in quotes"
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def _expand(given: str) -> list[Path]:
    path = Path(given)
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.name.endswith(_ENDINGS) and p.is_file())
    if path.exists():
        return [path]
    return sorted(Path(match) for match in glob.glob(given, recursive=True) if Path(match).is_file())


def has_keys(path: StrPath) -> bool:
    """Return whether the documents of a file are objects with keys; plain text is not."""
    return os.fspath(path).endswith((*_JSON_ENDINGS, PARQUET_ENDING))


def find_pieces(files: Iterable[Path]) -> list[Piece]:
    """Return each file as one piece.

    Raises:
        DataFileError: a file cannot be reached, or a library that reads it is not installed.
    """
    pieces = []
    for path in files:
        _require_reader(path.name)
        try:
            pieces.append(Piece(str(path), 0, path.stat().st_size))
        except OSError as error:
            raise _unreadable(str(path), error) from error
    return pieces


def split_pieces(pieces: Sequence[Piece], parts: int) -> list[list[Piece]]:
    """Cut the pieces into `parts` runs of about as many bytes each, in order; some may be empty.

    Files that can only be read as a whole go to the part that their first byte falls into.
    """
    total = sum(piece.end - piece.begin for piece in pieces)
    cuts = [total * part // parts for part in range(parts + 1)]
    cuts[-1] += 1  # so that an empty file at the end belongs somewhere
    groups: list[list[Piece]] = [[] for _ in range(parts)]
    start = 0
    for piece in pieces:
        size = piece.end - piece.begin
        for part, group in enumerate(groups):
            low, high = max(cuts[part] - start, 0), min(cuts[part + 1] - start, size)
            if _is_range(piece):
                if low < high:
                    group.append(Piece(piece.path, piece.begin + low, piece.begin + high))
            elif cuts[part] <= start < cuts[part + 1]:
                group.append(piece)
        start += size
    return groups


def _is_range(piece: Piece) -> bool:
    return piece.path.endswith(_JSON) and os.path.isfile(piece.path)


# ---------------------------------------------------------------------------------------------------------- reading


def read_chunks(pieces: Iterable[Piece], keys: Sequence[str]) -> Iterator[Chunk]:
    """Yield the documents of the pieces in order, in chunks of about CHUNK_BYTES.

    Raises:
        DataFileError: a file cannot be read, or is a damaged archive.
    """
    texts: list[str] = []
    size = 0
    for piece in pieces:
        if not has_keys(piece.path):
            texts.append(piece.path)
            size += piece.end
            if size < CHUNK_BYTES and len(texts) < _CHUNK_FILES:
                continue
        if texts:
            yield Chunk(texts[0], texts=tuple(texts))
            texts, size = [], 0
        if has_keys(piece.path):
            yield from _keyed_chunks(piece, keys)
    if texts:
        yield Chunk(texts[0], texts=tuple(texts))


def _keyed_chunks(piece: Piece, keys: Sequence[str]) -> Iterator[Chunk]:
    if piece.path.endswith(PARQUET_ENDING):
        yield from _parquet_chunks(piece.path, keys)
    elif _is_range(piece):
        for begin in range(piece.begin, piece.end, CHUNK_BYTES):
            yield Chunk(piece.path, first=begin, end=min(begin + CHUNK_BYTES, piece.end))
    else:
        yield from _stream_chunks(piece.path)


def _stream_chunks(path: str) -> Iterator[Chunk]:
    number = 1
    try:
        with open_input(path) as file:
            while block := file.read(CHUNK_BYTES):
                if not block.endswith(b"\n"):
                    block += file.readline()
                yield Chunk(path, lines=block, first=number)
                number += block.count(b"\n")
    except Exception as error:
        raise _unreadable(path, error) from error


def _parquet_chunks(path: str, keys: Sequence[str]) -> Iterator[Chunk]:
    """Yield the rows of a parquet file; pyarrow reads them batch by batch."""
    parquet = importlib.import_module("pyarrow.parquet")
    number = 1
    try:
        with parquet.ParquetFile(path) as file:
            missing = [key for key in keys if key not in file.schema_arrow.names]
            if missing:
                raise UsageError(
                    f"--json-keys: got {missing}, expected columns of {path}: {file.schema_arrow.names[:10]}"
                )
            for batch in file.iter_batches(batch_size=_CHUNK_ROWS, columns=list(keys)):
                columns = [batch.column(key).to_pylist() for key in keys]
                yield Chunk(path, rows=[list(row) for row in zip(*columns, strict=True)], first=number)
                number += batch.num_rows
    except UsageError:
        raise
    except Exception as error:  # pyarrow has a family of its own
        raise _unreadable(path, error) from error


def read_range(path: str, begin: int, end: int) -> bytes:
    """Return the whole lines whose first byte lies in `begin` .. `end` - 1.

    Raises:
        DataFileError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            if begin:
                file.seek(begin - 1)
                file.readline()
            start = file.tell()
            if start >= end:
                return b""
            block = file.read(end - start)
            return block if block.endswith(b"\n") else block + file.readline()
    except OSError as error:
        raise _unreadable(path, error) from error


def lines_before(path: str, begin: int) -> int:
    """Return how many lines start before the first line of the range that starts at byte `begin`."""
    count, left, inside = 0, begin, False
    with open(path, "rb") as file:
        while left and (block := file.read(min(left, CHUNK_BYTES))):
            count += block.count(b"\n")
            left -= len(block)
            inside = not block.endswith(b"\n")
    return count + (begin > 0 and inside)


def read_text_file(path: str) -> bytes:
    """Return a whole plain text file, unpacked.

    Raises:
        DataFileError: it cannot be read, or is a damaged archive.
    """
    try:
        with open_input(path) as file:
            return file.read()
    except Exception as error:
        raise _unreadable(path, error) from error


def open_input(path: str) -> Any:
    """Open a file for reading, unpacking `.gz` and `.zst`."""
    if path.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.endswith(".zst"):
        # One frame after the other, as gzip does with its members.
        return importlib.import_module("zstandard").open(path, "rb")
    return open(path, "rb")


def _require_reader(name: str) -> None:
    """Refuse a file whose library is not installed, before anything is written."""
    for ending, package in ((".zst", "zstandard"), (PARQUET_ENDING, "pyarrow")):
        if not name.endswith(ending):
            continue
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise UsageError(
                f"--input {name}: {ending} files need the Python package {package}, which is not installed; fix: pip "
                f"install 'jmegatron[preprocess]', or pip install {package}"
            ) from error


def _unreadable(path: str, error: Exception) -> Exception:
    """Return the error to raise for what opening or unpacking a file has thrown."""
    known = isinstance(error, (OSError, EOFError, zlib.error)) or type(error).__module__.split(".")[0] in (
        "zstandard",
        "pyarrow",
    )
    if not known:
        return error
    return DataFileError(f"--input {path} cannot be read: {error}; fix: copy or compress it again")
