"""Checksums: of arrays, the same on every mesh, and of files.

An array's checksum is a sum over its elements of a hash of (position, bits), so that each device sums what it holds and
no layout, no file format and no compression changes it:

    p = hash(sum over dims of index * factor^(dim + 1))  of an element's position
    h = hash(bits ^ p)
    checksum = (sum of h, sum of hash(h ^ p))            mod 2^32 each

The hash is a bijection of 32 bits (the finalizer of MurmurHash3): a single element that changes always changes both
sums, several ones miss with 2^-64. Files are hashed with XXH3-128 as they lie on the disk.
"""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

_READ_BYTES = 4 << 20
_FACTOR = 0x85EBCA77
"""Odd. Elements less than 40000 apart in two dims, or 900 in three, never have one position: its powers are that
little related. (Multiples of one number would be: 3 steps along one dim as far as 1 along the next.)"""


# ---- arrays -------------------------------------------------------------------------------------------------------
def array_checksums(arrays: Mapping[str, Array]) -> Array:
    """Returns the checksums, uint32 [arrays, 2] in the order of the names, on every device.

    Communication: one all-reduce of two integers an array over the axes that divide it, added by XLA.
    """
    values = [arrays[name] for name in sorted(arrays)]
    sharding = values[0].sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    return _jitted_checksums(everywhere)(values)


def as_text(checksums: Array) -> list[str]:
    """Returns 16 hexadecimal digits for each checksum; waits for them."""
    return [f"{high:08x}{low:08x}" for high, low in np.asarray(checksums)]


@functools.cache
def _jitted_checksums(everywhere: jax.sharding.Sharding) -> Any:
    return jax.jit(_checksums, out_shardings=everywhere)


def region_checksum(value: np.ndarray, start: Sequence[int]) -> tuple[int, int]:
    """Returns the part of an array's checksum that a region of it makes, on the host; parts are added mod 2^32.

    Args:
      value: elements of the region.
      start: index of its first one in the array, of as many dims as `value`.
    """
    words = _numpy_words(np.ascontiguousarray(value))
    total = np.zeros(2, np.uint64)
    rows = max(1, (1 << 22) // max(words[:1].size, 1)) if words.ndim else 1
    for first in range(0, len(words) if words.ndim else 1, rows):
        block = words[first : first + rows] if words.ndim else words
        position = np.zeros(block.shape, np.uint32)
        for dim, size in enumerate(block.shape):
            offset = (start[dim] if dim < len(start) else 0) + (first if dim == 0 else 0)
            index = (np.arange(size, dtype=np.uint64) + np.uint64(offset)).astype(np.uint32)
            position += (index * np.uint32(_factor(dim))).reshape(-1, *[1] * (block.ndim - dim - 1))
        position = _numpy_mixed(position)
        one = _numpy_mixed(block ^ position)
        two = _numpy_mixed(one ^ position)
        total += np.array([lane.sum(dtype=np.uint64) for lane in (one, two)], np.uint64)
    return int(total[0]) & 0xFFFFFFFF, int(total[1]) & 0xFFFFFFFF


def checksum_text(parts: Iterable[tuple[int, int]]) -> str:
    """Returns the checksum of the array that regions make, as `as_text` writes it."""
    sums = [sum(lane) & 0xFFFFFFFF for lane in zip(*parts, strict=True)]
    return f"{sums[0]:08x}{sums[1]:08x}"


def _numpy_words(value: np.ndarray) -> np.ndarray:
    if value.dtype == np.bool_:
        return value.astype(np.uint32)
    size = value.dtype.itemsize
    bits = value.view(f"uint{min(size, 4) * 8}")
    return (bits.reshape(*value.shape, 2) if size == 8 else bits.reshape(value.shape)).astype(np.uint32)


def _numpy_mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return np.asarray(x ^ (x >> np.uint32(16)), np.uint32)


def _factor(dim: int) -> int:
    return pow(_FACTOR, dim + 1, 1 << 32)


def _checksums(values: list[Array]) -> Array:
    return jnp.stack([_checksum(value) for value in values])


def _checksum(value: Array) -> Array:
    bits = _words(value)
    position = jnp.zeros((), jnp.uint32)
    for dim in range(bits.ndim):
        position = position + jnp.uint32(_factor(dim)) * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    position = _mixed(position)
    first = _mixed(bits ^ position)
    second = _mixed(first ^ position)
    add = lambda a, b: (a[0] + b[0], a[1] + b[1])  # noqa: E731
    # One reduction with two results: ten times as fast on CPUs as two.
    zero = jnp.uint32(0)
    return jnp.stack(jax.lax.reduce((first, second), (zero, zero), add, tuple(range(bits.ndim))))


def _words(value: Array) -> Array:
    """Returns the elements' bits as uint32; elements of 64 bits as two, along a new last dim."""
    if value.dtype == jnp.bool_:
        return value.astype(jnp.uint32)
    size = value.dtype.itemsize
    return jax.lax.bitcast_convert_type(value, f"uint{min(size, 4) * 8}").astype(jnp.uint32)


def _mixed(x: Array) -> Array:
    """Returns a bijection of each uint32 in which every bit depends on every bit (MurmurHash3's finalizer)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


# ---- files --------------------------------------------------------------------------------------------------------
def file_checksum(path: Path, *, sync: bool = False) -> str:
    """Returns the XXH3-128 of a file, 32 hexadecimal digits.

    Args:
      path: the file.
      sync: first bring what was written to it to the disk.

    Raises:
      OSError: it cannot be read; it is a symbolic link.
    """
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    with open(path, "rb", buffering=0, opener=open_itself) as file:
        if sync:
            os.fsync(file.fileno())
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    return hasher.hexdigest()


def open_itself(path: str, flags: int) -> int:
    """Opens (for `open`) no symbolic link, and waits for no other end of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def text_checksum(text: str) -> str:
    """Returns the XXH3-128 of a text in UTF-8, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(text.encode())
