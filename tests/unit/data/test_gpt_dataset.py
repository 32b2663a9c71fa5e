"""Sample index and datasets: against a plain walk, the scenarios of endless loops, the cache, the made-up data."""

import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmegatron.data import index_cache
from jmegatron.data.borders import Borders
from jmegatron.data.build import build_gpt_datasets
from jmegatron.data.gpt_dataset import GPTDataset, MockGPTDataset
from jmegatron.data.gpt_index import CUT, Cut, build_gpt_index, build_sample_index, num_epochs
from jmegatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from jmegatron.data.split import split_ranges
from jmegatron.errors import DataFileError, UsageError


def _corpus(prefix, documents, dtype=np.uint16):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize()
    return IndexedDataset(prefix)


# ---------------------------------------------------------------------------------------------------------- index


def _walk(lengths, seq_len, cut=CUT):
    """The reference's walk over the documents (parity.md 4.14): a sample takes `seq_len` tokens and the extra one."""
    total, extra = sum(lengths), int(cut.extra_token)
    count = (total - extra) // seq_len if cut.drop_last_partial else math.ceil((total - extra) / seq_len)
    rows, document, offset = [[0, 0]], 0, 0
    for _ in range(count):
        remaining = seq_len + extra
        while True:
            available = lengths[document] - offset
            if available >= remaining:  # ends in this document; the next sample begins at its last token
                offset += remaining - extra
                break
            if not any(lengths[document + 1 :]):  # the rest is not whole
                offset = lengths[document] - extra
                break
            remaining, document, offset = remaining - available, document + 1, 0
        rows.append([document, offset])
    return rows


CUTS = st.builds(Cut, st.booleans(), st.booleans())


@given(
    st.lists(st.one_of(st.integers(0, 12), st.just(60)), min_size=1, max_size=30).filter(any), st.integers(1, 20), CUTS
)
@settings(max_examples=500, deadline=None)
def test_sample_index_equals_a_walk_over_the_documents(lengths, seq_len, cut):
    index = build_sample_index(np.array(lengths, dtype=np.int32), seq_len, cut)
    assert index.dtype == np.int64
    assert index.tolist() == _walk(lengths, seq_len, cut)


def _plain_index(lengths, first, end, num_samples, seq_len, seed):
    """The whole index by the sentences of parity.md 4.14, with Python lists and loops."""
    tokens = sum(lengths[first:end])
    epochs = 1
    while epochs * tokens < num_samples * seq_len + 1:
        epochs += 1
    before = ((epochs - 1) * tokens - 1) // seq_len
    apart = epochs > 1 and num_samples - before < int(0.80 * ((tokens - 1) // seq_len))
    rng = np.random.RandomState(seed)

    def shuffled(values):
        values = np.array(values, dtype=np.int64)
        rng.shuffle(values)
        return values.tolist()

    documents = list(range(first, end))
    order = shuffled(documents * (epochs - 1)) + shuffled(documents) if apart else shuffled(documents * epochs)
    samples = _walk([lengths[document] for document in order], seq_len)
    total = len(samples) - 1
    shuffle = shuffled(range(before)) + shuffled(range(before, total)) if apart else shuffled(range(total))
    return order, samples, shuffle


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40),
    st.tuples(*[st.integers(0, 100)] * 3).filter(any),
    st.integers(1, 30),
    st.integers(1, 60),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=300, deadline=None)
def test_index_of_any_split_equals_the_plain_loops(lengths, weights, seq_len, num_samples, seed):
    sizes = np.array(lengths, dtype=np.int32)
    bounds = np.cumsum([0.0, *(np.array(weights, float) / np.sum(weights))])
    for part, sequences in enumerate(split_ranges(",".join(map(str, weights)), len(lengths))):
        if weights[part] == 0:
            assert sequences is None
            continue
        first, end = (round(float(bound) * len(lengths)) for bound in bounds[part : part + 2])
        assert sequences == (first, end)
        if sum(lengths[first:end]) == 0:
            with pytest.raises(UsageError, match="hold no token"):
                build_gpt_index(sizes, first, end, num_samples, seq_len, seed)
            continue
        index = build_gpt_index(sizes, first, end, num_samples, seq_len, seed)
        expected = _plain_index(lengths, first, end, num_samples, seq_len, seed)
        assert tuple(values.tolist() for values in index) == expected


