"""From text files to an indexed dataset (no communication).

Input is JSON lines, parquet or plain text (`preprocess_input`). Output is `{prefix}_{key}_document.bin` and `.idx` for
each JSON key, as Megatron-LM's tools/preprocess_data.py:86-108,171 names and fills them: an empty text is a document
without sequence and gets no end-of-document token.

The text streams through in chunks of two megabytes, of which few are under way, so memory does not grow with the
corpus but for its index (4 bytes a sequence, 8 a document). `--workers` processes tokenise and write the chunks of one
stream (`preprocess_workers`). `--partitions` cuts the input into as many streams, each with its own workers, and
joins what they wrote: for archives, which one process must unpack. Both give the same bytes for any number.
"""

import contextlib
import logging
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from jmegatron.data.files import cannot_write
from jmegatron.data.indexed_dataset import IndexedDataset, best_dtype, bin_path, idx_path
from jmegatron.data.preprocess_encode import Counts, EncodeOptions
from jmegatron.data.preprocess_input import TEXT, Piece, find_input_files, find_pieces, read_chunks, split_pieces
from jmegatron.data.preprocess_output import CorpusWriter, check_output_prefix, part_folder, sole_writer
from jmegatron.data.preprocess_workers import Job, encode_here, encode_in_workers, without_interrupts
from jmegatron.data.tokenizers import Tokenizer, build_tokenizer, tokenizer_settings
from jmegatron.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreprocessOptions:
    """What `scripts/preprocess_data.py` can be told; the fields are its options.

    Attributes:
        input: files, patterns or folders.
        output_prefix: start of the output paths.
        json_keys: keys of the JSON objects (columns of parquet files) to take; each gives a corpus of its own.
        tokenizer_type: see `tokenizers.build_tokenizer`, also for the fields up to `tiktoken_special_tokens`.
        tokenizer_model: file or folder of the tokenizer.
        vocab_size: for NullTokenizer and TikTokenizer.
        vocab_file: for GPT2BPETokenizer.
        merge_file: for GPT2BPETokenizer.
        tiktoken_pattern: for TikTokenizer.
        tiktoken_num_special_tokens: for TikTokenizer.
        tiktoken_special_tokens: for TikTokenizer.
        append_eod: end each document that is not empty with the tokenizer's `eod`.
        workers: processes that tokenise, per partition; 1 works in the process that reads.
        partitions: parts of the input that are worked on at the same time.
        log_interval: documents between two progress lines; 0 for none.
        skip_bad_lines: count lines that cannot be read instead of stopping at the first.
        max_document_bytes: a document with more text is a line that cannot be read; None: no limit.
    """

    input: Sequence[str | os.PathLike[str]]
    output_prefix: str | os.PathLike[str]
    json_keys: Sequence[str] = ("text",)
    tokenizer_type: str = "ByteTokenizer"
    tokenizer_model: str | os.PathLike[str] | None = None
    vocab_size: int | None = None
    vocab_file: str | os.PathLike[str] | None = None
    merge_file: str | os.PathLike[str] | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tiktoken_special_tokens: Sequence[str] | None = None
    append_eod: bool = False
    workers: int = 1
    partitions: int = 1
    log_interval: int = 1000
    skip_bad_lines: bool = False
    max_document_bytes: int | None = None


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


def preprocess(options: PreprocessOptions) -> PreprocessReport:
    """Write the corpora and return what came out; the final files appear only after everything went well.

    Raises:
        UsageError: an option cannot be used, nothing matches `input`, the input holds no token or is one of the files
            to write, or another process writes the same corpora.
        DataFileError: a file cannot be read, holds a bad line (without `skip_bad_lines`), or cannot be written.
    """
    tokenizer = _check_options(options)
    pieces = find_pieces(find_input_files(options.input))
    _check_keys(pieces, options.json_keys)
    parts = split_pieces(pieces, options.partitions)
    prefix = Path(options.output_prefix)
    names = [f"{prefix}_{key}_document" for key in options.json_keys]
    _check_not_input(pieces, names)
    _make_folder(prefix.parent)
    progress = _Progress(PreprocessReport(names), options.log_interval)
    with sole_writer(names):
        if len(parts) == 1:
            _one_stream(pieces, options, tokenizer, names, progress.add)
        else:
            _many_streams(parts, options, tokenizer, names, progress)
    progress.report.seconds = time.monotonic() - progress.started
    return progress.report


