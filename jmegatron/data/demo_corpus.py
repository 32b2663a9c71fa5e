"""A few megabytes of real text without any download: Python's own library, as byte tokens (no communication).

The source files of the standard library are code and English prose in their documentation strings; every machine that
runs jmegatron has them. They are cut into documents of a few kilobytes, shuffled (so that the training and validation
parts are alike), and go through the same preprocessing as any other corpus.
"""

import json
import os
import platform
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jmegatron.data.files import folder_lock
from jmegatron.data.indexed_dataset import IndexedDataset
from jmegatron.data.preprocess import PreprocessOptions, preprocess
from jmegatron.errors import DataFileError, UsageError

# Raise when the text, its order or its tokens change: an older corpus is then left alone and a new one built.
FORMAT = 1
MAX_BYTES = 5_000_000
MIN_BYTES = 500_000
PIECE_BYTES = 8_000
SHUFFLE_SEED = 1234

# Tests, other people's packages, tables of numbers, generated text.
_SKIPPED_FOLDERS = frozenset(
    {
        *("__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data"),
        *("site-packages", "test", "tests", "tkinter", "turtledemo"),
    }
)


def ensure_demo_corpus(cache_dir: str | os.PathLike[str] | None = None) -> str:
    """Return the prefix of the demo corpus, building it on the first call (a few seconds).

    Of several processes that ask at once one builds, the others wait.

    Args:
        cache_dir: folder to keep it in; None is `jmegatron/demo_corpus` in `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        UsageError: the folder cannot be written, or this Python has no library sources.
    """
    root = default_cache_dir() if cache_dir is None else Path(cache_dir)
    folder = root / f"python{platform.python_version()}-v{FORMAT}"
    prefix = str(folder / "demo_text_document")
    if _is_whole(prefix):
        return prefix
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder):
            if not _is_whole(prefix):
                _build(folder)
    except (OSError, DataFileError) as error:
        raise UsageError(
            f"the demo corpus cannot be written to {folder}: {error}; fix: a writable folder for --data-cache-path or "
            "the environment variable XDG_CACHE_HOME"
        ) from error
    return prefix


def default_cache_dir() -> Path:
    """Return the folder of demo corpora in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "jmegatron" / "demo_corpus"


def demo_documents() -> list[str]:
    """Return the documents in the order of the corpus: the same for the same Python.

    Raises:
        UsageError: this Python has no library sources.
    """
    pieces: list[str] = []
    size = 0
    for text in _library_texts(Path(sysconfig.get_path("stdlib"))):
        for piece in _cut(text):
            pieces.append(piece)
            size += len(piece.encode("utf-8"))
    if size < MIN_BYTES:
        raise UsageError(
            f"the demo corpus needs the sources of Python's library; found {size} bytes in "
            f"{sysconfig.get_path('stdlib')}, expected {MIN_BYTES}; fix: give --data-path a corpus of your own"
        )
    np.random.RandomState(SHUFFLE_SEED).shuffle(pieces)
    # Pieces have about one size, so a share of them is that share of the bytes.
    return pieces[: max(1, len(pieces) * MAX_BYTES // max(size, MAX_BYTES))]


def _is_whole(prefix: str) -> bool:
    try:
        IndexedDataset(prefix)
    except (DataFileError, OSError):
        return False
    return True


def _build(folder: Path) -> None:
    """Write the corpus into its folder."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".text-") as scratch:
        text_file = Path(scratch) / "demo.jsonl"
        with open(text_file, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": piece}) + "\n" for piece in demo_documents())
        preprocess(PreprocessOptions([text_file], folder / "demo", append_eod=True, log_interval=0))


def _library_texts(stdlib: Path) -> Iterator[str]:
    """Yield the text of each source and text file of the library, in the order of their names."""
    for path in sorted(_walk(stdlib)):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a few library files are in older encodings on purpose
        if text.strip():
            yield text


def _walk(stdlib: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(stdlib):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        yield from (Path(folder) / name for name in names if name.endswith((".py", ".txt")))


def _cut(text: str) -> Iterator[str]:
    """Yield pieces of at least PIECE_BYTES characters (but for the last), cut at the ends of lines."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= PIECE_BYTES:
            yield "".join(piece)
            piece, size = [], 0
    if piece:
        yield "".join(piece)
