"""Runs that stop, are stopped or killed, and go on (P5, the plain part)."""

import math
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_runs import command, environment, read_metrics, saved_arrays, train, train_process, write_corpus

from jmegatron.errors import ConfigError, UsageError
from jmegatron.training.program import Program

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


@pytest.fixture
def sample_ids(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The sample ids of every batch that is put on the devices."""
    seen: list[np.ndarray] = []
    original = Program.put

    def put(self: Program, arrays: dict[str, np.ndarray]) -> Any:
        seen.append(arrays["sample_ids"])
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
@pytest.mark.parametrize("kind", ["mock", "corpus_bf16"])
def test_three_steps_and_three_after_a_restart_are_six_steps_bit_for_bit(kind: str, tmp_path: Path) -> None:
    options = DROPOUT
    if kind == "corpus_bf16":
        corpus = write_corpus(tmp_path / "corpus")
        options += ("--no-mock-data", "--data-path", corpus, "--data-cache-path", str(tmp_path / "index"))
        options += ("--bf16", "--vocab-size", "257", "--padded-vocab-size", "264")
    whole = train(tmp_path, *options, "--save", str(tmp_path / "whole"), "--save-interval", "3")
    parts = str(tmp_path / "parts")
    first = train(tmp_path, *options, "--save", parts, "--exit-interval", "3")
    second = train(tmp_path, *options, "--save", parts, "--load", parts)
    assert list(first.steps) == [1, 2, 3]
    assert list(second.steps) == [4, 5, 6]
    assert {**first.steps, **second.steps} == whole.steps
    for step in (3, 6):
        expected, got = saved_arrays(tmp_path / "whole", step), saved_arrays(tmp_path / "parts", step)
        assert expected.keys() == got.keys()
        assert any("master" in name for name in got) == (kind == "corpus_bf16")
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)
            assert got[name].dtype == array.dtype


def test_a_checkpoint_goes_on_at_another_mesh_with_the_same_samples(
    stopped: Path, tmp_path: Path, sample_ids: list[np.ndarray]
) -> None:
    here = train(tmp_path, *NO_DROPOUT, "--load", str(stopped))
    there = train(
        tmp_path, *NO_DROPOUT, "--load", str(stopped), *["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    )
    assert "mesh: pp 1, dp 2, ep 1, cp 1, tp 2, sequence parallel" in there.out
    np.testing.assert_allclose(there.losses, here.losses, rtol=1e-6)
    np.testing.assert_array_equal(sample_ids[:3], [np.arange(8) + 8 * step for step in (3, 4, 5)])
    np.testing.assert_array_equal(sample_ids[3:], sample_ids[:3])


# ---- when checkpoints are written -----------------------------------------------------------------------------------
def test_a_derived_padding_stays_that_of_the_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    folder = str(tmp_path / "save")
    padding = (*NO_DROPOUT, "--padded-vocab-size", "null", "--make-vocab-size-divisible-by", "62")
    whole = train(tmp_path, *padding, "--save", folder, "--save-interval", "3", "--exit-interval", "3")
    assert "padded to 62" in whole.out
    on = ("--load", folder, "--tensor-model-parallel-size", "2")
    assert "padded to 62" in train(tmp_path, *padding, *on).out
    with pytest.raises(ConfigError, match="padded_vocab_size is 128"):
        train(tmp_path, *padding, *on, "--padded-vocab-size", "128")


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
def test_the_log_says_which_learning_rate_applies_after_a_change(stopped: Path, tmp_path: Path) -> None:
    run = train(tmp_path, *NO_DROPOUT, "--load", str(stopped), *["--lr", "5e-3", "--lr-decay-style", "constant"])
    assert "changed since the checkpoint: optimizer.lr 0.005 applies (saved with 0.01)" in run.out
    assert "changed since the checkpoint: optimizer.lr_decay_style constant applies (saved with linear)" in run.out
    assert [line["lr"] for line in run.metrics] == pytest.approx([5e-3] * 3)


def test_an_unchanged_restart_names_no_change(stopped: Path, tmp_path: Path) -> None:
    assert "changed since" not in train(tmp_path, *NO_DROPOUT, "--load", str(stopped)).out


@pytest.mark.parametrize("size", [4, 16])
def test_consumed_samples_go_on_with_another_global_batch(
    size: int, stopped: Path, tmp_path: Path, sample_ids: list[np.ndarray]
) -> None:
    run = train(tmp_path, *NO_DROPOUT, "--load", str(stopped), "--global-batch-size", str(size))
    assert f"training.global_batch_size {size} applies (saved with 8)" in run.out
    assert [line["consumed_samples"] for line in run.metrics] == [24 + size, 24 + 2 * size, 24 + 3 * size]
    np.testing.assert_array_equal(np.concatenate(sample_ids), np.arange(24, 24 + 3 * size))


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


# ---- killed ---------------------------------------------------------------------------------------------------------
def test_a_killed_run_goes_on_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    options = [*NO_DROPOUT, *["--num-cpu-devices", "4", "--train-iters", "100000", "--lr-decay-style", "constant"]]
    options += ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save"), "--save-interval", "5"]
    options += ["--metrics-file", str(tmp_path / "metrics.jsonl")]
    killed = subprocess.Popen(command(*options), env=environment(), stdout=subprocess.DEVNULL)
    try:
        _wait_for(lambda: (tmp_path / "save" / "10").is_dir(), killed)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    done = max(int(p.name) for p in (tmp_path / "save").iterdir() if p.name.isdigit())
    num_lines = len(read_metrics(tmp_path / "metrics.jsonl"))
    resumed = train_process(tmp_path, *options, "--exit-interval", str(done + 5))
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert f"step {done}, consumed samples {8 * done}" in resumed.stdout
    lines = read_metrics(tmp_path / "metrics.jsonl")
    before = {line["step"]: line["loss"] for line in lines[:num_lines]}
    after = {line["step"]: line["loss"] for line in lines[num_lines:]}
    assert list(after) == [done + step for step in range(1, 6)]
    assert all(before.get(step, loss) == loss for step, loss in after.items())


def _wait_for(condition: Any, process: subprocess.Popen[Any], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < end, f"waited {seconds} s, {os.listdir('.')}"
        time.sleep(0.02)


def test_a_missing_checkpoint_stops_the_run_if_asked_to(tmp_path: Path) -> None:
    nowhere = ("--load", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="no checkpoint there"):
        train(tmp_path, *nowhere, "--exit-on-missing-checkpoint")
    assert "WARNING: --load" in train(tmp_path, *nowhere, "--train-iters", "1").out
    assert "WARNING" not in train(tmp_path, *nowhere, "--train-iters", "1", "--save", nowhere[1]).out
