"""Peers: all processes come to the same verdict; whoever does not come is named; nothing is left in the store."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoint_support as support
import pytest
from memory_store import MemoryStore

from jmegatron.checkpoint import reader
from jmegatron.checkpoint.peers import Peers


def together(count: int, action: Callable[[Peers], Any], seconds: float = 20.0) -> list[Any]:
    """What each process returns, or the exception that it raises."""
    store = MemoryStore(count)

    def run(index: int) -> Any:
        try:
            return action(Peers(index, count, store, seconds))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def keys(store: MemoryStore) -> list[str]:
    return sorted(store.list("checkpoint"))


# ---- collect ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("problems", "verdict"),
    [
        (["", "", ""], ""),
        (["", "", "full"], "process 2: full"),
        (["", "full", "late"], "process 1: full"),
        (["own", "full", ""], "process 0: own"),
    ],
)
def test_all_processes_get_the_first_problem(problems: list[str], verdict: str) -> None:
    assert together(3, lambda peers: peers.collect("save", problems[peers.index])) == [verdict] * 3


def test_many_calls_of_several_names_in_a_row_do_not_mix(tmp_path: Path) -> None:
    def run(peers: Peers) -> list[Any]:
        found: list[Any] = []
        for number in range(30):
            time.sleep(0.001 * ((number * 7 + peers.index * 5) % 3))
            found.append(peers.collect("save", f"{number}" if peers.index == number % 3 else ""))
            found.append(peers.share("steps", [number] if peers.index == 0 else "not asked"))
            found.append(peers.collect("written", ""))
        return found

    expected = [value for n in range(30) for value in (f"process {n % 3}: {n}", [n], "")]
    assert together(3, run) == [expected] * 3


def test_a_process_that_does_not_come_is_named_after_the_limit_and_all_hear_of_it() -> None:
    begin = time.monotonic()
    found = together(3, lambda peers: None if peers.index == 1 else peers.collect("save", ""), seconds=0.5)
    assert found == ["process 1: has not come within 0 s", None, "process 1: has not come within 0 s"]
    assert time.monotonic() - begin > 0.5


def test_several_that_do_not_come_cost_one_limit_and_not_one_each() -> None:
    """The others wait twice as long for the verdict: they would give up, and say something else."""
    begin = time.monotonic()
    found = together(6, lambda peers: peers.collect("save", "") if peers.index in (0, 5) else None, seconds=1.0)
    assert found[0] == found[5] == "process 1: has not come within 1 s"
    assert time.monotonic() - begin < 1.9


def test_processes_that_come_one_after_another_within_the_limit_agree() -> None:
    def run(peers: Peers) -> str:
        time.sleep(0.3 * peers.index)
        return peers.collect("save", "")

    assert together(4, run, seconds=2.0) == [""] * 4


def test_the_others_name_process_0_if_it_does_not_come() -> None:
    found = together(3, lambda peers: peers.collect("save", "") if peers.index else None, seconds=0.3)
    assert found == [None, "process 0 has not come within 1 s", "process 0 has not come within 1 s"]


def test_problems_of_past_calls_are_removed_from_the_store() -> None:
    store = MemoryStore(2)
    left = []
    with ThreadPoolExecutor(2) as pool:
        peers = [Peers(index, 2, store, 20.0) for index in range(2)]
        for _ in range(10):
            list(pool.map(lambda p: p.collect("save", "x" * 100), peers))
            left.append(keys(store))
    assert len(left[-1]) == len(left[1]) == 4
    assert {key.split("/")[1] for key in left[-1]} == {"8", "9"}


def test_one_process_alone_has_its_own_problem_and_value_and_asks_nobody() -> None:
    assert Peers().collect("save", "full") == "full"
    assert Peers().collect("save") == ""
    assert Peers().share("steps", (1, 2)) == (1, 2)


# ---- share --------------------------------------------------------------------------------------------------------
def test_all_processes_get_what_process_0_has() -> None:
    values = [[1, 2], [1], None]
    assert together(3, lambda peers: peers.share("steps", values[peers.index])) == [[1, 2]] * 3


def test_process_0_may_share_often_before_another_one_reads() -> None:
    def run(peers: Peers) -> list[Any]:
        time.sleep(0.2 * peers.index)
        return [peers.share("steps", number) for number in range(6)]

    assert together(2, run, seconds=5.0) == [list(range(6))] * 2


def test_without_process_0_sharing_ends_after_the_limit_and_says_so() -> None:
    found = together(2, lambda peers: peers.share("steps", 1) if peers.index else None, seconds=0.2)
    assert isinstance(found[1], TimeoutError)
    assert "steps: process 0 has not come within 0 s" in str(found[1])


@pytest.mark.parametrize(("count", "store"), [(2, None), (1, MemoryStore(1))])
def test_a_store_is_for_several_processes_and_several_need_one(count: int, store: Any) -> None:
    with pytest.raises(ValueError, match="expected a store if, and only if, several"):
        Peers(0, count, store)


# ---- find ---------------------------------------------------------------------------------------------------------
def test_several_processes_find_the_same_step_and_process_0s_list_counts(tmp_path: Path) -> None:
    support.save(tmp_path / "0", 3, 5)
    support.save(tmp_path / "1", 3, 5, 8)  # a second later, as another process sees it

    def run(peers: Peers) -> Any:
        checkpoint, passed = reader.find(str(tmp_path / f"{min(peers.index, 1)}"), peers=peers)
        assert checkpoint is not None
        return checkpoint.step, passed

    assert together(3, run) == [(5, [])] * 3


def test_every_damaged_file_is_seen_by_all_whichever_process_reads_it(tmp_path: Path) -> None:
    support.save(tmp_path, 3, 8)

    def run(peers: Peers) -> Any:
        said: list[str] = []
        checkpoint, passed = reader.find(str(tmp_path), peers=peers, say=said.append)
        assert checkpoint is not None
        return checkpoint.step, passed, said

    readers = set()
    for path in support.files(tmp_path / "8"):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found = together(4, run)
        path.write_bytes(content)
        assert found == [found[0]] * 4
        step, passed, (line,) = found[0]
        assert (step, passed) == (3, [8])
        assert path.relative_to(tmp_path / "8").as_posix() in line
        readers.add(line.partition("passed over: ")[2][:9])
    assert len(readers) == 4
    assert together(4, run) == [(8, [], [])] * 4


def test_a_step_that_one_process_does_not_see_counts_for_none(tmp_path: Path) -> None:
    """A folder that is not shared by all machines."""
    support.save(tmp_path / "0", 3)
    (tmp_path / "1").mkdir()
    found = together(2, lambda peers: reader.find(str(tmp_path / f"{peers.index}"), peers=peers))
    for error in found:
        assert "none of its steps can be used: step 3: process 1: it is not complete: no manifest.json" in str(error)
