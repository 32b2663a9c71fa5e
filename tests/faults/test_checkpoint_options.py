"""What the options of checkpoints do to runs: when steps are saved, which stay, and what a run takes of one."""

from pathlib import Path

import numpy as np
import pytest
from training_runs import saved_arrays, train

from jmegatron.errors import UsageError

NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder with steps 2, 4 and 6 of a run, and its losses."""
    folder = tmp_path_factory.mktemp("saved")
    run = train(folder, *NO_DROPOUT, "--save", str(folder / "save"), "--save-interval", "2")
    return folder / "save", run.losses


# ---- when, and which stay -------------------------------------------------------------------------------------------
def test_a_tiny_interval_in_minutes_saves_after_every_step(tmp_path: Path) -> None:
    train(tmp_path, *NO_DROPOUT, "--save", str(tmp_path / "save"), "--save-interval-minutes", "1e-9")
    assert names(tmp_path / "save") == ["1", "2", "3", "4", "5", "6"]


def test_a_long_interval_in_minutes_saves_at_the_end_alone(tmp_path: Path) -> None:
    train(tmp_path, *NO_DROPOUT, "--save", str(tmp_path / "save"), "--save-interval-minutes", "60")
    assert names(tmp_path / "save") == ["6"]


def test_the_newest_and_every_so_many_stay_and_the_log_says_what_went(tmp_path: Path) -> None:
    options = ("--save-interval", "1", "--keep-latest", "2", "--keep-every", "3")
    run = train(tmp_path, *NO_DROPOUT, "--save", str(tmp_path / "save"), *options)
    assert names(tmp_path / "save") == ["3", "5", "6"]
    said = [line.partition("; ")[2] for line in run.out.splitlines() if line.startswith("saved checkpoint")]
    assert said == ["", "", "removed step 1", "removed step 2", "", "removed step 4"]


def test_without_background_each_save_ends_before_the_next_step_and_leaves_the_same_arrays(
    saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    options = ("--save", str(tmp_path / "save"), "--save-interval", "2", "--no-async-save")
    run = train(tmp_path, *NO_DROPOUT, *options)
    lines = [line for line in run.out.splitlines() if " iteration " in line or line.startswith("saved")]
    for number, line in enumerate(lines):
        if line.startswith("saving checkpoint at iteration"):
            assert lines[number + 1].startswith("saved checkpoint of iteration")
    assert run.losses == saved[1]
    assert names(tmp_path / "save") == ["2", "4", "6"]
    for step in (2, 4, 6):
        for name, array in saved_arrays(saved[0], step).items():
            np.testing.assert_array_equal(saved_arrays(tmp_path / "save", step)[name], array, err_msg=name)


# ---- what a run takes -----------------------------------------------------------------------------------------------
def test_the_step_that_is_asked_for_is_the_one_gone_on_from(saved: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder, losses = saved
    run = train(tmp_path, *NO_DROPOUT, "--load", str(folder), "--ckpt-step", "2")
    assert f"resumed from {folder}, step 2, consumed samples 16" in run.out
    assert run.losses == losses[2:]
    with pytest.raises(UsageError, match=r"--ckpt-step 3: no such step in --load .*; it holds 2, 4, 6"):
        train(tmp_path, *NO_DROPOUT, "--load", str(folder), "--ckpt-step", "3")
    with pytest.raises(UsageError, match="holds a checkpoint of step 6, but this run starts at step 2"):
        train(tmp_path, *NO_DROPOUT, "--load", str(folder), "--save", str(folder), "--ckpt-step", "2")


def test_without_the_optimizer_weights_step_and_samples_go_on_and_moments_begin_anew(
    saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder, losses = saved
    options = ("--load", str(folder), "--ckpt-step", "2", "--no-load-optim")
    run = train(tmp_path, *NO_DROPOUT, *options, "--save", str(tmp_path / "save"), "--exit-interval", "3")
    assert "step 2, consumed samples 16, a new optimizer (--no-load-optim)" in run.out
    assert list(run.steps) == [3]
    assert run.steps[3]["consumed_samples"] == 24
    assert run.losses == losses[2:3]  # the loss is that before the update
    # After one update of adam, nu is a thousandth of the gradient's square: that of two earlier ones is not in it.
    fresh, kept = (saved_arrays(at, step) for at, step in ((tmp_path / "save", 3), (folder, 4)))
    counts = [name for name in fresh if name.endswith("count")]
    assert counts
    assert all(fresh[name] == 1 and kept[name] == 4 for name in counts)


def test_another_optimizer_goes_on_without_the_old_ones_moments(
    saved: tuple[Path, list[float]], tmp_path: Path
) -> None:
    options = ("--load", str(saved[0]), "--ckpt-step", "2", "--optimizer", "sgd")
    with pytest.raises(UsageError, match="optimizer"):
        train(tmp_path, *NO_DROPOUT, *options)
    run = train(tmp_path, *NO_DROPOUT, *options, "--no-load-optim", "--exit-interval", "3")
    assert run.losses == saved[1][2:3]


def test_finetune_is_a_new_run_with_the_weights(saved: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder = saved[0]
    options = ("--load", str(folder), "--finetune", "--lr", "5e-3", "--save", str(tmp_path / "save"))
    run = train(tmp_path, *NO_DROPOUT, *options, "--train-iters", "2")
    assert f"started with the weights of {folder}, step 6; step 0, consumed samples 0, a new optimizer" in run.out
    assert "applies" not in "".join(line for line in run.out.splitlines() if "--lr" in line)  # it has its own schedules
    assert list(run.steps) == [1, 2]
    assert [line["consumed_samples"] for line in run.metrics] == [8, 16]
    assert [line["lr"] for line in run.metrics] == pytest.approx([5e-3, 2.5e-3])
    assert run.losses[0] < saved[1][0]  # of the same samples, by trained weights
    assert names(tmp_path / "save") == ["2"]
    with pytest.raises(UsageError, match="no checkpoint there, and it is needed"):
        train(tmp_path, *NO_DROPOUT, "--finetune", "--load", str(tmp_path / "nowhere"))
