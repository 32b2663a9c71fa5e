"""From text files to an indexed dataset (no communication).

Input is JSON lines (`.jsonl`, `.json`, also `.gz`), a document a line, or plain text, a document a file. Output is
`{prefix}_{key}_document.bin` and `.idx` for each JSON key, as Megatron-LM's tools/preprocess_data.py:86-108,171 names
and fills them: an empty text is a document without sequence and gets no end-of-document token.

The text streams through in chunks of about a megabyte; with several workers at most a few chunks are under way, in
order, so memory does not grow with the corpus. A worker that dies stops the run instead of hanging it.
"""

import glob
import gzip
import json
import logging
import multiprocessing
import os
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jmegatron.data.indexed_dataset import IndexedDatasetBuilder, best_dtype
from jmegatron.data.tokenizers import Tokenizer, build_tokenizer
from jmegatron.errors import DataFileError, UsageError

logger = logging.getLogger(__name__)

_JSON_ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_TEXT_ENDINGS = (".txt", ".md", ".py", ".rst", ".txt.gz")
_CHUNK_BYTES = 1 << 20
_CHUNK_DOCUMENTS = 1024


@dataclass(frozen=True)
class PreprocessOptions:
    """What `scripts/preprocess_data.py` can be told; the fields are its options.

    Attributes:
        input: files, patterns or folders.
        output_prefix: start of the output paths.
        json_keys: keys of the JSON objects to take; each gives a corpus of its own.
        tokenizer_type: see `tokenizers.build_tokenizer`.
        tokenizer_model: file or folder of the tokenizer.
        vocab_size: for NullTokenizer.
        append_eod: end each document that is not empty with the tokenizer's `eod`.
        workers: processes that tokenise; 1 works in this process.
        log_interval: documents between two progress lines; 0 for none.
        skip_bad_lines: count lines that cannot be read instead of stopping at the first.
    """

    input: Sequence[str | os.PathLike[str]]
    output_prefix: str | os.PathLike[str]
    json_keys: Sequence[str] = ("text",)
    tokenizer_type: str = "ByteTokenizer"
    tokenizer_model: str | os.PathLike[str] | None = None
    vocab_size: int | None = None
    append_eod: bool = False
    workers: int = 1
    log_interval: int = 1000
    skip_bad_lines: bool = False


@dataclass
class PreprocessReport:
    """What came out.

    Attributes:
        prefixes: one corpus path per JSON key, without `.bin` and `.idx`.
        num_documents: documents written per key, empty ones included.
        num_tokens: tokens written, all keys together.
        num_bytes: bytes of text read (UTF-8), all keys together.
        num_bad_lines: lines left out.
        seconds: time taken.
    """

    prefixes: list[str]
    num_documents: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_bad_lines: int = 0
    seconds: float = 0.0


class Chunk(NamedTuple):
    """Some documents as they stand in a file.

    path: the file. first_line: number of its first line here, or None for plain text. items: lines, or one whole text.
    """

    path: str
    first_line: int | None
    items: list[bytes]


@dataclass
class EncodedChunk:
    """The documents of a chunk as tokens.

    tokens: per JSON key, int32 [all tokens of the chunk]. lengths: per JSON key, the tokens of each document.
    """

    tokens: list[np.ndarray] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    num_bytes: int = 0
    num_bad_lines: int = 0


def preprocess(options: PreprocessOptions) -> PreprocessReport:
    """Write the corpora and return what came out; the final files appear only after everything went well.

    Raises:
        UsageError: an option cannot be used, nothing matches `input`, or the input holds no token.
        DataFileError: a file cannot be read, holds a bad line (without `skip_bad_lines`), or cannot be written.
    """
    tokenizer = _check_options(options)
    files = find_input_files(options.input)
    _check_keys(files, options.json_keys)
    prefix = Path(options.output_prefix)
    report = PreprocessReport([f"{prefix}_{key}_document" for key in options.json_keys])
    _make_folder(prefix.parent)
    started = time.monotonic()
    with ExitStack() as stack:
        dtype = best_dtype(tokenizer.vocab_size)
        builders = [stack.enter_context(IndexedDatasetBuilder(name, dtype)) for name in report.prefixes]
        for encoded in _encode_all(read_chunks(files), options, tokenizer):
            _add(builders, encoded, report)
            report.seconds = time.monotonic() - started
            _log_progress(report, len(encoded.lengths[0]), options.log_interval)
        if report.num_tokens == 0:
            raise UsageError(f"--input: {len(files)} files with {report.num_documents} documents hold no token")
        for builder in builders:
            builder.finalize()
    report.seconds = time.monotonic() - started
    return report