def test_sample_index_counts_beyond_32_bits():
    index = build_sample_index(np.array([1_500_000_000, 1_500_000_000, 1_500_000_000], dtype=np.int32), 1_000_000_000)
    assert index.tolist() == [[0, 0], [0, 1_000_000_000], [1, 500_000_000], [2, 0], [2, 1_000_000_000]]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(0, 99),
)
@settings(max_examples=200, deadline=None)
def test_every_epoch_holds_every_sequence_and_every_sample_comes_once(lengths, seq_len, num_samples, seed):
    sizes = np.array(lengths, dtype=np.int32)
    index = build_gpt_index(sizes, 0, len(sizes), num_samples, seq_len, seed)
    epochs = num_epochs(num_samples, int(sizes.sum()), seq_len)
    assert epochs == 1 or (epochs - 1) * sizes.sum() < num_samples * seq_len + 1
    assert epochs * sizes.sum() >= num_samples * seq_len + 1
    assert np.bincount(index.document_index, minlength=len(sizes)).tolist() == [epochs] * len(sizes)
    assert sorted(index.shuffle_index.tolist()) == list(range(len(index.sample_index) - 1))
    assert len(index.shuffle_index) >= num_samples


@pytest.mark.parametrize(("num_samples", "epochs"), [(1, 1), (2, 1), (3, 2), (5, 2)])
def test_three_documents_of_four_tokens_end_with_the_right_epochs(tmp_path, num_samples, epochs):
    corpus = _corpus(tmp_path / "c", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]])
    dataset = GPTDataset(corpus, (0, 3), num_samples, 4, 1234)
    assert len(dataset.index.document_index) == 3 * epochs
    assert len(dataset) >= num_samples
    assert 12 * epochs >= num_samples * 4 + 1
    stream = np.concatenate([corpus.get(int(d)) for d in dataset.index.document_index])
    for number in range(len(dataset)):
        start = int(dataset.index.shuffle_index[number]) * 4
        sample = dataset[number]
        assert np.array_equal(sample["tokens"], stream[start : start + 4])
        assert np.array_equal(sample["labels"], stream[start + 1 : start + 5])
        assert sample["loss_mask"].tolist() == [1.0] * 4


@pytest.mark.parametrize(("num_samples", "apart"), [(17, True), (18, False), (20, False)])
def test_final_epoch_is_kept_apart_below_eight_of_its_ten_samples(num_samples, apart):
    # 41 tokens, S = 4: 10 samples an epoch; 17 samples need 7 of the second epoch, 18 need 8.
    lengths = np.full(41, 1, dtype=np.int32)
    index = build_gpt_index(lengths, 0, 41, num_samples, 4, 1234)
    assert len(index.document_index) == 82
    assert (set(index.document_index[:41].tolist()) == set(range(41))) is apart
    assert (set(index.shuffle_index[:10].tolist()) == set(range(10))) is apart


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_beyond_32_bits_is_refused(seed):
    with pytest.raises(UsageError, match="--seed"):
        build_gpt_index(np.array([9], dtype=np.int32), 0, 1, 1, 4, seed)


# ---------------------------------------------------------------------------------------------------------- split


@pytest.mark.parametrize("split", ["1,-1,0", "0,0,0", "", "a,b,c", "1,2,3,4", "nan,1,1", "inf,1,0", "1,2;3"])
def test_split_that_cannot_be_read_is_refused(split):
    with pytest.raises(UsageError, match="--split"):
        split_ranges(split, 10)


