"""Placing global batches: which rows a process needs, and that they land where the sampler deals them."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmegatron.data.sampler import rank_sample_ids
from jmegatron.training.batches import BatchPlacer, needed_rows
from jmegatron.training.step import Batch


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


def _abstract(mesh, wrap=lambda sharding: sharding):
    row = NamedSharding(mesh, PartitionSpec(None, "dp"))
    leaf = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=row)  # noqa: E731
    ids = leaf((3, 4), np.uint32)
    return Batch(leaf((3, 4, 5), np.int32), leaf((3, 4, 5), np.int32), leaf((3, 4, 5), np.float32), ids)


def _arrays(rows):
    tokens = np.arange(12 * 5, dtype=np.int32).reshape(12, 5)[rows]
    ones = np.ones((len(rows), 5), np.float32)
    ones.flags.writeable = False
    return {"tokens": tokens, "labels": tokens + 1, "loss_mask": ones, "sample_ids": rows.astype(np.uint32)}


def test_batch_lands_micro_batch_major_and_the_mask_once():
    placer = BatchPlacer(_abstract(Mesh(np.array(jax.devices()[:2]), ("dp",))), 3)
    assert placer.rows.tolist() == list(range(12))
    arrays = _arrays(placer.rows)
    first, second = placer(arrays), placer({**arrays, "tokens": arrays["tokens"] + 7})
    np.testing.assert_array_equal(first.tokens, np.arange(60).reshape(3, 4, 5))
    np.testing.assert_array_equal(second.tokens, np.arange(60).reshape(3, 4, 5) + 7)
    assert first.loss_mask is second.loss_mask
    assert first.tokens.addressable_shards[1].index[1] == slice(2, 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_of_one_process_are_found_by_their_place_in_the_global_batch(rank, monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:2]), ("dp",))
    abstract = _abstract(mesh)
    half = _Half(abstract.sample_ids.sharding, rank)
    placer = BatchPlacer(
        Batch(
            *[
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
                for leaf in (abstract.tokens, abstract.labels, abstract.loss_mask)
            ],
            _Struct((3, 4), half),
        ),
        3,
    )
    assert placer.rows.tolist() == rank_sample_ids(0, 12, 2, 2, rank).ravel().tolist()
    asked = {}

    def from_callback(shape, sharding, callback):
        index = (slice(None), slice(2 * rank, 2 * rank + 2), slice(1, 4))[: len(shape)]
        part = callback(index)
        asked.setdefault(shape, part)
        return jax.numpy.asarray(part)

    monkeypatch.setattr(jax, "make_array_from_callback", from_callback)
    placer(_arrays(placer.rows))
    np.testing.assert_array_equal(asked[3, 4, 5], np.arange(60).reshape(3, 4, 5)[:, 2 * rank : 2 * rank + 2, 1:4])
    np.testing.assert_array_equal(asked[3, 4], np.arange(12).reshape(3, 4)[:, 2 * rank : 2 * rank + 2])


class _Struct:
    def __init__(self, shape, sharding):
        self.shape, self.sharding = shape, sharding
