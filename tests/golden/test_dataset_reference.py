"""The data part against what Megatron-Core wrote (`data/dataset`) and the golden numbers of its index.

The files are recordings of the reference's own builder and datasets (megatron-core 0.16.1). `meta.json` says
what each case asks for; every document ends with token 119.
"""

import hashlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from jmegatron.data.blend import (
    Blend,
    build_blend_index,
    build_exhaustive_blend_index,
    normalised,
    samples_per_corpus,
)
from jmegatron.data.borders import Borders
from jmegatron.data.build import build_gpt_datasets
from jmegatron.data.gpt_dataset import GPTDataset
from jmegatron.data.gpt_index import Cut, build_gpt_index
from jmegatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder, write_index
from jmegatron.data.sampler import CyclicOrder, SequentialOrder, rank_sample_ids
from jmegatron.data.split import SPLIT_NAMES, split_ranges

DATA = Path(__file__).parent / "data" / "dataset"
META = json.loads((DATA / "meta.json").read_text())
SEQ_LEN = META["seq"]
EOD = META["eod"]
SEED = 1234
CORPORA = ["corpusA_u16", "corpusA_i32", "corpusB_u16", "corpusC_u16"]
# The last two are arguments of the datasets without a flag, in the reference as here.
PLAIN = ["A_900_60_40_small", "A_900_60_40_epochs", "A_all_train_none", "A_i32", "C_949_50_1", "A_resets"]
CASES = [*PLAIN, "A_valid_keep_partial", "A_no_extra_token"]


@pytest.fixture(scope="module")
def recorded():
    with np.load(DATA / "gpt_dataset.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", CORPORA)
def test_reader_finds_the_recorded_lengths_pointers_marks_and_tokens(name):
    corpus = IndexedDataset(DATA / name)
    with np.load(DATA / "indexed.npz") as arrays:
        for field in ("sequence_lengths", "sequence_pointers", "document_indices"):
            expected = arrays[f"{name}/{field}"]
            actual = getattr(corpus, field)
            assert actual.dtype == expected.dtype
            np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(corpus.get(0), arrays[f"{name}/first_tokens"])
        np.testing.assert_array_equal(corpus.get(len(corpus) - 1), arrays[f"{name}/last_tokens"])
        np.testing.assert_array_equal(corpus.get(1, offset=1), arrays[f"{name}/get_1_off1"])
        assert corpus.dtype == arrays[f"{name}/first_tokens"].dtype


@pytest.mark.parametrize("name", CORPORA)
def test_builder_writes_the_reference_files_byte_for_byte(name, tmp_path):
    corpus = IndexedDataset(DATA / name)
    with IndexedDatasetBuilder(tmp_path / "copy", corpus.dtype) as builder:
        for begin, end in zip(corpus.document_indices[:-1], corpus.document_indices[1:], strict=True):
            pieces = [corpus.get(sequence) for sequence in range(begin, end)]
            builder.add_document(np.concatenate(pieces), [len(piece) for piece in pieces])
        builder.finalize()
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"copy{ending}").read_bytes() == (DATA / f"{name}{ending}").read_bytes()


def test_index_file_of_three_sequences_has_the_known_102_bytes():
    file = io.BytesIO()
    write_index(file, np.uint16, np.array([3, 2, 4]), np.array([0, 1, 2, 3]))
    raw = file.getvalue()
    assert len(raw) == 102
    assert raw[:34].hex() == "4d4d4944494458000001000000000000000803000000000000000400000000000000"
    assert hashlib.md5(raw).hexdigest() == "9d6e7d94bd5bbe2a549772fc0f9c228c"


BORDERS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")


def _dataset(case, part):
    asked = META["gpt_dataset"][case]
    corpus = IndexedDataset(DATA / asked["prefix"])
    sequence_range = split_ranges(asked["split"], len(corpus))[part]
    if sequence_range is None:
        return None
    return GPTDataset(
        corpus,
        sequence_range,
        asked["sizes"][part],
        SEQ_LEN,
        SEED,
        split_name=SPLIT_NAMES[part],
        borders=Borders(EOD, *(f"'{name}': True" in asked["extras"] for name in BORDERS)),
        vocab_size=EOD + 1,
        cut=Cut(
            extra_token="'add_extra_token_to_sequence': False" not in asked["extras"],
            drop_last_partial=part != 1 or "'drop_last_partial_validation_sequence': False" not in asked["extras"],
        ),
    )