def test_split_rounds_halves_to_the_even_neighbour():
    assert split_ranges("50,50,0", 5) == ((0, 2), (2, 5), None)
    assert split_ranges("50,50", 7) == ((0, 4), (4, 7), None)


def test_split_weight_zero_is_no_part_at_all():
    assert split_ranges("100,0,0", 10) == ((0, 10), None, None)
    assert split_ranges("1, 0, 1", 10) == ((0, 5), None, (5, 10))


def test_split_separators_of_launch_lines_are_read():
    assert split_ranges("949/50/1", 1000) == split_ranges("949 50 1", 1000) == split_ranges("949,50,1", 1000)


# -------------------------------------------------------------------------------------------------------- dataset


@pytest.fixture
def small(tmp_path):
    rng = np.random.RandomState(0)
    _corpus(tmp_path / "small", [rng.randint(0, 50, size=size) for size in rng.randint(1, 20, size=37)])
    return tmp_path / "small"


def _build(prefix, **changes):
    arguments = {"vocab_size": 50, "seq_len": 8, "split": "80,10,10", "num_samples": (20, 5, 5)} | changes
    return build_gpt_datasets(prefix, **arguments)


def test_build_gives_each_split_its_own_sequences(small):
    train, valid, test = _build(small)
    parts = [set(d.index.document_index.tolist()) for d in (train, valid, test)]
    assert parts[0] | parts[1] | parts[2] == set(range(37))
    assert sum(map(len, parts)) == 37


def test_build_gives_none_where_nothing_is_asked_or_the_weight_is_zero(small):
    assert _build(small, num_samples=(20, 0, 0))[1:] == (None, None)
    assert _build(small, split="1,0,0", num_samples=(20, 5, 5))[1:] == (None, None)


def test_split_rounded_to_nothing_stops_instead_of_looping_for_ever(small):
    # 37 sequences under 949,50,1: the reference loops for ever on the test part.
    with pytest.raises(UsageError, match=r"--split leaves the test part 0 of the 37 sequences"):
        _build(small, split="949,50,1", num_samples=(100, 10, 2))


def test_empty_test_part_may_be_left_out_with_a_word(small, caplog):
    train, valid, test = _build(small, split="949,50,1", num_samples=(100, 10, 2), require_test=False)
    assert test is None
    assert len(train) >= 100
    assert len(valid) >= 10
    assert "no test loss" in caplog.text


def test_split_of_empty_sequences_only_stops(tmp_path):
    _corpus(tmp_path / "c", [[1, 2, 3, 4, 5], []])
    with pytest.raises(UsageError, match=r"valid part 1 of the 2 sequences .* with 0 tokens"):
        _build(tmp_path / "c", split="1,1,0", num_samples=(1, 1, 0), seq_len=2)


def test_one_epoch_without_a_whole_sample_stops(small):
    with pytest.raises(UsageError, match="not one whole sample"):
        _build(small, num_samples=(None, 0, 0), seq_len=100_000)


@pytest.mark.parametrize("arguments", [{"prefix": None}, {"prefix": "x", "mock": True}])
def test_build_needs_exactly_one_source(arguments):
    with pytest.raises(UsageError, match=r"--data-path .* --mock-data"):
        _build(**arguments)


def test_token_outside_the_vocabulary_stops(small):
    train, *_ = _build(small, vocab_size=10)
    with pytest.raises(DataFileError, match=r"expected 0 \.\. 9; fix: the --tokenizer-type"):
        [train[i] for i in range(20)]


def test_float_corpus_is_refused(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "c", np.float32) as builder:
        builder.add_document([1.0, 2.0])
        builder.finalize()
    with pytest.raises(DataFileError, match="float32 values"):
        _build(tmp_path / "c", split="1")


