"""Pickles are read as data: nothing that a file names is imported or called, and what is damaged is one message."""

import collections
import contextlib
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jmegatron.errors import UsageError
from jmegatron.interop.safe_pickle import Foreign, Refused, loads

LIMIT = 1 << 16


class Runs:
    """Makes a folder when Python unpickles it."""

    def __init__(self, function: Any, *args: Any):
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def read(data: bytes, **options: Any) -> Any:
    return loads(data, {("collections", "OrderedDict"): lambda: {}}, where="file.pt", **options)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, -2, 2**40, 2**100, 0.5, None, True, False], "b": ("x", "ü" * 300, ()), 3: {"c": (1,)}},
        [[(1, 2), (1, 2, 3), (1, 2, 3, 4)], [[]], {}],
        "text",
    ],
    ids=["dict", "nested", "text"],
)
def test_plain_values_are_what_python_reads(value: Any, protocol: int) -> None:
    assert read(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(2, 6))
def test_equal_parts_are_shared_and_known_names_are_made(protocol: int) -> None:
    part = [1]
    value = collections.OrderedDict(a=part, b=part)
    got = read(pickle.dumps(value, protocol))
    assert type(got) is dict
    assert got == dict(value)
    assert got["a"] is got["b"]


@pytest.mark.parametrize("protocol", [4, 5])
def test_sets_and_bytes_are_what_python_reads(protocol: int) -> None:
    value = [{1, "a"}, frozenset({2}), b"bytes", b"x" * 300]
    assert read(pickle.dumps(value, protocol)) == value


def test_an_object_of_an_unknown_class_is_a_name_with_its_fields() -> None:
    got = read(pickle.dumps(subprocess.CompletedProcess(["ls"], 3)))
    assert isinstance(got, Foreign)
    assert got.name == "subprocess.CompletedProcess"
    assert got.state["args"] == ["ls"]
    assert got.state["returncode"] == 3


def _calls(marker: Path) -> dict[str, bytes]:
    """Returns pickles that make a folder when Python reads them."""
    code = f"__import__('os').mkdir({str(marker)!r})"
    text = f"mkdir {marker}"
    unicode = lambda s: b"X" + len(s).to_bytes(4, "little") + s.encode()  # noqa: E731
    return {
        "os.system": pickle.dumps(Runs(os.system, text)),
        "os.system as text": pickle.dumps(Runs(os.system, text), 0),
        "posix.system": b"cposix\nsystem\n" + b"(" + unicode(text) + b"tR.",
        "builtins.eval": pickle.dumps(Runs(eval, code)),
        "builtins.exec": pickle.dumps(Runs(exec, code)),
        "os.mkdir": pickle.dumps(Runs(os.mkdir, str(marker))),
        "subprocess.call": pickle.dumps(Runs(subprocess.call, ["mkdir", str(marker)])),
        "by stack": b"\x80\x04" + unicode("os") + unicode("system") + b"\x93" + unicode(text) + b"\x85R.",
        "by class": b"\x80\x02csubprocess\nPopen\n" + unicode("mkdir") + unicode(str(marker)) + b"\x86\x85R.",
        "by state": pickle.dumps([Runs(os.mkdir, str(marker)), 1]),
    }


KINDS = list(_calls(Path("x")))


@pytest.fixture
def marker(tmp_path: Path) -> Any:
    yield tmp_path / "marker"
    assert not (tmp_path / "marker").exists(), "a file has run a program"


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_becomes_a_name_and_runs_nothing(kind: str, marker: Path) -> None:
    got = read(_calls(marker)[kind])
    got = got[0] if isinstance(got, list) else got
    assert isinstance(got, Foreign)
    assert got.args


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_refused_by_name_where_all_names_must_be_known(kind: str, marker: Path) -> None:
    with pytest.raises(UsageError, match=r"file\.pt: .* names [a-z]+\.\w+, which is not allowed"):
        read(_calls(marker)[kind], strict=True)


def test_the_samples_do_run_when_python_reads_them(tmp_path: Path) -> None:
    for n, kind in enumerate(KINDS):
        marker = tmp_path / str(n)
        started = pickle.loads(_calls(marker)[kind])
        if isinstance(started, subprocess.Popen):
            started.wait()
        assert marker.is_dir(), kind


