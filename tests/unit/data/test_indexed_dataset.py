"""The corpus format: round trips, every kind of damage, names that appear only whole, offsets beyond 32 bits."""

import io
import itertools
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmegatron.data.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    best_dtype,
    idx_path,
    sequence_pointers,
    write_index,
)
from jmegatron.errors import DataFileError


def _write(prefix, documents, dtype=np.uint16):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
        builder.finalize()


@pytest.fixture
def prefix(tmp_path):
    _write(tmp_path / "corpus", [[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    return tmp_path / "corpus"


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_round_trip_in_every_integer_type(tmp_path, dtype):
    _write(tmp_path / "c", [[1, 2, 3], [], [4]], dtype)
    corpus = IndexedDataset(tmp_path / "c")
    assert corpus.dtype == np.dtype(dtype)
    assert [corpus.get(i).tolist() for i in range(len(corpus))] == [[1, 2, 3], [4]]
    assert corpus.document_indices.tolist() == [0, 1, 1, 2]


def test_document_of_several_sequences_keeps_their_borders(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "c", np.int32) as builder:
        builder.add_document([1, 2, 3, 4, 5], lengths=[2, 0, 3])
        builder.finalize()
    corpus = IndexedDataset(tmp_path / "c")
    assert [corpus.get(i).tolist() for i in range(3)] == [[1, 2], [], [3, 4, 5]]
    assert corpus.document_indices.tolist() == [0, 3]


def test_get_returns_a_part_read_only(prefix):
    corpus = IndexedDataset(prefix)
    assert corpus.get(2, offset=1, length=2).tolist() == [7, 8]
    assert corpus.get(2, offset=4).tolist() == []
    with pytest.raises(ValueError, match="read-only"):
        corpus.get(0)[0] = 5


@pytest.mark.parametrize(
    ("index", "offset", "length"), [(3, 0, None), (-1, 0, None), (0, 4, None), (0, 1, 3), (0, -1, 1)]
)
def test_get_outside_the_corpus_is_an_index_error(prefix, index, offset, length):
    with pytest.raises(IndexError, match="corpus"):
        IndexedDataset(prefix).get(index, offset, length)


def test_corpus_without_any_token_can_be_opened(tmp_path):
    _write(tmp_path / "empty", [])
    assert len(IndexedDataset(tmp_path / "empty")) == 0


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "uint16"), (65499, "uint16"), (65500, "int32"), (128256, "int32")]
)
def test_best_dtype_has_the_cut_of_the_reference(vocab_size, dtype):
    assert best_dtype(vocab_size) == np.dtype(dtype)


# ------------------------------------------------------------------------------------------------- beyond 32 bits


def test_pointers_beyond_32_bits_are_exact(tmp_path):
    lengths = np.array([1_500_000_000, 10, 3], dtype=np.int32)
    assert sequence_pointers(lengths, 2).tolist() == [0, 3_000_000_000, 3_000_000_020]
    assert sequence_pointers(lengths, 4).tolist() == [0, 6_000_000_000, 6_000_000_040]
    # more tokens, not only bytes, than 32 bits count
    assert sequence_pointers(np.full(3, 1_500_000_000, dtype=np.int32), 2).tolist() == [0, 3_000_000_000, 6_000_000_000]
    with open(tmp_path / "large.idx", "wb") as file:
        write_index(file, np.uint16, lengths, np.arange(4))
    with open(tmp_path / "large.bin", "wb") as file:  # holes take no room on the disk
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))
        file.seek(3_000_000_020)
        file.write(np.array([7, 8, 9], dtype="<u2").tobytes())
    corpus = IndexedDataset(tmp_path / "large")
    assert corpus.get(2).tolist() == [7, 8, 9]
    assert corpus.get(1).tolist() == [0] * 10


# --------------------------------------------------------------------------------------------------------- damage


def _patch(path, offset, raw):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(raw)] = raw
    path.write_bytes(content)


HEADER, LENGTHS, POINTERS, MARKS = 0, 34, 34 + 12, 34 + 12 + 24