def test_uint16_ids_beyond_15_bits_stay_positive(tmp_path):
    _corpus(tmp_path / "c", [[65499, 40000, 3, 4, 5]])
    train, *_ = _build(tmp_path / "c", split="1", seq_len=4, num_samples=(1, 0, 0), vocab_size=65500)
    assert train[0]["tokens"].tolist() == [65499, 40000, 3, 4]
    assert train[0]["tokens"].dtype == np.int32


def test_borders_need_an_eod():
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}: the tokenizer has no end-of-document token"):
            Borders(**{name: True})


def test_sample_outside_is_an_index_error(small):
    train, *_ = _build(small)
    for index in (-1, len(train)):
        with pytest.raises(IndexError, match="expected 0 <= sample"):
            train[index]


@pytest.mark.parametrize("mean", [3, 400])
def test_batch_of_short_and_of_long_documents_equals_the_stream(tmp_path, mean):
    rng = np.random.RandomState(mean)
    corpus = _corpus(tmp_path / "c", [rng.randint(0, 500, size=size) for size in rng.randint(0, 2 * mean, size=200)])
    dataset = GPTDataset(corpus, (0, 200), None, 37, 1234, vocab_size=500)
    stream = np.concatenate([corpus.get(int(document)) for document in dataset.index.document_index])
    numbers = rng.permutation(len(dataset))
    batch = dataset.batch(numbers)
    starts = dataset.index.shuffle_index[numbers].astype(int) * 37
    for row, start in enumerate(starts):
        np.testing.assert_array_equal(batch["tokens"][row], stream[start : start + 37])
        np.testing.assert_array_equal(batch["labels"][row], stream[start + 1 : start + 38])
    assert batch["loss_mask"].all()
    assert dataset.batch(numbers)["loss_mask"] is batch["loss_mask"]
    assert set(dataset.compact(numbers)) == {"text"}  # a mask of ones does not travel


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
def test_text_keeps_two_bytes_a_token_where_the_corpus_has_them(tmp_path, dtype):
    corpus = _corpus(tmp_path / "c", [np.arange(200), np.arange(55)], dtype)
    dataset = GPTDataset(corpus, (0, 2), None, 8, 1234, vocab_size=200)
    text = dataset.compact(np.arange(len(dataset)))["text"]
    assert text.dtype == (np.uint16 if dtype == np.uint16 else np.int32)
    if np.dtype(dtype) == text.dtype:
        assert text.ctypes.data % 64 == 0  # JAX on CPU takes it over without a copy
    batch = dataset.batch(np.arange(len(dataset)))
    np.testing.assert_array_equal(text[:, :-1], batch["tokens"])
    np.testing.assert_array_equal(text[:, 1:], batch["labels"])
    assert {name: values.dtype.name for name, values in batch.items()} == {
        "tokens": "int32",
        "labels": "int32",
        "loss_mask": "float32",
    }


def test_ids_above_16_bits_stay_what_they_are(tmp_path):
    corpus = _corpus(tmp_path / "c", [[70_000, 65_536, 3, 131_071, 5]], np.int32)
    dataset = GPTDataset(corpus, (0, 1), 1, 4, 1234, vocab_size=131_072)
    assert dataset.compact(np.array([0]))["text"].tolist() == [[70_000, 65_536, 3, 131_071, 5]]
    assert dataset[0]["labels"].tolist() == [65_536, 3, 131_071, 5]


@pytest.mark.parametrize(
    ("dtype", "token", "vocab_size"),
    [(np.uint16, 9, 9), (np.uint16, 65_535, 65_535), (np.int32, 9, 9), (np.int32, -1, 9), (np.int32, -7, None)],
)
@pytest.mark.parametrize("cut", [CUT, Cut(drop_last_partial=False)])
def test_one_wrong_id_anywhere_in_a_batch_stops(tmp_path, dtype, token, vocab_size, cut):
    tokens = np.zeros(400, dtype)
    tokens[333] = token
    corpus = _corpus(tmp_path / "c", [tokens], dtype)
    dataset = GPTDataset(corpus, (0, 1), None, 8, 1234, vocab_size=vocab_size, cut=cut)
    with pytest.raises(DataFileError, match=f"holds token id {token}, expected 0"):
        dataset.compact(np.arange(len(dataset)))
    if token > 0:
        fits = GPTDataset(corpus, (0, 1), None, 8, 1234, vocab_size=token + 1, cut=cut)
        assert fits.compact(np.arange(len(fits)))["text"].max() == token


