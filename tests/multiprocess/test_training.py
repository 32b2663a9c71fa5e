"""Several processes train what one process with as many devices trains, and go on from one another's checkpoints."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from multiprocess_support import MOCK, TINY, launch, steps_saved
from tolerances import LOSS_RELATIVE
from training_runs import Run, read_metrics, saved_arrays, train, write_corpus

CORPUS = ("--vocab-size", "257", "--padded-vocab-size", "264", "--split", "80,20,0", "--eval-iters", "2")


def corpus_options(folder: Path) -> tuple[str, ...]:
    return (*CORPUS, "--data-path", str(folder / "corpus"), "--data-cache-path", str(folder / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    write_corpus(folder / "corpus")
    return folder


@pytest.fixture(scope="module")
def one_process(folder: Path) -> Run:
    """Four steps of one process with two devices."""
    whole = ("--save", str(folder / "one"), "--save-interval", "2", "--eval-interval", "2")
    return train(folder, *corpus_options(folder), *whole, devices=2, defaults=TINY)


@pytest.fixture(scope="module")
def two_processes(folder: Path, one_process: Run) -> Run:
    """The same of two processes with a device each, on an index cache that is not there yet."""
    shutil.rmtree(folder / "cache")
    metrics = folder / "two.jsonl"
    job = launch(
        folder,
        2,
        *corpus_options(folder),
        *("--save", str(folder / "two"), "--save-interval", "2", "--eval-interval", "2"),
        *("--metrics-file", str(metrics), "--tensorboard-dir", str(folder / "board"), "--log-ranks"),
    )
    assert job.status == 0, job.err[-3000:]
    return Run(job.out, read_metrics(metrics))


def assert_same_steps(got: Run, expected: Run) -> None:
    assert list(got.steps) == list(expected.steps)
    for step, line in expected.steps.items():
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(got.steps[step][name], line[name], rtol=LOSS_RELATIVE, err_msg=f"{name} {step}")
        for name in ("consumed_samples", "consumed_tokens", "lr"):
            assert got.steps[step][name] == line[name]


def assert_same_arrays(got: Path, expected: Path, step: int) -> None:
    ours, theirs = saved_arrays(got, step), saved_arrays(expected, step)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        scale = np.abs(array).max() or 1.0
        np.testing.assert_allclose(ours[name] / scale, array / scale, atol=1e-4, err_msg=name)


# ---- the same numbers -----------------------------------------------------------------------------------------------
def test_two_processes_train_and_evaluate_as_one_with_two_devices(two_processes: Run, one_process: Run) -> None:
    assert_same_steps(two_processes, one_process)
    evaluations = [[line["loss"] for line in run.metrics if "split" in line] for run in (two_processes, one_process)]
    assert len(evaluations[0]) == 2  # after steps 2 and 4
    np.testing.assert_allclose(evaluations[0], evaluations[1], rtol=LOSS_RELATIVE)


def test_process_0_alone_writes_and_says(two_processes: Run, folder: Path) -> None:
    assert [line["step"] for line in two_processes.metrics if "split" not in line] == [1, 2, 3, 4]
    assert len(list((folder / "board").iterdir())) == 1
    said = [line for line in two_processes.out.splitlines() if "[Gloo]" not in line]
    assert {line[:3] for line in said if line.strip()} == {"[0]"}


def test_the_ranks_are_listed_with_their_places_processes_and_hosts(two_processes: Run) -> None:
    lines = two_processes.out.splitlines()
    head = next(i for i, line in enumerate(lines) if "rank   pp   dp   ep   cp   tp  process  device  host" in line)
    assert [line.split()[1:9] for line in lines[head + 1 : head + 3]] == [
        ["0", "0", "0", "0", "0", "0", "0", "0"],
        ["1", "0", "1", "0", "0", "0", "1", "0"],
    ]
    assert "devices: 2 x cpu (cpu), 2 processes" in two_processes.out


def test_an_index_cache_that_several_build_at_once_is_whole(two_processes: Run, folder: Path) -> None:
    names = [path.name for path in (folder / "cache").iterdir()]
    assert len([name for name in names if name.endswith(".json")]) == 2  # training and validation
    assert [name for name in names if name.endswith(".tmp")] == []


def test_both_save_the_same_arrays(two_processes: Run, folder: Path) -> None:
    assert steps_saved(folder / "two") == [2, 4]
    assert_same_arrays(folder / "two", folder / "one", 4)


@pytest.mark.slow
def test_four_processes_on_two_tensor_and_two_data_ranks_train_as_one_with_four_devices(tmp_path: Path) -> None:
    options = (*MOCK, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--train-iters", "3")
    one = train(tmp_path, *options, devices=4, defaults=TINY)
    job = launch(tmp_path, 4, *options, "--metrics-file", str(tmp_path / "four.jsonl"))
    assert job.status == 0, job.err[-3000:]
    assert_same_steps(Run(job.out, read_metrics(tmp_path / "four.jsonl")), one)


def test_two_processes_with_two_of_four_experts_each_train_as_one_with_two_devices(tmp_path: Path) -> None:
    experts = "--num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2"
    options = (*MOCK, *experts.split(), "--train-iters", "3", "--save-interval", "3", "--save")
    one = train(tmp_path, *options, str(tmp_path / "one"), devices=2, defaults=TINY)
    job = launch(tmp_path, 2, *options, str(tmp_path / "two"), "--metrics-file", str(tmp_path / "two.jsonl"))
    assert job.status == 0, job.err[-3000:]
    two = Run(job.out, read_metrics(tmp_path / "two.jsonl"))
    assert_same_steps(two, one)
    for step, line in one.steps.items():
        for name in ("expert_load_max", "expert_load_min", "dropped_tokens"):
            assert two.steps[step][name] == line[name]
        np.testing.assert_allclose(two.steps[step]["moe_aux_loss"], line["moe_aux_loss"], rtol=LOSS_RELATIVE)
    assert_same_arrays(tmp_path / "two", tmp_path / "one", 3)


# ---- another number of processes ------------------------------------------------------------------------------------
def only_step_2(folder: Path, source: str, name: str) -> str:
    (folder / name).mkdir()
    shutil.copytree(folder / source / "2", folder / name / "2")
    return str(folder / name)


def test_what_two_processes_saved_goes_on_in_one(two_processes: Run, one_process: Run, folder: Path) -> None:
    load = only_step_2(folder, "two", "from_two")
    resumed = train(folder, *corpus_options(folder), "--load", load, "--eval-iters", "0", devices=1, defaults=TINY)
    assert list(resumed.steps) == [3, 4]
    np.testing.assert_allclose(resumed.losses, one_process.losses[2:], rtol=LOSS_RELATIVE)


def test_what_one_process_saved_goes_on_in_two(one_process: Run, folder: Path) -> None:
    load = only_step_2(folder, "one", "from_one")
    metrics = folder / "resumed.jsonl"
    job = launch(
        folder, 2, *corpus_options(folder), "--eval-iters", "0", "--load", load, "--metrics-file", str(metrics)
    )
    assert job.status == 0, job.err[-3000:]
    resumed = Run(job.out, read_metrics(metrics))
    assert list(resumed.steps) == [3, 4]
    np.testing.assert_allclose(resumed.losses, one_process.losses[2:], rtol=LOSS_RELATIVE)


# ---- who is slow ----------------------------------------------------------------------------------------------------
def test_a_process_whose_host_delays_each_step_is_named_the_straggler(tmp_path: Path) -> None:
    job = launch(tmp_path, 2, *MOCK, "--log-straggler", "--log-interval", "2", fault="1 1 slow")
    assert job.status == 0, job.err[-3000:]
    line = next(line for line in job.out.splitlines() if "straggler check at iteration 4" in line)
    own = [float(word) for word in line.partition("(ms): ")[2].partition(" |")[0].split()]
    assert own[1] > 200 > own[0]
    assert re.search(r"slow: process 1 \(.+\): own work 2\d\d", line)
