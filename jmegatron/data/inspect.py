"""A corpus described as text: counts, a histogram of lengths, some documents (no communication)."""

from collections.abc import Iterator

import numpy as np

from jmegatron.data.indexed_dataset import IndexedDataset, bin_path
from jmegatron.data.tokenizers import Tokenizer
from jmegatron.errors import DataFileError, UsageError

_BAR = 40


def describe(corpus: IndexedDataset) -> Iterator[str]:
    """Yield the lines of a corpus's counts and of the histogram of its sequence lengths, in powers of two."""
    lengths = np.asarray(corpus.sequence_lengths, dtype=np.int64)
    tokens = int(lengths.sum())
    documents = np.diff(corpus.document_indices)
    yield f"corpus                {corpus.prefix}"
    yield f"token type            {corpus.dtype} ({corpus.dtype.itemsize} bytes)"
    yield f"documents             {len(documents)}, of them {int((documents == 0).sum())} empty"
    yield f"sequences             {len(lengths)}"
    yield f"tokens                {tokens} ({bin_path(corpus.prefix).stat().st_size} bytes)"
    if len(lengths):
        shortest, middle, longest = np.quantile(lengths, [0, 0.5, 1]).tolist()
        mean = tokens / len(lengths)
        yield f"tokens per sequence   {shortest:.0f} to {longest:.0f}, mean {mean:.1f}, median {middle:g}"
        yield from _histogram(lengths)


def _histogram(lengths: np.ndarray) -> Iterator[str]:
    """Yield a line per power of two between the shortest and the longest sequence."""
    bins = np.frexp(np.maximum(lengths, 0))[1]  # length n lies in bin e with 2**(e - 1) <= n < 2**e
    first, counts = int(bins.min()), np.bincount(bins)
    for number, count in enumerate(counts.tolist()[first:], start=first):
        low, high = (1 << number) // 2, (1 << number) - 1
        bar = "#" * -(-count * _BAR // int(counts.max()))
        yield f"{low:>12} .. {high:<12} {count:>10}  {bar}".rstrip()


def describe_documents(
    corpus: IndexedDataset, numbers: list[int], tokenizer: Tokenizer | None, width: int
) -> Iterator[str]:
    """Yield the tokens of some documents, and their text if there is a tokenizer.

    Args:
        corpus: where they are.
        numbers: which documents; negative ones count from the end.
        tokenizer: the one the corpus was made with.
        width: tokens to show of each.

    Raises:
        UsageError: no such document.
        DataFileError: a token id lies outside the tokenizer's vocabulary.
    """
    total = len(corpus.document_indices) - 1
    for number in numbers:
        if not -total <= number < total:
            raise UsageError(f"--documents: got {number}, expected {-total} .. {total - 1}")
        begin, end = corpus.document_indices[number % total : number % total + 2].tolist()
        for sequence in range(begin, end):
            ids = corpus.get(sequence)
            shown = ids[:width]
            more = f" and {len(ids) - len(shown)} more" if len(ids) > len(shown) else ""
            yield f"document {number % total}, sequence {sequence}: {' '.join(map(str, shown.tolist()))}{more}"
            if tokenizer is not None:
                yield f"    {_text(corpus, shown, tokenizer)!r}"
        if begin == end:
            yield f"document {number % total}: empty"


def _text(corpus: IndexedDataset, ids: np.ndarray, tokenizer: Tokenizer) -> str:
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    if corpus.dtype.kind not in "iu" or low < 0 or high >= tokenizer.vocab_size:
        raise DataFileError(
            f"{bin_path(corpus.prefix)} holds token id {low if low < 0 else high}, expected 0 .. "
            f"{tokenizer.vocab_size - 1}; fix: the tokenizer that the corpus was made with"
        )
    return tokenizer.detokenize(ids)