DAMAGES = {
    "foreign magic": (HEADER, b"PK\x03\x04", "not an indexed dataset"),
    "other version": (9, struct.pack("<Q", 2), "format version 2, expected 1"),
    "unknown dtype code": (17, b"\x09", "dtype code 9"),
    "dtype code of another width": (17, b"\x04", "starts at byte 6.*expected byte 12"),
    "sequence count too large": (
        18,
        struct.pack("<Q", 2**63),
        "expected .* bytes for the 9223372036854775808 sequences",
    ),
    "sequence count too small": (18, struct.pack("<Q", 2), "for the 2 sequences"),
    "no document marks": (26, struct.pack("<Q", 0), "0 document marks"),
    "negative length": (LENGTHS, struct.pack("<i", -3), "sequence 0 has length -3"),
    "wrong length": (LENGTHS + 4, struct.pack("<i", 9), "sequence 2 starts at byte 10"),
    "wrong last length": (LENGTHS + 8, struct.pack("<i", 5), "shorter than its index says.*got 18 bytes, expected 20"),
    "wrong pointer": (POINTERS + 8, struct.pack("<q", 8), "sequence 1 starts at byte 8"),
    "marks do not start at 0": (MARKS, struct.pack("<q", 1), "document marks run from 1 to 3"),
    "marks do not end at the last sequence": (MARKS + 24, struct.pack("<q", 9), "document marks run from 0 to 9"),
    "marks fall": (MARKS + 8, struct.pack("<q", 3), "document marks"),
    "marks whose differences overflow": (MARKS + 8, struct.pack("<qq", 2**63 - 1, -(2**63)), "document marks"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_index_is_refused_with_one_clear_message(prefix, damage):
    offset, raw, message = DAMAGES[damage]
    path = prefix.with_name("corpus.idx")
    _patch(path, offset, raw)
    with pytest.raises(DataFileError, match=f"(?s)corpus.*{message}"):
        IndexedDataset(prefix)


def test_index_cut_anywhere_is_refused(prefix):
    path = prefix.with_name("corpus.idx")
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(DataFileError, match=r"corpus\.idx"):
            IndexedDataset(prefix)


def test_index_with_modes_of_a_multimodal_corpus_is_read(prefix):
    path = prefix.with_name("corpus.idx")
    path.write_bytes(path.read_bytes() + bytes(3))
    assert len(IndexedDataset(prefix)) == 3


@pytest.mark.parametrize(("change", "message"), [(-2, "is shorter"), (2, "is longer")])
def test_token_file_of_another_size_is_refused(prefix, change, message):
    path = prefix.with_name("corpus.bin")
    os.truncate(path, path.stat().st_size + change)
    with pytest.raises(DataFileError, match=f"corpus.bin {message} than its index says"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_missing_file_is_named(prefix, ending):
    path = prefix.with_name(f"corpus.{ending}")
    path.unlink()
    with pytest.raises(DataFileError, match=f"corpus.{ending} does not exist"):
        IndexedDataset(prefix)


def test_prefix_with_an_ending_gets_a_hint(prefix):
    with pytest.raises(DataFileError, match=r"leave out the ending: .*corpus$"):
        IndexedDataset(f"{prefix}.bin")


# -------------------------------------------------------------------------------------------------------- writing


def test_nothing_carries_the_final_name_before_finalize(tmp_path):
    builder = IndexedDatasetBuilder(tmp_path / "c", np.uint16)
    builder.add_document([1, 2])
    assert not (tmp_path / "c.bin").exists()
    assert not (tmp_path / "c.idx").exists()
    builder.finalize()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.bin", "c.idx"]


def test_exception_leaves_the_folder_empty(tmp_path):
    def write_half():
        with IndexedDatasetBuilder(tmp_path / "c", np.uint16) as builder:
            builder.add_document([1, 2])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_failed_finalize_leaves_the_older_corpus_alone(prefix, monkeypatch):
    before = IndexedDataset(prefix).get(0).tolist()
    builder = IndexedDatasetBuilder(prefix, np.uint16)
    builder.add_document([9])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jmegatron.data.indexed_dataset.write_index", full)
    with builder, pytest.raises(OSError, match="No space"):
        builder.finalize()
    assert IndexedDataset(prefix).get(0).tolist() == before
    assert sorted(p.name for p in prefix.parent.iterdir()) == ["corpus.bin", "corpus.idx"]


def test_writing_again_replaces_the_corpus(prefix):
    _write(prefix, [[9, 9]], np.int32)
    assert IndexedDataset(prefix).get(0).tolist() == [9, 9]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Corpora in which a token says where it lies, of two integer widths, long and shorter than a block of a gather."""
    corpora = {}
    for dtype, count in itertools.product(("<u2", "<i4"), (3000, 100)):
        prefix = tmp_path_factory.mktemp("gather") / "c"
        with IndexedDatasetBuilder(prefix, np.dtype(dtype)) as builder:
            builder.add_document(np.arange(count), [count])
            builder.finalize()
        corpora[dtype, count] = IndexedDataset(prefix)
    return corpora


SIZES = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000]), st.integers(0, 300))


@given(
    st.sampled_from(["<u2", "<i4"]),
    st.sampled_from([3000, 100]),
    st.lists(st.tuples(SIZES, st.one_of(st.just(1.0), st.floats(0, 1))), max_size=30),
)
@settings(max_examples=300, deadline=None)
def test_gather_equals_slices_one_after_the_other(numbered, dtype, count, pieces):
    corpus = numbered[dtype, count]
    sizes = np.array([min(size, count) for size, _ in pieces], np.int64)
    # 1.0: the piece ends with the file.
    starts = np.array([int(place * (count - size)) for size, (_, place) in zip(sizes, pieces, strict=True)], np.int64)
    got = corpus.gather(starts, starts + sizes)
    expected = [corpus.get(0, start, size) for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    np.testing.assert_array_equal(got, np.concatenate([np.empty(0, dtype), *expected]))
    assert got.dtype == corpus.dtype
    assert got.size == 0 or got.ctypes.data % 64 == 0


@pytest.mark.parametrize("size", [0, 1, 64, 127, 128, 129])
def test_gather_of_every_place_near_the_end_of_the_file_equals_slices(numbered, size):
    corpus = numbered["<u2", 3000]
    for start in range(3000 - 2 * 130, 3000 - size + 1):
        starts = np.array([7, start, start], np.int64)
        stops = starts + np.array([200, size, size])
        expected = [corpus.get(0, 7, 200), *[corpus.get(0, start, size)] * 2]
        np.testing.assert_array_equal(corpus.gather(starts, stops), np.concatenate(expected))


def test_gather_of_many_blocks_equals_slices(tmp_path):
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "c", np.uint16) as builder:
        builder.add_document(rng.integers(0, 65_000, 200_000), [200_000])
        builder.finalize()
    corpus = IndexedDataset(tmp_path / "c")
    sizes = rng.exponential(900, 300).astype(np.int64)  # some 2100 blocks
    starts = rng.integers(0, 200_000 - sizes)
    expected = [corpus.get(0, start, size) for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    np.testing.assert_array_equal(corpus.gather(starts, starts + sizes), np.concatenate(expected))


@pytest.mark.parametrize(("tokens", "lengths"), [([1, 2], [1]), ([1], [2, -1]), ([70000], None), ([-1], None)])
def test_builder_refuses_wrong_sums_and_ids_that_would_wrap(tmp_path, tokens, lengths):
    with (
        IndexedDatasetBuilder(tmp_path / "c", np.uint16) as builder,
        pytest.raises(ValueError, match=r"sum to|do not fit"),
    ):
        builder.add_document(tokens, lengths)


def test_builder_names_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(DataFileError, match=r"cannot write .*missing"):
        IndexedDatasetBuilder(tmp_path / "missing" / "c", np.uint16)


def test_type_without_code_is_refused():
    with pytest.raises(ValueError, match="complex64 has no code"):
        write_index(io.BytesIO(), np.complex64, np.array([1]), np.array([0, 1]))


# ---------------------------------------------------------------------------------------------------------- modes


def _multimodal(prefix):
    with IndexedDatasetBuilder(prefix, np.uint16, multimodal=True) as builder:
        builder.add_document([1, 2, 3], [2, 1], [0, 1])
        builder.add_document([4], None, [-3])
        builder.add_document([5, 6])
        builder.finalize()


def test_modes_follow_the_document_marks_one_byte_a_sequence(tmp_path):
    _multimodal(tmp_path / "m")
    raw = idx_path(tmp_path / "m").read_bytes()
    assert len(raw) == 34 + 4 * (4 + 8) + 8 * 4 + 4
    assert raw[-4:] == bytes([0, 1, 253, 0])
    corpus = IndexedDataset(tmp_path / "m")
    assert corpus.sequence_modes.dtype == np.int8
    assert corpus.sequence_modes.tolist() == [0, 1, -3, 0]
    assert corpus.document_indices.tolist() == [0, 2, 3, 4]


def test_corpus_without_modes_has_none(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "t", np.uint16) as builder:
        builder.add_document([1])
        with pytest.raises(ValueError, match="no multimodal corpus"):
            builder.add_document([1], None, [0])
        builder.finalize()
    assert IndexedDataset(tmp_path / "t").sequence_modes is None


@pytest.mark.parametrize("modes", [[0], [0, 1, 2], [0, 128], [-129, 0]])
def test_modes_that_do_not_fit_are_refused(tmp_path, modes):
    with (
        IndexedDatasetBuilder(tmp_path / "m", np.uint16, multimodal=True) as builder,
        pytest.raises(ValueError, match="expected 2 numbers"),
    ):
        builder.add_document([1, 2], [1, 1], modes)


@pytest.mark.parametrize("cut", [1, 3])
def test_modes_cut_short_are_refused(tmp_path, cut):
    _multimodal(tmp_path / "m")
    path = idx_path(tmp_path / "m")
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataFileError, match="is damaged or cut short"):
        IndexedDataset(tmp_path / "m")
