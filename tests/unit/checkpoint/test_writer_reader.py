"""CheckpointWriter and the reader: what goes in comes out, on any sharding, whatever happens; which step counts."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import checkpoint_support as support
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmegatron.checkpoint import reader, steps, writer
from jmegatron.checkpoint.manifest import ArrayRecord
from jmegatron.checkpoint.writer import CheckpointWriter, Retention
from jmegatron.errors import UsageError


def newest(folder: Path) -> Any:
    return reader.find(str(folder))[0]


def file_in(step: Path) -> Path:
    """A file of the payload."""
    return max((path for path in support.files(step)), key=lambda path: path.stat().st_size)


def damage(step: Path) -> str:
    """Changes one bit of the payload and returns the file's path in the step."""
    path = file_in(step)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return path.relative_to(step).as_posix()


# ---- what goes in comes out ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("saved_at", [(4, 2), (1, 1), (1, 8)])
def test_what_is_read_is_bit_equal_at_every_other_sharding(saved_at: tuple[int, int], tmp_path: Path) -> None:
    """Among the arrays: dims that no mesh divides, all dtypes, scalars, NaNs with all their bits."""
    save = CheckpointWriter(str(tmp_path))
    save.save(3, support.arrays(*saved_at), support.meta())
    save.wait()
    assert [o.problem for o in save.outcomes()] == [""]
    checkpoint = newest(tmp_path)
    for rows, columns in [(1, 1), (2, 2), (4, 1), (1, 8), (2, 4), (8, 1)]:
        wanted = support.layout(rows, columns, support.values())
        found = checkpoint.read(wanted)
        support.assert_equal(found, support.values())
        assert {name: a.sharding for name, a in found.items()} == {name: a.sharding for name, a in wanted.items()}


def test_each_devices_shard_is_the_part_of_the_whole_that_belongs_there(tmp_path: Path) -> None:
    support.save(tmp_path, 3)
    found = newest(tmp_path).read(support.layout(2, 4, support.values()))
    for name, whole in support.values(3).items():
        for shard in found[name].addressable_shards:
            assert support.bits_of(shard.data) == support.bits_of(whole[shard.index]), name


def test_some_of_the_arrays_can_be_read_without_the_others(tmp_path: Path) -> None:
    support.save(tmp_path, 3)
    wanted = {name: a for name, a in support.layout(2, 2, support.values()).items() if name.startswith("parameters/")}
    found = newest(tmp_path).read(wanted)
    support.assert_equal(found, {name: support.values(3)[name] for name in wanted})


def test_arrays_come_in_the_dtype_that_was_saved_whatever_is_asked_for(tmp_path: Path) -> None:
    support.save(tmp_path, 3)
    wanted = support.layout(2, 2, support.values())
    asked = {name: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=a.sharding) for name, a in wanted.items()}
    support.assert_equal(newest(tmp_path).read(asked), support.values(3))


def test_meta_and_records_come_back_as_they_were_given(tmp_path: Path) -> None:
    support.save(tmp_path, 3)
    manifest = newest(tmp_path).manifest
    assert manifest.meta == support.meta()
    shapes = {name: (record.dtype, record.shape) for name, record in manifest.arrays.items()}
    assert shapes == {name: (str(value.dtype), value.shape) for name, value in support.values().items()}
    assert set(manifest.files) == {
        path.relative_to(tmp_path / "3").as_posix() for path in support.files(tmp_path / "3" / "state")
    }


def test_a_step_holds_its_manifest_and_its_state_alone_and_the_folder_steps_alone(tmp_path: Path) -> None:
    support.save(tmp_path, 3, 10)
    assert support.names(tmp_path) == ["10", "3"]
    assert support.names(tmp_path / "3") == ["manifest.json", "state"]


