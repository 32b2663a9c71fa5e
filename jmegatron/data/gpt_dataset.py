"""Samples of `seq_len` tokens with their labels, cut from a corpus or made up (no communication).

Documents are packed one after the other without padding; by default attention, positions and loss run across their
borders, as in Megatron-LM (core/datasets/gpt_dataset.py:280-320,800-875). `gpt_index` says which tokens a sample holds.
"""

import os
from typing import Protocol, runtime_checkable

import numpy as np

from jmegatron.data.borders import Borders
from jmegatron.data.gpt_index import GPTIndex, build_gpt_index, random_state
from jmegatron.data.index_cache import content_key, load_or_build
from jmegatron.data.indexed_dataset import IndexedDataset, bin_path
from jmegatron.errors import DataFileError, UsageError

Sample = dict[str, np.ndarray]
RUN_ON = Borders()
"""Attention, positions and loss run across documents."""


@runtime_checkable
class SampleSource(Protocol):
    """What the loader needs: a number of samples, and sample i as a dict of arrays of equal shapes."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """Return one sample."""
        ...


class GPTDataset:
    """Next-token samples of one split of a corpus, in shuffled order.

    `len()` is the number of whole samples in all epochs read, at least `num_samples`.

    Attributes:
        index: the document, sample and shuffle index, see `gpt_index.GPTIndex`.
        tokens_per_epoch: tokens of the split.

    Args:
        indexed: the corpus.
        sequence_range: [begin, end) of the split, in sequences; see `split.split_ranges`.
        num_samples: samples that must be available; None means those of one epoch.
        seq_len: tokens per sample.
        seed: seed of both shuffles.
        split_name: "train", "valid" or "test", for messages.
        borders: what ends with a document inside a sample; by default nothing.
        vocab_size: if given, tokens outside 0 .. vocab_size - 1 stop the run instead of reading a wrong embedding.
        cache_dir: folder for built indices; None builds each time.

    Raises:
        UsageError: the split has no sequence or no token; a number is out of range.
        DataFileError: the corpus does not hold integers.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_range: tuple[int, int],
        num_samples: int | None,
        seq_len: int,
        seed: int,
        *,
        split_name: str = "train",
        borders: Borders = RUN_ON,
        vocab_size: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ):
        self.indexed = indexed
        self.seq_len = seq_len
        self._vocab_size = vocab_size
        self._borders = borders
        self._check(sequence_range, num_samples, split_name)
        first, end = sequence_range
        self.tokens_per_epoch = int(indexed.sequence_lengths[first:end].sum(dtype=np.int64))
        self._check_tokens(sequence_range, num_samples, split_name)
        self.index = self._index(sequence_range, num_samples, seed, split_name, cache_dir)

    def __len__(self) -> int:
        """Return the number of samples in all epochs read."""
        return len(self.index.shuffle_index)

    def __getitem__(self, index: int) -> Sample:
        """Return one sample.

        Args:
            index: 0 .. len - 1.

        Returns:
            `tokens` int32 [seq_len], `labels` int32 [seq_len] (the tokens one place later), `loss_mask` float32
            [seq_len], 1 where the label counts; `position_ids` and `segment_ids` int32 [seq_len] where `borders` asks
            for them.

        Raises:
            IndexError: no such sample.
            DataFileError: a token id lies outside the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index}: expected 0 <= sample < {len(self)}")
        text = self._text(int(self.index.shuffle_index[index]))
        self._check_vocabulary(text)
        tokens, labels = text[:-1], text[1:]
        return {"tokens": tokens, "labels": labels, **self._borders.arrays(tokens)}

    def _text(self, row: int) -> np.ndarray:
        """Return the tokens of one row of the sample index: int32 [seq_len + 1]."""
        (begin, begin_offset), (end, end_offset) = self.index.sample_index[row : row + 2].tolist()
        documents = self.index.document_index[begin : end + 1].tolist()
        if len(documents) == 1:
            pieces = [self.indexed.get(documents[0], begin_offset, end_offset + 1 - begin_offset)]
        else:
            pieces = [self.indexed.get(documents[0], begin_offset)]
            pieces += [self.indexed.get(document) for document in documents[1:-1]]
            pieces += [self.indexed.get(documents[-1], 0, end_offset + 1)]
        # Copies, and int32 whatever the corpus stores: uint16 ids must not wrap in later arithmetic.
        return np.concatenate(pieces, dtype=np.int32, casting="unsafe")

    def _index(
        self,
        sequence_range: tuple[int, int],
        num_samples: int | None,
        seed: int,
        split_name: str,
        cache_dir: str | os.PathLike[str] | None,
    ) -> GPTIndex:
        """Build the index or read it from the cache."""
        lengths = self.indexed.sequence_lengths

        def build() -> GPTIndex:
            return build_gpt_index(lengths, *sequence_range, num_samples, self.seq_len, seed)

        if cache_dir is None:
            return build()
        settings = {
            "split": split_name,
            "range": list(sequence_range),
            "num_samples": num_samples,
            "seq_len": self.seq_len,
            "seed": seed,
        }
        return load_or_build(cache_dir, content_key(settings, lengths[slice(*sequence_range)]), build)

    def _check(self, sequence_range: tuple[int, int], num_samples: int | None, split_name: str) -> None:
        """Refuse what would loop for ever or fail later in a less clear place."""
        if self.indexed.dtype.kind not in "iu":
            raise DataFileError(
                f"{bin_path(self.indexed.prefix)} holds {self.indexed.dtype} values, expected integer token ids; fix: "
                "rebuild it with scripts/preprocess_data.py"
            )
        if self.seq_len < 1:
            raise UsageError(f"--seq-length: got {self.seq_len}, expected 1 or more")
        if num_samples is not None and num_samples < 1:
            raise UsageError(f"{split_name} samples: got {num_samples}, expected 1 or more")
        first, end = sequence_range
        if not 0 <= first <= end <= len(self.indexed):
            raise UsageError(f"sequence range {sequence_range} leaves the {len(self.indexed)} of {self.indexed.prefix}")

    def _check_tokens(self, sequence_range: tuple[int, int], num_samples: int | None, split_name: str) -> None:
        """Refuse a split without tokens (the reference loops for ever here) or without one whole sample."""
        first, end = sequence_range
        where = f"--split leaves the {split_name} part {end - first} of the {len(self.indexed)} sequences of "
        where += f"{self.indexed.prefix}, with {self.tokens_per_epoch} tokens"
        if self.tokens_per_epoch == 0:
            raise UsageError(
                f"{where}, but {'the samples of one epoch' if num_samples is None else f'{num_samples} samples'} were "
                f"asked for; expected at least one token; fix: a larger share for {split_name} in --split (or 0 for "
                "none), a larger corpus, or for valid and test --eval-iters 0"
            )
        if num_samples is None and self.tokens_per_epoch <= self.seq_len:
            raise UsageError(
                f"{where}: not one whole sample in one epoch; expected more than --seq-length {self.seq_len} tokens; "
                "fix: a shorter sequence or a larger corpus"
            )

    def _check_vocabulary(self, text: np.ndarray) -> None:
        """Refuse token ids the embedding has no row for: on an accelerator they would be clamped without a word."""
        low, high = int(text.min()), int(text.max())
        if self._vocab_size is not None and (low < 0 or high >= self._vocab_size):
            raise DataFileError(
                f"{bin_path(self.indexed.prefix)} holds token id {low if low < 0 else high}, expected 0 .. "
                f"{self._vocab_size - 1}; fix: --vocab-size of the tokenizer the corpus was made with"
            )


class MockGPTDataset:
    """Made-up samples a model can learn (`--mock-data`): a sample depends on seed, split and its number alone.

    Each is an arithmetic progression modulo PERIOD with a start and a stride drawn at random; one token in twenty is
    replaced by a random one. The loss can fall in steps that tell how far a model has come: log(vocab_size) at the
    start, about log(PERIOD) once it knows which ids occur, about log(MAX_STRIDE) plus noise from the last token alone,
    and only the noise from the last two.

    Args:
        num_samples: number of samples.
        seq_len: tokens per sample.
        vocab_size: ids are below this, and below PERIOD.
        seed: 0 .. 2**32 - 1.
        split: 0 train, 1 valid, 2 test: the same progressions, other draws.
        borders: what ends with a document; no token ends one here, so that a sample is one document.

    Raises:
        UsageError: a number is out of range.
    """

    PERIOD = 64
    MAX_STRIDE = 4
    NOISE = 0.05

    def __init__(
        self, num_samples: int, seq_len: int, vocab_size: int, seed: int, split: int = 0, borders: Borders = RUN_ON
    ):
        if num_samples < 1 or seq_len < 1 or vocab_size < 2:
            raise UsageError(
                f"--mock-data: got {num_samples} samples, --seq-length {seq_len}, --vocab-size {vocab_size}; expected "
                "at least 1, 1 and 2"
            )
        random_state(seed)  # checks the range
        self._num_samples, self._seq_len = num_samples, seq_len
        self._period = min(self.PERIOD, vocab_size)
        self._key = [seed, split]
        self._borders = borders

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """Return one sample, with the arrays of `GPTDataset.__getitem__`.

        Raises:
            IndexError: no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index}: expected 0 <= sample < {len(self)}")
        rng = np.random.RandomState([*self._key, index & 0xFFFFFFFF, index >> 32])
        start, stride = rng.randint(self._period), rng.randint(1, self.MAX_STRIDE + 1)
        text = (start + stride * np.arange(self._seq_len + 1)) % self._period
        noisy = rng.random_sample(len(text)) < self.NOISE
        text = np.where(noisy, rng.randint(self._period, size=len(text)), text).astype(np.int32)
        return {"tokens": text[:-1], "labels": text[1:], **self._borders.arrays(text[:-1])}
