"""What every tokenizer can do, and how its files are read (no communication).

Files are text or a protocol buffer that a library parses; nothing in them is executed. Whatever is wrong with one ends
in a single `DataFileError`.
"""

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np

from jmegatron.errors import DataFileError, UsageError

Ids = Sequence[int | np.integer] | np.ndarray
StrPath = str | os.PathLike[str]


@runtime_checkable
class Tokenizer(Protocol):
    """What preprocessing, training and sampling need of a tokenizer.

    Attributes:
        vocab_size: ids are below this.
        eod: id that ends a document, or None if the tokenizer has no such token.
    """

    @property
    def vocab_size(self) -> int:
        """Return the number of ids."""
        ...

    @property
    def eod(self) -> int | None:
        """Return the id that ends a document, or None."""
        ...

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token such as `<|im_end|>`, or None if there is none of that name."""
        ...

    def tokenize(self, text: str) -> np.ndarray:
        """Return the ids of a text: int32 [tokens]."""
        ...

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts, faster than one by one: a list of int32 [tokens]."""
        ...

    def detokenize(self, ids: Ids) -> str:
        """Return the text of ids; ids that end a document give no text."""
        ...


def require_library(name: str, tokenizer_type: str, extra: str = "") -> Any:
    """Return a Python package that a tokenizer needs.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        fix = f"; fix: pip install 'jmegatron[{extra}]', or pip install {name}" if extra else ""
        raise UsageError(
            f"--tokenizer-type {tokenizer_type} needs the Python package {name}, which is not installed{fix}"
        ) from error


def read_json(path: Path, option: str, expected: str) -> Any:
    """Return what a JSON file holds.

    Raises:
        DataFileError: missing, no text, or no JSON.
    """
    text = read_text(path, option, expected)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        bad_file(path, option, f"a file that is not JSON ({error})", expected, error)


def read_text(path: Path, option: str, expected: str) -> str:
    """Return the text of a file.

    Raises:
        DataFileError: missing, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        bad_file(path, option, f"an unreadable file ({reason})", expected, error)


def bad_file(path: Path, option: str, got: str, expected: str, cause: BaseException | None = None) -> NoReturn:
    """Raise the DataFileError of a tokenizer's file."""
    raise DataFileError(
        f"{option} {path}: got {got}, expected {expected}; fix: check the path, or copy the file again"
    ) from cause


def checked_ids(ids: Ids, vocab_size: int) -> list[int]:
    """Return ids as Python numbers.

    Raises:
        ValueError: an id outside the vocabulary.
    """
    numbers = np.asarray(ids, dtype=np.int64)
    if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < vocab_size:
        raise ValueError(f"ids {numbers.min()}..{numbers.max()}: expected 0 .. {vocab_size - 1}")
    return [int(number) for number in numbers]