# ---------------------------------------------------------------------------------------------------------- streams

# (documents, tokens, bytes of text, bad lines) of a chunk.
Sizes = tuple[int, int, int, int]


def _one_stream(
    pieces: Sequence[Piece],
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    names: Sequence[str],
    add: Callable[[Sizes], None],
    may_be_empty: bool = False,
) -> None:
    """Write the documents of the pieces to a corpus per JSON key."""
    dtype = best_dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        writers = [stack.enter_context(CorpusWriter(name, dtype)) for name in names]

        def reserve(counts: Counts) -> list[int]:
            return [w.reserve(*c) for w, *c in zip(writers, counts.lengths, counts.sequences, strict=True)]

        encode_options = EncodeOptions(
            tuple(options.json_keys), options.append_eod, options.skip_bad_lines, dtype, options.max_document_bytes
        )
        settings = tokenizer_settings(options) | {"vocab_size": options.vocab_size}
        job = Job(settings, encode_options, tuple(writer.path for writer in writers))
        chunks = read_chunks(pieces, options.json_keys)
        if options.workers == 1:
            encoded: Iterator[Counts] = encode_here(chunks, job, reserve, tokenizer)
        else:
            encoded = encode_in_workers(chunks, job, reserve, options.workers)
        num_tokens = num_bad = 0
        with contextlib.closing(encoded):  # type: ignore[type-var]
            for counts in encoded:
                sizes = _sizes(counts)
                num_tokens += sizes[1]
                num_bad += sizes[3]
                add(sizes)
        if num_tokens == 0 and not may_be_empty:
            raise _no_token(len(pieces), num_bad)
        add((0, 0, 0, 0))  # the part of a run that was killed ends here, since nobody listens
        for writer in writers:
            writer.commit()


def _many_streams(
    parts: Sequence[Sequence[Piece]],
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    names: Sequence[str],
    progress: "_Progress",
) -> None:
    """Write each part to corpora of its own, at the same time, and join them in order."""
    folder = part_folder(names)
    try:
        folder.mkdir()
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        prefixes = [[str(folder / f"{part}_{key}") for key in range(len(names))] for part in range(len(parts))]
        _run_parts(parts, options, prefixes, progress.add)
        if not _join(prefixes, names, tokenizer):
            raise _no_token(len({piece.path for part in parts for piece in part}), progress.report.num_bad_lines)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_parts(
    parts: Sequence[Sequence[Piece]],
    options: PreprocessOptions,
    prefixes: Sequence[Sequence[str]],
    add: Callable[[Sizes], None],
) -> None:
    """Run a process for each part until all have ended.

    Raises:
        UsageError: what the first of them raised in the order of the input, or one died.
    """
    context = multiprocessing.get_context("spawn")
    running: dict[Connection, tuple[int, Any]] = {}
    failed: dict[int, Exception] = {}
    try:
        for part, (pieces, names) in enumerate(zip(parts, prefixes, strict=True)):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_part_process, args=(theirs, pieces, options, names))
            with without_interrupts():
                process.start()
                running[ours] = (part, process)
            theirs.close()
        # A part before the one that failed may hold an error as well; the first of the input is the one to report.
        while running and (not failed or min(part for part, _ in running.values()) < min(failed)):
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                _receive(pipe, running, failed, add)
        if failed:
            raise failed[min(failed)]
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


def _receive(
    pipe: Connection,
    running: dict[Connection, tuple[int, Any]],
    failed: dict[int, Exception],
    add: Callable[[Sizes], None],
) -> None:
    """Take one message of a part's process, or its end."""
    part, process = running[pipe]
    try:
        message = pipe.recv()
    except EOFError:
        process.join()
        del running[pipe]
        if process.exitcode and part not in failed:
            failed[part] = UsageError("--partitions: a process died, perhaps for want of memory; fix: fewer of them")
        return
    if isinstance(message, Exception):
        failed[part] = message
    else:
        add(message)