# ---- in the background --------------------------------------------------------------------------------------------
def test_arrays_deleted_as_soon_as_save_returns_were_saved(tmp_path: Path) -> None:
    save = CheckpointWriter(str(tmp_path))
    for step in range(1, 6):
        live = support.arrays(seed=step)
        save.save(step, live, support.meta(step))
        for array in live.values():
            array.delete()
    save.wait()
    assert [(o.step, o.problem) for o in save.outcomes()] == [(step, "") for step in range(1, 6)]
    for step in range(1, 6):
        checkpoint, _ = reader.find(str(tmp_path), step=step)
        assert checkpoint is not None
        support.assert_equal(checkpoint.read(support.layout(2, 2, support.values())), support.values(step))


@pytest.mark.parametrize("rows_columns", [(1, 1), (4, 2)])
def test_donated_arrays_overwritten_while_they_are_written_were_saved(
    rows_columns: tuple[int, int], tmp_path: Path
) -> None:
    """On CPUs the host's copy could be the very memory that the next step writes to."""
    place = support.sharding(*rows_columns, "rows", "columns")
    live = {"step": jax.device_put(np.arange(1 << 18, dtype=np.int32).reshape(512, 512), place)}
    update = jax.jit(lambda tree: jax.tree.map(lambda a: a * 3 + 1, tree), donate_argnums=0)
    save = CheckpointWriter(str(tmp_path))
    expected = {}
    host = np.arange(1 << 18, dtype=np.int32).reshape(512, 512)
    for step in range(1, 6):
        expected[step] = host
        save.save(step, live, support.meta(step))
        for number in range(3):
            before, live = live, update(live)
            assert before["step"].is_deleted() or number == 0  # what the host still looks at is not given away
            host = host * np.int32(3) + np.int32(1)
        jax.block_until_ready(live)
    save.wait()
    assert not any(o.problem for o in save.outcomes())
    for step, value in expected.items():
        checkpoint, _ = reader.find(str(tmp_path), step=step)
        assert checkpoint is not None
        found = checkpoint.read({"step": jax.ShapeDtypeStruct((512, 512), np.int32, sharding=place)})
        support.assert_equal(found, {"step": value})


def test_save_returns_before_the_step_is_there_in_the_background_and_after_it_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    finish = writer.finish_writing

    def held(folder: Path) -> None:
        assert go_on.wait(60)
        finish(folder)

    monkeypatch.setattr(writer, "finish_writing", held)
    save = CheckpointWriter(str(tmp_path))
    save.save(3, support.arrays(), support.meta())
    assert save.outcomes() == []
    assert support.names(tmp_path) == ["3.tmp"]
    go_on.set()
    save.wait()
    assert [o.step for o in save.outcomes()] == [3]
    assert support.names(tmp_path) == ["3"]
    save = CheckpointWriter(str(tmp_path), in_background=False)
    save.save(4, support.arrays(), support.meta(4))
    assert [o.step for o in save.outcomes()] == [4]
    assert support.names(tmp_path) == ["3", "4"]


def test_a_save_waits_for_the_one_before_and_each_outcome_is_told_once(tmp_path: Path) -> None:
    save = CheckpointWriter(str(tmp_path))
    for step in (1, 2, 3):
        save.save(step, support.arrays(), support.meta(step))
    assert {o.step for o in save.outcomes()} >= {1, 2}
    save.wait()
    assert {o.step for o in save.outcomes()} <= {3}
    assert save.outcomes() == []
    assert support.names(tmp_path) == ["1", "2", "3"]


def test_saving_leaves_no_threads_behind(tmp_path: Path) -> None:
    support.save(tmp_path, 1)
    before = threading.active_count()
    support.save(tmp_path, 2, 3, 4)
    assert threading.active_count() <= before


