"""Runs that stop and go on: bit for bit, on another mesh, with other options (P5)."""

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tolerances import BF16_RELATIVE, RESUMED_LOSS_RELATIVE
from training_runs import saved_arrays, train, write_corpus

from jmegatron.errors import ConfigError, UsageError
from jmegatron.training.program import Program

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, np.ndarray]]:
    """The rows of every batch that is put on the devices."""
    seen: list[dict[str, np.ndarray]] = []
    original = Program.put

    def put(self: Program, arrays: dict[str, np.ndarray]) -> Any:
        seen.append({name: np.array(rows) for name, rows in arrays.items()})
        return original(self, arrays)

    monkeypatch.setattr(Program, "put", put)
    return seen


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoint of step 3 of 6, dropout off."""
    folder = tmp_path_factory.mktemp("stopped")
    run = train(folder, *NO_DROPOUT, "--exit-interval", "3", "--save", str(folder / "save"))
    assert "exiting at iteration 3" in run.out
    return folder / "save"


# ---- the same run in one piece and in two ---------------------------------------------------------------------------
def corpus_options(folder: Path, *options: str, eod: int | None = None) -> tuple[str, ...]:
    """A corpus of 12 short documents, of which six steps read one and a half epochs, and two for validation."""
    corpus = write_corpus(folder / "corpus", documents=12, eod=eod)
    data = ("--no-mock-data", "--data-path", corpus, "--data-cache-path", str(folder / "index"), "--split", "10,2,0")
    evaluation = ("--eval-interval", "2", "--eval-iters", "1")
    return (*DROPOUT, *data, *evaluation, "--vocab-size", "257", "--padded-vocab-size", "264", *options)


PACKED = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
SKIPPING = ("--fp16", "--initial-loss-scale", str(2**22))


@pytest.mark.parametrize("kind", ["mock", "corpus_bf16", "packed_fp16"])
def test_runs_that_stop_and_go_on_are_the_whole_run_bit_for_bit(kind: str, tmp_path: Path) -> None:
    """Every number of the log, every array on the disk; fp32 after three steps, the others twice in a row."""
    options: tuple[str, ...] = DROPOUT
    if kind == "corpus_bf16":
        options = corpus_options(tmp_path, "--bf16")
    elif kind == "packed_fp16":
        options = corpus_options(tmp_path, *PACKED, *SKIPPING, eod=256)
    every = 3 if kind == "mock" else 2
    whole = train(tmp_path, *options, "--save", str(tmp_path / "whole"), "--save-interval", str(every))
    both = ("--save", str(tmp_path / "parts"), "--load", str(tmp_path / "parts"))
    parts = [train(tmp_path, *options, *both, "--exit-interval", str(every)) for _ in range(6 // every)]
    assert [list(part.steps) for part in parts] == np.arange(1, 7).reshape(-1, every).tolist()
    assert {step: line for part in parts for step, line in part.steps.items()} == whole.steps
    # The end of a run is one more evaluation only for the whole one, and it is the same one.
    assert [line for part in parts for line in part.evaluations] == whole.evaluations
    assert bool(whole.evaluations) == (kind != "mock")
    if kind == "packed_fp16":
        assert 0 < whole.steps[6]["skipped"] < 5
        assert whole.steps[6]["loss_scale"] < 2**22
    for step in range(every, 7, every):
        expected, got = saved_arrays(tmp_path / "whole", step), saved_arrays(tmp_path / "parts", step)
        assert expected.keys() == got.keys()
        assert {str(a.dtype) for name, a in got.items() if not name.startswith("optimizer")} <= {"float32", "int32"}
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)
            assert got[name].dtype == array.dtype
    # Once more from the middle: reading a checkpoint changes nothing in it.
    again = train(tmp_path, *options, *both[2:], "--ckpt-step", str(every))
    assert again.steps == {step: line for step, line in whole.steps.items() if step > every}


def test_a_checkpoint_goes_on_at_another_mesh_with_the_same_samples(
    stopped: Path, tmp_path: Path, batches: list[dict[str, np.ndarray]]
) -> None:
    here = train(tmp_path, *NO_DROPOUT, "--load", str(stopped))
    there = train(
        tmp_path, *NO_DROPOUT, "--load", str(stopped), *["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    )
    assert "mesh: pp 1, dp 2, ep 1, cp 1, tp 2, sequence parallel" in there.out
    assert there.losses[0] == pytest.approx(here.losses[0], rel=RESUMED_LOSS_RELATIVE)
    np.testing.assert_allclose(there.losses, here.losses, rtol=1e-6)
    ids = [batch["sample_ids"] for batch in batches]
    np.testing.assert_array_equal(ids[:3], [np.arange(8) + 8 * step for step in (3, 4, 5)])
    np.testing.assert_array_equal(ids[3:], ids[:3])


def test_a_checkpoint_of_two_data_ranks_goes_on_at_four_with_the_same_samples(
    tmp_path: Path, batches: list[dict[str, np.ndarray]]
) -> None:
    options = (*corpus_options(tmp_path), *NO_DROPOUT, "--eval-iters", "0", "--micro-batch-size", "2")
    save = str(tmp_path / "save")
    whole = train(tmp_path, *options, "--save", save, "--save-interval", "3", devices=2)
    of_two = batches[3:6]
    batches.clear()
    resumed = train(tmp_path, *options, "--load", save, "--ckpt-step", "3", devices=4)
    for two, four in zip(of_two, batches[:3], strict=True):  # a loader may put later ones as well
        assert two.keys() == four.keys() >= {"text", "sample_ids"}
        for name, rows in two.items():
            np.testing.assert_array_equal(four[name], rows)
    assert resumed.losses[0] == pytest.approx(whole.losses[3], rel=RESUMED_LOSS_RELATIVE)


# ---- when checkpoints are written -----------------------------------------------------------------------------------
def test_a_trained_padding_stays_that_of_the_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    folder = str(tmp_path / "save")
    trained = ("--no-mask-padded-vocab", "--padded-vocab-size", "null", "--make-vocab-size-divisible-by", "62")
    padding = (*NO_DROPOUT, *trained, "--save-interval", "3", "--exit-interval", "3")
    assert "padded to 62" in train(tmp_path, *padding, "--save", folder).out
    on = (*NO_DROPOUT, *trained, "--load", folder, "--tensor-model-parallel-size", "2")
    assert "padded to 62" in train(tmp_path, *on).out
    with pytest.raises(ConfigError, match="padded_vocab_size is 128"):
        train(tmp_path, *on, "--padded-vocab-size", "128")


def test_a_padding_that_is_not_trained_follows_the_mesh_and_changes_no_number(stopped: Path, tmp_path: Path) -> None:
    derived = ("--padded-vocab-size", "null", "--make-vocab-size-divisible-by", "62")
    on = (*NO_DROPOUT, "--load", str(stopped))
    here = train(tmp_path, *on)
    wide = train(tmp_path, *on, *derived, "--tensor-model-parallel-size", "2")
    assert "padded to 124" in wide.out
    assert "model.padded_vocab_size" not in wide.out  # it follows from the mesh
    assert wide.losses[0] == pytest.approx(here.losses[0], rel=RESUMED_LOSS_RELATIVE)
    (name,) = (name for name in saved_arrays(stopped, 3) if name.startswith("parameters/embedding/word"))
    assert saved_arrays(stopped, 3)[name].shape == (61, 32)


def test_checkpoints_come_every_save_interval_and_at_the_end(tmp_path: Path) -> None:
    run = train(tmp_path, *NO_DROPOUT, "--save", str(tmp_path / "save"), "--save-interval", "4")
    assert sorted(int(p.name) for p in (tmp_path / "save").iterdir()) == [4, 6]
    assert [line for line in run.out.splitlines() if "saving checkpoint" in line] == [
        f"saving checkpoint at iteration {step} to {tmp_path / 'save'}" for step in (4, 6)
    ]
    again = train(tmp_path, *NO_DROPOUT, "--load", str(tmp_path / "save"))
    assert "nothing to do: step 6 of 6 is already reached" in again.out
    assert not again.metrics


def test_a_save_folder_with_later_steps_is_refused_before_training(stopped: Path, tmp_path: Path) -> None:
    """Else the new run's checkpoint would be dropped, or the next start would resume from the other run's."""
    with pytest.raises(
        UsageError, match=r"--save .*holds a checkpoint of step 3, but this run starts at step 0.*--load"
    ):
        train(tmp_path, *NO_DROPOUT, "--save", str(stopped))


# ---- options that change at the restart -----------------------------------------------------------------------------
OTHER_SCHEDULE = ("--lr", "5e-3", "--lr-decay-style", "constant", "--weight-decay", "0.5")
OVERRIDE = "--override-opt-param-scheduler"


def test_without_override_the_checkpoints_schedules_go_on_and_the_log_says_so(stopped: Path, tmp_path: Path) -> None:
    plain = train(tmp_path, *NO_DROPOUT, "--load", str(stopped))
    run = train(tmp_path, *NO_DROPOUT, "--load", str(stopped), *OTHER_SCHEDULE)
    assert run.steps == plain.steps
    for option, then, now in (
        ("lr", 0.01, 0.005),
        ("lr-decay-style", "linear", "constant"),
        ("weight-decay", 0.01, 0.5),
    ):
        assert (
            f"changed since the checkpoint: --{option} {then}, the checkpoint's, applies, and not {now};"
            f" {OVERRIDE} makes the given one apply\n"
        ) in run.out


def test_with_override_the_given_schedules_apply_and_the_log_says_so(stopped: Path, tmp_path: Path) -> None:
    run = train(tmp_path, *NO_DROPOUT, "--load", str(stopped), *OTHER_SCHEDULE, OVERRIDE)
    for option, then, now in (
        ("lr", 0.01, 0.005),
        ("lr-decay-style", "linear", "constant"),
        ("weight-decay", 0.01, 0.5),
    ):
        assert (
            f"changed since the checkpoint: --{option} {now} applies, for {OVERRIDE} is given (saved with {then})\n"
        ) in run.out
    assert [line["lr"] for line in run.metrics] == pytest.approx([5e-3] * 3)


def test_a_longer_run_decays_over_its_own_length(stopped: Path, tmp_path: Path) -> None:
    """Nobody asked for the six steps of the decay that the first run had; they were the run's."""
    run = train(tmp_path, *NO_DROPOUT, "--load", str(stopped), "--train-iters", "8")
    assert "--lr-decay-iters 8 applies, as long as the run (saved with 6)" in run.out
    assert [line["lr"] for line in run.metrics] == pytest.approx([1e-2 * (1 - step / 8) for step in range(3, 8)])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_precision_may_change_at_a_restart_and_back(precision: str, stopped: Path, tmp_path: Path) -> None:
    here = train(tmp_path, *NO_DROPOUT, "--load", str(stopped))
    save = str(tmp_path / "save")
    half = train(
        tmp_path, *NO_DROPOUT, "--load", str(stopped), f"--{precision}", "--save", save, "--exit-interval", "4"
    )
    assert f"changed since the checkpoint: training.{precision} True applies (saved with False)" in half.out
    assert ("loss scale: none saved, it begins anew" in half.out) == (precision == "fp16")
    assert half.losses[0] == pytest.approx(here.losses[0], rel=BF16_RELATIVE)
    back = train(tmp_path, *NO_DROPOUT, "--load", save)
    assert ("loss scale: that of the checkpoint is not needed" in back.out) == (precision == "fp16")
    assert list(back.steps) == [5, 6]
    before, after = saved_arrays(stopped, 3), saved_arrays(tmp_path / "save", 4)
    assert before.keys() <= after.keys()
    assert {name: (a.dtype, a.shape) for name, a in before.items()} == {
        name: (after[name].dtype, after[name].shape) for name in before
    }


