"""Blends: the order against the walk of the reference, how they are written down, sizes, and the datasets."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmegatron.data import blend as blend_module
from jmegatron.data.blend import (
    Blend,
    build_blend_index,
    build_exhaustive_blend_index,
    normalised,
    parse_blend,
    read_data_args,
    read_split_data_args,
    samples_per_corpus,
)
from jmegatron.data.build import build_gpt_datasets
from jmegatron.data.indexed_dataset import IndexedDatasetBuilder
from jmegatron.data.split import split_ranges
from jmegatron.errors import DataFileError, UsageError

# ---------------------------------------------------------------------------------------------------------- order


def _walk(weights, num_samples, limits=None):
    """parity.md 4.14 word by word: greedy largest error, first index wins ties, max(sample, 1)."""
    counts = [0] * len(weights)
    datasets, samples = [], []
    for sample in range(num_samples):
        best, best_error = None, -math.inf
        for dataset, weight in enumerate(weights):
            if limits is not None and counts[dataset] == limits[dataset]:
                continue
            error = weight * float(max(sample, 1)) - float(counts[dataset])
            if error > best_error:
                best, best_error = dataset, error
        datasets.append(best)
        samples.append(counts[best])
        counts[best] += 1
    return datasets, samples


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks so short that the estimate at their start is often wrong and they have to run again."""
    monkeypatch.setattr(blend_module, "_SHORTEST", 7)
    monkeypatch.setattr(blend_module, "_WARM_UP", 3)


WEIGHTS = st.lists(
    st.one_of(st.floats(1e-6, 1.0), st.integers(1, 10).map(float), st.sampled_from([0.0005, 0.9995, 1e-9])),
    min_size=1,
    max_size=9,
)


@pytest.mark.usefixtures("short_blocks")
def test_blend_equals_the_walk_of_the_reference():
    repairs = []

    @given(WEIGHTS, st.integers(1, 700))
    @settings(max_examples=150, deadline=None)
    def check(weights, num_samples):
        shares = normalised(weights)
        index = build_blend_index(shares, num_samples)
        datasets, samples = _walk(shares.tolist(), num_samples)
        assert index.dataset_index.tolist() == datasets
        assert index.dataset_sample_index.tolist() == samples

    real = blend_module._Greedy._fill

    def counted(self, lanes, counts):
        repairs.append(len(lanes))
        return real(self, lanes, counts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend_module._Greedy, "_fill", counted)
        check()
    assert len(repairs) > 200  # more than one pass for many of them: the check at the borders does its work


@pytest.mark.usefixtures("short_blocks")
@given(st.lists(st.integers(0, 90), min_size=1, max_size=8).filter(any))
@settings(max_examples=100, deadline=None)
def test_exhaustive_blend_equals_the_walk_and_gives_every_sample_once(sizes):
    total = sum(sizes)
    index = build_exhaustive_blend_index(sizes)
    datasets, samples = _walk([size / total for size in sizes], total, sizes)
    assert index.dataset_index.tolist() == datasets
    assert index.dataset_sample_index.tolist() == samples
    assert np.bincount(index.dataset_index, minlength=len(sizes)).tolist() == sizes


def test_long_blend_equals_the_walk():
    shares = normalised([0.123, 0.8, 1e-4, 0.077])
    index = build_blend_index(shares, 50_000)
    datasets, samples = _walk(shares.tolist(), 50_000)
    assert index.dataset_index.tolist() == datasets
    assert index.dataset_sample_index.tolist() == samples


def test_small_weight_gets_its_one_sample_of_fifty():
    index = build_blend_index(normalised([0.0005, 0.9995]), 50)
    assert np.bincount(index.dataset_index).tolist() == [1, 49]


def test_sizes_round_up_twice():
    assert samples_per_corpus(normalised([0.0005, 0.9995]), 50) == [2, 51]
    assert samples_per_corpus(normalised([1.0, 1.0, 1.0]), 10, 0.0) == [4, 4, 4]


# ----------------------------------------------------------------------------------------------------- written down


