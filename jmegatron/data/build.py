"""From options to the training, validation and test samples (no communication).

The numbers of samples come from the caller, which knows the schedule: the reference asks for train_iters *
global_batch_size, (train_iters // eval_interval + 1) * eval_iters * global_batch_size and eval_iters *
global_batch_size (Megatron-LM training.py:5419-5454).
"""

import logging
import os

from jmegatron.data.borders import Borders
from jmegatron.data.gpt_dataset import RUN_ON, GPTDataset, MockGPTDataset
from jmegatron.data.indexed_dataset import IndexedDataset
from jmegatron.data.split import DEFAULT_SPLIT, SPLIT_NAMES, split_ranges
from jmegatron.errors import UsageError

logger = logging.getLogger(__name__)

TEST = 2
"""Place of the test part among train, valid, test."""

GPTSource = GPTDataset | MockGPTDataset
GPTSources = tuple[GPTSource | None, GPTSource | None, GPTSource | None]


def build_gpt_datasets(
    prefix: str | os.PathLike[str] | None,
    *,
    mock: bool = False,
    vocab_size: int,
    seq_len: int,
    seed: int = 1234,
    split: str = DEFAULT_SPLIT,
    num_samples: tuple[int | None, int | None, int | None],
    cache_dir: str | os.PathLike[str] | None = None,
    borders: Borders = RUN_ON,
    require_test: bool = True,
) -> GPTSources:
    """Return (train, valid, test); an entry is None if 0 samples were asked for or its weight in `split` is 0.

    Args:
        prefix: corpus path without `.bin` and `.idx` (`--data-path`); None with `mock`.
        mock: made-up samples instead of a corpus (`--mock-data`).
        vocab_size: token ids are below this.
        seq_len: tokens per sample.
        seed: seed of the order.
        split: weights of train, valid, test.
        num_samples: samples needed of train, valid, test; None means one epoch (corpora only).
        cache_dir: folder for built indices (`--data-cache-path`); None builds each time.
        borders: what ends with a document inside a sample; by default nothing.
        require_test: False gives None, with a warning in the log, where the test part rounds to no document. The
            default split leaves one in a hundred for it, which small corpora do not have.

    Raises:
        UsageError: no corpus or two; a split that cannot be read; a part with a weight, samples asked for, no token.
        DataFileError: the corpus is missing or damaged.
    """
    if mock == (prefix is not None):
        raise UsageError(
            f"got --data-path {prefix} and --mock-data {mock}, expected exactly one; fix: give the path of a corpus, "
            "or --mock-data for made-up samples"
        )
    if prefix is None:
        return _mock_datasets(num_samples, seq_len, vocab_size, seed, borders)
    indexed = IndexedDataset(prefix)
    ranges = split_ranges(split, len(indexed))

    def one(part: int) -> GPTDataset | None:
        sequence_range, samples = ranges[part], num_samples[part]
        if sequence_range is None or samples == 0:
            return None
        if part == TEST and not require_test and sequence_range[0] == sequence_range[1]:
            logger.warning("--split %s leaves no document to the test part: there will be no test loss", split)
            return None
        return GPTDataset(
            indexed,
            sequence_range,
            samples,
            seq_len,
            seed,
            split_name=SPLIT_NAMES[part],
            borders=borders,
            vocab_size=vocab_size,
            cache_dir=cache_dir,
        )

    return one(0), one(1), one(2)


def _mock_datasets(
    num_samples: tuple[int | None, int | None, int | None], seq_len: int, vocab_size: int, seed: int, borders: Borders
) -> GPTSources:
    """Return the made-up samples of the three splits."""

    def one(part: int) -> MockGPTDataset | None:
        samples = num_samples[part]
        if samples is None:
            raise UsageError(f"--mock-data has no epochs: the number of {SPLIT_NAMES[part]} samples must be given")
        return MockGPTDataset(samples, seq_len, vocab_size, seed, part, borders) if samples else None

    return one(0), one(1), one(2)