def test_an_unchanged_restart_names_no_change(stopped: Path, tmp_path: Path) -> None:
    assert "changed since" not in train(tmp_path, *NO_DROPOUT, "--load", str(stopped)).out


@pytest.mark.parametrize("size", [4, 16])
def test_consumed_samples_go_on_with_another_global_batch(
    size: int, stopped: Path, tmp_path: Path, batches: list[dict[str, np.ndarray]]
) -> None:
    run = train(tmp_path, *NO_DROPOUT, "--load", str(stopped), "--global-batch-size", str(size))
    assert f"training.global_batch_size {size} applies (saved with 8)" in run.out
    assert [line["consumed_samples"] for line in run.metrics] == [24 + size, 24 + 2 * size, 24 + 3 * size]
    np.testing.assert_array_equal(
        np.concatenate([batch["sample_ids"] for batch in batches]), np.arange(24, 24 + 3 * size)
    )


def reference_rate(num_steps: int) -> float:
    """Learning rate after so many samples, Megatron-LM optimizer_param_scheduler.py: `SCHEDULE` below."""
    if num_steps <= 30:
        return 1e-3 + (1e-2 - 1e-3) * num_steps / 30
    if num_steps > 110:
        return 2e-3
    return 2e-3 + 0.5 * (math.cos(math.pi * (num_steps - 30) / (110 - 30)) + 1.0) * (1e-2 - 2e-3)