# ------------------------------------------------------------------------------------------------------------- input


def find_input_files(inputs: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the files that files, patterns and folders name: sorted within each, none twice.

    Folders are searched to the bottom for files with a known ending (JSON lines or text).

    Raises:
        UsageError: one of them names nothing.
    """
    found: dict[Path, None] = {}
    for given in inputs:
        matches = _expand(os.fspath(given))
        if not matches:
            raise UsageError(
                f"--input {given}: no such file, no match, or a folder without files that end in "
                f"{', '.join(_JSON_ENDINGS + _TEXT_ENDINGS)}; fix: check the path, put patterns in quotes"
            )
        found.update(dict.fromkeys(matches))
    return list(found)


def _expand(given: str) -> list[Path]:
    path = Path(given)
    if path.is_file():
        return [path]
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.name.endswith(_JSON_ENDINGS + _TEXT_ENDINGS) and p.is_file())
    return sorted(Path(match) for match in glob.glob(given, recursive=True) if Path(match).is_file())


def read_chunks(files: Iterable[Path]) -> Iterator[Chunk]:
    """Yield the documents of the files in order, undecoded, in chunks of about a megabyte.

    Raises:
        DataFileError: a file cannot be read, or is a damaged gzip file.
    """
    for path in files:
        try:
            with gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb") as file:
                if path.name.endswith(_JSON_ENDINGS):
                    yield from _line_chunks(str(path), file)
                else:
                    yield Chunk(str(path), None, [file.read()])
        except (OSError, EOFError, zlib.error) as error:
            raise DataFileError(f"--input {path} cannot be read: {error}; fix: copy or compress it again") from error


def _line_chunks(path: str, lines: Iterable[bytes]) -> Iterator[Chunk]:
    items: list[bytes] = []
    first, size = 1, 0
    for number, line in enumerate(lines, start=1):
        items.append(line)
        size += len(line)
        if size >= _CHUNK_BYTES or len(items) >= _CHUNK_DOCUMENTS:
            yield Chunk(path, first, items)
            items, first, size = [], number + 1, 0
    if items:
        yield Chunk(path, first, items)


# ------------------------------------------------------------------------------------------------------- tokenising


def encode_chunk(
    chunk: Chunk, tokenizer: Tokenizer, keys: Sequence[str], append_eod: bool, skip_bad_lines: bool
) -> EncodedChunk:
    """Return the tokens of a chunk.

    Raises:
        DataFileError: a document that cannot be read, unless `skip_bad_lines`.
    """
    encoded = EncodedChunk()
    documents: list[list[str]] = []
    for at, item in enumerate(chunk.items):
        if chunk.first_line is not None and not item.strip():
            continue  # blank lines, often the last, are no documents
        try:
            texts, size = _parse(chunk, item, keys, first=chunk.first_line == 1 and at == 0)
        except ValueError as error:
            if not skip_bad_lines:
                raise DataFileError(_bad_line(chunk, at, str(error))) from None
            encoded.num_bad_lines += 1
            continue
        documents.append(texts)
        encoded.num_bytes += size
    for key in range(len(keys)):
        _tokenize_key([texts[key] for texts in documents], tokenizer, append_eod, encoded)
    return encoded


def _tokenize_key(texts: list[str], tokenizer: Tokenizer, append_eod: bool, encoded: EncodedChunk) -> None:
    """Append the tokens of one JSON key."""
    ends = np.array([tokenizer.eod], dtype=np.int32) if append_eod else np.empty(0, dtype=np.int32)
    pieces: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
    lengths = []
    for tokens in tokenizer.tokenize_batch(texts):
        lengths.append(len(tokens) + (len(ends) if len(tokens) else 0))
        pieces += [tokens, ends] if len(tokens) else []
    encoded.tokens.append(np.concatenate(pieces))
    encoded.lengths.append(lengths)


def _parse(chunk: Chunk, item: bytes, keys: Sequence[str], first: bool) -> tuple[list[str], int]:
    """Return the text of each key and their bytes; ValueError says what is wrong with the document."""
    # A byte order mark may stand at the start of a file, and only there.
    text = item.decode("utf-8-sig" if first or chunk.first_line is None else "utf-8")
    if chunk.first_line is None:
        return [text], len(item)
    try:
        document = json.loads(text.rstrip("\r\n"))  # so that a cut line is not called one with a control character
    except RecursionError:
        raise ValueError("objects nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError(f"a JSON {type(document).__name__}, expected an object")
    texts = []
    for key in keys:
        if key not in document:
            raise ValueError(f"no key {key!r} among {sorted(document)[:10]}, see --json-keys")
        if not isinstance(document[key], str):
            raise ValueError(f"key {key!r} holds a {type(document[key]).__name__}, expected a string")
        texts.append(document[key])
    # Encoding also refuses lone surrogates, which JSON can spell and no tokenizer can read.
    return texts, sum(len(text.encode("utf-8")) for text in texts)


def _bad_line(chunk: Chunk, at: int, problem: str) -> str:
    where = chunk.path if chunk.first_line is None else f"{chunk.path}, line {chunk.first_line + at}"
    return f"--input {where}: {problem}; fix: repair the document, or leave bad lines out with --skip-bad-lines"


# Set in each worker process by _start_worker; a tokenizer is too large to travel with every chunk.
_worker_state: list[tuple[Tokenizer, PreprocessOptions]] = []


def _start_worker(options: PreprocessOptions) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are the parallelism
    _worker_state.append((_tokenizer(options), options))


def _work(chunk: Chunk) -> EncodedChunk:
    tokenizer, options = _worker_state[0]
    return encode_chunk(chunk, tokenizer, options.json_keys, options.append_eod, options.skip_bad_lines)


def _encode_all(chunks: Iterable[Chunk], options: PreprocessOptions, tokenizer: Tokenizer) -> Iterator[EncodedChunk]:
    """Yield the chunks as tokens, in order."""
    if options.workers == 1:
        for chunk in chunks:
            yield encode_chunk(chunk, tokenizer, options.json_keys, options.append_eod, options.skip_bad_lines)
        return
    # spawn: a fork of a process with threads (the tokenizer's) can hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.workers, mp_context=context, initializer=_start_worker, initargs=(options,))
    pending: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(_work, chunk))
            if len(pending) > 2 * options.workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UsageError(
            f"--workers {options.workers}: a worker process died, perhaps for want of memory; fix: fewer workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# ----------------------------------------------------------------------------------------------------------- output


def _add(builders: Sequence[IndexedDatasetBuilder], encoded: EncodedChunk, report: PreprocessReport) -> None:
    """Write a chunk to the corpus of each key."""
    for builder, tokens, lengths in zip(builders, encoded.tokens, encoded.lengths, strict=True):
        start = 0
        for length in lengths:
            builder.add_document(tokens[start : start + length])
            start += length
        report.num_tokens += len(tokens)
    report.num_documents += len(encoded.lengths[0])
    report.num_bytes += encoded.num_bytes
    report.num_bad_lines += encoded.num_bad_lines


def _log_progress(report: PreprocessReport, added: int, log_interval: int) -> None:
    """Log a line each time the number of documents passes a multiple of `log_interval`."""
    if log_interval and report.num_documents // log_interval > (report.num_documents - added) // log_interval:
        seconds = max(report.seconds, 1e-9)
        logger.info(
            "%d documents, %.1f documents/s, %.2f MB/s",
            report.num_documents,
            report.num_documents / seconds,
            report.num_bytes / 1e6 / seconds,
        )


def _check_options(options: PreprocessOptions) -> Tokenizer:
    """Refuse what cannot work, and return the tokenizer."""
    if options.workers < 1 or options.log_interval < 0:
        raise UsageError(
            f"got --workers {options.workers} and --log-interval {options.log_interval}, expected at least 1 and 0"
        )
    if not options.json_keys or len(set(options.json_keys)) != len(options.json_keys):
        raise UsageError(f"--json-keys: got {list(options.json_keys)}, expected different names, at least one")
    tokenizer = _tokenizer(options)
    if options.append_eod and tokenizer.eod is None:
        raise UsageError(
            f"--append-eod: the tokenizer {options.tokenizer_model} names no end-of-document token; fix: put an "
            "eos_token into the tokenizer_config.json beside it, or leave out --append-eod"
        )
    return tokenizer


def _tokenizer(options: PreprocessOptions) -> Tokenizer:
    return build_tokenizer(options.tokenizer_type, options.tokenizer_model, options.vocab_size)


def _check_keys(files: Iterable[Path], keys: Sequence[str]) -> None:
    """Plain text has no keys to choose from."""
    for path in files:
        if len(keys) > 1 and not path.name.endswith(_JSON_ENDINGS):
            raise UsageError(
                f"--json-keys: got {list(keys)}, expected one key, since {path} is plain text without keys"
            )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-prefix: the folder {folder} cannot be made: {error.strerror or error}") from error
