"""Preprocessing many kinds of input in many processes: packed files, parquet, partitions, large ids, kills."""

import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmegatron.data.indexed_dataset import IndexedDataset
from jmegatron.data.preprocess import PreprocessOptions, preprocess
from jmegatron.data.preprocess_input import (
    Piece,
    lines_before,
    read_chunks,
    read_range,
    split_pieces,
)
from jmegatron.data.preprocess_output import TokenFiles, part_folder, sole_writer
from jmegatron.data.tokenizers import ByteTokenizer
from jmegatron.errors import DataFileError, UsageError

EOD = ByteTokenizer.eod


def _lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _bytes(report):
    return [Path(prefix + ending).read_bytes() for prefix in report.prefixes for ending in (".bin", ".idx")]


def _run(tmp_path, name, *inputs, **options):
    return preprocess(PreprocessOptions(list(inputs), tmp_path / name / "c", **options))


def _documents(report):
    corpus = IndexedDataset(report.prefixes[0])
    marks = corpus.document_indices.tolist()
    return [[corpus.get(i).tolist() for i in range(a, b)] for a, b in itertools.pairwise(marks)]


# ------------------------------------------------------------------------------------------------------------ bytes


def test_small_corpus_has_the_bytes_of_the_reference(tmp_path):
    """'', two tokens, '', one token with EOD: two sequences, three empty marks; worked out from the format by hand."""
    (tmp_path / "a.jsonl").write_bytes(_lines(["", "5 6", "", "7"]))
    report = _run(tmp_path, "o", tmp_path / "a.jsonl", tokenizer_type="NullTokenizer", vocab_size=100, append_eod=True)
    tokens, index = _bytes(report)
    assert tokens == np.array([5, 6, 100, 7, 100], "<u2").tobytes()
    wanted = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\x08" + np.array([2, 5], "<u8").tobytes()
    wanted += np.array([3, 2], "<i4").tobytes() + np.array([0, 6], "<i8").tobytes()
    wanted += np.array([0, 0, 1, 1, 2], "<i8").tobytes()
    assert index == wanted
    assert len(index) == 98


