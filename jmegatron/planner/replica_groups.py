"""Which devices a collective joins, and over which mesh axes: the spellings of XLA's device groups.

No communication. XLA prints groups in four ways: `{{0,1},{2,3}}`, `[2,4]<=[8]` (an iota reshaped),
`[4,2]<=[2,4]T(1,0)` (the same, transposed first) and `mesh['dp'=2,'tp'=4] {'tp'}` (newest JAX). A device is counted by
its place in the mesh, row-major, which is also its partition number in the program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

from jmegatron.planner.hlo_text import split_top_level

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"(?:@?\w+\s*=\s*)?mesh\[([^\]]*)\](.*?)\s*\{([^}]*)\}\s*$")
_DEVICE_IDS = re.compile(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)")
_SUB_AXIS = re.compile(r"'?([^':]+)'?(?::\((\d+)\)(\d+))?$")


def parse_groups(text: str, num_devices: int) -> Groups:
    """Groups of device numbers of a `replica_groups` attribute; no groups at all means one with every device.

    Raises:
        ValueError: the spelling is not known.
    """
    text = text.strip()
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if iota := _IOTA.fullmatch(text):
        return _iota_groups(*iota.groups())
    if not text.startswith("{"):
        raise ValueError(f"HLO text: unknown spelling of replica groups {text[:80]!r}")
    groups = tuple(_integers(part) for part in split_top_level(text[1:-1]))
    return groups if groups else (tuple(range(num_devices)),)


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Pairs (source, target) of a `source_target_pairs` attribute."""
    pairs = [_integers(part) for part in split_top_level(text.strip()[1:-1])]
    return tuple((pair[0], pair[1]) for pair in pairs)


def axes_of_groups(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    """Names of the mesh axes, in mesh order, whose product the groups are exactly; None when there is no such set.

    An axis of size 1 is never named. Groups of one device give an empty tuple.

    Raises:
        ValueError: a device number lies outside the mesh.
    """
    axes = _varying_axes(([group[0], other] for group in groups for other in group), mesh_shape)
    expected = math.prod(mesh_shape[axis] for axis in axes)
    num_devices = math.prod(mesh_shape.values())
    complete = len(groups) * expected == num_devices and len({d for g in groups for d in g}) == num_devices
    return axes if complete and all(len(set(group)) == expected for group in groups) else None


def axes_of_pairs(pairs: Iterable[tuple[int, int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the mesh axes, in mesh order, along which some pair moves data.

    Raises:
        ValueError: a device number lies outside the mesh.
    """
    return _varying_axes((list(pair) for pair in pairs), mesh_shape)


def _varying_axes(pairs: Iterable[list[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Axes on which the two devices of some pair differ."""
    table = np.asarray(sorted({(low, high) for low, high in pairs}), dtype=np.int64).reshape(-1, 2)
    num_devices = math.prod(mesh_shape.values())
    if table.size and table.max() >= num_devices:
        raise ValueError(f"device {table.max()} of the program lies outside the mesh {dict(mesh_shape)}")
    coordinates = np.unravel_index(table, tuple(mesh_shape.values()))
    return tuple(
        axis for axis, where in zip(mesh_shape, coordinates, strict=True) if (where[:, 0] != where[:, 1]).any()
    )


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _iota_groups(shape: str, reshape: str, transpose: str | None) -> Groups:
    devices = np.arange(math.prod(_integers(reshape))).reshape(_integers(reshape))
    if transpose is not None:
        devices = devices.transpose(_integers(transpose))
    return tuple(tuple(row) for row in devices.reshape(_integers(shape)).tolist())


def _mesh_groups(text: str) -> Groups:
    match = _MESH.match(text)
    if match is None:
        raise ValueError(f"HLO text: unknown spelling of replica groups {text[:80]!r}")
    sizes = {part.split("=")[0].strip(" '"): int(part.split("=")[1]) for part in match.group(1).split(",")}
    dims: list[int] = []  # each axis is cut into (before, grouped, after)
    grouped: list[int] = []
    cuts = {name: (before, size) for name, before, size in map(_sub_axis, split_top_level(match.group(3)))}
    for axis, size in sizes.items():
        before, inside = cuts.get(axis, (1, 1))
        inside = inside or size
        dims += [before, inside, size // (before * inside)]
        grouped += [len(dims) - 2] if axis in cuts else []
    order = _device_order(match.group(2).strip().strip(","), math.prod(dims))
    devices = np.moveaxis(order.reshape(dims), grouped, range(-len(grouped), 0))
    group_size = math.prod(dims[axis] for axis in grouped)
    return tuple(tuple(row) for row in devices.reshape(-1, group_size).tolist())


def _device_order(text: str, num_devices: int) -> np.ndarray:
    """Devices of a mesh in its own row-major order: `device_ids=([2,4]T(1,0))`, or 0, 1, ... when nothing is said."""
    if not text:
        return np.arange(num_devices)
    match = _DEVICE_IDS.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"HLO text: unknown spelling of a device order {text[:80]!r} in replica groups")
    devices = np.arange(num_devices).reshape(_integers(match.group(1)))
    return devices.transpose(_integers(match.group(2))).reshape(-1) if match.group(2) else devices.reshape(-1)


def _sub_axis(text: str) -> tuple[str, int, int]:
    """Axis, the size before the part of it that is meant, and the size of the part (0 = the whole axis)."""
    match = _SUB_AXIS.match(text.strip())
    if match is None:
        raise ValueError(f"HLO text: unknown mesh axis {text!r} in replica groups")
    return match.group(1), int(match.group(2) or 1), int(match.group(3) or 0)
