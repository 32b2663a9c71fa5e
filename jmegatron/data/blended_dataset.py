"""Samples of several corpora in the order of a blend (no communication). `blend` says which sample comes from where."""

import os
from collections.abc import Sequence

import numpy as np

from jmegatron.data.blend import BlendIndex, build_blend_index, build_exhaustive_blend_index, normalised
from jmegatron.data.borders import Borders
from jmegatron.data.gpt_dataset import NO_PAD, RUN_ON, GPTDataset, Sample, finish, plain
from jmegatron.data.index_cache import content_key, in_range, load_or_build
from jmegatron.data.indexed_dataset import aligned_empty
from jmegatron.errors import UsageError


class BlendedDataset:
    """Samples of several `GPTDataset`s of one split, mixed (Megatron-LM core/datasets/blended_dataset.py).

    Attributes:
        datasets: the parts.
        index: where each sample lies.

    Args:
        datasets: one per corpus; all with the same `seq_len` and the usual cut.
        weights: shares of any sum; None: in proportion to the parts' sizes.
        num_samples: length; None (without weights only): every sample of every part once.
        borders: what ends with a document inside a sample; by default nothing.
        pad_token: the tokenizer's padding id, if it has one that is not its end of document.
        cache_dir: folder for built indices; None builds each time.
        split_name: "train", "valid" or "test", for messages.

    Raises:
        UsageError: the blend takes more samples from a part than that has.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float] | None,
        num_samples: int | None,
        *,
        borders: Borders = RUN_ON,
        pad_token: int = NO_PAD,
        cache_dir: str | os.PathLike[str] | None = None,
        split_name: str = "train",
    ):
        self.datasets = tuple(datasets)
        self._borders, self._pad_token = borders, pad_token
        sizes = [len(dataset) for dataset in datasets]
        shares = normalised([float(size) for size in sizes] if weights is None else weights)

        def build() -> BlendIndex:
            return (
                build_exhaustive_blend_index(sizes) if num_samples is None else build_blend_index(shares, num_samples)
            )

        def fits(index: BlendIndex) -> bool:
            return (
                index.dataset_index.shape == index.dataset_sample_index.shape
                and in_range(index.dataset_index, 0, len(sizes))
                and in_range(index.dataset_sample_index, 0, max(sizes))
            )

        if cache_dir is None:
            self.index = build()
        else:
            settings = {"blend": sizes if num_samples is None else None, "num_samples": num_samples}
            self.index = load_or_build(cache_dir, content_key(settings, shares), BlendIndex, build, fits)
        self._check_supply(sizes, split_name)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.index.dataset_index)

    def __getitem__(self, index: int) -> Sample:
        """Return one sample, with the arrays of `GPTDataset.__getitem__`.

        Raises:
            IndexError: no such sample.
            DataFileError: a token id lies outside the vocabulary.
        """
        return {name: values[0] for name, values in self.batch(np.array([index])).items()}

    def batch(self, numbers: np.ndarray) -> Sample:
        """Return the samples `numbers` (integer [samples]) as `__getitem__` does, stacked to [samples, seq_len]."""
        return plain(self.compact(numbers))

    def compact(self, numbers: np.ndarray) -> Sample:
        """Return the samples `numbers` (integer [samples]) in the form that goes to the devices, see `finish`.

        `text` is uint16 where all parts are, else int32.

        Raises:
            IndexError: no such sample.
            DataFileError: a token id lies outside the vocabulary.
        """
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"sample {numbers.min()} .. {numbers.max()}: expected 0 <= sample < {len(self)}")
        parts = self.index.dataset_index[numbers]
        inner = self.index.dataset_sample_index[numbers]
        dtype = np.result_type(*(dataset.text_dtype for dataset in self.datasets))
        text = aligned_empty((len(numbers), self.datasets[0].seq_len + 1), dtype)
        for part in np.unique(parts).tolist():
            rows = np.flatnonzero(parts == part)
            text[rows] = self.datasets[part].texts(inner[rows])
        return finish(text, self._borders, self._pad_token)

    def _check_supply(self, sizes: Sequence[int], split_name: str) -> None:
        """Refuse a blend that reads past the end of a part."""
        taken = np.bincount(self.index.dataset_index, minlength=len(sizes)).tolist()
        for dataset, size, count in zip(self.datasets, sizes, taken, strict=True):
            if count > size:
                raise UsageError(
                    f"the {split_name} blend takes {count} samples of {dataset.indexed.prefix}, which has {size} "
                    "ready; fix: a larger --mid-level-dataset-surplus"
                )
