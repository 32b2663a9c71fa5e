"""What preprocessing reads: files found and cut into chunks of two megabytes (no communication).

    .jsonl, .ndjson, .json    a document a line; cut by bytes, and the worker reads its range itself
    the same with .gz, .zst   unpacked by one process, which hands blocks of whole lines on
    a pipe, /dev/stdin        JSON lines, read by one process as well, unless it is named .txt and so on
    .parquet                  a document a row (needs pyarrow)
    .txt, .md, .py, .rst      a document a file (also .gz, .zst), several small files a chunk
    any other ending          JSON lines if the first line is an object, else a document; which of them is logged

Upper and lower case make no difference. A line belongs to the range that holds its first byte, so ranges can be cut
anywhere.
"""

import glob
import gzip
import importlib
import io
import json
import logging
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jmegatron.errors import DataFileError, UsageError

logger = logging.getLogger(__name__)

StrPath = str | os.PathLike[str]

JSON_LINES, PARQUET, TEXT = "json", "parquet", "text"
_PACKED = (".gz", ".zst")
_ENDINGS = {
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".json": JSON_LINES,
    ".parquet": PARQUET,
    ".txt": TEXT,
    ".md": TEXT,
    ".py": TEXT,
    ".rst": TEXT,
}
_CORPUS_ENDINGS = (".bin", ".idx")

CHUNK_BYTES = 1 << 21
_CHUNK_ROWS = 1024
_CHUNK_FILES = 64
_PACKED_BYTES = 1 << 12  # unpacks to at most some 130 MB
_MOST_SNIFFED = 1 << 26
MOST_DOCUMENT_BYTES = 1 << 30
"""The longest line or text that is read into memory, unpacked. A small archive, or a file of holes, can hold more than
any memory; and the lengths in a corpus end at 2**31 tokens."""


class Piece(NamedTuple):
    """Bytes `begin` .. `end` - 1 of a file of a kind; all of it where it can only be read as a whole."""

    path: str
    begin: int
    end: int
    kind: str = JSON_LINES


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

    Folders are searched to the bottom for files with a known ending; links to folders are not followed.

    Raises:
        UsageError: one of them names nothing.
        DataFileError: a file or a folder inside one cannot be reached.
    """
    found: dict[Path, None] = {}
    for given in [os.fspath(given) for given in inputs]:
        try:
            matches = _expand(given) if given else []
        except OSError as error:
            raise _unreadable(error.filename or given, error) from error
        if not matches:
            raise UsageError(
                f"--input {given or repr(given)}: no such file, no match, or a folder without files that end in "
                f"{', '.join(_ENDINGS)} (also .gz, .zst); fix: check the path, put patterns in quotes"
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def _expand(given: str) -> list[Path]:
    mode = _mode(given)
    if stat.S_ISDIR(mode):
        return sorted(path for path in _walk(given) if _kind_of_name(path.name) and stat.S_ISREG(_mode(path)))
    if mode:
        return [Path(given)]
    return sorted(Path(match) for match in glob.glob(given, recursive=True) if os.path.isfile(match))


def _mode(path: StrPath) -> int:
    """Return the mode of a file, 0 if there is none; what may not be looked at is an error in any version of Python."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _walk(folder: str) -> Iterator[Path]:
    """Yield what lies in a folder, to the bottom; a folder that cannot be read is an error, not an empty one."""

    def stop(error: OSError) -> None:
        raise error

    for base, _, names in os.walk(folder, onerror=stop):
        yield from (Path(base, name) for name in names)


def find_pieces(files: Iterable[Path]) -> list[Piece]:
    """Return each file as one piece.

    Raises:
        UsageError: a library that reads a file is not installed, or a file is no text.
        DataFileError: a file cannot be reached.
    """
    pieces = []
    for path in files:
        _require_reader(path.name)
        try:
            # A file behind /dev/stdin has a name of its own, which is the one that other processes know.
            name = str(path.resolve() if _is_descriptor(str(path)) and path.is_file() else path)
            pieces.append(Piece(name, 0, path.stat().st_size, _kind(name)))
        except OSError as error:
            raise _unreadable(str(path), error) from error
    return pieces


def _is_descriptor(path: str) -> bool:
    """Return whether a path means something else in another process, as /dev/stdin and /dev/fd/63 do."""
    return path.startswith(("/dev/", "/proc/"))


def _kind_of_name(name: str) -> str | None:
    """Return the kind of file that a name ends in, None if it is unknown."""
    root, ending = os.path.splitext(name.lower())
    kind = _ENDINGS.get(ending)
    if ending in _PACKED:
        kind = _ENDINGS.get(os.path.splitext(root)[1])
        return kind if kind != PARQUET else None
    return kind


def _kind(path: str) -> str:
    """Return the kind of a file, by what it holds where its name does not say it."""
    kind = _kind_of_name(os.path.basename(path))
    if kind is None and path.lower().endswith(_CORPUS_ENDINGS):
        raise UsageError(
            f"--input {path}: a file of a corpus, expected text; fix: name the text, or join corpora with "
            "scripts/merge_datasets.py"
        )
    if kind is None:
        kind = _kind_of_content(path) if os.path.isfile(path) else JSON_LINES
        logger.info(
            "%s: the ending says nothing, so it is read as %s",
            path,
            "JSON lines" if kind == JSON_LINES else "one document of plain text",
        )
    return kind


