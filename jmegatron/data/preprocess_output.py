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

from jmegatron.data.files import AtomicFile, cannot_write
from jmegatron.data.indexed_dataset import IndexedDataset, bin_path, commit_pair, idx_path
from jmegatron.errors import DataFileError, UsageError

StrPath = str | os.PathLike[str]

_COPY_BYTES = 1 << 24


class CorpusWriter:
    """A corpus whose tokens are written by others; the final names appear only in `commit`, and then whole.

    Leaving a `with` block without `commit` removes what was written.

    Args:
        prefix: path of both files without `.bin` and `.idx`; its folder must exist.
        dtype: type of the token ids.

    Raises:
        DataFileError: the folder cannot be written to, or later: the disk is full.
    """

    def __init__(self, prefix: str, dtype: np.dtype):
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        # Arrays of machine integers: 4 and 8 bytes an entry where a list would take some 40.
        self._lengths = array("i")
        self._marks = array("q", [0])
        self._modes = array("b")
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
        """Append a whole corpus of the same dtype, with its modes if it has some; then all that follow must have some.

        Raises:
            DataFileError: it cannot be read, or the disk is full.
        """
        marks = np.diff(corpus.document_indices)
        place = self.reserve(np.asarray(corpus.sequence_lengths), marks)
        if corpus.sequence_modes is not None:
            self._modes.frombytes(corpus.sequence_modes.tobytes())
        try:
            self._bin.handle.seek(place)
            with open(bin_path(corpus.prefix), "rb") as source:
                shutil.copyfileobj(source, self._bin.handle, _COPY_BYTES)
        except OSError as error:
            raise DataFileError(
                f"copying {bin_path(corpus.prefix)} to {self._bin.path} stopped: {error.strerror or error}; expected a "
                "file that can be read and room for all corpora together; fix: make room, or choose another folder"
            ) from error

    def commit(self) -> None:
        """Write the index and give both files their final names.

        An older corpus of the same name is taken apart first and `.idx` comes last, so that a process killed here
        leaves no pair of files that do not belong together.

        Raises:
            DataFileError: the disk is full.
        """
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        marks = np.frombuffer(self._marks, dtype=np.int64)
        modes = np.frombuffer(self._modes, dtype=np.int8) if self._modes else None
        try:
            commit_pair(self.prefix, self._bin, self.dtype, lengths, marks, modes)
        except OSError as error:
            raise cannot_write(idx_path(self.prefix), error) from error
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
                raise _writing_stopped(error) from error

    def close(self) -> None:
        """Close the files.

        Raises:
            DataFileError: the system says only now that the disk is full, as some network file systems do.
        """
        while self._files:
            try:
                os.close(self._files.pop())
            except OSError as error:
                raise _writing_stopped(error) from error


def _writing_stopped(error: OSError) -> DataFileError:
    return DataFileError(
        f"--output-prefix: writing stopped: {error.strerror or error}; expected room for 2 or 4 bytes a token; fix: "
        "make room, or choose another folder"
    )


def check_output_prefix(prefix: StrPath) -> None:
    """Refuse an output prefix without a file name.

    Raises:
        UsageError: it is empty or names a folder.
    """
    if os.path.basename(os.fspath(prefix)) in ("", ".", ".."):
        raise UsageError(
            f"--output-prefix: got {os.fspath(prefix)!r}, expected a path that ends in the start of a file name; fix: "
            "for example data/docs"
        )


def open_corpus(prefix: str) -> IndexedDataset:
    """Return a corpus that a script was given with `--input`.

    Raises:
        DataFileError: a file of it is missing, damaged, or cannot be read.
    """
    return IndexedDataset(prefix, "--input")


@contextlib.contextmanager
def sole_writer(names: Sequence[str]) -> Iterator[None]:
    """Keep other processes from writing the same corpora while the block runs, and sweep what a killed run left.

    Everything that writes a corpus takes the lock of its final name, a hidden file beside it, whatever program it is.
    The system drops the locks when their holder dies. Where they are not possible (some network file systems) the block
    runs without, and nothing is swept.

    Args:
        names: paths of the corpora without `.bin` and `.idx`.

    Raises:
        UsageError: another process holds one of the locks.
    """
    with contextlib.ExitStack() as stack:
        for name in map(Path, names):
            if _lock(stack, name):
                _sweep(name)
        yield


def _lock(stack: contextlib.ExitStack, name: Path) -> bool:
    """Hold the lock of a corpus until the stack ends; return False where locks are not possible."""
    path = name.with_name(f".{name.name}.lock")
    lock = _try_lock(path, name)
    if lock is None:
        return False
    stack.callback(os.close, lock)
    stack.callback(_remove, path)  # before that, still locked: nobody can have taken it meanwhile
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _try_lock(path: Path, name: Path) -> int | None:
    """Return the descriptor of the locked file, None where locks are not possible."""
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
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
                f"--output-prefix: another process is writing there ({name}); fix: wait for it, or choose another one"
            ) from None
        except OSError:
            os.close(lock)
            return None


def part_folder(names: Sequence[str]) -> Path:
    """Return a hidden folder for the parts of `--partitions`; it belongs to the first corpus."""
    first = Path(names[0])
    return first.with_name(f".{first.name}.{os.getpid()}.parts")


def _sweep(name: Path) -> None:
    """Remove temporary files and folders of runs that were killed; the lock of the corpus must be held."""
    temporary = re.compile(rf"\.{re.escape(name.name)}\.(bin|idx)\.\d+\.[0-9a-f]+\.tmp")
    parts = re.compile(rf"\.{re.escape(name.name)}\.\d+\.parts")
    with contextlib.suppress(OSError):  # a folder that cannot be listed
        for path in name.parent.iterdir():
            if temporary.fullmatch(path.name):
                _remove(path)
            elif parts.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