@pytest.mark.parametrize("part", range(3), ids=SPLIT_NAMES)
@pytest.mark.parametrize("case", CASES)
def test_gpt_dataset_equals_the_reference_in_indices_and_samples(case, part, recorded):
    dataset = _dataset(case, part)
    truth = META["gpt_dataset"][case]["splits"][SPLIT_NAMES[part]]
    if truth is None:
        assert dataset is None
        return
    key = f"{case}/{SPLIT_NAMES[part]}"
    assert dataset.tokens_per_epoch == truth["tokens_per_epoch"]
    assert len(dataset) == truth["num_samples"] == recorded[f"{key}/len"]
    for name, actual in dataset.index._asdict().items():
        np.testing.assert_array_equal(actual, recorded[f"{key}/{name}"], err_msg=name)
    for number, tokens in enumerate(recorded[f"{key}/tokens"]):
        sample = dataset[number]
        np.testing.assert_array_equal(sample["tokens"], tokens)
        for name in ("tokens", "labels", "loss_mask"):
            expected = recorded[f"{key}/{name}"][number]
            np.testing.assert_array_equal(sample[name], expected)
            assert sample[name].dtype == expected.dtype


@pytest.mark.parametrize("part", range(3), ids=SPLIT_NAMES)
def test_resets_at_document_ends_equal_the_reference(part, recorded):
    dataset, key = _dataset("A_resets", part), f"A_resets/{SPLIT_NAMES[part]}"
    for number, positions in enumerate(recorded[f"{key}/position_ids"]):
        np.testing.assert_array_equal(dataset[number]["position_ids"], positions)
        assert dataset[number]["position_ids"].dtype == positions.dtype
    hidden = recorded[f"{key}/attention_mask"][:, 0]
    assert len(hidden) > 0
    for number, expected in enumerate(hidden):
        segments = dataset[number]["segment_ids"]
        visible = (segments[:, None] == segments[None]) & np.tri(len(segments), dtype=bool)
        np.testing.assert_array_equal(~visible, expected)


BLENDS = META["blend"]


def _blended(case):
    asked = BLENDS[case]
    weights = None if asked["weights"] is None else tuple(asked["weights"])
    blend = Blend(tuple(str(DATA / prefix) for prefix in asked["prefixes"]), weights)
    return build_gpt_datasets(
        blend,
        vocab_size=EOD + 1,
        seq_len=SEQ_LEN,
        seed=SEED,
        split=asked["split"],
        num_samples=tuple(asked["sizes"]),
    )


@pytest.mark.parametrize("part", [0, 1], ids=["train", "valid"])
@pytest.mark.parametrize("case", BLENDS)
def test_blend_equals_the_reference_in_order_and_samples(case, part):
    dataset, truth = _blended(case)[part], BLENDS[case]["splits"][SPLIT_NAMES[part]]
    assert len(dataset) == truth["size"]
    assert [len(one) for one in dataset.datasets] == truth["per_dataset_len"]
    with np.load(DATA / "blend.npz") as recorded:
        for name, actual in dataset.index._asdict().items():
            expected = recorded[f"{case}/{SPLIT_NAMES[part]}/{name}"]
            assert actual.dtype == expected.dtype
            np.testing.assert_array_equal(actual, expected)
        tokens = recorded[f"{case}/{SPLIT_NAMES[part]}/tokens"]
    np.testing.assert_array_equal(dataset.batch(np.arange(len(tokens)))["tokens"], tokens)


def test_part_of_a_blend_with_weight_zero_is_none():
    assert all(_blended(case)[2] is None for case in BLENDS)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("helper_w127", lambda: build_blend_index(normalised([0.1, 0.2, 0.7]), 50)),
        ("helper_exh_5_8_17", lambda: build_exhaustive_blend_index([5, 8, 17])),
    ],
)
def test_blend_order_equals_the_reference_helpers(name, index):
    with np.load(DATA / "blend.npz") as recorded:
        for field, actual in index()._asdict().items():
            np.testing.assert_array_equal(actual, recorded[f"{name}/{field}"])