# ---- which steps stay ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("retention", "there"),
    [
        (Retention(), [1, 2, 3, 4, 8, 9, 10]),
        (Retention(latest=2), [9, 10]),
        (Retention(latest=1, every=4), [4, 8, 10]),
        (Retention(latest=100), [1, 2, 3, 4, 8, 9, 10]),
    ],
)
def test_the_steps_that_stay_are_the_latest_and_those_that_every_divides(
    retention: Retention, there: list[int], tmp_path: Path
) -> None:
    save = CheckpointWriter(str(tmp_path), retention=retention)
    for step in (1, 2, 3, 4, 8, 9, 10):
        save.save(step, support.arrays(), support.meta(step))
    save.wait()
    assert support.names(tmp_path) == sorted(map(str, there))
    removed = [step for o in save.outcomes() for step in o.removed]
    assert sorted(removed + there) == [1, 2, 3, 4, 8, 9, 10]
    assert newest(tmp_path).step == 10


def test_retention_counts_and_removes_complete_steps_alone(tmp_path: Path) -> None:
    support.save(tmp_path, 1, 5)
    (tmp_path / "7").mkdir()
    (tmp_path / "3.damaged").mkdir()
    (tmp_path / "notes").write_text("mine")
    save = CheckpointWriter(str(tmp_path), retention=Retention(latest=2))
    save.save(9, support.arrays(), support.meta(9))
    save.wait()
    assert [o.removed for o in save.outcomes()] == [(1,)]
    assert support.names(tmp_path) == ["3.damaged", "5", "7", "9", "notes"]


