"""Which tokens make up sample i: pure integer arithmetic on sequence lengths (no communication).

Equal bit for bit to Megatron-LM (core/datasets/gpt_dataset.py:551-797, helpers.cpp:144-230), with T = tokens of the
split, S = seq_len, n = samples asked for:

    epochs            E = ceil((n * S + 1) / T)
    document index    the split's sequences, E times, shuffled
    sample index      row k = (position in the document index, offset) of token k * S of that stream;
                      sample k is the tokens k * S .. (k + 1) * S, so neighbours share one token
    shuffle index     sample asked for -> row of the sample index

If fewer than 80 % of the last epoch's samples are needed, that epoch is shuffled on its own, in both shuffles, so that
its documents do not come early. One RandomState(seed) is consumed in the order written above.
"""

from typing import NamedTuple

import numpy as np

from jmegatron.data.index_cache import in_range
from jmegatron.errors import UsageError

# Below this share of the last epoch it is kept apart (Megatron-LM gpt_dataset.py:551-574).
FINAL_EPOCH_THRESHOLD = 0.80


class GPTIndex(NamedTuple):
    """The three arrays that turn a sample number into places in a corpus.

    document_index: int32 or int64 [epochs * sequences], numbers of sequences.
    sample_index: int64 [samples + 1, 2], (position in document_index, offset in tokens).
    shuffle_index: uint32 or int64 [samples], rows of sample_index.
    """

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


class Cut(NamedTuple):
    """How a stream of tokens is cut into samples; the defaults are what training uses.

    extra_token: a sample reads one token more than `seq_len`, its last label; else that label is missing.
    drop_last_partial: a last sample that is not whole is dropped; else it is padded when it is read.
    """

    extra_token: bool = True
    drop_last_partial: bool = True

    def num_samples(self, num_tokens: int, seq_len: int) -> int:
        """Return the samples in `num_tokens` tokens.

        The reference rounds a kept partial sample's count in float32 (helpers.cpp:177), which goes wrong beyond 2**24
        tokens; here it is exact.
        """
        usable = num_tokens - self.extra_token
        return usable // seq_len if self.drop_last_partial else -(-usable // seq_len)


CUT = Cut()