@pytest.mark.parametrize("extra_token", [True, False])
@pytest.mark.parametrize("pad_token", [-1, 9])
def test_missing_tokens_are_0_and_do_not_count(tmp_path, extra_token, pad_token):
    corpus = _corpus(tmp_path / "c", [[1, 2, 3], [4, 5, 6, 7]])
    dataset = GPTDataset(
        corpus, (0, 2), None, 4, 1234, vocab_size=9, pad_token=pad_token, cut=Cut(extra_token, drop_last_partial=False)
    )
    stream = np.concatenate([corpus.get(int(document)) for document in dataset.index.document_index]).tolist()
    seen = dataset.batch(np.argsort(dataset.index.shuffle_index))
    labels = [*stream[1:4], stream[4] if extra_token else 0, *stream[5:7], 0, 0]
    tokens = stream[:6] if extra_token else stream
    assert seen["tokens"].ravel()[: len(tokens)].tolist() == tokens
    assert seen["labels"].ravel().tolist() == labels
    assert seen["loss_mask"].ravel().tolist() == [float(label > 0) for label in labels]


def test_padding_id_counts_for_nothing(tmp_path):
    corpus = _corpus(tmp_path / "c", [[5, 7, 9, 7, 7, 3, 2]])
    dataset = GPTDataset(corpus, (0, 1), 1, 6, 1234, vocab_size=10, pad_token=7)
    assert {name: values.tolist() for name, values in dataset[0].items()} == {
        "tokens": [5, 0, 9, 0, 0, 3],
        "labels": [0, 9, 0, 0, 3, 2],
        "loss_mask": [0, 1, 0, 0, 1, 1],
    }


def test_cache_of_another_user_that_is_read_only_is_used(small, tmp_path, builds, monkeypatch):
    _build(small, cache_dir=tmp_path / "cache")
    before = len(builds)

    def refuse(path, *arguments):
        raise PermissionError(30, "Read-only file system", str(path))

    monkeypatch.setattr(index_cache, "atomic_output", refuse)
    monkeypatch.setattr(index_cache, "folder_lock", refuse)
    _build(small, cache_dir=tmp_path / "cache")
    assert len(builds) == before


