"""Placing global batches: which rows a process needs, where they land, and what the step makes of them."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from training_runs import MODEL

from jmegatron.config import load_config
from jmegatron.data.borders import Borders
from jmegatron.data.gpt_dataset import GPTDataset
from jmegatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from jmegatron.data.loader import build_global_batch
from jmegatron.data.sampler import rank_sample_ids
from jmegatron.mesh import build_mesh
from jmegatron.training.batches import Batch, BatchPlacer, CompactBatch, compact_shardings, expand, needed_rows
from jmegatron.training.program import build_program, resolve_for_run
from jmegatron.training.samples import build_data


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_process_needs_the_rows_of_its_ranks(rank):
    # 3 ranks, micro-batches of 2, 2 of them in a step; the process holds two devices of one rank.
    index = (slice(None), slice(2 * rank, 2 * rank + 2))
    assert needed_rows([index, index], 2, 6).tolist() == rank_sample_ids(0, 12, 2, 3, rank).ravel().tolist()


class _Half:
    """A sharding of which only rank `rank` lies in this process."""

    def __init__(self, sharding, rank):
        self.sharding, self.rank = sharding, rank

    def addressable_devices_indices_map(self, shape):
        indices = self.sharding.addressable_devices_indices_map(shape)
        return dict(sorted(indices.items(), key=lambda item: item[1][1].start or 0)[self.rank :: 2])


ALL_FIELDS = CompactBatch(*[True] * len(dataclasses.fields(CompactBatch)))


def _shardings(sharding):
    return jax.tree.map(lambda _: sharding, ALL_FIELDS)


def _arrays(rows):
    text = np.arange(12 * 6, dtype=np.uint16).reshape(12, 6)[rows]
    return {"text": text, "loss_mask": text[:, 1:] % 2 == 0, "sample_ids": rows.astype(np.uint32)}


def test_batch_lands_micro_batch_major():
    mesh = Mesh(np.array(jax.devices()[:2]), ("dp",))
    placer = BatchPlacer(_shardings(NamedSharding(mesh, PartitionSpec(None, "dp"))), 3, 4)
    assert placer.rows.tolist() == list(range(12))
    arrays = _arrays(placer.rows)
    batch = placer(arrays)
    text = np.arange(72).reshape(3, 4, 6)
    np.testing.assert_array_equal(batch.text, text)
    np.testing.assert_array_equal(batch.loss_mask, text[..., 1:] % 2 == 0)
    assert (batch.text.dtype, batch.loss_mask.dtype) == (np.uint16, np.bool_)
    assert batch.text.addressable_shards[1].index[1] == slice(2, 4)
    del arrays["loss_mask"]
    assert placer(arrays).loss_mask is None


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_one_process_are_found_by_their_place_in_the_global_batch(rank, monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:2]), ("dp",))
    half = _Half(NamedSharding(mesh, PartitionSpec(None, "dp")), rank)
    placer = BatchPlacer(_shardings(half), 3, 4)
    assert placer.rows.tolist() == rank_sample_ids(0, 12, 2, 2, rank).ravel().tolist()
    asked = {}

    def from_callback(shape, sharding, callback):
        index = (slice(None), slice(2 * rank, 2 * rank + 2), slice(1, 4))[: len(shape)]
        part = callback(index)
        asked.setdefault(shape, part)
        return jax.numpy.asarray(part)

    monkeypatch.setattr(jax, "make_array_from_callback", from_callback)
    placer(_arrays(placer.rows))
    np.testing.assert_array_equal(asked[3, 4, 6], np.arange(72).reshape(3, 4, 6)[:, 2 * rank : 2 * rank + 2, 1:4])
    np.testing.assert_array_equal(asked[3, 4], np.arange(12).reshape(3, 4)[:, 2 * rank : 2 * rank + 2])


@pytest.mark.parametrize(
    "names",
    [("sample_ids",), ("text",), ("tokens", "sample_ids"), ("text", "tokens", "labels", "sample_ids"), ("text", "ids")],
)
def test_arrays_that_make_no_batch_are_refused(names):
    mesh = Mesh(np.array(jax.devices()[:1]), ("dp",))
    placer = BatchPlacer(_shardings(NamedSharding(mesh, PartitionSpec(None, "dp"))), 1, 2)
    with pytest.raises(ValueError, match=r"batch arrays: got .* expected sample_ids, text"):
        placer({name: np.zeros((2, 3), np.int32) for name in names})


# ---- expansion ----------------------------------------------------------------------------------------------------
EVERYTHING = Borders(3, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)


@pytest.mark.parametrize(("dtype", "most"), [(np.uint16, 65_536), (np.int32, 2**31 - 1)])
@pytest.mark.parametrize(("borders", "pad_token"), [(Borders(), -1), (EVERYTHING, -1), (Borders(), 5), (EVERYTHING, 5)])
def test_expansion_on_the_devices_equals_the_plain_arrays(tmp_path, dtype, most, borders, pad_token):
    rng = np.random.default_rng(0)
    with IndexedDatasetBuilder(tmp_path / "c", dtype) as builder:
        # Small ids, so that ends and padding occur, and some of the largest.
        tokens = np.where(rng.random(400) < 0.8, rng.integers(0, 9, 400), rng.integers(most - 100, most, 400))
        builder.add_document(tokens)
        builder.finalize()
    corpus = IndexedDataset(tmp_path / "c")
    dataset = GPTDataset(corpus, (0, 1), None, 8, 1234, vocab_size=most, borders=borders, pad_token=pad_token)
    mesh = build_mesh(jax.devices()[:4], dp=2, tp=2)
    placer = BatchPlacer(compact_shardings(ALL_FIELDS, mesh), 3, 4)
    placed = placer(build_global_batch(dataset, 12, 12))
    assert placed.text.dtype == dtype
    assert (placed.loss_mask is None) == (borders.run_on and pad_token == -1)
    got, expected = jax.jit(expand)(placed), dataset.batch(np.arange(12, 24))
    expected["sample_ids"] = np.arange(12, 24, dtype=np.uint32)
    for field in dataclasses.fields(Batch):
        values = getattr(got, field.name)
        if field.name not in expected:
            assert values is None
            continue
        np.testing.assert_array_equal(values, expected[field.name].reshape(values.shape), strict=True)


def test_samples_with_labels_of_their_own_keep_them():
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 99, (4, 5)).astype(np.int32) for name in ("tokens", "labels")}
    arrays |= {"loss_mask": rng.random((4, 5)).astype(np.float32), "sample_ids": np.arange(4, dtype=np.uint32)}
    placer = BatchPlacer(compact_shardings(ALL_FIELDS, build_mesh(jax.devices()[:2], dp=2)), 2, 2)
    got = jax.jit(expand)(placer(arrays))
    for name, values in arrays.items():
        np.testing.assert_array_equal(getattr(got, name), values.reshape(2, 2, *values.shape[1:]), strict=True)


def test_an_expanded_batch_stays_as_it_is():
    batch = Batch(*[np.zeros((1, 2, 3), np.int32)] * 3, np.zeros((1, 2), np.uint32))
    assert expand(batch) is batch


@pytest.mark.parametrize("options", ["", "--vocab-size 70000 --padded-vocab-size 70016"])
def test_the_options_tell_what_a_batch_looks_like(options):
    config, tokenizer = resolve_for_run(load_config([*MODEL, *f"--train-iters 2 --mock-data {options}".split()]), 4)
    program = build_program(config, jax.devices()[:4])
    source = build_data(config, tokenizer)[0]
    batch = program.put(build_global_batch(source, 0, 8, rows=program.placer.rows))
    shape = lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding)  # noqa: E731
    assert jax.tree.map(shape, batch) == jax.tree.map(shape, program.abstract_batch())