def num_epochs(num_samples: int, tokens_per_epoch: int, seq_len: int, extra_token: bool = True) -> int:
    """Return how often the split must be read to give `num_samples` samples (the last one needs a label: + 1)."""
    return max(1, -(-(num_samples * seq_len + extra_token) // tokens_per_epoch))


def samples_before_final_epoch(
    num_samples: int, epochs: int, tokens_per_epoch: int, seq_len: int, extra_token: bool = True
) -> int | None:
    """Return the samples of all epochs but the last if the last is shuffled on its own, else None."""
    if epochs == 1:
        return None
    before = ((epochs - 1) * tokens_per_epoch - extra_token) // seq_len
    per_epoch = (tokens_per_epoch - extra_token) // seq_len
    separate = num_samples - before < int(FINAL_EPOCH_THRESHOLD * per_epoch)
    return before if separate else None


def build_gpt_index(
    sequence_lengths: np.ndarray,
    first: int,
    end: int,
    num_samples: int | None,
    seq_len: int,
    seed: int,
    cut: Cut = CUT,
) -> GPTIndex:
    """Return the index of the sequences first .. end - 1 of a corpus.

    Args:
        sequence_lengths: int32 [sequences of the whole corpus], in tokens.
        first: first sequence of the split.
        end: sequence after the last of the split.
        num_samples: samples that must be available; None means those of one epoch.
        seq_len: tokens per sample, without the label of the last one.
        seed: 0 .. 2**32 - 1.
        cut: what a sample reads and what becomes of the rest.

    Raises:
        UsageError: the split has no tokens, or one epoch has no whole sample and `num_samples` is None; bad seed.
    """
    tokens_per_epoch = int(sequence_lengths[first:end].sum(dtype=np.int64))
    if tokens_per_epoch == 0:
        raise UsageError(f"the sequences {first}..{end - 1} hold no token: no sample can be cut; fix: a larger corpus")
    epochs = 1 if num_samples is None else num_epochs(num_samples, tokens_per_epoch, seq_len, cut.extra_token)
    before = None
    if num_samples is not None:
        before = samples_before_final_epoch(num_samples, epochs, tokens_per_epoch, seq_len, cut.extra_token)
    rng = random_state(seed)
    document_index = build_document_index(first, end, epochs, before is not None, rng)
    sample_index = build_sample_index(sequence_lengths[document_index], seq_len, cut)
    total = len(sample_index) - 1
    return GPTIndex(document_index, sample_index, build_shuffle_index(total if before is None else before, total, rng))


def gpt_index_fits(index: GPTIndex, sequence_lengths: np.ndarray, first: int, end: int) -> bool:
    """Return whether every number of a stored index has a place in the sequences first .. end - 1 of a corpus."""
    documents, samples, shuffle = index
    return (
        in_range(documents, first, end)
        and samples.shape == (shuffle.size + 1, 2)
        and in_range(samples[:, 0], 0, documents.size)
        and in_range(samples[:, 1], 0, int(sequence_lengths.max()) + 1)
        and in_range(shuffle, 0, shuffle.size)
    )


def random_state(seed: int) -> np.random.RandomState:
    """Return numpy's MT19937 generator; its stream is frozen, unlike that of the newer Generator.

    Raises:
        UsageError: the seed does not fit 32 bits.
    """
    if not 0 <= seed < 2**32:
        raise UsageError(f"--seed: got {seed}, expected 0 .. {2**32 - 1} (32 bits)")
    return np.random.RandomState(seed)


def build_document_index(
    first: int, end: int, epochs: int, separate_final_epoch: bool, rng: np.random.RandomState
) -> np.ndarray:
    """Return the sequences first .. end - 1, `epochs` times over, shuffled.

    Returns:
        int32 (int64 if needed) [epochs * (end - first)].
    """
    if separate_final_epoch:
        early = build_document_index(first, end, epochs - 1, False, rng)
        final = build_document_index(first, end, 1, False, rng)
        return np.concatenate([early, final])
    dtype = np.int32 if end <= 2**31 else np.int64
    index = np.tile(np.arange(first, end, dtype=dtype), epochs)
    rng.shuffle(index)
    return index


def build_sample_index(lengths: np.ndarray, seq_len: int, cut: Cut = CUT) -> np.ndarray:
    """Return where the tokens 0, S, 2 * S, ... of a stream of sequences lie: int64 [samples + 1, 2].

    The reference walks over the sequences in C++; here every boundary is found at once in the running sum of lengths.

    Args:
        lengths: integer [sequences in stream order], in tokens; their sum must not be 0.
        seq_len: S.
        cut: what a sample reads and what becomes of the rest.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    boundaries = np.arange(cut.num_samples(int(ends[-1]), seq_len) + 1, dtype=np.int64) * seq_len
    # The last token that a sample reads lies `extra_token` places behind its boundary. A kept rest ends there too.
    np.minimum(boundaries, ends[-1] - cut.extra_token, out=boundaries)
    # side="left" passes over empty sequences: the first sequence that reaches as far as the sample reads holds its end.
    position = np.searchsorted(ends, boundaries + cut.extra_token, side="left")
    offset = boundaries - (ends[position] - lengths[position])
    # The reference's walk starts here even when the first sequence is empty.
    position[0], offset[0] = 0, 0
    return np.stack([position, offset], axis=1)


def build_shuffle_index(num_early: int, total: int, rng: np.random.RandomState) -> np.ndarray:
    """Return 0 .. num_early - 1 shuffled, then num_early .. total - 1 shuffled: uint32 (int64 if needed) [total]."""
    dtype = np.uint32 if total < 2**32 - 2 else np.int64
    early = np.arange(num_early, dtype=dtype)
    rng.shuffle(early)
    if num_early == total:
        return early
    final = np.arange(num_early, total, dtype=dtype)
    rng.shuffle(final)
    return np.concatenate([early, final])