REFUSED = {
    "an extension": (b"\x80\x02\x82\x01.", "EXT1"),
    "an old instance": (b"(S'mkdir x'\nios\nsystem\n.", "is not allowed"),
    "an old object": (b"(cos\nsystem\nK\x01o.", "OBJ"),
    "an out-of-band buffer": (b"\x80\x05\x97.", "NEXT_BUFFER"),
    "a persistent id": (b"\x80\x02K\x01Q.", "persistent"),
    "a persistent id as text": (b"Px\n.", "PERSID"),
    "a call of a number": (b"\x80\x02K\x01)R.", "calls a int"),
    "a call of an object": (b"\x80\x02cos\nsystem\n)R)R.", "calls a Foreign"),
    "arguments that are no tuple": (b"\x80\x02cos\nsystem\n]R.", "no tuple"),
    "fields of a class": (b"\x80\x02cos\nsystem\n}b.", "sets fields"),
    "fields of a known name": (b"\x80\x02ccollections\nOrderedDict\n}b.", "sets fields"),
    "fields of a list": (b"\x80\x02]}b.", "sets fields"),
    "a key that takes for ever to hash": (b"\x80\x02})" + b"2\x86" * 60 + b"K\x01s.", "a key is a tuple"),
    "a member of a set that takes for ever to hash": (b"\x80\x04\x8f()" + b"2\x86" * 60 + b"\x90.", "a key is a tuple"),
    "elements of a tuple": (b"\x80\x02)K\x01a.", "appends to a tuple"),
    "items of a list": (b"\x80\x02]K\x01K\x02s.", "sets items of a list"),
    "a key alone": (b"\x80\x02}(K\x01u.", "damaged"),
    "nothing": (b"", "damaged"),
    "no end": (b"\x80\x02K\x01", "damaged"),
    "nothing before the end": (b"\x80\x02.", "damaged"),
    "two values": (b"\x80\x02K\x01K\x02.", "left over"),
    "a mark that stays": (b"\x80\x02(K\x01.", "left over"),
    "no mark": (b"\x80\x02K\x01t.", "a mark is missing"),
    "a tuple of too few": (b"\x80\x02K\x01\x86.", "a value is missing"),
    "an unknown place of the memo": (b"\x80\x02h\x07.", "damaged"),
    "a number of 5000 digits": (b"I" + b"9" * 5000 + b"\n.", "damaged"),
    "text of 2**62 bytes": (b"\x80\x04\x8d" + (2**62).to_bytes(8, "little") + b"x.", "damaged"),
    "bytes of 2**64 - 1": (b"\x80\x04\x8e" + b"\xff" * 8 + b"x.", "damaged"),
    "bytes to write of 2**62": (b"\x80\x05\x96" + (2**62).to_bytes(8, "little") + b"x.", "damaged"),
    "a negative length": (b"\x80\x02\x8b\xff\xff\xff\xff.", "damaged"),
    "no pickle": (b"PK\x03\x04", "damaged"),
    "too many opcodes": (b"\x80\x02" + b"N0" * LIMIT + b"N.", "too many opcodes"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_damaged_or_not_allowed_is_one_message(kind: str) -> None:
    data, what = REFUSED[kind]
    with pytest.raises(UsageError, match=what) as error:
        read(data, most_opcodes=LIMIT)
    assert str(error.value).startswith("file.pt: ")
    assert "fix: " in str(error.value)


def test_deep_nesting_is_read_without_recursion() -> None:
    got = read(b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".")
    depth = 0
    while got:
        (got,) = got
        depth += 1
    assert depth == 19_999


def test_a_name_that_only_looks_like_a_known_one_is_unknown() -> None:
    for module, name in (("collections", "OrderedDict.fromkeys"), ("collections.OrderedDict", ""), ("", "OrderedDict")):
        data = pickle.dumps(module, 4)[:-1] + pickle.dumps(name, 4)[2:-1] + b"\x93)R."
        got = read(data)
        assert isinstance(got, Foreign), (module, name)
        assert got.name == f"{module}.{name}"


def test_a_constructor_may_refuse() -> None:
    def never() -> None:
        raise Refused("it is Tuesday")

    with pytest.raises(UsageError, match="it is Tuesday"):
        loads(b"\x80\x02ca\nb\n)R.", {("a", "b"): never}, where="x")


def test_any_changed_bytes_give_a_value_or_one_message(marker: Path) -> None:
    """Each sample is run 400 times with up to three bytes changed."""
    generator = random.Random(1)
    samples = [*_calls(marker).values(), pickle.dumps({"a": [1, (2, {3})], "b": subprocess.CompletedProcess("x", 1)})]
    for sample in samples:
        for _ in range(400):
            data = bytearray(sample)
            for _ in range(generator.randint(1, 3)):
                data[generator.randrange(len(data))] = generator.randrange(256)
            with contextlib.suppress(UsageError):
                read(bytes(data), most_opcodes=LIMIT)


def test_the_reader_needs_no_pickle_and_no_torch() -> None:
    """In a new interpreter: importing it brings neither."""
    code = "import sys, jmegatron.interop.safe_pickle; print({'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
