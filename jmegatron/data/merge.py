"""Several corpora joined into one (no communication).

The result has the bytes that preprocessing all their inputs at once would have given. Megatron-LM:
tools/merge_datasets.py, which takes a folder; here the prefixes are named, and their order is theirs.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from jmegatron.data.indexed_dataset import IndexedDataset, bin_path
from jmegatron.data.preprocess_output import CorpusWriter, check_output_prefix, open_corpus, sole_writer
from jmegatron.errors import DataFileError, UsageError

logger = logging.getLogger(__name__)


def find_prefixes(folder: Path) -> list[str]:
    """Return the corpora of a folder, sorted by name.

    Raises:
        UsageError: it holds none.
        DataFileError: it cannot be read.
    """
    try:
        names = os.listdir(folder) if os.path.isdir(folder) else []
    except OSError as error:
        raise DataFileError(
            f"--input {folder} cannot be read: {error.strerror or error}; fix: check the permissions"
        ) from error
    # A hidden one would be half of what another process writes.
    found = sorted(
        str(folder / name)[: -len(".idx")] for name in names if name.endswith(".idx") and not name.startswith(".")
    )
    if not found:
        raise UsageError(f"--input {folder}: expected a folder with .idx files, or prefixes of corpora; fix: the path")
    return found


def merge_corpora(prefixes: Sequence[str], output: str) -> tuple[int, int]:
    """Write the documents of all corpora, one corpus after the other, and return (documents, tokens).

    Raises:
        UsageError: fewer than one corpus, the output is one of them or no name, or another process writes it.
        DataFileError: a corpus is missing or damaged, their tokens have different types, only some of them have modes,
            or the output cannot be written.
    """
    if not prefixes:
        raise UsageError("--input: expected at least one prefix")
    check_output_prefix(output)
    same = [prefix for prefix in prefixes if Path(prefix).resolve() == Path(output).resolve()]
    if same:
        raise UsageError(f"--output-prefix {output}: it is one of the corpora to merge; fix: another name")
    corpora = [open_corpus(prefix) for prefix in prefixes]
    _check_dtypes(corpora)
    _check_modes(corpora)
    documents = tokens = 0
    with sole_writer([output]), CorpusWriter(output, corpora[0].dtype) as writer:
        for corpus in corpora:
            writer.append(corpus)
            documents += len(corpus.document_indices) - 1
            tokens += int(corpus.sequence_lengths.sum(dtype="int64"))
            logger.info("%s: %d documents and %d tokens so far", corpus.prefix, documents, tokens)
        writer.commit()
    return documents, tokens


def _check_dtypes(corpora: Sequence[IndexedDataset]) -> None:
    """Refuse corpora that were made with vocabularies of different sizes."""
    first = corpora[0]
    for corpus in corpora[1:]:
        if corpus.dtype != first.dtype:
            raise DataFileError(
                f"{bin_path(corpus.prefix)} holds {corpus.dtype} tokens, expected {first.dtype} as in "
                f"{bin_path(first.prefix)}; fix: make both with the same tokenizer"
            )


def _check_modes(corpora: Sequence[IndexedDataset]) -> None:
    """Refuse multimodal corpora together with others: sequences without a mode have no place beside those with one."""
    with_modes = [corpus.prefix for corpus in corpora if corpus.sequence_modes is not None]
    without = [corpus.prefix for corpus in corpora if corpus.sequence_modes is None and len(corpus)]
    if with_modes and without:
        raise DataFileError(
            f"--input: {with_modes[0]} is multimodal and {without[0]} is not, expected all or none of them to have "
            "modes; fix: merge them apart"
        )
