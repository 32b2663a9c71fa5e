"""Files that appear whole or not at all, and a lock between processes (no communication).

A reader must never find half a file under its final name, whenever the writer was killed. Everything in this package
that writes a file goes through here.
"""

import contextlib
import fcntl
import io
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from jmegatron.errors import DataFileError

logger = logging.getLogger(__name__)


class AtomicFile:
    """A file being written under a temporary name in the folder of its final name.

    Raises:
        DataFileError: the temporary file cannot be created, or later: the disk is full or gone.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        # Process id and random part: two processes that write the same name do not disturb one another.
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            self.handle: io.BufferedIOBase = open(self._temporary, "xb")  # noqa: SIM115
        except OSError as error:
            raise cannot_write(self.path, error) from error

    @property
    def temporary_path(self) -> Path:
        """Where the file lies until `commit`; other processes may write there too."""
        return self._temporary

    def commit(self) -> None:
        """Put the data on the disk and give the file its final name."""
        try:
            self.flush()
            self.handle.close()
            os.replace(self._temporary, self.path)
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise cannot_write(self.path, error) from error
            raise
        sync_folder(self.path.parent)

    def flush(self) -> None:
        """Force everything written so far onto the disk."""
        try:
            self.handle.flush()
            os.fsync(self.handle.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def discard(self) -> None:
        """Remove the temporary file; harmless when it is gone already."""
        with contextlib.suppress(OSError):
            self.handle.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)


def cannot_write(path: str | os.PathLike[str], error: OSError) -> DataFileError:
    """Return the error to raise for what writing a file has thrown, such as a full disk."""
    return DataFileError(
        f"cannot write {path}: {error.strerror or error}; expected a folder that exists, is writable and has space "
        "left; fix: choose another output path, make room or change its permissions"
    )


@contextlib.contextmanager
def atomic_outputs(*paths: str | os.PathLike[str]) -> Iterator[list[io.BufferedIOBase]]:
    """Yield binary files that take the names `paths` only if the block ends without an exception and all are written.

    Raises:
        DataFileError: the folder cannot be written to, or the disk is full.
    """
    outputs: list[AtomicFile] = []
    try:
        for path in paths:
            outputs.append(AtomicFile(path))
        yield [output.handle for output in outputs]
        for output in outputs:
            output.flush()
        for output in outputs:
            output.commit()
    except BaseException as error:
        for output in outputs:
            output.discard()
        if isinstance(error, OSError):
            raise cannot_write(", ".join(map(str, paths)), error) from error
        raise


@contextlib.contextmanager
def atomic_output(path: str | os.PathLike[str]) -> Iterator[io.BufferedIOBase]:
    """Yield a binary file that takes the name `path` only if the block ends without an exception.

    Raises:
        DataFileError: the folder cannot be written to, or the disk is full.
    """
    with atomic_outputs(path) as (file,):
        yield file


def sync_folder(folder: Path) -> None:
    """Put the folder's own entries on the disk, so that a rename survives a power cut (where the system can)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on `folder` while the block runs.

    The system drops the lock when its holder dies, so nothing stale can stay behind. Where locks are not possible
    (read-only folder, some network file systems) the block runs without: since all writes are atomic, the price is
    work done twice, never a torn file.
    """
    with contextlib.ExitStack() as stack:
        try:
            # Not through a link, which others may have put there: it would make the file that it points to.
            handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            logger.info("no lock on %s (%s): going on without", folder, error)
        yield