def _kind_of_content(path: str) -> str:
    """Return JSON_LINES for a file whose first line that is not blank is an object, else TEXT."""
    try:
        with open_input(path) as file:
            line = b"\n"
            while line and not line.strip():
                line = file.readline(_MOST_SNIFFED)
    except Exception as error:
        raise _unreadable(path, error) from error
    line = line.removeprefix(b"\xef\xbb\xbf").strip()
    if not line.startswith(b"{"):
        return TEXT
    try:
        json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"--input {path}: the ending says nothing and the first line begins like a JSON object but is none "
            f"({error}); fix: name it .jsonl for a document a line, or .txt for plain text"
        ) from error
    return JSON_LINES


def split_pieces(pieces: Sequence[Piece], parts: int) -> list[list[Piece]]:
    """Cut the pieces into `parts` runs of about as many bytes each, in order; some may be empty.

    Files that can only be read as a whole go to the part that their first byte falls into.

    Raises:
        UsageError: one of several parts would be a pipe that only this process has.
    """
    private = [piece.path for piece in pieces if _is_descriptor(piece.path)]
    if parts > 1 and private:
        raise UsageError(
            f"--partitions: got {parts} with {private[0]}, which one process reads; fix: leave --partitions out, or "
            "put the text into a file"
        )
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
    packed = piece.path.lower().endswith(_PACKED)
    return piece.kind == JSON_LINES and not packed and os.path.isfile(piece.path)


# ---------------------------------------------------------------------------------------------------------- reading


def read_chunks(pieces: Iterable[Piece], keys: Sequence[str]) -> Iterator[Chunk]:
    """Yield the documents of the pieces in order, in chunks of about CHUNK_BYTES.

    Raises:
        DataFileError: a file cannot be read, is a damaged archive, or has a line longer than MOST_DOCUMENT_BYTES.
    """
    texts: list[str] = []
    size = 0
    for piece in pieces:
        if piece.kind == TEXT:
            texts.append(piece.path)
            size += piece.end
            if size < CHUNK_BYTES and len(texts) < _CHUNK_FILES:
                continue
        if texts:
            yield Chunk(texts[0], texts=tuple(texts))
            texts, size = [], 0
        if piece.kind != TEXT:
            yield from _keyed_chunks(piece, keys)
    if texts:
        yield Chunk(texts[0], texts=tuple(texts))


def _keyed_chunks(piece: Piece, keys: Sequence[str]) -> Iterator[Chunk]:
    if piece.kind == PARQUET:
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
                    block += _rest_of_line(file, path)
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
        DataFileError: the file cannot be read, or has a line longer than MOST_DOCUMENT_BYTES.
    """
    try:
        with open(path, "rb") as file:
            if begin:
                file.seek(begin - 1)
                while (skipped := file.readline(CHUNK_BYTES)) and not skipped.endswith(b"\n"):
                    pass
            start = file.tell()
            if start >= end:
                return b""
            block = file.read(end - start)
            return block if block.endswith(b"\n") else block + _rest_of_line(file, path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _rest_of_line(file: Any, path: str) -> bytes:
    """Return the bytes up to the next end of a line, or of the file."""
    line = file.readline(MOST_DOCUMENT_BYTES + 1)
    _check_size(len(line), path)
    return line


def _check_size(size: int, path: str) -> None:
    """Refuse a document that has grown too large while it is read."""
    if size > MOST_DOCUMENT_BYTES:
        raise DataFileError(
            f"--input {path}: got a line or a text of more than {MOST_DOCUMENT_BYTES} bytes; expected documents that "
            "fit memory; fix: cut it into several documents, or leave the file out"
        )


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
        DataFileError: it cannot be read, is a damaged archive, or is longer than MOST_DOCUMENT_BYTES.
    """
    try:
        blocks, size = [], 0
        with open_input(path) as file:
            while block := file.read(CHUNK_BYTES):
                blocks.append(block)
                size += len(block)
                _check_size(size, path)
        return b"".join(blocks)
    except Exception as error:
        raise _unreadable(path, error) from error


def open_input(path: str) -> Any:
    """Open a file for reading, unpacking `.gz` and `.zst`."""
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_ZstReader(open(path, "rb")), CHUNK_BYTES)
    return open(path, "rb")


class _ZstReader(io.RawIOBase):
    """The text of a .zst file, one frame after the other, as gzip does with its members.

    The library's own reader takes a file that is cut short for a whole one, and reads no lines.
    """

    def __init__(self, file: io.BufferedIOBase):
        self._library = importlib.import_module("zstandard")
        self._file = file
        self._frame: Any = None
        self._packed = b""
        self._text = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer and return how many bytes there were; 0 at the end.

        Raises:
            EOFError: the file ends inside a frame.
        """
        while not self._text:
            self._packed = self._packed or self._file.read(_PACKED_BYTES)
            if not self._packed and self._frame is None:
                return 0
            if not self._packed:
                raise EOFError("the file is cut short")
            self._frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            self._text = memoryview(self._frame.decompress(self._packed))
            self._packed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size


def _require_reader(name: str) -> None:
    """Refuse a file whose library is not installed, before anything is written."""
    for ending, package in ((".zst", "zstandard"), (".parquet", "pyarrow")):
        if not name.lower().endswith(ending):
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
    if isinstance(error, PermissionError):
        return DataFileError(f"--input {path} cannot be read: {error.strerror}; fix: check the permissions")
    reason = str(error) or type(error).__name__
    return DataFileError(f"--input {path} cannot be read: {reason}; fix: copy or compress it again")
