"""One process of a job fails, differs or is told to stop: all of them end soon, and the reason is there to read."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
from multiprocess_support import MOCK, TINY, fault_time, launch, run_alone, steps_saved
from tolerances import LOSS_RELATIVE
from training_runs import read_metrics, train

ENDLESS = (*MOCK, "--train-iters", "100000")


# ---- killed ---------------------------------------------------------------------------------------------------------
def test_a_killed_process_ends_a_launched_job_within_seconds_and_a_restart_goes_on(tmp_path: Path) -> None:
    save = str(tmp_path / "save")
    options = (*MOCK, "--save", save, "--load", save, "--save-interval", "2", "--train-iters", "6")
    metrics = ("--metrics-file", str(tmp_path / "metrics.jsonl"))
    job = launch(tmp_path, 2, *options, *metrics, fault="1 5 kill-once", launcher=("--max-restarts", "1"))
    assert job.status == 0, job.err[-3000:]
    assert "launch_local: process 1 was killed by SIGKILL" in job.err
    starts = [float(time) for time in re.findall(r"started at ([\d.]+)", job.out)]
    assert max(starts) - fault_time(job.out) < 15
    step = int(re.search(f"resumed from {save}, step ([24]),", job.out).group(1))  # type: ignore[union-attr]
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps[:4] == [1, 2, 3, 4]
    assert steps[-(6 - step) :] == list(range(step + 1, 7))


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_a_killed_process_ends_the_others_within_a_minute_without_a_launcher(process: int, tmp_path: Path) -> None:
    ended = run_alone(tmp_path, 2, *ENDLESS, fault=f"{process} 3 kill")
    other = ended[1 - process]
    assert ended[process].status == -signal.SIGKILL
    assert other.status not in (0, -signal.SIGKILL)
    assert other.at - fault_time(ended[process].out) < 60
    # Whichever notices first, the collective or the coordination service, says that a process died, and a stack tells
    # where this one waited.
    assert re.search("another task died|another process was killed or died", other.err)
    assert "Traceback" in other.err or "most recent call first" in other.err


# ---- an exception ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("process", [0, 1])
def test_an_uncaught_exception_ends_both_within_ten_seconds_with_its_text_last(process: int, tmp_path: Path) -> None:
    ended = run_alone(tmp_path, 2, *ENDLESS, fault=f"{process} 3 raise")
    assert max(end.at for end in ended) - fault_time(ended[process].out) < 10
    assert [end.status for end in ended] == ([1, 3] if process == 0 else [3, 1])
    assert "Traceback" in ended[process].err
    for end in ended:
        assert end.last_error.endswith("RuntimeError: the fault of the test")
    assert f"ended by the failure of process {process} (" in ended[1 - process].last_error


# ---- saves ----------------------------------------------------------------------------------------------------------
def test_a_save_that_fails_in_one_process_is_none_for_all_and_training_goes_on(tmp_path: Path) -> None:
    save = ("--save", str(tmp_path / "save"), "--save-interval", "2", "--train-iters", "6")
    ended = run_alone(tmp_path, 2, *MOCK, *save, fault="1 4 no-space")
    assert [end.status for end in ended] == [0, 0], ended[0].err[-3000:]
    assert steps_saved(tmp_path / "save") == [2, 6]
    assert sorted(path.name for path in (tmp_path / "save").iterdir()) == ["2", "6"]
    said = "WARNING: --save .*: the checkpoint of iteration 4 could not be written: process 1: OSError: .*No space left"
    assert re.search(said, ended[0].out)


@pytest.mark.slow
def test_four_processes_one_killed_inside_a_save_go_on_as_two(tmp_path: Path) -> None:
    save = str(tmp_path / "save")
    options = (*MOCK, "--save", save, "--load", save, "--save-interval", "2", "--train-iters", "8")
    ended = run_alone(tmp_path, 4, *options, fault="2 4 kill-in-save")
    at = fault_time(ended[2].out)
    assert ended[2].status == -signal.SIGKILL
    for index in (0, 1, 3):
        assert ended[index].status not in (0, -signal.SIGKILL)
        assert ended[index].at - at < 60
        assert re.search("another task died|another process was killed or died", ended[index].err)
    assert steps_saved(tmp_path / "save") == [2]
    metrics = tmp_path / "metrics.jsonl"
    resumed = launch(tmp_path, 2, *options, "--metrics-file", str(metrics), devices=2)
    assert resumed.status == 0, resumed.err[-3000:]
    assert f"resumed from {save}, step 2," in resumed.out
    whole = train(tmp_path, *MOCK, "--train-iters", "8", devices=4, defaults=TINY)
    losses = [line["loss"] for line in read_metrics(metrics)]
    np.testing.assert_allclose(losses, whole.losses[2:], rtol=LOSS_RELATIVE)


# ---- processes that differ ------------------------------------------------------------------------------------------
def test_a_process_with_another_option_is_named_with_both_values_within_thirty_seconds(tmp_path: Path) -> None:
    ended = run_alone(tmp_path, 3, *MOCK, "--global-batch-size", "6", own=[(), ("--seed", "5"), ()])
    assert [end.status for end in ended] == [2, 2, 2]
    assert max(end.at for end in ended) - min(end.at for end in ended) < 30
    for end in ended:
        assert re.search(r"process 1 \(.+\): --seed is 5, but 1234 in process 0 \(", end.err)
        assert "Traceback" not in end.err
        assert "compiling" not in end.out


def test_processes_that_find_other_data_are_stopped_before_they_train(tmp_path: Path) -> None:
    """The same path on two machines, with another checkpoint in it: one folder for each process stands for that."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    ended = run_alone(
        tmp_path, 2, *MOCK, own=[("--data-cache-path", str(folder)) for folder in folders], fault="1 0 other-data"
    )
    assert [end.status for end in ended] == [2, 2]
    for end in ended:
        assert re.search(r"process 1 \(.+\): training samples is \d+, first and last with checksum", end.err)


# ---- asked to stop --------------------------------------------------------------------------------------------------
def test_sigterm_to_one_process_stops_all_at_the_same_step_saved_and_with_status_0(tmp_path: Path) -> None:
    ended = run_alone(tmp_path, 2, *ENDLESS, "--save", str(tmp_path / "save"), fault="1 3 term")
    assert [end.status for end in ended] == [0, 0]
    (step,) = steps_saved(tmp_path / "save")
    assert f"exiting at iteration {step} (SIGTERM at process 1 (" in ended[0].out
    assert ended[0].out.count("iteration ") >= step
    assert f"saving checkpoint at iteration {step} to " in ended[0].out
    assert "SIGTERM: leaving after this step" in ended[1].err


# ---- a step that does not end ---------------------------------------------------------------------------------------
def test_a_step_that_hangs_ends_all_at_the_limit_with_the_stacks(tmp_path: Path) -> None:
    """The wrapper makes the limit a tenth of a minute once training has begun."""
    ended = run_alone(tmp_path, 2, *ENDLESS, fault="1 3 hang")
    at = fault_time(ended[1].out)
    for end in ended:
        assert end.status in (1, 3)
        assert 5 < end.at - at < 30
    assert "in with_fault" in ended[1].err  # who hung, and who waited for it
    assert re.search(r"loop\.py\", line \d+,? in _", ended[0].err)
    assert any(re.search(r"step \d has taken more than 0.1 min", end.last_error) for end in ended)