def test_words_are_weights_and_prefixes_or_prefixes_alone():
    assert parse_blend(["0.3", "a", "7e-1", "b"]) == Blend(("a", "b"), (0.3, 0.7))
    assert parse_blend(["a"]) == Blend(("a",), None)
    assert parse_blend(["a", "b"]) == Blend(("a", "b"), None)
    assert parse_blend(["1", "a", "2"]) == Blend(("1", "a", "2"), None)  # odd: prefixes, as in the reference


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "got nothing"),
        (["0.3", "a", "b", "c"], "'b' where a weight should be"),
        (["0", "a", "1", "b"], "got weight 0.0 for a, expected a finite number above 0"),
        (["-1", "a"], "got weight -1.0 for a"),
        (["nan", "a"], "got weight nan"),
        (["inf", "a"], "got weight inf"),
        (["1e308", "a", "1e308", "b"], "expected a finite sum"),
        (["1e300", "a", "1e-300", "b"], "no share that rounds to 0"),
        (["p"] * 32769, "got 32769 corpora, expected at most 32767"),
    ],
)
def test_words_that_make_no_blend_are_refused(words, message):
    with pytest.raises(UsageError, match=f"--data-path.*{message}.*fix:"):
        parse_blend(words)


def test_files_hold_what_would_stand_on_the_command_line(tmp_path):
    (tmp_path / "words").write_text("0.3 a\n 0.7 b\n")
    assert read_data_args(str(tmp_path / "words")) == ("0.3", "a", "0.7", "b")
    content = {"train": ["0.3", "a", 0.7, "b"], "valid": "c d", "test": []}
    (tmp_path / "parts").write_text(json.dumps(content))
    assert read_split_data_args(str(tmp_path / "parts")) == {
        "train": ("0.3", "a", "0.7", "b"),
        "valid": ("c", "d"),
        "test": (),
    }


def test_null_is_a_part_without_data(tmp_path):
    (tmp_path / "f").write_text('{"train": ["a"], "valid": null, "test": null}')
    assert read_split_data_args(str(tmp_path / "f")) == {"train": ("a",), "valid": (), "test": ()}


def test_split_whose_sum_is_infinite_is_refused():
    with pytest.raises(UsageError, match=r"--split: got '1e308,1e308,1'.*with a finite sum"):
        split_ranges("1e308,1e308,1", 100)


@pytest.mark.parametrize("content", ["", "[", "[]", '{"train": []}', '{"train": 3, "valid": [], "test": []}', '"x"'])
def test_files_that_make_no_blend_are_refused(tmp_path, content):
    (tmp_path / "f").write_text(content)
    with pytest.raises(DataFileError, match=r"--per-split-data-args-path .*/f: .*expected a JSON object.*fix:"):
        read_split_data_args(str(tmp_path / "f"))
    with pytest.raises(DataFileError, match=r"--data-args-path .*/none"):
        read_data_args(str(tmp_path / "none"))
    (tmp_path / "f").write_text(" \n")
    with pytest.raises(DataFileError, match=r"--data-args-path .*got an empty file"):
        read_data_args(str(tmp_path / "f"))


# --------------------------------------------------------------------------------------------------------- datasets


@pytest.fixture
def corpora(tmp_path):
    """Two corpora whose tokens tell them apart: below and above 100."""
    rng = np.random.RandomState(0)
    for name, low in (("a", 0), ("b", 100)):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for size in rng.randint(1, 30, size=40):
                builder.add_document(rng.randint(low, low + 100, size=size))
            builder.finalize()
    return str(tmp_path / "a"), str(tmp_path / "b")


def _build(corpora, num_samples, **changes):
    arguments = {"vocab_size": 200, "seq_len": 8, "split": "80,20,0"} | changes
    return build_gpt_datasets(corpora, num_samples=num_samples, **arguments)