SCHEDULE = (
    *("--train-iters", "null", "--train-samples", "240", "--lr-decay-style", "cosine", "--lr", "1e-2"),
    *("--min-lr", "2e-3", "--lr-warmup-init", "1e-3", "--lr-warmup-samples", "30", "--lr-decay-samples", "110"),
)


def test_learning_rate_goes_on_from_the_samples_of_the_updates_done_through_restarts_with_other_batches(
    tmp_path: Path,
) -> None:
    """Megatron-LM training.py:3213: a step adds its batch to num_steps, and one that is skipped does not."""
    both = ("--save", str(tmp_path / "save"), "--load", str(tmp_path / "save"))
    options = (*NO_DROPOUT, *SCHEDULE, *both, "--fp16", "--initial-loss-scale", str(2**19))
    num_steps, lost, skipped = 0, 0, 0
    for size, last in ((8, 6), (4, 8), (12, 16)):
        run = train(tmp_path, *options, "--global-batch-size", str(size), "--exit-interval", str(last))
        for line in run.metrics:
            assert line["lr"] == pytest.approx(reference_rate(num_steps), rel=1e-6, abs=0)
            was_skipped, skipped = line["skipped"] > skipped, line["skipped"]
            num_steps, lost = num_steps + size * (not was_skipped), lost + size * was_skipped
        assert line["step"] == last
    assert 0 < skipped < 5
    assert num_steps > 110  # past the end of the decay
    assert line["consumed_samples"] == num_steps + lost


