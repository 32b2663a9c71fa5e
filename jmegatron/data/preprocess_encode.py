"""The documents of a chunk as token ids (no communication).

A document is a string, or a list of strings that become its sequences, as in Megatron-LM's tools/preprocess_data.py
(class Encoder). Empty strings give no sequence; a document without any still counts and gets no end-of-document token.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jmegatron.data.preprocess_input import (
    Chunk,
    find_input_files,
    find_pieces,
    lines_before,
    read_chunks,
    read_range,
    read_text_file,
)
from jmegatron.data.tokenizers import Tokenizer
from jmegatron.errors import DataFileError

_DECODER = json.JSONDecoder()


class EncodeOptions(NamedTuple):
    """What encoding depends on beside the tokenizer: see `preprocess.PreprocessOptions`."""

    keys: tuple[str, ...]
    append_eod: bool
    skip_bad_lines: bool
    dtype: np.dtype
    max_document_bytes: int | None = None


@dataclass
class Counts:
    """How much a chunk holds, without its tokens.

    Attributes:
        lengths: per JSON key, int32 [sequences], in tokens.
        sequences: per JSON key, int32 [documents], the sequences of each document.
        num_bytes: bytes of text (UTF-8), all keys together.
        num_bad_lines: lines or rows left out.
    """

    lengths: list[np.ndarray] = field(default_factory=list)
    sequences: list[np.ndarray] = field(default_factory=list)
    num_bytes: int = 0
    num_bad_lines: int = 0


@dataclass
class _Texts:
    """The texts of one JSON key: all sequences one after the other, and how many each document has."""

    texts: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, value: str | list[str]) -> None:
        if isinstance(value, str):
            self.texts.append(value)
            self.counts.append(1)
        else:
            self.texts.extend(value)
            self.counts.append(len(value))


def encode_chunk(chunk: Chunk, tokenizer: Tokenizer, options: EncodeOptions) -> tuple[Counts, list[np.ndarray]]:
    """Return the counts of a chunk, and per JSON key its tokens: dtype [all tokens of the chunk].

    Raises:
        DataFileError: a document that cannot be read, unless `skip_bad_lines`; a file that cannot be read.
    """
    documents = []
    num_bad = 0
    for at, document in _documents(chunk, options.keys):
        values = _values_or_stop(chunk, at, document, options.keys, options.skip_bad_lines, options.max_document_bytes)
        if values is None:
            num_bad += 1
        else:
            documents.append((at, *values))
    try:
        return _encode_documents(documents, num_bad, tokenizer, options)
    except DataFileError:  # which one it was, the batch does not say
        good = [document for document in documents if _has_ids_or_stop(chunk, document, tokenizer, options)]
        return _encode_documents(good, num_bad + len(documents) - len(good), tokenizer, options)


_Document = tuple[int, list[Any], int]
"""Place in the chunk, a value per JSON key, bytes of text."""


def _encode_documents(
    documents: Sequence[_Document], num_bad: int, tokenizer: Tokenizer, options: EncodeOptions
) -> tuple[Counts, list[np.ndarray]]:
    """Return what `encode_chunk` does."""
    counts = Counts(num_bytes=sum(size for *_, size in documents), num_bad_lines=num_bad)
    columns = [_Texts() for _ in options.keys]
    for _, values, _ in documents:
        for column, value in zip(columns, values, strict=True):
            column.add(value)
    tokens = [_encode_column(column, tokenizer, options, counts) for column in columns]
    return counts, tokens


def _has_ids_or_stop(chunk: Chunk, document: _Document, tokenizer: Tokenizer, options: EncodeOptions) -> bool:
    """Return whether the tokenizer takes the texts of a document; False means to leave it out."""
    at, values, _ = document
    try:
        for value in values:
            tokenizer.tokenize_batch([value] if isinstance(value, str) else value)
    except DataFileError as error:
        if options.skip_bad_lines:
            return False
        raise DataFileError(
            f"--input {_place(chunk, at)}: {error}, or leave bad lines out with --skip-bad-lines"
        ) from error
    return True


def read_texts(
    inputs: Sequence[str], keys: Sequence[str], skip_bad_lines: bool, max_documents: int | None = None
) -> Iterator[str]:
    """Yield the texts of all keys, in order, for what learns from text (`scripts/train_tokenizer.py`).

    Raises:
        UsageError: an input names nothing.
        DataFileError: a file or a document that cannot be read.
    """
    left = -1 if max_documents is None else max_documents
    for chunk in read_chunks(find_pieces(find_input_files(inputs)), keys):
        for at, document in _documents(chunk, keys):
            if left == 0:
                return
            values = _values_or_stop(chunk, at, document, keys, skip_bad_lines)
            if values is not None:
                left -= 1
                yield from (text for value in values[0] for text in ([value] if isinstance(value, str) else value))


def _values_or_stop(
    chunk: Chunk,
    at: int,
    document: dict[str, Any] | ValueError,
    keys: Sequence[str],
    skip_bad_lines: bool,
    max_bytes: int | None = None,
) -> tuple[list[Any], int] | None:
    """Return the texts of each key and their bytes; None for a document to be left out."""
    try:
        if isinstance(document, ValueError):
            raise document
        values, size = _check_values(document, keys)
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"{size} bytes of text, expected at most {max_bytes}, see --max-document-bytes")
        return values, size
    except ValueError as error:
        if skip_bad_lines:
            return None
        raise DataFileError(
            f"--input {_place(chunk, at)}: {error}; fix: repair the document, or leave bad lines out with "
            "--skip-bad-lines"
        ) from None


# --------------------------------------------------------------------------------------------------------- parsing


def _documents(chunk: Chunk, keys: Sequence[str]) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """Yield (place in the chunk, the document or what is wrong with it)."""
    if chunk.rows is not None:
        for at, row in enumerate(chunk.rows):
            yield at, dict(zip(keys, row, strict=True))
    elif chunk.texts:
        for at, path in enumerate(chunk.texts):
            try:
                yield at, {keys[0]: read_text_file(path).decode("utf-8-sig")}
            except UnicodeDecodeError as error:
                yield at, error
    else:
        is_start = chunk.first == (0 if chunk.lines is None else 1)
        block = read_range(chunk.path, chunk.first, chunk.end) if chunk.lines is None else chunk.lines
        yield from _parse_lines(block.removeprefix(b"\xef\xbb\xbf") if is_start else block)


def _parse_lines(block: bytes) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """Yield (place, object or what is wrong) of each line that is not blank."""
    try:
        text = block.decode("utf-8")
    except UnicodeDecodeError:
        for at, line in enumerate(block.split(b"\n")):
            try:
                yield from ((at, document) for _, document in _parse_lines_of(line.decode("utf-8")))
            except UnicodeDecodeError as error:
                yield at, error
        return
    yield from _parse_lines_of(text)


def _parse_lines_of(text: str) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """Yield (place, object or what is wrong) of each line that is not blank.

    Objects are read where they stand in the text: cutting it into lines first would take a fifth of the time.
    """
    at = begin = 0
    while begin < len(text):
        end = text.find("\n", begin)
        end = len(text) if end < 0 else end
        document = _parse_at(text, begin, end)
        if document is not None:
            yield at, document
        at, begin = at + 1, end + 1


def _parse_at(text: str, begin: int, end: int) -> dict[str, Any] | ValueError | None:
    """Return the object between two places, or what is wrong with it; None for a blank line."""
    try:
        document, stop = _DECODER.raw_decode(text, begin)
        if stop == end and isinstance(document, dict):
            return document
    except (ValueError, RecursionError):
        pass  # said below, in words that count from the line's start
    line = text[begin:end].strip(" \t\r")
    try:
        return _parse(line) if line else None
    except ValueError as error:
        return error


def _parse(text: str) -> dict[str, Any]:
    """Return the object of a line; ValueError says what is wrong with it."""
    try:
        document, end = _DECODER.raw_decode(text)
    except RecursionError:
        raise ValueError("objects nested too deeply") from None
    if end != len(text):
        raise ValueError(f"extra data after the JSON value: {text[end : end + 20]!r}")
    if not isinstance(document, dict):
        raise ValueError(f"a JSON {type(document).__name__}, expected an object")
    return document


def _check_values(document: dict[str, Any], keys: Sequence[str]) -> tuple[list[Any], int]:
    """Return the texts of each key and their bytes; ValueError says what is wrong with the document."""
    values, size = [], 0
    for key in keys:
        if key not in document:
            raise ValueError(f"no key {key!r} among {sorted(document)[:10]}, see --json-keys")
        value = document[key]
        for text in value if isinstance(value, list) else (value,):
            if not isinstance(text, str):
                raise ValueError(f"key {key!r} holds a {type(text).__name__}, expected a string or a list of strings")
            # Encoding also refuses lone surrogates, which JSON can spell and no tokenizer can read.
            size += len(text) if text.isascii() else len(text.encode("utf-8"))
        values.append(value)
    return values, size


def _place(chunk: Chunk, at: int) -> str:
    """Return where a document is to be found."""
    if chunk.texts:
        return chunk.texts[at]
    if chunk.rows is not None:
        return f"{chunk.path}, row {chunk.first + at}"
    before = lines_before(chunk.path, chunk.first) + 1 if chunk.lines is None else chunk.first
    return f"{chunk.path}, line {before + at}"


# ------------------------------------------------------------------------------------------------------ tokenising


def _encode_column(column: _Texts, tokenizer: Tokenizer, options: EncodeOptions, counts: Counts) -> np.ndarray:
    """Return the tokens of one JSON key and append its lengths to `counts`."""
    arrays = tokenizer.tokenize_batch(column.texts)
    lengths = np.fromiter((len(array) for array in arrays), dtype=np.int32, count=len(arrays))
    documents = np.repeat(np.arange(len(column.counts)), column.counts)
    full = np.flatnonzero(lengths)
    sequences = np.bincount(documents[full], minlength=len(column.counts)).astype(np.int32)
    if options.append_eod and len(full):
        last = full[np.append(documents[full][1:] != documents[full][:-1], True)]
        lengths[last] += 1
        arrays = _with_ends(arrays, last, tokenizer.eod)
    counts.lengths.append(lengths[full])
    counts.sequences.append(sequences)
    return _stored(arrays, options.dtype)


def _with_ends(arrays: list[np.ndarray], last: np.ndarray, eod: int | None) -> list[np.ndarray]:
    """Return the sequences with the end-of-document token after those numbered `last`."""
    end = np.array([eod], dtype=np.int32)
    if len(last) == len(arrays):
        return [piece for array in arrays for piece in (array, end)]
    ends = set(last.tolist())
    return [piece for at, array in enumerate(arrays) for piece in ((array, end) if at in ends else (array,))]


def _stored(arrays: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Return the ids one after the other in the corpus's type, having checked that it can hold them."""
    if not arrays:
        return np.empty(0, dtype=dtype)
    ids = np.concatenate(arrays)
    # As unsigned numbers negative ids are large ones, so one pass finds both.
    if len(ids) and int(ids.view(np.uint32).max()) > np.iinfo(dtype).max:
        raise ValueError(f"token ids {ids.min()}..{ids.max()} do not fit {dtype}: the tokenizer's vocab_size is wrong")
    return ids.astype(dtype)
