"""Several corpora joined into one (no communication).

The result has the bytes that preprocessing all their inputs at once would have given. Megatron-LM:
tools/merge_datasets.py, which takes a folder; here the prefixes are named, and their order is theirs.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from jmegatron.data.indexed_dataset import IndexedDataset, bin_path
from jmegatron.data.preprocess_output import CorpusWriter, sole_writer
from jmegatron.errors import DataFileError, UsageError

logger = logging.getLogger(__name__)


def find_prefixes(folder: Path) -> list[str]:
    """Return the corpora of a folder, sorted by name.

    Raises:
        UsageError: it holds none.
    """
    found = sorted(str(path)[: -len(".idx")] for path in folder.glob("*.idx")) if folder.is_dir() else []
    if not found:
        raise UsageError(f"--input {folder}: expected a folder with .idx files, or prefixes of corpora; fix: the path")
    return found


def merge_corpora(prefixes: Sequence[str], output: str) -> tuple[int, int]:
    """Write the documents of all corpora, one corpus after the other, and return (documents, tokens).

    Raises:
        UsageError: fewer than one corpus, or the output is one of them.
        DataFileError: a corpus is missing or damaged, or their tokens have different types.
    """
    if not prefixes:
        raise UsageError("--input: expected at least one prefix")
    same = [prefix for prefix in prefixes if Path(prefix).resolve() == Path(output).resolve()]
    if same:
        raise UsageError(f"--output-prefix {output}: it is one of the corpora to merge; fix: another name")
    corpora = [IndexedDataset(prefix) for prefix in prefixes]
    _check_dtypes(corpora)
    documents = tokens = 0
    with sole_writer(Path(output), [output]), CorpusWriter(output, corpora[0].dtype) as writer:
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