def test_samples_of_a_blend_are_those_of_its_parts_in_the_order_of_the_index(corpora):
    train, valid, test = _build(Blend(corpora, (0.3, 0.7)), (100, 20, 0))
    assert (len(train), len(valid), test) == (100, 20, None)
    whole = train.batch(np.arange(100))
    for number in range(100):
        part = int(train.index.dataset_index[number])
        inner = train.datasets[part][int(train.index.dataset_sample_index[number])]
        for name, values in inner.items():
            np.testing.assert_array_equal(train[number][name], values)
            np.testing.assert_array_equal(whole[name][number], values)
        assert (inner["tokens"] >= 100).all() == bool(part)
    assert np.bincount(train.index.dataset_index).tolist() == [30, 70]


@pytest.mark.parametrize(("second", "expected"), [(np.uint16, np.uint16), (np.int32, np.int32)])
def test_text_of_a_blend_is_as_wide_as_its_widest_corpus(tmp_path, second, expected):
    for name, dtype in (("a", np.uint16), ("b", second)):
        with IndexedDatasetBuilder(tmp_path / name, dtype) as builder:
            builder.add_document(np.arange(300) + (65_000 if name == "a" else 0))
            builder.finalize()
    pair = (str(tmp_path / "a"), str(tmp_path / "b"))
    train, *_ = _build(Blend(pair, (0.5, 0.5)), (20, 0, 0), vocab_size=65_536, split="1,0,0")
    text = train.compact(np.arange(20))["text"]
    assert text.dtype == expected
    for number in range(20):
        part, inner = train.index.dataset_index[number], train.index.dataset_sample_index[number]
        np.testing.assert_array_equal(text[number, :-1], train.datasets[part][int(inner)]["tokens"])
        assert (text[number] >= 65_000).all() == (part == 0)


def test_blend_without_weights_gives_every_sample_once_or_stops(corpora):
    train, *_ = _build(Blend(corpora, None), (None, 0, 0))
    assert len(train) == sum(map(len, train.datasets))
    assert len(_build(Blend(corpora, None), (10, 0, 0))[0]) == 10
    with pytest.raises(UsageError, match=r"hold \d+ train samples, but 9999 are asked for.*fix: a weight before each"):
        _build(Blend(corpora, None), (9999, 0, 0))


def test_weights_need_a_number_of_samples(corpora):
    with pytest.raises(UsageError, match="with weights has no epochs"):
        _build(Blend(corpora, (1.0, 1.0)), (None, 0, 0))


def test_parts_may_have_corpora_of_their_own(corpora):
    first, second = corpora
    parts = (Blend((first,), None), Blend((second, first), (9.0, 1.0)), None)
    train, valid, test = _build(parts, (30, 20, 5), split=None)
    assert sorted(set(train.index.document_index.tolist())) == list(range(40))
    assert (len(valid), test) == (20, None)
    assert np.bincount(valid.index.dataset_index).tolist() == [18, 2]


def test_empty_validation_part_of_one_corpus_of_a_blend_stops(corpora):
    with pytest.raises(UsageError, match=r"--split leaves the valid part 0 of the 40 sequences"):
        _build(Blend(corpora, (1.0, 1.0)), (10, 10, 0), split="999,1,0")


def test_test_part_without_documents_is_none_with_a_warning(corpora, caplog):
    *_, test = _build(Blend(corpora, (1.0, 1.0)), (9, 9, 9), split="90,9,1", require_test=False)
    assert test is None
    assert "no test loss" in caplog.text


def test_blend_order_is_cached(corpora, tmp_path, monkeypatch):
    fresh = _build(Blend(corpora, (0.3, 0.7)), (100, 0, 0))[0]
    _build(Blend(corpora, (0.3, 0.7)), (100, 0, 0), cache_dir=tmp_path / "cache")
    monkeypatch.setattr("jmegatron.data.blended_dataset.build_blend_index", None)
    stored = _build(Blend(corpora, (0.3, 0.7)), (100, 0, 0), cache_dir=tmp_path / "cache")[0]
    for left, right in zip(fresh.index, stored.index, strict=True):
        np.testing.assert_array_equal(left, right)


def test_sample_outside_a_blend_is_an_index_error(corpora):
    train, *_ = _build(Blend(corpora, (0.3, 0.7)), (10, 0, 0))
    for number in (-1, len(train)):
        with pytest.raises(IndexError, match="expected 0 <= sample"):
            train[number]
