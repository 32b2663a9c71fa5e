"""From options to the training, validation and test samples (no communication).

The numbers of samples come from the caller, which knows the schedule: the reference asks for train_iters *
global_batch_size, (train_iters // eval_interval + 1) * eval_iters * global_batch_size and eval_iters *
global_batch_size (Megatron-LM training.py:5419-5454). Blends follow core/datasets/blended_megatron_dataset_builder.py.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence

from jmegatron.data.blend import SURPLUS, Blend, normalised, samples_per_corpus
from jmegatron.data.blended_dataset import BlendedDataset
from jmegatron.data.borders import Borders
from jmegatron.data.gpt_dataset import NO_PAD, RUN_ON, GPTDataset, MockGPTDataset
from jmegatron.data.indexed_dataset import IndexedDataset
from jmegatron.data.split import DEFAULT_SPLIT, SPLIT_NAMES, Range, split_ranges
from jmegatron.errors import UsageError

logger = logging.getLogger(__name__)

TEST = 2
"""Place of the test part among train, valid, test."""

GPTSource = GPTDataset | BlendedDataset | MockGPTDataset
GPTSources = tuple[GPTSource | None, GPTSource | None, GPTSource | None]
NumSamples = tuple[int | None, int | None, int | None]


def build_gpt_datasets(
    corpora: str | os.PathLike[str] | Blend | Sequence[Blend | None] | None,
    *,
    mock: bool = False,
    vocab_size: int,
    seq_len: int,
    seed: int = 1234,
    split: str | None = None,
    num_samples: NumSamples,
    cache_dir: str | os.PathLike[str] | None = None,
    borders: Borders = RUN_ON,
    pad_token: int = NO_PAD,
    surplus: float = SURPLUS,
    require_test: bool = True,
) -> GPTSources:
    """Return (train, valid, test); an entry is None if 0 samples were asked for or nothing is meant for it.

    Args:
        corpora: corpus path without `.bin` and `.idx`, or a blend, that `split` divides (`--data-path`); or three
            blends, one for each part and None for none (`--train-data-path`, ...); None with `mock`.
        mock: made-up samples instead of a corpus (`--mock-data`).
        vocab_size: token ids are below this.
        seq_len: tokens per sample.
        seed: seed of the order.
        split: weights of train, valid, test; None: 969,30,1.
        num_samples: samples needed of train, valid, test; None means one epoch (corpora without weights only).
        cache_dir: folder for built indices (`--data-cache-path`); None builds each time.
        borders: what ends with a document inside a sample; by default nothing.
        pad_token: the tokenizer's padding id, if it has one that is not its end of document.
        surplus: part of its samples that each corpus of a weighted blend is built larger.
        require_test: False gives None, with a warning in the log, where the test part rounds to no document. The
            default split leaves one in a hundred for it, which small corpora do not have.

    Raises:
        UsageError: no corpus or two; a split that cannot be read; a part with a weight, samples asked for, no token;
            a blend without weights that holds fewer samples than asked for.
        DataFileError: a corpus is missing or damaged.
    """
    if mock == (corpora is not None):
        raise UsageError(
            f"got --data-path {corpora} and --mock-data {mock}, expected exactly one; fix: give the path of a corpus, "
            "or --mock-data for made-up samples"
        )
    if corpora is None:
        return _mock_datasets(num_samples, seq_len, vocab_size, seed, borders)
    build = _Builder(seq_len, seed, vocab_size, cache_dir, borders, pad_token, surplus, require_test)
    if isinstance(corpora, str | os.PathLike):
        corpora = Blend((os.fspath(corpora),), None)
    if isinstance(corpora, Blend):
        return _split_datasets(build, corpora, split or DEFAULT_SPLIT, num_samples)
    train, valid, test = (
        None if blend is None else build.part(blend, part, whole, num_samples[part])
        for part, blend in enumerate(corpora)
        for whole in [_open(blend, _everything)]
    )
    return train, valid, test


Corpus = tuple[IndexedDataset, Range | None]
"""A corpus and the sequences of one part of it."""


def _everything(num_sequences: int) -> Range:
    return (0, num_sequences)


def _open(blend: Blend | None, sequences: Callable[[int], Range | None]) -> list[Corpus]:
    """Open the corpora of a blend and choose their sequences."""
    indexed = [IndexedDataset(prefix) for prefix in blend.prefixes] if blend else []
    return [(corpus, sequences(len(corpus))) for corpus in indexed]


def _split_datasets(build: "_Builder", blend: Blend, split: str, num_samples: NumSamples) -> GPTSources:
    """Return the three parts of corpora that `split` divides."""
    opened = [corpus for corpus, _ in _open(blend, _everything)]
    train, valid, test = (
        build.part(
            blend, part, [(corpus, split_ranges(split, len(corpus))[part]) for corpus in opened], num_samples[part]
        )
        for part in range(len(SPLIT_NAMES))
    )
    return train, valid, test


@dataclasses.dataclass(frozen=True)
class _Builder:
    """What all samples of a run have in common; see `build_gpt_datasets`."""

    seq_len: int
    seed: int
    vocab_size: int
    cache_dir: str | os.PathLike[str] | None
    borders: Borders
    pad_token: int
    surplus: float
    require_test: bool

    def part(
        self, blend: Blend, part: int, corpora: Sequence[Corpus], num_samples: int | None
    ) -> GPTDataset | BlendedDataset | None:
        """Return the samples of one part (0 train, 1 valid, 2 test), or None if there are to be none."""
        ranges = [sequences for _, sequences in corpora if sequences is not None]
        if len(ranges) < len(corpora) or num_samples == 0:
            return None
        if part == TEST and not self.require_test and any(first == end for first, end in ranges):
            logger.warning("the split leaves no document of some corpus to the test part: there will be no test loss")
            return None
        name = SPLIT_NAMES[part]
        indexed = [corpus for corpus, _ in corpora]
        if blend.weights is not None:
            return self._weighted(blend.weights, indexed, ranges, name, num_samples)
        if len(corpora) == 1:
            return self._single(indexed[0], ranges[0], name, num_samples)
        return self._unweighted(indexed, ranges, name, num_samples)

    def _single(self, indexed: IndexedDataset, sequences: Range, name: str, num_samples: int | None) -> GPTDataset:
        return GPTDataset(
            indexed,
            sequences,
            num_samples,
            self.seq_len,
            self.seed,
            split_name=name,
            borders=self.borders,
            vocab_size=self.vocab_size,
            cache_dir=self.cache_dir,
            pad_token=self.pad_token,
        )

    def _blended(
        self, datasets: Sequence[GPTDataset], weights: Sequence[float] | None, name: str, num_samples: int | None
    ) -> BlendedDataset:
        return BlendedDataset(
            datasets,
            weights,
            num_samples,
            borders=self.borders,
            pad_token=self.pad_token,
            cache_dir=self.cache_dir,
            split_name=name,
        )

    def _weighted(
        self,
        weights: Sequence[float],
        indexed: Sequence[IndexedDataset],
        ranges: Sequence[Range],
        name: str,
        num_samples: int | None,
    ) -> BlendedDataset:
        """Return a blend that repeats its corpora as often as their weights ask for."""
        if num_samples is None:
            raise UsageError(f"--data-path with weights has no epochs: the number of {name} samples must be given")
        shares = normalised(weights)
        asked = samples_per_corpus(shares, num_samples, self.surplus)
        datasets = [
            self._single(corpus, sequences, name, samples)
            for corpus, sequences, samples in zip(indexed, ranges, asked, strict=True)
        ]
        # Normalised once more, as in the reference: the sum may not have been exactly 1.
        return self._blended(datasets, shares.tolist(), name, sum(samples_per_corpus(shares, num_samples, 0.0)))

    def _unweighted(
        self, indexed: Sequence[IndexedDataset], ranges: Sequence[Range], name: str, num_samples: int | None
    ) -> BlendedDataset:
        """Return a blend of one epoch of each corpus, in proportion to their sizes."""
        datasets = [
            self._single(corpus, sequences, name, None) for corpus, sequences in zip(indexed, ranges, strict=True)
        ]
        held = sum(len(dataset) for dataset in datasets)
        if num_samples is not None and held < num_samples:
            raise UsageError(
                f"--data-path: the {len(datasets)} corpora without weights hold {held} {name} samples, but "
                f"{num_samples} are asked for, and a blend without weights reads nothing twice; fix: a weight before "
                "each prefix, or fewer --train-iters or --eval-iters"
            )
        return self._blended(datasets, None, name, num_samples)


def _mock_datasets(num_samples: NumSamples, seq_len: int, vocab_size: int, seed: int, borders: Borders) -> GPTSources:
    """Return the made-up samples of the three splits."""

    def one(part: int) -> MockGPTDataset | None:
        samples = num_samples[part]
        if samples is None:
            raise UsageError(f"--mock-data has no epochs: the number of {SPLIT_NAMES[part]} samples must be given")
        return MockGPTDataset(samples, seq_len, vocab_size, seed, part, borders) if samples else None

    return one(0), one(1), one(2)
