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
        DataFileError: the temporary file cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        # Process id and random part: two processes that write the same name do not disturb one another.
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
        try:
            self.handle: io.BufferedIOBase = open(self._temporary, "xb")  # noqa: SIM115
        except OSError as error:
            raise DataFileError(
                f"cannot write {self.path}: {error.strerror or error}; expected a folder that exists, is writable and "
                "has space left; choose another output path or change its permissions"
            ) from error

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
        except BaseException:
            self.discard()
            raise
        sync_folder(self.path.parent)

    def flush(self) -> None:
        """Force everything written so far onto the disk."""
        self.handle.flush()
        os.fsync(self.handle.fileno())

    def discard(self) -> None:
        """Remove the temporary file; harmless when it is gone already."""
        with contextlib.suppress(OSError):
            self.handle.close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)


@contextlib.contextmanager
def atomic_output(path: str | os.PathLike[str]) -> Iterator[io.BufferedIOBase]:
    """Yield a binary file that takes the name `path` only if the block ends without an exception.

    Raises:
        DataFileError: the folder cannot be written to.
    """
    output = AtomicFile(path)
    try:
        yield output.handle
    except BaseException:
        output.discard()
        raise
    output.commit()


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
            handle = stack.enter_context(open(folder / ".lock", "ab"))
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            logger.info("no lock on %s (%s): going on without", folder, error)
        yield
