"""What preprocessing writes: corpora that several processes fill, and what a killed run left (no communication).

The parent process decides where the tokens of each chunk go, in order, from their number alone; whoever has the tokens
writes them there. They never travel between processes, and the file is the same for any number of workers.
"""

import contextlib
import fcntl
import os
import re
import shutil
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from jmegatron.data.files import AtomicFile
from jmegatron.data.indexed_dataset import IndexedDataset, bin_path, commit_pair
from jmegatron.errors import DataFileError, UsageError

_COPY_BYTES = 1 << 24


class CorpusWriter:
    """A corpus whose tokens are written by others; the final names appear only in `commit`, and then whole.

    Leaving a `with` block without `commit` removes what was written.

    Args:
        prefix: path of both files without `.bin` and `.idx`; its folder must exist.
        dtype: type of the token ids.

    Raises:
        DataFileError: the folder cannot be written to.
    """

    def __init__(self, prefix: str, dtype: np.dtype):
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        # Arrays of machine integers: 4 and 8 bytes an entry where a list would take some 40.
        self._lengths = array("i")
        self._marks = array("q", [0])
        self._num_bytes = 0
        self._committed = False
        self._bin = AtomicFile(bin_path(prefix))

    def __enter__(self) -> "CorpusWriter":
        """Return the writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was written unless `commit` has run."""
        if not self._committed:
            self._bin.discard()

    @property
    def path(self) -> str:
        """Where the tokens are to be written for now."""
        return str(self._bin.temporary_path)

    def reserve(self, lengths: np.ndarray, sequences: np.ndarray) -> int:
        """Append documents and return the byte at which their tokens are to be written.

        Args:
            lengths: int32 [sequences], in tokens.
            sequences: int32 [documents], the sequences of each document.
        """
        place = self._num_bytes
        marks = len(self._lengths) + np.cumsum(sequences, dtype=np.int64)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self._marks.frombytes(marks.astype(np.int64).tobytes())
        self._num_bytes += int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        return place

    def append(self, corpus: IndexedDataset) -> None:
        """Append a whole corpus of the same dtype."""
        marks = np.diff(corpus.document_indices)
        place = self.reserve(np.asarray(corpus.sequence_lengths), marks)
        self._bin.handle.seek(place)
        with open(bin_path(corpus.prefix), "rb") as source:
            shutil.copyfileobj(source, self._bin.handle, _COPY_BYTES)

    def commit(self) -> None:
        """Write the index and give both files their final names.

        An older corpus of the same name is taken apart first and `.idx` comes last, so that a process killed here
        leaves no pair of files that do not belong together.
        """
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        commit_pair(self.prefix, self._bin, self.dtype, lengths, np.frombuffer(self._marks, dtype=np.int64))
        self._committed = True


class TokenFiles:
    """The unfinished `.bin` files of each JSON key, opened for writing at given places."""

    def __init__(self, paths: Sequence[str]):
        self._files = [os.open(path, os.O_WRONLY) for path in paths]

    def write(self, tokens: Sequence[np.ndarray], places: Sequence[int]) -> None:
        """Write the tokens of each key at its place, in bytes.

        Raises:
            DataFileError: the disk is full, or gone.
        """
        for file, values, place in zip(self._files, tokens, places, strict=True):
            left = memoryview(values).cast("B") if len(values) else memoryview(b"")
            try:
                while left:
                    written = os.pwrite(file, left, place)
                    left, place = left[written:], place + written
            except OSError as error:
                raise DataFileError(
                    f"--output-prefix: writing stopped: {error.strerror or error}; expected room for 2 or 4 bytes a "
                    "token; fix: make room, or choose another folder"
                ) from error

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)


@contextlib.contextmanager
def sole_writer(prefix: Path, names: Sequence[str]) -> Iterator[None]:
    """Keep other processes from writing the same corpora while the block runs, and sweep what a killed run left.

    The system drops the lock when its holder dies. Where locks are not possible (some network file systems) the block
    runs without, and nothing is swept.

    Args:
        prefix: `--output-prefix`; the lock is a hidden file beside it.
        names: paths of the corpora without `.bin` and `.idx`.

    Raises:
        UsageError: another process holds the lock.
    """
    path = prefix.with_name(f".{prefix.name}.lock")
    lock = _try_lock(path, prefix)
    if lock is None:
        yield
        return
    try:
        _sweep(prefix, names)
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # still locked: nobody can have taken it meanwhile
        os.close(lock)


def _try_lock(path: Path, prefix: Path) -> int | None:
    """Return the descriptor of the locked file, None where locks are not possible."""
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(lock), path.stat()):
                return lock
            os.close(lock)  # the holder before us removed the file between our opening and locking it
        except BlockingIOError:
            os.close(lock)
            raise UsageError(
                f"--output-prefix {prefix}: another process is writing there; fix: wait for it, or choose another one"
            ) from None
        except OSError:
            os.close(lock)
            return None


def part_folder(prefix: Path) -> Path:
    """Return a hidden folder for the parts of `--partitions`."""
    return prefix.with_name(f".{prefix.name}.{os.getpid()}.parts")


def _sweep(prefix: Path, names: Sequence[str]) -> None:
    """Remove temporary files and folders of runs that were killed."""
    finals = "|".join(re.escape(Path(name).name) for name in names)
    temporary = re.compile(rf"\.({finals})\.(bin|idx)\.\d+\.[0-9a-f]+\.tmp")
    parts = re.compile(rf"\.{re.escape(prefix.name)}\.\d+\.parts")
    for path in prefix.parent.iterdir():
        if temporary.fullmatch(path.name):
            path.unlink(missing_ok=True)
        elif parts.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