def test_a_removal_that_is_interrupted_leaves_no_step_and_the_others_go_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support.save(tmp_path, 1, 2)
    rmtree = shutil.rmtree

    def half(path: Path, **options: Any) -> None:
        if path.name.startswith("1."):
            support.files(path)[-1].unlink()
            raise OSError("Device or resource busy")
        rmtree(path, **options)

    save = CheckpointWriter(str(tmp_path), retention=Retention(latest=1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        save.save(3, support.arrays(), support.meta(3))
        save.wait()
    assert [(o.problem, o.removed) for o in save.outcomes()] == [("", (2,))]
    assert support.names(tmp_path) == ["1.removing", "3"]
    assert steps.all_steps(tmp_path) == [3]
    assert steps.tidy(tmp_path) == ["1.removing"]
    assert support.names(tmp_path) == ["3"]


def test_tidy_removes_what_was_left_half_done_and_nothing_else(tmp_path: Path) -> None:
    support.save(tmp_path, 3)
    for name in ("5.tmp", "4.removing", "6.damaged", "x.tmp", "07.tmp", "8.tmp.old"):
        (tmp_path / name / "state").mkdir(parents=True)
    (tmp_path / "9.tmp").write_text("a file")
    (tmp_path / "10.tmp").symlink_to("3", target_is_directory=True)
    left = support.names(tmp_path)
    assert steps.tidy(tmp_path) == ["4.removing", "5.tmp"]
    assert support.names(tmp_path) == [name for name in left if name not in ("4.removing", "5.tmp")]
    assert steps.tidy(tmp_path / "missing") == []
    assert newest(tmp_path).step == 3


def test_what_a_killed_save_of_the_same_step_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "3.tmp" / "state" / "d").mkdir(parents=True)
    (tmp_path / "3.tmp" / "state" / "d" / "old").write_text("old")
    support.save(tmp_path, 3)
    support.assert_restores(tmp_path, 3)
    assert not (tmp_path / "3" / "state" / "d" / "old").exists()


def test_a_step_without_a_manifest_is_set_aside_when_it_is_saved_again(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / "3").mkdir()
        (tmp_path / "3" / f"of {number}").write_text("mine")
        support.save(tmp_path, 3)
        support.assert_restores(tmp_path, 3)
        if number < 2:
            shutil.rmtree(tmp_path / "3")
    assert support.names(tmp_path) == ["3", "3.damaged", "3.damaged-2", "3.damaged-3"]
    assert support.names(tmp_path / "3.damaged-2") == ["of 1"]


class Killed(BaseException):
    """Ends a save where it stands, as SIGKILL does: nothing of the package catches it."""


def test_killed_before_any_change_of_the_folder_a_save_leaves_the_old_step_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each fsync, rename and removal in turn, until a save comes through; with --keep-latest 1."""
    source = tmp_path / "source"
    support.save(source, 5)
    (source / "8").mkdir()  # was left without a manifest, and is set aside on the way
    left = set()
    for kill_at in range(1000):
        folder = tmp_path / str(kill_at)
        shutil.copytree(source, folder)
        calls = 0

        def counted(real: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > kill_at:  # noqa: B023
                    raise Killed
                return real(*arguments, **options)

            return call

        save = CheckpointWriter(str(folder), in_background=False, retention=Retention(latest=1))
        with monkeypatch.context() as patch:
            for name in ("fsync", "rename", "rmdir"):
                patch.setattr(os, name, counted(getattr(os, name)))
            try:
                save.save(8, support.arrays(seed=8), support.meta(8))
            except Killed:
                pass
            else:
                assert support.names(folder) == ["8", "8.damaged"]
                break
        checkpoint, _ = reader.find(str(folder))
        assert checkpoint is not None
        left.add(checkpoint.step)
        steps.tidy(folder)
        assert set(support.names(folder)) <= {"5", "8", "8.damaged"}
        support.assert_restores(folder, checkpoint.step)
        shutil.rmtree(folder)
    assert left == {5, 8}
    assert kill_at > 20


# ---- which step counts --------------------------------------------------------------------------------------------
def test_the_newest_step_by_number_counts(tmp_path: Path) -> None:
    support.save(tmp_path, 10, 9, 2)
    support.assert_restores(tmp_path, 10)


def test_what_is_not_called_as_a_run_calls_it_is_no_step(tmp_path: Path) -> None:
    support.save(tmp_path, 3)
    for name in ("007", "03", "abc", "5.tmp", "6.damaged", "7.removing", "-8", "+9", "1e3", " 11", "१२", "1" * 20):
        shutil.copytree(tmp_path / "3", tmp_path / name)
    assert steps.all_steps(tmp_path) == [3]
    checkpoint, passed = reader.find(str(tmp_path))
    assert checkpoint is not None
    assert (checkpoint.step, passed) == (3, [])


def test_what_is_called_like_a_step_and_is_none_is_passed_over_and_said(tmp_path: Path) -> None:
    support.save(tmp_path, 3)
    (tmp_path / "12").write_text("a file")
    (tmp_path / "13").mkdir()
    shutil.copytree(tmp_path / "3", tmp_path / "14")
    (tmp_path / "15").symlink_to("3", target_is_directory=True)
    (tmp_path / "16").symlink_to("nowhere")
    said: list[str] = []
    checkpoint, passed = reader.find(str(tmp_path), say=said.append)
    assert checkpoint is not None
    assert checkpoint.step == 3
    assert passed == [16, 15, 14, 13, 12]
    reasons = [
        "it is a symbolic link",
        "it is a symbolic link",
        "manifest.json: the folder says step 14, the manifest step 3",
        "it is not complete: no manifest.json",
        "manifest.json cannot be read: NotADirectoryError",
    ]
    for line, number, reason in zip(said, passed, reasons, strict=True):
        assert f"WARNING: --load {tmp_path}: step {number} cannot be used and is passed over: {reason}" in line


def test_damaged_steps_are_passed_over_and_step_and_file_are_said(tmp_path: Path) -> None:
    support.save(tmp_path, 3, 5, 8)
    five, eight = damage(tmp_path / "5"), file_in(tmp_path / "8")
    eight.unlink()
    said: list[str] = []
    checkpoint, passed = reader.find(str(tmp_path), say=said.append)
    assert checkpoint is not None
    assert (checkpoint.step, passed) == (3, [8, 5])
    assert [line.partition(": step ")[2] for line in said] == [
        f"8 cannot be used and is passed over: {eight.relative_to(tmp_path / '8').as_posix()} is missing",
        f"5 cannot be used and is passed over: {five} is damaged: its checksum does not fit",
    ]


def test_a_whole_step_is_taken_without_a_word(tmp_path: Path) -> None:
    support.save(tmp_path, 3, 5)
    damage(tmp_path / "3")
    said: list[str] = []
    checkpoint, passed = reader.find(str(tmp_path), say=said.append)
    assert checkpoint is not None
    assert (checkpoint.step, passed, said) == (5, [], [])


def test_where_no_step_is_whole_it_stops_and_names_each(tmp_path: Path) -> None:
    support.save(tmp_path, 3)
    path = damage(tmp_path / "3")
    (tmp_path / "4").mkdir()
    with pytest.raises(UsageError) as caught:
        reader.find(str(tmp_path))
    said = str(caught.value)
    assert "step 4: it is not complete: no manifest.json" in said
    assert f"step 3: {path} is damaged" in said
    assert "; fix: " in said


def test_a_step_that_is_asked_for_is_that_one_or_none(tmp_path: Path) -> None:
    support.save(tmp_path, 3, 5, 8)
    checkpoint, passed = reader.find(str(tmp_path), step=3)
    assert checkpoint is not None
    assert (checkpoint.step, passed) == (3, [])
    with pytest.raises(UsageError, match=r"--ckpt-step 4: no such step in --load .*; it holds 3, 5, 8; fix: "):
        reader.find(str(tmp_path), step=4)
    path = damage(tmp_path / "5")
    with pytest.raises(UsageError, match=rf"checkpoint of step 5 cannot be restored .*{path} is damaged.*; fix: "):
        reader.find(str(tmp_path), step=5)


def test_reading_creates_nothing_and_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert reader.find(str(tmp_path / "missing")) == (None, [])
    assert reader.find(str(tmp_path)) == (None, [])
    with pytest.raises(UsageError, match=r"--ckpt-step 3: no such step in --load .*it holds none"):
        reader.find(str(tmp_path / "missing"), step=3)
    assert support.names(tmp_path) == []


def test_reading_changes_nothing(tmp_path: Path) -> None:
    support.save(tmp_path, 3, 5)
    damage(tmp_path / "5")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in support.files(tmp_path)}
    support.assert_restores(tmp_path, 3)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in support.files(tmp_path)} == before


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--load .*file: is a file, expected a folder; fix: "):
        reader.find(str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"--pretrained .*file: is a file"):
        reader.find(str(tmp_path / "file"), option="pretrained")


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    support.save(tmp_path, 3)
    (tmp_path).chmod(0)
    as_root = os.geteuid() == 0
    try:
        if as_root:  # who may read everything
            os.seteuid(65534)
        with pytest.raises(UsageError, match=r"cannot be read: .*Permission denied.*; fix: check its permissions"):
            reader.find(str(tmp_path))
    finally:
        if as_root:
            os.seteuid(0)
        tmp_path.chmod(0o700)


def test_a_path_that_no_file_system_takes_is_refused() -> None:
    with pytest.raises(UsageError, match=r"cannot be read: .*too long.*; fix: "):
        reader.find("/tmp/" + "x" * 300)


# ---- does it fit --------------------------------------------------------------------------------------------------
def test_arrays_that_are_missing_too_many_or_of_another_shape_are_named() -> None:
    place = support.sharding(1, 1)
    records = {
        "a": ArrayRecord("float32", (4, 8), ""),
        "b": ArrayRecord("int32", (), ""),
        "c": ArrayRecord("f", (2,), ""),
    }
    layout = {
        "a": jax.ShapeDtypeStruct((4, 16), np.float32, sharding=place),
        "c": jax.ShapeDtypeStruct((2,), np.int8, sharding=place),
        "d": jax.ShapeDtypeStruct((3,), np.float32, sharding=place),
    }
    assert reader.differences(records, layout) == [
        "a is [4, 8], expected [4, 16]",
        "b [] is not part of this run",
        "d is missing, expected [3]",
    ]
    assert reader.differences(records, {}) != []
    assert reader.differences({}, {}) == []