def test_list_of_strings_is_a_document_of_several_sequences(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(_lines([["ab", "", "c", ""], [], "d", ["", ""]]))
    report = _run(tmp_path, "o", tmp_path / "a.jsonl", append_eod=True)
    assert _documents(report) == [[[97, 98], [99, EOD]], [], [[100, EOD]], []]


def test_ids_above_65535_are_stored_whole(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(_lines(["65535 65536 99999", "0"]))
    for workers in (1, 2):
        report = _run(
            tmp_path,
            f"o{workers}",
            tmp_path / "a.jsonl",
            tokenizer_type="NullTokenizer",
            vocab_size=100_000,
            append_eod=True,
            workers=workers,
        )
        assert _documents(report) == [[[65535, 65536, 99999, 100_000]], [[0, 100_000]]]
        assert IndexedDataset(report.prefixes[0]).dtype == "int32"


# ------------------------------------------------------------------------------------------------------------ kinds


def test_zst_files_of_several_frames(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    frames = b"".join(zstandard.ZstdCompressor().compress(_lines([text])) for text in ("one", "two"))
    (tmp_path / "a.jsonl.zst").write_bytes(frames)
    (tmp_path / "b.txt.zst").write_bytes(zstandard.ZstdCompressor().compress(b"three"))
    report = _run(tmp_path, "o", tmp_path)
    assert _documents(report) == [[[*b"one"]], [[*b"two"]], [[*b"three"]]]
    (tmp_path / "a.jsonl.zst").write_bytes(frames[:-4])
    with pytest.raises(DataFileError, match=r"a\.jsonl\.zst"):
        _run(tmp_path, "o", tmp_path / "a.jsonl.zst")
    (tmp_path / "a.jsonl.zst").write_bytes(b"no archive")
    with pytest.raises(DataFileError, match=r"a\.jsonl\.zst cannot be read"):
        _run(tmp_path, "o", tmp_path / "a.jsonl.zst")


def test_parquet_rows_are_documents(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["a", "", "ü", None], "other": [1, 2, 3, 4], "parts": [["x", "y"], [], ["z"], []]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataFileError, match=r"a\.parquet, row 4: key 'text' holds a NoneType"):
        _run(tmp_path, "o", tmp_path / "a.parquet")
    report = _run(tmp_path, "o", tmp_path / "a.parquet", skip_bad_lines=True, workers=2)
    assert _documents(report) == [[[97]], [], [[*"ü".encode()]]]
    assert report.num_bad_lines == 1
    report = _run(tmp_path, "p", tmp_path / "a.parquet", json_keys=["parts"])
    assert _documents(report) == [[[120], [121]], [], [[122]], []]
    with pytest.raises(UsageError, match=r"--json-keys: got \['body'\], expected columns of"):
        _run(tmp_path, "o", tmp_path / "a.parquet", json_keys=["body"])
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataFileError, match=r"a\.parquet cannot be read"):
        _run(tmp_path, "o", tmp_path / "a.parquet")


@pytest.mark.parametrize(("name", "package"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_missing_library_is_said_before_anything_is_written(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError, match=rf"need the Python package {package}.*jmegatron\[preprocess\]"):
        _run(tmp_path, "o", tmp_path / name)
    assert not (tmp_path / "o").exists()


# --------------------------------------------------------------------------------------------- cutting and processes


@given(
    texts=st.lists(st.text(alphabet="aé\n", max_size=40), max_size=12),
    chunk=st.integers(1, 60),
    parts=st.integers(1, 5),
    end=st.sampled_from([b"", b"\n", b"\n\n"]),
)
@settings(max_examples=60, deadline=None)
def test_every_line_belongs_to_one_range(tmp_path_factory, texts, chunk, parts, end):
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_bytes(_lines(texts).rstrip(b"\n") + end)
    groups = split_pieces([Piece(str(path), 0, path.stat().st_size)], parts)
    read = []
    for piece in (piece for group in groups for piece in group):
        for begin in range(piece.begin, piece.end, chunk):
            block = read_range(str(path), begin, min(begin + chunk, piece.end))
            if block:
                assert path.read_bytes().split(b"\n")[lines_before(str(path), begin)] == block.split(b"\n")[0]
            read.append(block)
    assert b"".join(read) == path.read_bytes()


def test_files_that_cannot_be_cut_go_whole_to_one_part(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(_lines([name] * 50)))
    pieces = [Piece(str(tmp_path / f"{name}.jsonl.gz"), 0, 100) for name in "abc"]
    for parts in range(1, 6):
        groups = split_pieces(pieces, parts)
        assert [piece for group in groups for piece in group] == pieces
        assert len(groups) == parts


@pytest.fixture
def mixed(tmp_path):
    """All kinds of files, enough for several chunks each."""
    folder = tmp_path / "in"
    folder.mkdir()
    rng = np.random.RandomState(0)
    texts = ["word " * rng.randint(0, 60) + "ü" for _ in range(300)]
    texts[10] = texts[299] = ""
    (folder / "a.jsonl").write_bytes(_lines(texts[:150]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(_lines(texts[150:250])))
    (folder / "c.txt").write_text("plain text")
    (folder / "d.json").write_bytes(_lines(texts[250:])[:-1])
    (folder / "e.md").write_text("more")
    return folder


@pytest.mark.parametrize(("workers", "partitions"), [(2, 1), (3, 1), (1, 2), (1, 5), (2, 2)])
def test_processes_do_not_change_the_bytes(tmp_path, mixed, workers, partitions):
    one = _run(tmp_path, "one", mixed, append_eod=True)
    many = _run(tmp_path, "many", mixed, append_eod=True, workers=workers, partitions=partitions)
    assert _bytes(one) == _bytes(many)
    same = ("num_documents", "num_tokens", "num_bytes", "num_bad_lines")
    assert [getattr(one, name) for name in same] == [getattr(many, name) for name in same]
    assert one.num_documents == 302
    assert sorted(p.name for p in (tmp_path / "many").iterdir()) == ["c_text_document.bin", "c_text_document.idx"]


def test_chunks_of_a_stream_in_workers_do_not_change_the_bytes(tmp_path, mixed, monkeypatch):
    one = _run(tmp_path, "one", mixed, append_eod=True)
    monkeypatch.setattr("jmegatron.data.preprocess_input.CHUNK_BYTES", 700)
    assert len(list(read_chunks([Piece(str(mixed / "b.jsonl.gz"), 0, 1)], ["text"]))) > 10
    assert _bytes(one) == _bytes(_run(tmp_path, "many", mixed, append_eod=True, workers=2))


@pytest.mark.parametrize("options", [{"workers": 2}, {"partitions": 3}, {"partitions": 2, "workers": 2}])
def test_bad_line_in_any_process_is_named_and_nothing_stays(tmp_path, options):
    texts = [f"text {number}" for number in range(200)]
    (tmp_path / "a.jsonl").write_bytes(_lines(texts) + b"broken\n" + _lines(texts))
    with pytest.raises(DataFileError, match=r"a\.jsonl, line 201: "):
        _run(tmp_path, "o", tmp_path / "a.jsonl", **options)
    assert list((tmp_path / "o").iterdir()) == []
    report = _run(tmp_path, "o", tmp_path / "a.jsonl", skip_bad_lines=True, **options)
    assert (report.num_documents, report.num_bad_lines) == (400, 1)


def test_partitions_without_a_token_stop(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(_lines(["", ""]))
    with pytest.raises(UsageError, match="hold no token"):
        _run(tmp_path, "o", tmp_path / "a.jsonl", partitions=2)
    assert list((tmp_path / "o").iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ kills


@pytest.mark.parametrize("options", ["workers=2", "partitions=2"])
def test_killed_run_with_processes_leaves_no_final_name_and_no_process(tmp_path, options):
    (tmp_path / "a.jsonl").write_bytes(_lines(["a"] * 10))
    os.mkfifo(tmp_path / "pipe.jsonl")  # never ends
    code = (
        "import jmegatron.data.preprocess as p\n"
        "if __name__ == '__main__':\n"
        f"    p.preprocess(p.PreprocessOptions([{str(tmp_path / 'a.jsonl')!r}, {str(tmp_path / 'pipe.jsonl')!r}], "
        f"{str(tmp_path / 'o' / 'c')!r}, {options}))\n"
    )
    (tmp_path / "run.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen([sys.executable, str(tmp_path / "run.py")], env=environment)
    deadline = time.monotonic() + 30
    while len(_children(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    children = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    names = [p.name for p in (tmp_path / "o").iterdir()]
    assert all(re.fullmatch(r"\..*\.(tmp|lock|parts)", name) for name in names), names
    with open(os.open(tmp_path / "pipe.jsonl", os.O_RDWR | os.O_NONBLOCK), "wb"):
        pass  # a reader of the pipe sees its end
    report = _run(tmp_path, "o", tmp_path / "a.jsonl")
    assert report.num_documents == 10
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == ["c_text_document.bin", "c_text_document.idx"]
    while any(map(_is_alive, children)) and time.monotonic() < deadline + 30:
        time.sleep(0.1)
    assert not any(map(_is_alive, children))


def _children(pid):
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _is_alive(pid):
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_worker_that_is_killed_ends_the_run(tmp_path, monkeypatch):
    from jmegatron.data import preprocess_workers

    start = preprocess_workers._Worker.start.__func__

    def start_and_kill(cls, context, job):
        worker = start(cls, context, job)
        worker.process.kill()
        worker.process.join()
        return worker

    monkeypatch.setattr(preprocess_workers._Worker, "start", classmethod(start_and_kill))
    (tmp_path / "a.jsonl").write_bytes(_lines(["a"] * 10))
    with pytest.raises(UsageError, match="--workers: a worker process died"):
        _run(tmp_path, "o", tmp_path / "a.jsonl", workers=2)
    assert list((tmp_path / "o").iterdir()) == []


def test_full_disk_gives_one_message():
    files = TokenFiles(["/dev/full"])
    with pytest.raises(DataFileError, match="--output-prefix: writing stopped: No space left"):
        files.write([np.arange(10, dtype="<u2")], [0])
    files.close()


def test_two_runs_with_one_prefix_do_not_mix(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(_lines(["a"]))
    prefix = tmp_path / "o" / "c"
    prefix.parent.mkdir()
    with (
        sole_writer([f"{prefix}_text_document"]),
        pytest.raises(UsageError, match="another process is writing there"),
    ):
        _run(tmp_path, "o", tmp_path / "a.jsonl")
    assert _run(tmp_path, "o", tmp_path / "a.jsonl").num_documents == 1


def test_sweep_leaves_what_is_not_its_own(tmp_path):
    prefix = tmp_path / "c"
    stale = [".c_text_document.bin.1.0a.tmp", ".c_text_document.idx.77.ff.tmp"]
    kept = [".d_text_document.bin.1.0a.tmp", "c_text_document.bin", ".c_text_document.bin.tmp", "c.parts"]
    for name in stale + kept:
        (tmp_path / name).write_text("")
    names = [f"{prefix}_text_document"]
    folder = part_folder(names)
    folder.mkdir()
    (folder / "0_0.bin").write_text("")
    with sole_writer(names):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(kept)
