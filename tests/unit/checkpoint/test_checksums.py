"""Checksums: of arrays the formula, on every mesh, and different after every change; of files those of XXH3-128."""

import itertools
from pathlib import Path
from typing import Any

import checkpoint_support as support
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xxhash

from jmegatron.checkpoint.checksums import (
    array_checksums,
    as_text,
    checksum_text,
    file_checksum,
    region_checksum,
    text_checksum,
)

FACTORS = (0x85EBCA77, 0xFC9A0351, 0x129074A7, 0x757EFFA1)
"""The odd number of each dim. Recorded: others would make every checkpoint that was ever written a damaged one."""


def mixed(x: np.ndarray) -> np.ndarray:
    """MurmurHash3's finalizer (Appleby, fmix32), on uint64 below 2^32."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x ^ (x >> 16)


def formula(value: np.ndarray) -> str:
    """The checksum by the formula of the module's docstring, in 64-bit integers."""
    size = value.dtype.itemsize
    bits = np.ascontiguousarray(value).reshape(value.shape).view(f"u{min(size, 4)}").astype(np.uint64)
    if size == 8:
        bits = bits.reshape(*value.shape, 2)
    place = np.zeros(bits.shape, np.uint64)
    for dim, length in enumerate(bits.shape):
        index = np.arange(length, dtype=np.uint64).reshape(-1, *[1] * (bits.ndim - dim - 1))
        place = (place + index * FACTORS[dim]) & 0xFFFFFFFF
    place = mixed(place)
    first = mixed(bits ^ place)
    second = mixed(first ^ place)
    return "".join(f"{int(part.sum()) & 0xFFFFFFFF:08x}" for part in (first, second))


def checksums(arrays: dict[str, Any]) -> dict[str, str]:
    return dict(zip(sorted(arrays), as_text(array_checksums(arrays)), strict=True))


@pytest.fixture(scope="module")
def checksum() -> Any:
    return lambda value: checksums({"one": jnp.asarray(value)})["one"]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 2), (1, 8)])
def test_an_arrays_checksum_is_the_formula_on_every_mesh_and_dtype(rows: int, columns: int) -> None:
    values = {
        **support.values(),
        "empty": np.zeros((4, 0), np.float32),
        "four dims": np.arange(16, dtype=np.float32).reshape(2, 2, 2, 2),
    }
    placed = {
        name: jax.device_put(values[name], a.sharding) for name, a in support.layout(rows, columns, values).items()
    }
    assert checksums(placed) == {name: formula(value) for name, value in values.items()}


@pytest.mark.parametrize("name", [*support.values(), "64 bits"])
def test_the_regions_of_an_array_add_up_to_the_formula_on_the_host_wherever_it_is_cut(name: str) -> None:
    value = {**support.values(), "64 bits": np.random.default_rng(3).normal(size=(6, 5))}[name]
    parts = []
    cuts = [sorted({0, size // 3, size // 2, size}) for size in value.shape]
    for corner in itertools.product(*[itertools.pairwise(at) for at in cuts]):
        region = np.asarray(value[tuple(slice(begin, end) for begin, end in corner)])
        parts.append(region_checksum(region, [begin for begin, _ in corner]))
    assert checksum_text(parts) == formula(value)


def test_a_region_of_many_megabytes_has_the_checksum_of_its_rows() -> None:
    """It is gone through in blocks."""
    value = np.arange(9 << 19, dtype=np.int32).reshape(9, -1)
    rows = [region_checksum(value[row : row + 1], [row + 7, 5]) for row in range(9)]
    assert checksum_text([region_checksum(value, [7, 5])]) == checksum_text(rows)
    assert checksum_text([region_checksum(value, [0, 0])]) == formula(value)


def test_elements_of_64_bits_count_as_two(checksum: Any) -> None:
    value = np.random.default_rng(0).integers(-(2**62), 2**62, (3, 5))
    with jax.enable_x64(True):
        assert checksum(value) == formula(value)
        assert checksum(value.view(np.float64)) == formula(value)


def test_a_checksum_stays_what_it_was_when_this_was_written(checksum: Any) -> None:
    assert checksum(np.arange(6, dtype=np.float32).reshape(2, 3)) == "f43344cc611c1bad"


def test_200_random_flipped_bits_all_change_the_checksum_and_both_its_halves(checksum: Any) -> None:
    value = support.values()["parameters/layers"]
    before = checksum(value)
    random = np.random.default_rng(1)
    for _ in range(200):
        bits = value.copy().view(np.uint32)
        bits.reshape(-1)[random.integers(value.size)] ^= np.uint32(1 << random.integers(32))
        after = checksum(bits.view(np.float32))
        assert after[:8] != before[:8]
        assert after[8:] != before[8:]


def test_two_elements_or_rows_that_change_places_change_the_checksum(checksum: Any) -> None:
    value = support.values()["parameters/kernel"]
    before = checksum(value)
    random = np.random.default_rng(2)
    for _ in range(50):
        other = value.copy()
        a, b = random.choice(value.size, 2, replace=False)
        other.reshape(-1)[[a, b]] = other.reshape(-1)[[b, a]]
        assert checksum(other) != before
    for axis in range(2):
        assert checksum(np.roll(value, 1, axis)) != before
        assert checksum(np.flip(value, axis)) != before


@pytest.mark.parametrize("shape", [(512, 1024), (8192, 40), (12, 128, 256), (32, 8, 8, 64)])
def test_no_two_elements_of_an_array_have_the_same_position(shape: tuple[int, ...]) -> None:
    """Two such could change places unseen. (The factors are those of the code: see the formula above.)"""
    place = np.zeros(shape, np.uint32)
    for dim, index in enumerate(np.ogrid[*map(slice, shape)]):
        place += index.astype(np.uint32) * np.uint32(FACTORS[dim])
    assert len(np.unique(place)) == place.size


def test_a_transposed_array_has_another_checksum(checksum: Any) -> None:
    value = support.values()["optimizer/half"]
    assert value.shape == value.T.shape
    assert checksum(value.T) != checksum(value)


@pytest.mark.parametrize(
    ("one", "other"), [(0.0, -0.0), (np.float32(np.nan), np.uint32(0x7FC00001).view(np.float32)), (1e-45, 0.0)]
)
def test_values_that_compare_alike_or_round_alike_have_checksums_of_their_own(
    one: float, other: float, checksum: Any
) -> None:
    assert checksum(np.full(4, one, np.float32)) != checksum(np.array([one, one, other, one], np.float32))


@pytest.mark.parametrize("size", [0, 1, 1000, (4 << 20) + 5])
@pytest.mark.parametrize("sync", [False, True])
def test_a_files_checksum_is_the_xxh3_128_of_its_bytes(size: int, sync: bool, tmp_path: Path) -> None:
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "file").write_bytes(content)
    assert file_checksum(tmp_path / "file", sync=sync) == xxhash.xxh3_128_hexdigest(content)


def test_a_texts_checksum_is_that_of_its_utf_8() -> None:
    assert text_checksum("weights: größer") == xxhash.xxh3_128_hexdigest("weights: größer".encode())


def test_a_files_checksum_refuses_links_and_folders_and_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to("file")
    for name in ("link", ".", "missing"):
        with pytest.raises(OSError, match=f"{tmp_path}"):
            file_checksum(tmp_path / name)