# ---- steps that cannot be used --------------------------------------------------------------------------------------
def damaged_copy(folder: Path, target: Path, step: int) -> Path:
    """A copy of a folder of checkpoints with one bit of one file of a step flipped."""
    shutil.copytree(folder, target)
    path = max((target / str(step) / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return target


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with steps 2 and 4 of a run of six."""
    folder = tmp_path_factory.mktemp("two")
    train(folder, *NO_DROPOUT, "--save-interval", "2", "--exit-interval", "4", "--save", str(folder / "save"))
    return folder / "save"


def test_a_damaged_newest_step_is_named_set_aside_and_saved_again(two_steps: Path, tmp_path: Path) -> None:
    folder = damaged_copy(two_steps, tmp_path / "save", 4)
    both = ("--load", str(folder), "--save", str(folder), "--save-interval", "2")
    run = train(tmp_path, *NO_DROPOUT, *both)
    lines = run.out.splitlines()
    (passed,) = (line for line in lines if "is passed over" in line)
    assert passed.startswith(f"WARNING: --load {folder}: step 4 cannot be used and is passed over: state/")
    assert passed.endswith("is damaged: its checksum does not fit")
    assert f"--save {folder}: set step 4 aside as 4.damaged" in lines
    assert "resumed from" in run.out
    assert list(run.steps) == [3, 4, 5, 6]
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4", "4.damaged", "6"]
    for name, array in saved_arrays(two_steps, 4).items():
        np.testing.assert_array_equal(saved_arrays(folder, 4)[name], array, err_msg=name)
    assert "passed over" not in train(tmp_path, *NO_DROPOUT, *both).out


def test_a_damaged_newest_step_of_another_folder_is_left_as_it_is(two_steps: Path, tmp_path: Path) -> None:
    folder = damaged_copy(two_steps, tmp_path / "load", 4)
    run = train(tmp_path, *NO_DROPOUT, "--load", str(folder), "--save", str(tmp_path / "save"), "--exit-interval", "3")
    assert "step 4 cannot be used and is passed over" in run.out
    assert "aside" not in run.out
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]
    assert [path.name for path in (tmp_path / "save").iterdir()] == ["3"]


def test_a_damaged_step_that_is_asked_for_stops_the_run(two_steps: Path, tmp_path: Path) -> None:
    folder = damaged_copy(two_steps, tmp_path / "save", 4)
    with pytest.raises(UsageError, match=r"step 4 cannot be restored into this run: state/.* is damaged"):
        train(tmp_path, *NO_DROPOUT, "--load", str(folder), "--ckpt-step", "4")
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4"]


def test_what_killed_runs_left_is_removed_and_said(two_steps: Path, tmp_path: Path) -> None:
    folder = tmp_path / "save"
    shutil.copytree(two_steps, folder)
    for name in ("6.tmp/state", "2.removing/state", "5.damaged/state", "notes.tmp"):
        (folder / name).mkdir(parents=True)
    run = train(tmp_path, *NO_DROPOUT, "--load", str(folder), "--save", str(folder))
    for name in ("2.removing", "6.tmp"):
        assert f"--save {folder}: removed {name}, which a run left unfinished" in run.out
    assert sorted(path.name for path in folder.iterdir()) == ["2", "4", "5.damaged", "6", "notes.tmp"]


def test_a_missing_checkpoint_stops_the_run_if_asked_to(tmp_path: Path) -> None:
    nowhere = ("--load", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="no checkpoint there"):
        train(tmp_path, *nowhere, "--exit-on-missing-checkpoint")
    assert "WARNING: --load" in train(tmp_path, *nowhere, "--train-iters", "1").out
    assert "WARNING" not in train(tmp_path, *nowhere, "--train-iters", "1", "--save", nowhere[1]).out
