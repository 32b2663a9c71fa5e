"""The mesh's rank order against process groups recorded from the reference's RankGenerator."""

import json

import jax
import numpy as np
import pytest
from golden.megatron_weights import DATA

from jmegatron.errors import ConfigError
from jmegatron.mesh import AXES, batch_spec, build_mesh, rank_coordinates

GROUPS = json.loads((DATA / "tables" / "rank_groups.json").read_text())


def degrees(key: str) -> dict[str, int]:
    """Degrees of a key like "tp2_cp1_ep2_dp4_pp1_ORDER"."""
    return {part[:2]: int(part[2:]) for part in key.split("_")[:5]}


def mesh_of_numbers(**sizes: int):
    """A mesh over plain numbers: rank r at place r."""
    count = int(np.prod(list(sizes.values())))
    return build_mesh(list(range(count)), **sizes)


def groups_along(mesh, axes: set[str]) -> list[list[int]]:
    """Ranks that differ in `axes` only."""
    groups: dict[tuple, list[int]] = {}
    for rank in range(mesh.devices.size):
        rest = tuple(value for axis, value in rank_coordinates(mesh, rank).items() if axis not in axes)
        groups.setdefault(rest, []).append(rank)
    return sorted(groups.values())


@pytest.mark.parametrize("key", GROUPS)
def test_ranks_that_share_an_axis_are_the_recorded_groups(key):
    """The recorded grids with ep > 1 are those of expert parameters, whose dp is ours: ranks with equal experts."""
    mesh = mesh_of_numbers(**degrees(key))
    assert {"tp", "dp", "pp"} < GROUPS[key].keys()
    for name, groups in GROUPS[key].items():
        assert groups_along(mesh, set(name.split("-"))) == sorted(groups), name


@pytest.mark.parametrize("sizes", [dict(pp=2, dp=2, ep=2, cp=2, tp=2), dict(dp=4, tp=2), dict(pp=3, cp=5)])
def test_coordinates_count_tp_fastest_and_pp_slowest(sizes):
    mesh = mesh_of_numbers(**sizes)
    assert mesh.axis_names == AXES == ("pp", "dp", "ep", "cp", "tp")
    shape = dict(mesh.shape)
    for rank in range(mesh.devices.size):
        place = rank_coordinates(mesh, rank)
        number = 0
        for axis in AXES:
            number = number * shape[axis] + place[axis]
        assert number == rank == mesh.devices[tuple(place.values())]


def test_expert_parallel_ranks_are_the_neighbours_within_data_parallelism():
    """parity.md section 5, world 16 with ep 4 and pp 2: expert groups 0-3, 4-7, .., their dp [0, 4], [1, 5], .."""
    mesh = mesh_of_numbers(pp=2, dp=2, ep=4)
    assert groups_along(mesh, {"ep"}) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert groups_along(mesh, {"dp"})[:2] == [[0, 4], [1, 5]]


def test_a_batch_lies_over_dp_and_ep_in_whole_sequences():
    mesh = build_mesh(jax.devices()[:8], dp=2, ep=2, cp=2)
    placed = jax.device_put(np.arange(3 * 4 * 6).reshape(3, 4, 6), jax.NamedSharding(mesh, batch_spec(None)))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(3, 1, 6)}


def test_degrees_that_do_not_make_up_the_devices_stop_with_all_numbers():
    with pytest.raises(ConfigError, match=r"1 x 2 x 1 x 1 x 3 = 6, but there are 4 devices"):
        build_mesh(list(range(4)), dp=2, tp=3)


def test_a_degree_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"every degree must be at least 1.*'tp': 0"):
        build_mesh(list(range(4)), dp=4, tp=0)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_mesh_is_refused(rank):
    with pytest.raises(IndexError, match=rf"rank {rank} is outside 0\.\.3"):
        rank_coordinates(mesh_of_numbers(dp=4), rank)