def _part_process(pipe: Connection, pieces: Sequence[Piece], options: PreprocessOptions, names: Sequence[str]) -> None:
    """Write the corpora of one part; the pipe takes the sizes of its chunks, or what went wrong."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        _one_stream(pieces, options, _tokenizer(options), names, pipe.send, may_be_empty=True)
    except BrokenPipeError:
        return  # the parent is gone
    except UsageError as error:
        pipe.send(error)


def _join(prefixes: Sequence[Sequence[str]], names: Sequence[str], tokenizer: Tokenizer) -> bool:
    """Append the corpora of all parts in order; each part goes as soon as it is copied. False if there is no token."""
    with ExitStack() as stack:
        writers = [stack.enter_context(CorpusWriter(name, best_dtype(tokenizer.vocab_size))) for name in names]
        num_tokens = 0
        for part in prefixes:
            for writer, prefix in zip(writers, part, strict=True):
                corpus = IndexedDataset(prefix)
                num_tokens += int(corpus.sequence_lengths.sum(dtype="int64"))
                writer.append(corpus)
                bin_path(prefix).unlink()
        if num_tokens == 0:
            return False
        for writer in writers:
            writer.commit()
        return True


# --------------------------------------------------------------------------------------------------------- progress


class _Progress:
    """Adds up what the streams report, and logs a line each time the documents pass a multiple of `log_interval`."""

    def __init__(self, report: PreprocessReport, log_interval: int):
        self.report = report
        self.started = time.monotonic()
        self._interval = log_interval

    def add(self, sizes: Sizes) -> None:
        """Add the sizes of a chunk."""
        report, (documents, tokens, num_bytes, bad) = self.report, sizes
        before = report.num_documents
        report.num_documents += documents
        report.num_tokens += tokens
        report.num_bytes += num_bytes
        report.num_bad_lines += bad
        if self._interval and report.num_documents // self._interval > before // self._interval:
            seconds = max(time.monotonic() - self.started, 1e-9)
            logger.info(
                "%d documents, %.1f documents/s, %.2f MB/s",
                report.num_documents,
                report.num_documents / seconds,
                report.num_bytes / 1e6 / seconds,
            )


def _sizes(counts: Counts) -> Sizes:
    tokens = sum(int(lengths.sum(dtype="int64")) for lengths in counts.lengths)
    return len(counts.sequences[0]), tokens, counts.num_bytes, counts.num_bad_lines


def _no_token(num_files: int, num_bad: int) -> UsageError:
    bad = f" ({num_bad} bad lines left out)" if num_bad else ""
    return UsageError(f"--input: {num_files} files hold no token{bad}; fix: check the files and --json-keys")


# ---------------------------------------------------------------------------------------------------------- options


def _check_options(options: PreprocessOptions) -> Tokenizer:
    """Refuse what cannot work, and return the tokenizer."""
    if options.workers < 1 or options.partitions < 1 or options.log_interval < 0:
        raise UsageError(
            f"got --workers {options.workers}, --partitions {options.partitions} and --log-interval "
            f"{options.log_interval}, expected at least 1, 1 and 0"
        )
    if options.max_document_bytes is not None and options.max_document_bytes < 1:
        raise UsageError(f"--max-document-bytes: got {options.max_document_bytes}, expected at least 1")
    check_output_prefix(options.output_prefix)
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
    return build_tokenizer(**tokenizer_settings(options), vocab_size=options.vocab_size)


def _check_keys(pieces: Sequence[Piece], keys: Sequence[str]) -> None:
    """Plain text has no keys to choose from."""
    for piece in pieces:
        if len(keys) > 1 and piece.kind == TEXT:
            raise UsageError(
                f"--json-keys: got {list(keys)}, expected one key, since {piece.path} is plain text without keys"
            )


def _check_not_input(pieces: Sequence[Piece], names: Sequence[str]) -> None:
    """Refuse to write over what is read."""
    outputs = [str(path) for name in names for path in (bin_path(name), idx_path(name)) if os.path.exists(path)]
    for piece in pieces:
        for output in outputs:
            if os.path.samefile(piece.path, output):
                raise UsageError(f"--output-prefix: it would write over --input {piece.path}; fix: another name")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output-prefix: the folder {folder} cannot be made: {error.strerror or error}") from error
