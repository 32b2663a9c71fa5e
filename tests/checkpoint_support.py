"""Small checkpoints for tests: arrays of every kind that a training state holds, at any mesh."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmegatron.checkpoint import reader
from jmegatron.checkpoint.writer import CheckpointWriter

POSITION = {"updates": 2, "samples": 16}


def meta(step: int = 3) -> dict[str, Any]:
    """What a run writes beside the arrays."""
    return {
        "step": step,
        "consumed_samples": 8 * step,
        "schedule_position": POSITION,
        "config": "model: {}",
        "versions": {"jax": "0"},
        "random_keys": {"dropout": [1, 2]},
    }


def sharding(rows: int, columns: int, *entries: Any) -> NamedSharding:
    """A sharding over rows x columns devices."""
    devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
    return NamedSharding(Mesh(devices, ("rows", "columns")), PartitionSpec(*entries))


def values(seed: int = 0) -> dict[str, np.ndarray]:
    """Bits of all patterns: NaNs, infinities and denormal numbers as well."""
    random = np.random.default_rng(seed)

    def bits(dtype: Any, *shape: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize
        return random.integers(0, 256, (*shape, size), np.uint8).view(dtype).reshape(shape)

    return {
        "parameters/kernel": bits(np.float32, 16, 24),
        "parameters/layers": bits(np.float32, 3, 8, 16),
        "parameters/odd": bits(np.float32, 13, 7),
        "optimizer/half": bits(jnp.bfloat16, 8, 8),
        "optimizer/scale": bits(np.float16, 5),
        "optimizer/count": bits(np.int32),
        "optimizer/bytes": bits(np.uint8, 16),
        "finite": np.array([True, False, True]),
        "step": np.int32(3).reshape(()),
    }


def layout(rows: int, columns: int, of: dict[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    """Each of the last two dims is divided where it can be; what cannot be divided lies whole on every device."""

    def entries(shape: tuple[int, ...]) -> list[str | None]:
        pairs = zip(shape[-2:], ("rows", "columns")[-len(shape) :], (rows, columns)[-len(shape) :], strict=False)
        own = [axis if size % count == 0 else None for size, axis, count in pairs]
        return [None] * (len(shape) - len(own)) + own

    return {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding(rows, columns, *entries(value.shape)))
        for name, value in of.items()
    }


def arrays(rows: int = 4, columns: int = 2, seed: int = 0) -> dict[str, jax.Array]:
    """The values on devices."""
    own = values(seed)
    return {name: jax.device_put(own[name], a.sharding) for name, a in layout(rows, columns, own).items()}


def save(folder: Path, *steps: int) -> None:
    """Saves steps, each with values of its own (its number is the seed)."""
    writer = CheckpointWriter(str(folder))
    for step in steps:
        writer.save(step, arrays(seed=step), meta(step))
    writer.wait()
    assert [(o.step, o.problem) for o in writer.outcomes()] == [(step, "") for step in steps]


def bits_of(value: Any) -> tuple[Any, tuple[int, ...], bytes]:
    """What two arrays have in common if, and only if, they are equal bit for bit."""
    value = np.asarray(value)
    return value.dtype, value.shape, value.tobytes()


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compares arrays by name, bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert bits_of(found[name]) == bits_of(value), name


def assert_restores(folder: Path, step: int, rows: int = 1, columns: int = 1) -> None:
    """The newest whole step of the folder is this one, and holds what `save` wrote."""
    checkpoint, _ = reader.find(str(folder))
    assert checkpoint is not None
    assert checkpoint.step == step
    assert_equal(checkpoint.read(layout(rows, columns, values())), values(step))


def names(folder: Path) -> list[str]:
    """What lies in a folder, in order."""
    return sorted(entry.name for entry in folder.iterdir())


def files(step: Path) -> list[Path]:
    """All files of a step."""
    return sorted(path for path in step.rglob("*") if path.is_file())
