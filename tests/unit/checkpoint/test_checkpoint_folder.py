"""CheckpointFolder: what goes in comes out, on any sharding; what is wrong is named."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmegatron.checkpoint.manager import CheckpointFolder
from jmegatron.errors import UsageError

POSITION = {"updates": 2, "samples": 16}
META = {
    "step": 3,
    "consumed_samples": 24,
    "schedule_position": POSITION,
    "config": "model: {}",
    "versions": {"jax": "0"},
}


def sharding(rows: int, columns: int, spec: PartitionSpec) -> NamedSharding:
    devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
    return NamedSharding(Mesh(devices, ("rows", "columns")), spec)


def state(place: NamedSharding | None = None) -> dict[str, Any]:
    place = place or sharding(2, 2, PartitionSpec("rows", "columns"))
    whole = sharding(2, 2, PartitionSpec())
    return {
        "kernel": jax.device_put(np.arange(32, dtype=np.float32).reshape(4, 8) / 7, place),
        "half": jax.device_put(jnp.arange(5, dtype=jnp.bfloat16) / 3, whole),
        "step": jax.device_put(jnp.int32(3), whole),
        "none": None,
    }


def abstract(tree: Any, place: NamedSharding | None = None) -> Any:
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place if place and a.ndim == 2 else a.sharding), tree
    )


def save(path: Path, *steps: int) -> None:
    with CheckpointFolder(str(path), option="save") as folder:
        for step in steps:
            folder.save(step, state(), META)


def reader(path: Path) -> CheckpointFolder:
    return CheckpointFolder(str(path), option="load", read_only=True)


def test_what_is_restored_is_bit_equal_with_dtypes_and_none(tmp_path: Path) -> None:
    save(tmp_path, 3)
    with reader(tmp_path) as folder:
        assert folder.latest_step() == 3
        assert folder.read_meta(3) == META
        got = folder.restore(3, abstract(state()))
    assert got["none"] is None
    for name in ("kernel", "half", "step"):
        assert got[name].dtype == state()[name].dtype
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(state()[name]))


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 1), (1, 8), (2, 4)])
def test_a_state_goes_to_another_mesh(rows: int, columns: int, tmp_path: Path) -> None:
    save(tmp_path, 3)
    place = sharding(rows, columns, PartitionSpec("rows", "columns"))
    with reader(tmp_path) as folder:
        got = folder.restore(3, abstract(state(), place))["kernel"]
    assert got.sharding == place
    np.testing.assert_array_equal(np.asarray(got), np.asarray(state()["kernel"]))


def test_arrays_may_be_deleted_as_soon_as_save_returns(tmp_path: Path) -> None:
    """The next step donates them while the files are still being written."""
    live = state()
    with CheckpointFolder(str(tmp_path), option="save") as folder:
        folder.save(3, live, META)
        for leaf in jax.tree.leaves(live):
            leaf.delete()
    with reader(tmp_path) as folder:
        got = folder.restore(3, abstract(state()))
    np.testing.assert_array_equal(np.asarray(got["kernel"]), np.asarray(state()["kernel"]))


def test_reading_creates_nothing(tmp_path: Path) -> None:
    with reader(tmp_path / "missing") as folder:
        assert folder.latest_step() is None
    assert not (tmp_path / "missing").exists()


def test_the_newest_complete_step_counts_and_half_written_ones_do_not(tmp_path: Path) -> None:
    save(tmp_path, 3, 10)
    (tmp_path / "11.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with reader(tmp_path) as folder:
        assert folder.latest_step() == 10


def test_a_leaf_of_another_shape_is_named(tmp_path: Path) -> None:
    save(tmp_path, 3)
    wanted = abstract(state())
    wanted["kernel"] = jax.ShapeDtypeStruct((4, 16), np.float32, sharding=wanted["kernel"].sharding)
    with (
        reader(tmp_path) as folder,
        pytest.raises(UsageError, match=r"kernel is float32\[4, 8\], expected float32\[4, 16\]; fix: "),
    ):
        folder.restore(3, wanted)


def test_a_leaf_of_another_dtype_is_not_cast_silently(tmp_path: Path) -> None:
    save(tmp_path, 3)
    wanted = abstract(state())
    wanted["kernel"] = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16, sharding=wanted["kernel"].sharding)
    with reader(tmp_path) as folder, pytest.raises(UsageError, match=r"kernel is float32\[4, 8\], expected bfloat16"):
        folder.restore(3, wanted)


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_a_leaf_too_many_or_too_few_is_named(change: str, tmp_path: Path) -> None:
    save(tmp_path, 3)
    wanted = abstract(state())
    if change == "more":
        wanted["another"] = wanted["kernel"]
    else:
        del wanted["kernel"]
    name = "another" if change == "more" else "kernel"
    with reader(tmp_path) as folder, pytest.raises(UsageError, match=rf"--load .*step 3 .*{name}"):
        folder.restore(3, wanted)


@pytest.mark.parametrize("missing", ["config", "consumed_samples"])
def test_meta_without_what_a_resume_needs_is_refused(missing: str, tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "3" / "meta" / "metadata").write_text(json.dumps({k: v for k, v in META.items() if k != missing}))
    with reader(tmp_path) as folder, pytest.raises(UsageError, match=missing):
        folder.read_meta(3)


def test_without_a_position_every_step_is_taken_for_an_update_of_what_was_consumed(tmp_path: Path) -> None:
    save(tmp_path, 3)
    old = {name: value for name, value in META.items() if name != "schedule_position"}
    (tmp_path / "3" / "meta" / "metadata").write_text(json.dumps(old))
    with reader(tmp_path) as folder:
        assert folder.read_meta(3)["schedule_position"] == {"updates": 3, "samples": 24}


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file, expected a folder"):
        reader(tmp_path / "file")


def test_a_save_that_fails_in_the_background_is_a_usage_error_when_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 3)
    folder = CheckpointFolder(str(tmp_path), option="save")

    def full() -> None:
        raise ValueError("No space left on device")

    with monkeypatch.context() as patch:
        manager = folder._manager
        patch.setattr(manager, "wait_until_finished", full)
        with pytest.raises(
            UsageError, match=r"--save .*No space left on device; the last complete one is step 3; fix: "
        ):
            folder.close()
    assert manager is not None
    manager.close()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("consumed_samples", -5, "consumed_samples is -5"),
        ("consumed_samples", 3.7, "consumed_samples is 3.7"),
        ("schedule_position", {**POSITION, "updates": 2.5}, "updates is 2.5"),
        ("schedule_position", {"updates": 2}, "samples"),
        ("step", 4, "meta file step 4"),
    ],
)
def test_meta_that_cannot_be_true_is_refused(key: str, value: Any, said: str, tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / "3" / "meta" / "metadata").write_text(json.dumps({**META, key: value}))
    with reader(tmp_path) as folder, pytest.raises(UsageError, match=said):
        folder.read_meta(3)