@pytest.mark.parametrize(
    ("weights", "datasets", "samples"),
    [
        ([0.3, 0.7], [1, 0, 1, 1, 0, 1, 1, 0, 1, 1], [0, 0, 1, 2, 1, 3, 4, 2, 5, 6]),
        ([0.5, 0.3, 0.2], [0, 1, 2, 0, 1, 0, 2, 0, 1, 0], None),
        (None, [0, 1, 2, 0, 1, 0, 2, 0, 1, 0], None),
    ],
)
def test_golden_blend_of_ten_samples(weights, datasets, samples):
    index = build_exhaustive_blend_index([5, 3, 2]) if weights is None else build_blend_index(normalised(weights), 10)
    assert index.dataset_index.tolist() == datasets
    assert samples is None or index.dataset_sample_index.tolist() == samples


def test_golden_sizes_of_a_blend_with_the_surplus():
    found = [samples_per_corpus(normalised([0.3, 0.7]), size) for size in (1000, 100, 10)]
    assert found == [[302, 704], [31, 71], [4, 8]]


GOLDEN_SIZES = np.array([5, 7, 3, 9, 4, 6, 8, 2, 5, 7], dtype=np.int32)


def _golden_index(num_samples):
    return build_gpt_index(GOLDEN_SIZES, 0, 9, num_samples, 8, 1234)


def test_golden_index_of_one_epoch():
    index = _golden_index(4)
    assert index.document_index.tolist() == [8, 2, 1, 0, 7, 4, 5, 6, 3]
    assert index.sample_index.tolist() == [[0, 0], [2, 0], [3, 1], [5, 2], [7, 0], [8, 0], [8, 8]]
    assert index.shuffle_index.tolist() == [0, 4, 3, 2, 5, 1]


def test_golden_index_of_two_epochs_keeps_the_final_one_apart():
    index = _golden_index(8)
    assert index.document_index.tolist() == [8, 2, 1, 0, 7, 4, 5, 6, 3, 6, 4, 0, 5, 3, 2, 8, 7, 1]
    assert index.sample_index.tolist() == [
        [0, 0], [2, 0], [3, 1], [5, 2], [7, 0], [8, 0], [8, 8],
        [9, 7], [11, 3], [13, 0], [13, 8], [15, 4], [17, 5],
    ]  # fmt: skip
    assert index.shuffle_index.tolist() == [1, 4, 3, 0, 5, 2, 9, 10, 8, 7, 6, 11]


def test_golden_index_of_four_epochs():
    index = _golden_index(20)
    assert len(index.document_index) == 4 * 9
    assert index.shuffle_index.tolist() == [
        6, 9, 0, 5, 8, 15, 4, 7, 10, 13, 14, 11, 1, 12, 17, 2, 3, 16, 20, 19, 21, 18, 22, 23,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("num_sequences", "ranges"),
    [
        (1000, ((0, 949), (949, 999), (999, 1000))),
        (100, ((0, 95), (95, 100), (100, 100))),
        (10, ((0, 9), (9, 10), (10, 10))),
        (4096, ((0, 3887), (3887, 4092), (4092, 4096))),
    ],
)
def test_golden_split_bounds(num_sequences, ranges):
    assert split_ranges("949,50,1", num_sequences) == ranges


SAMPLERS = json.loads((DATA / "samplers.json").read_text())
# A last partial batch is always dropped here.
SAMPLER_CASES = [name for name in SAMPLERS if "droplastFalse" not in name]


@pytest.mark.parametrize("name", SAMPLER_CASES)
def test_sampler_hands_each_rank_the_recorded_ids(name):
    kind = re.fullmatch(r"(\w+)/total(\d+)_consumed(\d+)_mb(\d+)_dp(\d+)_(\w+)/rank(\d+)", name).groups()
    total, consumed, micro, dp, rank = (int(kind[at]) for at in (1, 2, 3, 4, 6))
    if kind[0] == "cyclic":
        order = CyclicOrder(total, micro, dp, sharded=kind[5] == "shardingTrue")
    else:
        order = SequentialOrder(total)
    # One micro-batch per global batch: the reference's sampler knows no larger unit.
    positions = [
        rank_sample_ids(first, micro * dp, micro, dp, rank)[0]
        for first in range(consumed, consumed + len(SAMPLERS[name]) * micro * dp, micro * dp)
    ]
    assert [order.ids(batch).tolist() for batch in positions] == SAMPLERS[name]
    if kind[0] == "sequential":
        assert order.num_batches(consumed, micro * dp) == len(SAMPLERS[name])
