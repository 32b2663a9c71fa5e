"""Samples of `seq_len` tokens with their labels, cut from a corpus or made up (no communication).

Documents are packed one after the other without padding; by default attention, positions and loss run across their
borders, as in Megatron-LM (core/datasets/gpt_dataset.py:280-320,800-875). `gpt_index` says which tokens a sample holds.
"""

import functools
import logging
import math
import os
from typing import NoReturn, Protocol, runtime_checkable

import numpy as np

from jmegatron.data.borders import Borders
from jmegatron.data.gpt_index import CUT, Cut, GPTIndex, build_gpt_index, gpt_index_fits, num_epochs, random_state
from jmegatron.data.index_cache import content_key, load_or_build
from jmegatron.data.indexed_dataset import IndexedDataset, best_dtype, bin_path
from jmegatron.errors import DataFileError, UsageError

logger = logging.getLogger(__name__)

MANY_EPOCHS = 1000
"""A corpus that is read more often than this is probably the wrong one, or far too small."""
Sample = dict[str, np.ndarray]
RUN_ON = Borders()
"""Attention, positions and loss run across documents."""

NO_PAD = -1
"""Stands for a missing token where the tokenizer has no padding id of its own."""


@runtime_checkable
class SampleSource(Protocol):
    """What the loader needs: a number of samples, and sample i as a dict of arrays of equal shapes."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """Return one sample."""
        ...


Sources = tuple[SampleSource | None, SampleSource | None, SampleSource | None]
"""Training, validation and test samples; None where there are none."""


@functools.lru_cache(maxsize=8)
def full_mask(shape: tuple[int, ...]) -> np.ndarray:
    """Return a read-only float32 array of ones; the same object for the same shape."""
    mask = np.ones(shape, np.float32)
    mask.flags.writeable = False
    return mask


def finish(text: np.ndarray, borders: Borders, pad_token: int, cut: Cut = CUT) -> Sample:
    """Return samples in the form that goes to the devices; `plain` says what it means.

    Args:
        text: integer [samples, seq_len + 1], or [samples, seq_len] where `cut` has no extra token; may be written to.
        borders: what ends with a document.
        pad_token: id that stands for no token: it becomes 0, and no place with this label counts.
        cut: how the tokens were cut.

    Returns:
        `text` integer [samples, seq_len + 1]; where they are asked for `position_ids` and `segment_ids` int32
        [samples, seq_len]; where some place may not count `loss_mask` bool [samples, seq_len].
    """
    if not cut.extra_token:  # the last label is not known
        text = np.pad(text, ((0, 0), (0, 1)), constant_values=pad_token)
    arrays = borders.arrays(text[:, :-1])
    if pad_token != NO_PAD or cut != CUT:
        missing = text == pad_token
        arrays["loss_mask"] = arrays.get("loss_mask", True) & ~missing[:, 1:]
        text[missing] = 0
    return {"text": text, **arrays}


def plain(samples: Sample) -> Sample:
    """Return `tokens`, `labels` int32, `loss_mask` float32 [samples, seq_len] and the ids, from what `finish` returns.

    `training.batches.expand` does the same on the devices.
    """
    text = samples["text"].astype(np.int32, copy=False)
    tokens, labels = text[:, :-1], text[:, 1:]
    mask = samples.get("loss_mask")
    loss_mask = full_mask(tokens.shape) if mask is None else mask.astype(np.float32)
    arrays = {name: values for name, values in samples.items() if name != "text"}
    return {**arrays, "tokens": tokens, "labels": labels, "loss_mask": loss_mask}


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
        pad_token: the tokenizer's padding id, if it has one that is not its end of document.
        cut: what a sample reads and what becomes of the rest.

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
        pad_token: int = NO_PAD,
        cut: Cut = CUT,
    ):
        self.indexed = indexed
        self.seq_len = seq_len
        self.cut = cut
        self._pad_token = pad_token
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
        return {name: values[0] for name, values in self.batch(np.array([index])).items()}

    def batch(self, numbers: np.ndarray) -> Sample:
        """Return the samples `numbers` (integer [samples]) as `__getitem__` does, stacked to [samples, seq_len]."""
        return plain(self.compact(numbers))

    def compact(self, numbers: np.ndarray) -> Sample:
        """Return the samples `numbers` (integer [samples]) in the form that goes to the devices, see `finish`."""
        return finish(self.texts(numbers), self._borders, self._pad_token, self.cut)

    @property
    def text_dtype(self) -> np.dtype:
        """The dtype of `texts`: uint16 if the corpus has it, else int32; unusual cuts need NO_PAD, and so int32."""
        return np.dtype(np.uint16 if self.indexed.dtype == np.uint16 and self.cut == CUT else np.int32)

    def texts(self, numbers: np.ndarray) -> np.ndarray:
        """Return the tokens of samples in new memory.

        Returns:
            `text_dtype` [samples, seq_len + 1], without the 1 where `cut` has no extra token.

        Raises:
            IndexError: no such sample.
            DataFileError: a token id lies outside the vocabulary; a cached index does not fit the corpus.
        """
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"sample {numbers.min()} .. {numbers.max()}: expected 0 <= sample < {len(self)}")
        rows = self.index.shuffle_index[numbers].astype(np.int64)
        begin, end = self.index.sample_index[rows], self.index.sample_index[rows + 1]
        shape = (len(rows), self.seq_len + self.cut.extra_token)
        starts, stops, counts = self._pieces(begin, end)
        missing = math.prod(shape) - int((stops - starts).sum())
        if missing < 0 or (missing and self.cut.drop_last_partial):
            self._refuse_index()
        tokens = self.indexed.gather(starts, stops)
        # Wider ids are checked before they are narrowed: 2**32 + 1 must not pass as 1.
        self._check_vocabulary(tokens)
        tokens = tokens.astype(self.text_dtype, copy=False)
        if self.cut.drop_last_partial:
            return tokens.reshape(shape)
        text = np.full(shape, self._pad_token, self.text_dtype)
        sizes = np.diff(np.cumsum(stops - starts)[np.cumsum(counts) - 1], prepend=0)
        text[np.arange(shape[1]) < sizes[:, None]] = tokens  # padding behind the last sample of an epoch
        return text

    def _pieces(self, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where the samples between places of the sample index lie in `.bin`.

        Args:
            begin: int64 [samples, 2], (position in the document index, offset).
            end: the places of the next samples.

        Returns:
            (first tokens, tokens after the last: int64 [pieces] each; pieces of each sample: int64 [samples]).

        Raises:
            DataFileError: a sample ends before it begins, or a piece leaves its sequence.
        """
        counts = end[:, 0] - begin[:, 0] + 1
        if (counts < 1).any():
            self._refuse_index()
        after = np.cumsum(counts)
        first, last = after - counts, after - 1
        places = np.arange(after[-1] if len(after) else 0) + np.repeat(begin[:, 0] - first, counts)
        documents = self.index.document_index[places]
        starts = self.indexed.sequence_pointers[documents] // self.indexed.dtype.itemsize
        ends = starts + self.indexed.sequence_lengths[documents]
        stops = ends.copy()
        stops[last] = starts[last] + end[:, 1] + self.cut.extra_token
        starts[first] += begin[:, 1]
        if (starts > stops).any() or (stops > ends).any():
            self._refuse_index()
        return starts, stops, counts

    def _refuse_index(self) -> NoReturn:
        """Stop: only files of the cache that somebody has changed on purpose, with their checksums, come this far."""
        raise DataFileError(
            f"--data-cache-path: a cached index does not fit {self.indexed.prefix}; expected samples of --seq-length "
            f"{self.seq_len} tokens; fix: remove the folder, its files are built again"
        )

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
            return build_gpt_index(lengths, *sequence_range, num_samples, self.seq_len, seed, self.cut)

        if cache_dir is None:
            return build()
        settings = {
            "split": split_name,
            "range": list(sequence_range),
            "num_samples": num_samples,
            "seq_len": self.seq_len,
            "seed": seed,
            "cut": list(self.cut),
        }

        def fits(index: GPTIndex) -> bool:
            return gpt_index_fits(index, lengths, *sequence_range)

        return load_or_build(cache_dir, content_key(settings, lengths[slice(*sequence_range)]), GPTIndex, build, fits)

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
        if num_samples is not None:
            self._check_epochs(end - first, num_samples, where)
        if num_samples is None and self.cut.num_samples(self.tokens_per_epoch, self.seq_len) < 1:
            raise UsageError(
                f"{where}: not one whole sample in one epoch; expected more than --seq-length {self.seq_len} tokens; "
                "fix: a shorter sequence or a larger corpus"
            )

    def _check_epochs(self, num_sequences: int, num_samples: int, where: str) -> None:
        """Refuse an index that no memory holds, and say aloud when a corpus is read very often."""
        epochs = num_epochs(num_samples, self.tokens_per_epoch, self.seq_len, self.cut.extra_token)
        samples = epochs * self.tokens_per_epoch // self.seq_len
        # Document index and lengths, int32 each; sample index, two int64; shuffle index, uint32; one copy to shuffle.
        size = 8 * epochs * num_sequences + 24 * samples
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > memory:
            raise UsageError(
                f"{where}, but {num_samples} samples of --seq-length {self.seq_len} were asked for: {epochs} epochs, an"
                f" index of {size / 2**30:,.0f} GiB; expected at most this machine's {memory / 2**30:,.0f} GiB; fix:"
                " fewer --train-iters, or a larger corpus"
            )
        if epochs > MANY_EPOCHS:
            logger.warning("%s: it will be read %d times over", where, epochs)

    def _check_vocabulary(self, text: np.ndarray) -> None:
        """Refuse token ids the embedding has no row for: on an accelerator they would be clamped without a word."""
        most = 2**31 - 1 if self._vocab_size is None else self._vocab_size - 1
        # Read as unsigned, a negative id is larger than any that is allowed: one pass finds both.
        if text.size and int(text.view(f"u{text.itemsize}").max()) > most:
            low, high = int(text.min()), int(text.max())
            raise DataFileError(
                f"{bin_path(self.indexed.prefix)} holds token id {low if low < 0 else high}, expected 0 .. {most}; fix:"
                " the --tokenizer-type and --tokenizer-model (or --vocab-size) that the corpus was made with"
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
        self._dtype = best_dtype(vocab_size)  # as a corpus would have it
        self._borders = borders

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        """Return one sample, with the arrays of `GPTDataset.__getitem__`.

        Raises:
            IndexError: no such sample.
        """
        return {name: values[0] for name, values in plain(self.compact(np.array([index]))).items()}

    def compact(self, numbers: np.ndarray) -> Sample:
        """Return the samples `numbers` (integer [samples]) in the form that goes to the devices, see `finish`.

        Raises:
            IndexError: no such sample.
        """
        text = np.empty((len(numbers), self._seq_len + 1), self._dtype)
        for row, number in zip(text, numbers.tolist(), strict=True):
            row[:] = self._text(number)
        return finish(text, self._borders, NO_PAD)

    def _text(self, index: int) -> np.ndarray:
        """Return the tokens of a sample: integer [seq_len + 1]."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index}: expected 0 <= sample < {len(self)}")
        rng = np.random.RandomState([*self._key, index & 0xFFFFFFFF, index >> 32])
        start, stride = rng.randint(self._period), rng.randint(1, self.MAX_STRIDE + 1)
        text = (start + stride * np.arange(self._seq_len + 1)) % self._period
        noisy = rng.random_sample(len(text)) < self.NOISE
        return np.where(noisy, rng.randint(self._period, size=len(text)), text)
