r"""Token corpora on disk: `.bin` holds the token ids, `.idx` says where each sequence lies (no communication).

The layout is that of Megatron-LM (megatron/core/datasets/indexed_dataset.py:54-67,114-126,150-214,263), byte for byte,
so corpora can be carried over in both directions:

    .bin   token ids, little endian, one after the other
    .idx   9 bytes   magic "MMIDIDX\0\0"
           uint64    version, 1
           uint8     dtype code (DTYPE_CODES)
           uint64    number of sequences N
           uint64    number of document marks D (documents + 1)
           int32[N]  length of each sequence, in tokens
           int64[N]  start of each sequence in .bin, in bytes
           int64[D]  document d holds the sequences mark[d] .. mark[d + 1] - 1
           int8[N]   modes, only in multimodal corpora: what kind of data each sequence is

Unlike the reference, the reader checks every one of these against the others before the first token is used.
"""

import io
import math
import os
import stat
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from jmegatron.data.files import AtomicFile, sync_folder
from jmegatron.errors import DataFileError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# magic, version, dtype code, sequences, document marks: 34 bytes without padding.
HEADER = struct.Struct("<9sQBQQ")

DTYPE_CODES: dict[int, np.dtype] = {
    1: np.dtype("uint8"),
    2: np.dtype("int8"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}

_INT32_MAX = 2**31 - 1
_BLOCK = 128
"""Tokens that `gather` copies for one index; found by timing."""
_SHORT_PIECE = 10
"""Tokens per piece below which `gather` reads token by token; found by timing."""
_BLOCKS_AT_ONCE = 512
"""Blocks that `gather` reads into a processor's cache and writes from there."""
_ALIGNMENT = 64
"""Bytes. JAX on CPU takes an array over instead of copying it if it begins at a multiple of this."""
_REBUILD = "fix: copy both files again or rebuild them with scripts/preprocess_data.py"


def best_dtype(vocab_size: int) -> np.dtype:
    """Return the type preprocessing stores tokens in: uint16 below 65500 entries, else int32.

    The margin below 65536 is the reference's (indexed_dataset.py:114-126) and is kept for identical files.
    """
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a new array, not filled, that begins at a multiple of 64 bytes: JAX on CPU need not copy it."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % _ALIGNMENT
    return raw[begin : begin + size].view(dtype).reshape(shape)


def _blocks(tokens: np.ndarray, stride: int) -> np.ndarray:
    """Return views of _BLOCK tokens that begin every `stride` bytes: void [blocks]."""
    size = _BLOCK * tokens.itemsize
    return np.ndarray(((tokens.nbytes - size) // stride + 1,), f"V{size}", buffer=tokens.data, strides=(stride,))


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the token file of `prefix`."""
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    """Return the path of the index file of `prefix`."""
    return Path(f"{os.fspath(prefix)}.idx")


class IndexedDataset:
    """A corpus opened for reading; its files are memory mapped, so opening it costs no token memory.

    Attributes:
        prefix: path of both files without `.bin` and `.idx`.
        dtype: numpy type of the stored token ids.
        sequence_lengths: int32 [sequences], in tokens.
        sequence_pointers: int64 [sequences], start of each sequence in `.bin`, in bytes.
        document_indices: int64 [documents + 1], first sequence of each document, then the number of sequences.
        sequence_modes: int8 [sequences] of a multimodal corpus, else None.

    Args:
        prefix: see above.
        option: what the user gave the prefix with, for messages.

    Raises:
        DataFileError: a file is missing, foreign, of another version, cut short, cannot be read, or contradicts itself
            or the other.
    """

    def __init__(self, prefix: str | os.PathLike[str], option: str = "--data-path"):
        self.prefix = os.fspath(prefix)
        try:
            self._open(option)
        except OSError as error:
            raise DataFileError(
                f"{option} {self.prefix}: {error.filename or 'its files'} cannot be read: {error.strerror or error}; "
                "fix: check the permissions of both files and of their folder"
            ) from error

    def _open(self, option: str) -> None:
        """Map both files, having checked them."""
        _require_files(self.prefix, option)
        raw, num_sequences, num_marks, self.dtype = _read_header(idx_path(self.prefix), option)
        lengths_end = HEADER.size + 4 * num_sequences
        pointers_end = lengths_end + 8 * num_sequences
        self.sequence_lengths = raw[HEADER.size : lengths_end].view("<i4")
        self.sequence_pointers = raw[lengths_end:pointers_end].view("<i8")
        marks_end = pointers_end + 8 * num_marks
        self.document_indices = raw[pointers_end:marks_end].view("<i8")
        self.sequence_modes = raw[marks_end:].view("i1") if len(raw) > marks_end else None
        self._check_arrays()
        self._tokens = self._map_tokens()

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return tokens of one sequence, without copying them.

        Args:
            index: number of the sequence.
            offset: first token wanted, counted from the start of the sequence.
            length: number of tokens wanted; None means up to the end of the sequence.

        Returns:
            dtype [length], read-only.

        Raises:
            IndexError: no such sequence, or the range leaves it.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {self.prefix}: expected 0 <= sequence < {len(self)}")
        available = int(self.sequence_lengths[index])
        length = available - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"tokens {offset}..{offset + length - 1} of sequence {index} of {self.prefix}: it has {available}"
            )
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize + offset
        return self._tokens[start : start + length]

    def gather(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return ranges of `.bin`, one after the other, in new memory.

        Args:
            starts: int64 [pieces], first token of each, counted from the start of the file.
            stops: int64 [pieces], token after the last of each; at least `starts`, at most the tokens of the file.

        Returns:
            dtype [sum of stops - starts], of the corpus's dtype; begins at a multiple of 64 bytes.
        """
        sizes = stops - starts
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        if total < len(starts) * _SHORT_PIECE or len(self._tokens) < _BLOCK:
            out = aligned_empty((total,), self.dtype)
            out[:] = self._tokens[np.arange(total) + np.repeat(starts - (ends - sizes), sizes)]
            return out
        return self._gather_blocks(starts, stops, ends - sizes, total)

    def _gather_blocks(self, starts: np.ndarray, stops: np.ndarray, places: np.ndarray, total: int) -> np.ndarray:
        """Return what `gather` does, of pieces that begin at `places` of the result, _BLOCK tokens at a time.

        numpy copies whole items by an index array without Python, so blocks of tokens are made its items. A block of
        the result is read as if the piece in which it begins had no end; what it gets wrong are beginnings of pieces,
        fewer than _BLOCK tokens each. These are written after that, again a whole block each, in order, as numpy
        assigns: what one writes too much, the next puts right. What would be read from behind the end of the file comes
        last, by slices.
        """
        num_blocks = -(-total // _BLOCK)
        out = aligned_empty(((num_blocks + 1) * _BLOCK,), self.dtype)  # one more, so that a last piece can be a block
        # Every place of the file begins a block: items that overlap.
        source = _blocks(self._tokens, self.dtype.itemsize)
        aligned = _blocks(out, _BLOCK * self.dtype.itemsize)
        # A piece holds the beginnings of the blocks ceil(place / _BLOCK) .. ceil(next place / _BLOCK) - 1.
        counts = np.diff(-(-places // _BLOCK), append=num_blocks)
        begins = np.arange(0, num_blocks * _BLOCK, _BLOCK) + np.repeat(starts - places, counts)
        np.minimum(begins, len(source) - 1, out=begins)
        for at in range(0, num_blocks, _BLOCKS_AT_ONCE):
            part = slice(at, min(at + _BLOCKS_AT_ONCE, num_blocks))
            aligned[part] = source[begins[part]]
        behind = stops >= len(source)
        inside = slice(None) if not behind.any() else ~behind
        _blocks(out, self.dtype.itemsize)[places[inside]] = source[starts[inside]]
        for piece in np.flatnonzero(behind).tolist():
            start, stop, place = int(starts[piece]), int(stops[piece]), int(places[piece])
            out[place : place + stop - start] = self._tokens[start:stop]
        return out[:total]

    def _check_arrays(self) -> None:
        """Refuse lengths, pointers and document marks that do not add up."""
        path = idx_path(self.prefix)
        lengths, pointers, marks = self.sequence_lengths, self.sequence_pointers, self.document_indices
        if lengths.size and int(lengths.min()) < 0:
            at = int(lengths.argmin())
            _damaged(path, f"sequence {at} has length {lengths[at]}", "lengths of 0 tokens or more")
        expected = sequence_pointers(lengths, self.dtype.itemsize)
        wrong = np.flatnonzero(pointers != expected)
        if wrong.size:
            at = int(wrong[0])
            _damaged(
                path,
                f"sequence {at} starts at byte {pointers[at]}",
                f"byte {expected[at]}, the sum of the lengths before it",
            )
        if int(marks[0]) != 0 or int(marks[-1]) != len(lengths) or bool((marks[1:] < marks[:-1]).any()):
            _damaged(
                path,
                f"document marks run from {marks[0]} to {marks[-1]}",
                f"marks that rise from 0 to {len(lengths)}, the number of sequences",
            )

    def _map_tokens(self) -> np.ndarray:
        """Map `.bin`, having checked that its size is what the index says."""
        path = bin_path(self.prefix)
        expected = int(self.sequence_lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        size = path.stat().st_size
        if size != expected:
            kind = "is shorter" if size < expected else "is longer"
            raise DataFileError(
                f"{path} {kind} than its index says: got {size} bytes, expected {expected} bytes "
                f"(from {idx_path(self.prefix)}); the copy was cut off or the two files belong to different corpora; "
                f"{_REBUILD}"
            )
        if size == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.asarray(np.memmap(path, dtype=self.dtype, mode="r"))


def _require_files(prefix: str, option: str) -> None:
    """Refuse a prefix that lacks one of its two files, or that names one of the files instead."""
    for path in (idx_path(prefix), bin_path(prefix)):
        if stat.S_ISREG(_mode(path)):
            continue
        hint = f"fix: give {option} the path of an existing corpus without .bin and .idx"
        if prefix.endswith((".bin", ".idx")):
            hint = f"fix: leave out the ending: {prefix[:-4]}"
        raise DataFileError(f"no corpus under {option} {prefix}: {path} does not exist; {hint}")


def _mode(path: Path) -> int:
    """Return the mode of a file, 0 if there is none; a folder that cannot be searched is an OSError."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except ValueError:  # a name that no file can have, such as one with a zero byte
        return 0


def _read_header(path: Path, option: str) -> tuple[np.ndarray, int, int, np.dtype]:
    """Return (the file's bytes, sequences, document marks, dtype) of an index file whose size fits its header."""
    size = path.stat().st_size
    if size < HEADER.size:
        _damaged(path, f"{size} bytes", f"at least {HEADER.size} bytes (the header)")
    raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    magic, version, code, num_sequences, num_marks = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise DataFileError(
            f"{path} is not an indexed dataset: it starts with {magic!r}, expected {MAGIC!r}; fix: give {option} a "
            "corpus written by scripts/preprocess_data.py or by Megatron-LM's preprocessing"
        )
    if version != VERSION:
        raise DataFileError(f"{path}: format version {version}, expected {VERSION}; {_REBUILD}")
    if code not in DTYPE_CODES:
        _damaged(path, f"dtype code {code}", f"one of {sorted(DTYPE_CODES)}")
    # Python integers: a damaged count must not overflow and look small.
    expected = HEADER.size + 12 * num_sequences + 8 * num_marks
    if num_marks < 1:
        _damaged(path, "0 document marks", "at least 1, the end of the last document")
    if size not in (expected, expected + num_sequences):
        _damaged(
            path,
            f"{size} bytes",
            f"{expected} bytes for the {num_sequences} sequences and {num_marks} document marks of its header",
        )
    # Checking takes 8 bytes a sequence; a file of holes has room for any number of them.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 8 * num_sequences > memory:
        raise DataFileError(
            f"{path}: got {num_sequences} sequences, expected at most the {memory // 8} that this machine has memory "
            f"for; {_REBUILD}"
        )
    return raw, num_sequences, num_marks, DTYPE_CODES[code]


def _damaged(path: Path, got: str, expected: str) -> NoReturn:
    raise DataFileError(f"{path} is damaged or cut short: got {got}, expected {expected}; {_REBUILD}")


# ---------------------------------------------------------------------------------------------------------- writing


def sequence_pointers(lengths: np.ndarray, itemsize: int) -> np.ndarray:
    """Return where each sequence starts in `.bin`: the sum of the lengths before it times `itemsize`.

    Args:
        lengths: integer [sequences], in tokens.
        itemsize: bytes per token.

    Returns:
        int64 [sequences], in bytes. 64 bits from the first addition on: the lengths are int32 and their sum is not.
    """
    pointers = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers *= itemsize
    return pointers


def write_index(
    file: io.BufferedIOBase,
    dtype: Any,
    lengths: np.ndarray,
    document_indices: np.ndarray,
    modes: np.ndarray | None = None,
) -> None:
    """Write a whole `.idx` file to an open binary file.

    Args:
        file: where to write.
        dtype: type of the token ids, one of DTYPE_CODES.
        lengths: integer [sequences], in tokens.
        document_indices: integer [documents + 1].
        modes: int8 [sequences] of a multimodal corpus.

    Raises:
        ValueError: the format has no code for `dtype`, or there is not one mode per sequence.
    """
    dtype = np.dtype(dtype)
    if modes is not None and len(modes) != len(lengths):
        raise ValueError(f"{len(modes)} modes for {len(lengths)} sequences; expected one each")
    file.write(HEADER.pack(MAGIC, VERSION, _dtype_code(dtype), len(lengths), len(document_indices)))
    file.write(np.ascontiguousarray(lengths, dtype="<i4").data)
    file.write(sequence_pointers(np.asarray(lengths), dtype.itemsize).astype("<i8", copy=False).data)
    file.write(np.ascontiguousarray(document_indices, dtype="<i8").data)
    if modes is not None:
        file.write(np.ascontiguousarray(modes, dtype="i1").data)


def _dtype_code(dtype: np.dtype) -> int:
    for code, known in DTYPE_CODES.items():
        if known == dtype:
            return code
    raise ValueError(
        f"dtype {dtype} has no code in the format; expected one of {[str(d) for d in DTYPE_CODES.values()]}"
    )


def commit_pair(
    prefix: str | os.PathLike[str],
    tokens: AtomicFile,
    dtype: np.dtype,
    lengths: np.ndarray,
    document_indices: np.ndarray,
    modes: np.ndarray | None = None,
) -> None:
    """Write the index of finished tokens and give both files their final names.

    An older corpus of the same name is taken apart first and `.idx` comes last, so that a process killed here leaves no
    pair of files that do not belong together.

    Args:
        prefix: path without `.bin` and `.idx`.
        tokens: the unfinished `.bin`.
        dtype: of the tokens.
        lengths: int32 [sequences], in tokens.
        document_indices: int64 [documents + 1].
        modes: int8 [sequences], or None.
    """
    index = AtomicFile(idx_path(prefix))
    try:
        write_index(index.handle, dtype, lengths, document_indices, modes)
        index.flush()
        tokens.flush()
        index.path.unlink(missing_ok=True)
        tokens.commit()
        index.commit()
    except BaseException:
        index.discard()
        raise
    sync_folder(index.path.parent)


class IndexedDatasetBuilder:
    """Writes a corpus document by document; the final names appear only in `finalize`, and then whole.

    Use it as a context manager: leaving the block without `finalize`, by an exception or not, removes what was written.

    Args:
        prefix: path of both files without `.bin` and `.idx`; its folder must exist.
        dtype: type of the token ids, see `best_dtype`.
        multimodal: write a mode with every sequence.

    Raises:
        DataFileError: the folder cannot be written to.
        ValueError: the format has no code for `dtype`.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: Any, multimodal: bool = False):
        self.dtype = np.dtype(dtype).newbyteorder("<")
        _dtype_code(self.dtype)
        self.prefix = os.fspath(prefix)
        # Arrays of machine integers: 4 and 8 bytes an entry where a list would take some 40.
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._modes = array("b") if multimodal else None
        self._finished = False
        self._bin = AtomicFile(bin_path(self.prefix))

    def __enter__(self) -> "IndexedDatasetBuilder":
        """Return the builder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was written unless `finalize` has run."""
        self.abort()

    def add_document(
        self,
        tokens: Any,
        lengths: Sequence[int] | np.ndarray | None = None,
        modes: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Append one document.

        Args:
            tokens: integer [tokens], the ids of all its sequences one after the other.
            lengths: integer [sequences], whose sum is `tokens`. None: one sequence, or none for an empty document
                (which then still counts as a document, as in the reference).
            modes: int8 [sequences], in a multimodal corpus; None: 0 each.

        Raises:
            ValueError: the lengths do not sum to the number of tokens, an id does not fit the dtype, or modes do not
                fit the sequences or the corpus.
        """
        tokens = np.asarray(tokens)
        if lengths is None:
            lengths = [len(tokens)] if len(tokens) else []
        sizes = np.asarray(lengths, dtype=np.int64)
        self._check_document(tokens, sizes)
        self._add_modes(len(sizes), modes)
        self._bin.handle.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        self._lengths.frombytes(sizes.astype(np.int32).tobytes())
        self._document_indices.append(len(self._lengths))

    def _add_modes(self, num_sequences: int, modes: Sequence[int] | np.ndarray | None) -> None:
        """Take over the modes of a document's sequences."""
        if self._modes is None:
            if modes is not None:
                raise ValueError(
                    f"{self.prefix} is no multimodal corpus: modes have no place in it; fix: multimodal=True"
                )
            return
        values = np.zeros(num_sequences, np.int64) if modes is None else np.asarray(modes, np.int64)
        if values.shape != (num_sequences,) or (values.size and not -128 <= values.min() <= values.max() <= 127):
            raise ValueError(f"modes {values.tolist()}: expected {num_sequences} numbers of -128 .. 127")
        self._modes.frombytes(values.astype(np.int8).tobytes())

    def _check_document(self, tokens: np.ndarray, sizes: np.ndarray) -> None:
        """Refuse what would silently become other tokens: wrong sums, ids that wrap around."""
        if self._finished:
            raise ValueError(f"{self.prefix} is finished; open a new builder to write another corpus")
        if int(sizes.sum()) != len(tokens) or (
            sizes.size and not 0 <= int(sizes.min()) <= int(sizes.max()) <= _INT32_MAX
        ):
            raise ValueError(
                f"sequence lengths sum to {int(sizes.sum())}, expected {len(tokens)}, the number of tokens"
            )
        if len(tokens) and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = int(tokens.min()), int(tokens.max())
            if low < limits.min or high > limits.max:
                raise ValueError(f"token ids {low}..{high} do not fit {self.dtype} ({limits.min}..{limits.max})")

    def finalize(self) -> None:
        """Write the index and give both files their final names.

        An older corpus of the same name is taken apart first and `.idx` comes last, so that a process killed here
        leaves no pair of files that do not belong together.
        """
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, dtype=np.int32)
        marks = np.frombuffer(self._document_indices, dtype=np.int64)
        modes = None if self._modes is None else np.array(self._modes, dtype=np.int8)
        commit_pair(self.prefix, self._bin, self.dtype, lengths, marks, modes)
        self._finished = True

    def abort(self) -> None:
        """Remove the temporary files of an unfinished corpus; harmless after `finalize`."""
        if not self._finished:
            self._bin.discard()
            self._finished = True
