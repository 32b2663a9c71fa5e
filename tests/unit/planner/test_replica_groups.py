"""Spellings of device groups, and the mesh axes that they stand for."""

import numpy as np
import pytest

from jmegatron.planner.replica_groups import axes_of_groups, axes_of_pairs, parse_groups, parse_pairs

MESH = {"pp": 2, "dp": 3, "ep": 1, "cp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(0,2,1)", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['dp'=2,'tp'=4] {'tp'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['dp'=2,'tp'=4] {'dp'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['pp'=2,'dp'=2,'ep'=1,'tp'=2] {'pp','tp'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([8]) {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['dp'=2,'tp'=4] {'tp':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['dp'=2,'tp'=4] {'tp':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_every_spelling_gives_the_same_groups(text, expected):
    assert parse_groups(text, 8) == expected


@pytest.mark.parametrize("text", ["V3[...]", "mesh['dp'=2,'tp'=4], device_ids=(1,0) {'tp'}", "mesh['dp'=2] {'dp':x}"])
def test_an_unknown_spelling_is_refused(text):
    with pytest.raises(ValueError, match=r"unknown (spelling|mesh axis)"):
        parse_groups(text, 8)


@pytest.mark.parametrize("axes", [("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp"), ("pp", "tp"), tuple(MESH)])
def test_groups_of_whole_axes_are_named(axes):
    grid = np.arange(48).reshape(tuple(MESH.values()))
    positions = [list(MESH).index(axis) for axis in axes]
    groups = np.moveaxis(grid, positions, range(-len(axes), 0)).reshape(-1, int(np.prod([MESH[a] for a in axes])))
    named = tuple(axis for axis in axes if MESH[axis] > 1)
    assert axes_of_groups(tuple(map(tuple, groups.tolist())), MESH) == named


def test_groups_that_are_no_product_of_axes_have_no_name():
    assert axes_of_groups(((0, 1), (2, 3), (4, 5), (6, 7)), {"dp": 2, "tp": 4}) is None  # half of tp
    assert axes_of_groups(((0, 1, 2, 3),), {"dp": 2, "tp": 4}) is None  # only one of the dp ranks
    assert axes_of_groups(((0, 5), (1, 4), (2, 7), (3, 6)), {"dp": 2, "tp": 4}) is None  # diagonal


def test_groups_of_one_device_run_over_no_axis():
    assert axes_of_groups(((0,), (1,)), {"tp": 2}) == ()


def test_pairs_name_the_axes_along_which_they_move():
    mesh = {"pp": 2, "dp": 2, "tp": 2}
    assert axes_of_pairs(parse_pairs("{{0,4},{1,5},{2,6},{3,7}}"), mesh) == ("pp",)
    assert axes_of_pairs(parse_pairs("{{0,1},{1,2},{2,3},{3,0}}"), mesh) == ("dp", "tp")
    assert axes_of_pairs(parse_pairs("{{0,0},{1,1}}"), mesh) == ()


def test_a_device_outside_the_mesh_is_refused():
    with pytest.raises(ValueError, match="device 8"):
        axes_of_pairs(((0, 8),), {"tp": 8})