@pytest.mark.slow
def test_a_tenth_of_ten_billion_tokens_is_indexed_in_a_tenth_of_the_time_and_memory():
    code = (
        "import resource, time, numpy as np\n"
        "from jmegatron.data.gpt_index import build_gpt_index\n"
        "lengths = np.random.RandomState(0).randint(1, 4000, size=500_000).astype(np.int32)\n"
        "before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()\n"
        "index = build_gpt_index(lengths, 0, len(lengths), None, 2048, 1234)\n"
        "assert len(index.shuffle_index) == (int(lengths.sum()) - 1) // 2048\n"
        "print(time.process_time() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    seconds, gib = map(float, output.split())
    assert seconds < 6
    assert gib < 0.4


# ---------------------------------------------------------------------------------------------------------- cache


def _same(left, right):
    return all(np.array_equal(a, b) for a, b in zip(left.index, right.index, strict=True))


@pytest.fixture
def builds(monkeypatch):
    """Counts how often an index is really built."""
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return build_gpt_index(*arguments)

    monkeypatch.setattr("jmegatron.data.gpt_dataset.build_gpt_index", counted)
    return calls


def test_cached_index_is_used_and_equal(small, tmp_path, builds):
    first = _build(small, cache_dir=tmp_path / "cache")
    assert len(builds) == 3
    again = _build(small, cache_dir=tmp_path / "cache")
    assert len(builds) == 3
    assert all(_same(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("change", [{"seed": 5}, {"seq_len": 9}, {"split": "70,10,20"}, {"num_samples": (21, 0, 0)}])
def test_other_settings_get_another_cache_entry(small, tmp_path, builds, change):
    _build(small, cache_dir=tmp_path / "cache", num_samples=(20, 0, 0))
    train, *_ = _build(small, **({"num_samples": (20, 0, 0)} | change), cache_dir=tmp_path / "cache")
    assert len(builds) == 2
    assert _same(train, _build(small, **({"num_samples": (20, 0, 0)} | change))[0])


def test_changed_corpus_under_the_same_name_gets_another_cache_entry(tmp_path, builds):
    for sizes in ([9, 8, 7], [7, 9, 8]):
        _corpus(tmp_path / "c", [[1] * size for size in sizes])
        train, *_ = _build(tmp_path / "c", split="1", num_samples=(2, 0, 0), cache_dir=tmp_path / "cache")
        assert _same(train, _build(tmp_path / "c", split="1", num_samples=(2, 0, 0))[0])
    assert len(builds) == 4


@pytest.mark.parametrize("ending", ["json", "document_index.npy", "sample_index.npy", "shuffle_index.npy"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone"])
def test_damaged_cache_is_built_again(small, tmp_path, builds, ending, damage, caplog):
    cache = tmp_path / "cache"
    good = _build(small, cache_dir=cache, num_samples=(20, 0, 0))[0]
    good = GPTDataset(good.indexed, (0, 30), 20, 8, 1234)  # its arrays are not those of the files
    (path,) = cache.glob(f"*.{ending}")
    content = path.read_bytes()
    damaged = {"cut": content[:-7], "flipped": content[:-5] + bytes([content[-5] ^ 1]) + content[-4:], "empty": b""}
    path.unlink()
    if damage != "gone":
        path.write_bytes(damaged[damage])
    before = len(builds)
    assert _same(_build(small, cache_dir=cache, num_samples=(20, 0, 0))[0], good)
    assert len(builds) == before + 1
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) <= 1
    assert _same(_build(small, cache_dir=cache, num_samples=(20, 0, 0))[0], good)
    assert len(builds) == before + 1


def test_cache_that_cannot_be_written_costs_a_log_line_only(small, tmp_path, caplog, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(index_cache, "atomic_output", refuse)
    with caplog.at_level(logging.WARNING):
        train, *_ = _build(small, cache_dir=tmp_path / "cache")
    assert _same(train, _build(small)[0])
    assert "cannot be written" in caplog.text


def test_cache_path_that_is_a_file_costs_a_log_line_only(small, tmp_path, caplog):
    (tmp_path / "cache").write_text("")
    train, *_ = _build(small, cache_dir=tmp_path / "cache")
    assert _same(train, _build(small)[0])
    assert "cannot be made" in caplog.text


def test_cache_that_cannot_be_read_costs_a_log_line_only(small, tmp_path, caplog, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    train, *_ = _build(small, cache_dir=tmp_path / "cache", num_samples=(20, 0, 0))
    monkeypatch.undo()
    assert _same(train, _build(small, num_samples=(20, 0, 0))[0])
    assert caplog.text.count("cannot be read") == 1


_TWO_AT_ONCE = """
import sys
import jmegatron.data.gpt_dataset as g
from jmegatron.data.indexed_dataset import IndexedDataset
real, calls = g.build_gpt_index, []
def slow(*arguments):
    import time
    calls.append(1)
    time.sleep(0.5)
    return real(*arguments)
g.build_gpt_index = slow
dataset = g.GPTDataset(IndexedDataset(sys.argv[1]), (0, 30), 20, 8, 1234, cache_dir=sys.argv[2])
print(len(calls), dataset.index.shuffle_index.tolist())
"""


def test_two_processes_at_once_build_one_index(small, tmp_path):
    command = [sys.executable, "-c", _TWO_AT_ONCE, os.fspath(small), os.fspath(tmp_path / "cache")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0].split(maxsplit=1) for process in running]
    assert sorted(calls for calls, _ in outputs) == ["0", "1"]
    assert outputs[0][1] == outputs[1][1]


def test_package_costs_neither_jax_nor_the_tokenizers_library():
    code = (
        "import sys, jmegatron.data.build, jmegatron.data.loader, jmegatron.data.demo_corpus\n"
        "sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# ----------------------------------------------------------------------------------------------------------- mock


def test_mock_samples_depend_on_seed_split_and_number_alone():
    one, two = MockGPTDataset(10, 16, 100, 7), MockGPTDataset(99, 16, 100, 7)
    assert np.array_equal(one[3]["tokens"], two[3]["tokens"])
    others = [one[4], MockGPTDataset(10, 16, 100, 8)[3], MockGPTDataset(10, 16, 100, 7, split=1)[3]]
    assert not any(np.array_equal(one[3]["tokens"], other["tokens"]) for other in others)


@pytest.mark.parametrize("vocab_size", [2, 50, 50304])
def test_mock_samples_fit_the_vocabulary_and_shift_by_one(vocab_size):
    sample = MockGPTDataset(3, 32, vocab_size, 1)[2]
    assert sample["tokens"].shape == sample["labels"].shape == sample["loss_mask"].shape == (32,)
    assert sample["tokens"].dtype == sample["labels"].dtype == np.int32
    assert np.array_equal(sample["tokens"][1:], sample["labels"][:-1])
    assert 0 <= sample["tokens"].min() <= sample["tokens"].max() < vocab_size


def test_mock_data_can_be_learned_from_the_last_two_tokens():
    dataset = MockGPTDataset(50, 64, 1000, 3)
    hits = [
        np.mean((2 * s["tokens"][1:] - s["tokens"][:-1]) % dataset.PERIOD == s["labels"][1:])
        for s in (dataset[i] for i in range(50))
    ]
    assert np.mean(hits) > 0.8  # 0.95 ** 3 of the places are free of noise


def test_mock_build_gives_the_asked_numbers():
    train, valid, test = _build(None, mock=True, num_samples=(7, 3, 0))
    assert (len(train), len(valid), test) == (7, 3, None)
    with pytest.raises(UsageError, match="--mock-data has no epochs"):
        _build(None, mock=True, num_samples=(None, 0, 0))
    with pytest.raises(UsageError, match="--mock-data"):
        MockGPTDataset(1, 8, 1, 0)
    with pytest.raises(IndexError, match="sample 7"):
        train[7]


@pytest.mark.parametrize("token", [2**32 + 1, 2**40, -1])
@pytest.mark.parametrize("vocab_size", [100, None])
def test_ids_wider_than_32_bits_are_refused_instead_of_wrapped(tmp_path, token, vocab_size):
    with IndexedDatasetBuilder(tmp_path / "wide", np.dtype("<i8")) as builder:
        builder.add_document(np.full(20, token, np.int64))
        builder.finalize()
    indexed = IndexedDataset(tmp_path / "wide")
    dataset = GPTDataset(indexed, (0, 1), 1, 8, 1234, vocab_size=vocab_size)
    with pytest.raises(DataFileError, match=f"holds token id {token}, expected 0"):
        dataset[0]


def test_more_epochs_than_memory_holds_are_refused_before_anything_is_built(small):
    for samples in (10**15, 2**70):
        with pytest.raises(UsageError, match="fewer --train-iters"):
            _build(small, num_samples=(samples, 0, 0))


def test_a_corpus_that_is_read_thousands_of_times_is_said_aloud(small, caplog):
    _build(small, num_samples=(10**5, 0, 0))
    assert "times over" in caplog.text
