"""What all processes must have alike: compared through a store in memory, between threads instead of processes."""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_store import MemoryStore, job_of
from training_runs import OPTIONS

from jmegatron.config import SECTIONS, load_config
from jmegatron.errors import TrainingError, UsageError
from jmegatron.training import agreement
from jmegatron.training.agreement import MAY_DIFFER, agree, data_facts, difference, source_facts, startup_facts


def everywhere(count: int, call: Callable[[Any], Any], minutes: float = 1.0) -> list[Any]:
    """What each of `count` jobs gets from `call`, or the exception."""
    store, results = MemoryStore(count), [None] * count

    def one(index: int) -> None:
        try:
            results[index] = call(job_of(store, index, minutes))
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


# ---- facts ----------------------------------------------------------------------------------------------------------
def test_every_option_but_those_named_is_compared() -> None:
    facts = startup_facts(load_config(OPTIONS), {"jax": "1"})
    for section in SECTIONS.values():
        for field in dataclasses.fields(section):
            assert (f"--{field.name.replace('_', '-')}" in facts) == (field.name not in MAY_DIFFER)
    assert set(MAY_DIFFER) <= {field.name for section in SECTIONS.values() for field in dataclasses.fields(section)}
    assert facts["version of jax"] == "1"
    assert facts["--lr"] == "0.01"


def test_a_changed_line_of_source_changes_the_digest(tmp_path: Path) -> None:
    digests = []
    for name, text in (("a", "x = 1\n"), ("b", "x = 1\n"), ("c", "x = 2\n")):
        (tmp_path / name / "package").mkdir(parents=True)
        (tmp_path / name / "package" / "module.py").write_text(text)
        digests.append(source_facts(tmp_path / name / "package"))
    assert digests[0] == digests[1] != digests[2]
    assert "git revision" not in digests[0]  # no checkout there


def test_the_checkout_s_revision_is_among_the_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "package").mkdir()
    answers = {"rev-parse": "abc123", "status": " M train.py"}
    monkeypatch.setattr(agreement, "_git", lambda folder, word, *_: answers[word])
    assert source_facts(tmp_path / "package")["git revision"] == "abc123 (modified)"


def test_other_samples_or_another_checkpoint_are_other_facts() -> None:
    class Samples:
        def __init__(self, last: int):
            self._last = last

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {"text": np.array([index if index < 2 else self._last])}

    class Device:
        device_kind = "card"

    facts = [
        data_facts([Device()] * devices, (Samples(last), None, None), step)
        for devices, last, step in ((2, 2, None), (2, 2, None), (2, 9, None), (2, 2, "step 5"), (1, 2, None))
    ]
    assert facts[0] == facts[1]
    assert [fact for fact in facts[2:] if fact == facts[0]] == []
    assert facts[0]["validation samples"] == "none"
    assert facts[3]["checkpoint to go on from"] == "step 5"


# ---- comparison -----------------------------------------------------------------------------------------------------
def test_equal_facts_give_every_process_the_hosts() -> None:
    results = everywhere(3, lambda job: agree(job, "options", {"--seed": "1"}))
    assert len(results[0]) == 3
    assert results == [results[0]] * 3


def test_a_difference_is_the_same_error_in_every_process_and_names_rank_key_and_values() -> None:
    results = everywhere(3, lambda job: agree(job, "options", {"--seed": "5" if job.index == 1 else "1", "--lr": "2"}))
    assert [type(result) for result in results] == [UsageError] * 3
    assert len({str(result) for result in results}) == 1
    assert "process 1 (" in str(results[0])
    assert "--seed is 5, but 1 in process 0" in str(results[0])
    assert "--lr" not in str(results[0])


def test_the_kind_of_error_is_the_caller_s() -> None:
    results = everywhere(2, lambda job: agree(job, "program", {"digest": str(job.index)}, TrainingError))
    assert [type(result) for result in results] == [TrainingError] * 2


def test_the_odd_one_out_is_named_also_if_it_is_process_0() -> None:
    message = difference(["a", "b", "c"], [{"--seed": "5"}, {"--seed": "1"}, {"--seed": "1"}])
    assert "process 0 (a): --seed is 5, but 1 in process 1 (b)" in message
    assert message.count("process") == 4  # heading, the line's two, fix


def test_a_key_that_one_does_not_have_and_many_differences_are_named() -> None:
    assert "process 1 (b): x is (not there), but 1 in process 0 (a)" in difference(["a", "b"], [{"x": "1"}, {}])
    many = difference(["a", "b"], [{str(i): "1" for i in range(20)}, {str(i): "2" for i in range(20)}])
    assert "... and 12 more" in many
    assert difference(["a", "b"], [{"x": "1"}, {"x": "1"}]) == ""


def test_a_process_that_does_not_come_is_named_in_bounded_time() -> None:
    store = MemoryStore(2)
    with pytest.raises(TrainingError, match="process 1 has not come to the comparison"):
        agree(job_of(store, 0, minutes=0.005), "options", {})


def test_one_process_compares_nothing() -> None:
    from jmegatron.training.job import Job

    assert len(agree(Job(), "options", {"--seed": "1"})) == 1
