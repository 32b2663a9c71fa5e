"""What counts as which kind of input: endings, files without one, pipes, folders, cut archives."""

import gzip
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jmegatron.data.indexed_dataset import IndexedDataset
from jmegatron.data.preprocess import PreprocessOptions, preprocess
from jmegatron.data.preprocess_input import find_input_files, open_input
from jmegatron.errors import DataFileError, UsageError

ROOT = Path(__file__).parents[3]
LINES = b'{"text": "a"}\n{"text": "bc"}\n'
WANTED = [[97], [98, 99]]


@pytest.fixture
def permissions(tmp_path_factory):
    """Permissions have a meaning; for root they have none."""
    file = tmp_path_factory.mktemp("permissions") / "file"
    file.touch(mode=0)
    if os.access(file, os.R_OK):
        pytest.skip("root reads everything")


def _run(tmp_path, *inputs, **options):
    return preprocess(PreprocessOptions(list(inputs), tmp_path / "out" / "c", **options))


def _tokens(report):
    corpus = IndexedDataset(report.prefixes[0])
    return [corpus.get(i).tolist() for i in range(len(corpus))]


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "a.Json", "a.ndjson.gz", "a.JSONL.GZ", "noending", "a.log"])
def test_json_lines_of_any_name_are_documents(tmp_path, name, caplog):
    packed = name.lower().endswith(".gz")
    (tmp_path / name).write_bytes(gzip.compress(LINES) if packed else LINES)
    with caplog.at_level(logging.INFO):
        for options in ({}, {"workers": 2}):
            assert _tokens(_run(tmp_path, tmp_path / name, **options)) == WANTED
    assert ("the ending says nothing, so it is read as JSON lines" in caplog.text) == (name in ("noending", "a.log"))


def test_unknown_ending_with_plain_text_is_one_document_and_said(tmp_path, caplog):
    (tmp_path / "LICENSE").write_text("\nplain {text}\n")
    with caplog.at_level(logging.INFO):
        assert _tokens(_run(tmp_path, tmp_path / "LICENSE")) == [list(b"\nplain {text}\n")]
    assert "LICENSE: the ending says nothing, so it is read as one document of plain text" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.log", b'\n{"text": \n"a"}', "begins like a JSON object but is none.*fix: name it .jsonl"),
        ("a.bin", b"a", "a file of a corpus, expected text"),
        ("a.IDX", b"a", "a file of a corpus, expected text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        _run(tmp_path, tmp_path / name)
    assert not (tmp_path / "out").exists()


def _from_stdin(tmp_path, *options, **source):
    command = [sys.executable, str(ROOT / "scripts" / "preprocess_data.py"), "--input", "/dev/stdin"]
    command += ["--output-prefix", str(tmp_path / "c"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **source)


@pytest.mark.parametrize("options", [(), ("--workers", "2")])
def test_standard_input_is_json_lines(tmp_path, options):
    done = _from_stdin(tmp_path, *options, input=LINES.decode())
    assert done.returncode == 0, done.stderr
    corpus = IndexedDataset(tmp_path / "c_text_document")
    assert [corpus.get(i).tolist() for i in range(2)] == WANTED
    assert "read as JSON lines" in done.stderr


def test_file_as_standard_input_is_read_by_workers_too(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with open(tmp_path / "a.jsonl") as file:
        done = _from_stdin(tmp_path, "--workers", "2", "--partitions", "2", stdin=file)
    assert done.returncode == 0, done.stderr
    assert len(IndexedDataset(tmp_path / "c_text_document")) == 2


def test_pipe_of_one_process_is_not_cut_into_partitions(tmp_path):
    done = _from_stdin(tmp_path, "--partitions", "2", input=LINES.decode())
    assert done.returncode == 2
    assert "--partitions: got 2 with /dev/stdin, which one process reads" in done.stderr


def test_empty_name_is_not_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a")
    with pytest.raises(UsageError, match="--input '': no such file"):
        find_input_files([""])


def test_input_is_never_written_over(tmp_path):
    _run(tmp_path, _lines(tmp_path / "a.jsonl"))
    output = tmp_path / "out" / "c_text_document.bin"
    before = output.read_bytes()
    (tmp_path / "link.txt").symlink_to(output)
    with pytest.raises(UsageError, match=r"it would write over --input .*link\.txt"):
        _run(tmp_path, tmp_path / "link.txt")
    assert output.read_bytes() == before


def _lines(path):
    path.write_bytes(LINES)
    return path


@pytest.mark.usefixtures("permissions")
def test_what_cannot_be_read_is_named(tmp_path):
    closed = tmp_path / "in" / "closed"
    closed.mkdir(parents=True)
    for path in (tmp_path / "in" / "a.jsonl", closed / "b.jsonl"):
        _lines(path)
    closed.chmod(0)
    try:
        for given in (tmp_path / "in", closed / "b.jsonl"):
            with pytest.raises(DataFileError, match=r"closed.* cannot be read: Permission denied; fix: check the perm"):
                _run(tmp_path, given)
    finally:
        closed.chmod(0o700)
    (tmp_path / "in" / "a.jsonl").chmod(0)
    with pytest.raises(DataFileError, match=r"a\.jsonl cannot be read: .*Permission denied"):
        _run(tmp_path, tmp_path / "in")


def test_subfolder_that_cannot_be_read_is_not_an_empty_one(tmp_path, monkeypatch):
    _lines(tmp_path / "a.jsonl")
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refuse(folder):
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataFileError, match=r"--input .*/closed cannot be read: Permission denied"):
        find_input_files([tmp_path])


# -------------------------------------------------------------------------------------------------------- zstandard


def test_large_zst_files_are_read_to_their_end_and_cut_ones_refused(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    words = np.random.RandomState(0).randint(0, 10**9, size=(600, 600)).tolist()
    whole = b"".join(json.dumps({"text": str(row)}).encode() + b"\n" for row in words)
    assert len(whole) > 3 << 20
    packed = zstandard.ZstdCompressor().compress(whole[:-1])  # without the last end of line
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    assert _run(tmp_path, tmp_path / "a.jsonl.zst").num_documents == len(words)
    frames = packed + zstandard.ZstdCompressor().compress(b"") + packed
    (tmp_path / "a.jsonl.zst").write_bytes(frames)
    with open_input(str(tmp_path / "a.jsonl.zst")) as file:
        assert file.read() == 2 * whole[:-1]
    for size in (3, len(packed) // 2, len(packed) - 1, len(frames) - 4):
        (tmp_path / "a.jsonl.zst").write_bytes(frames[:size])
        with pytest.raises(DataFileError, match=r"a\.jsonl\.zst cannot be read: the file is cut short; fix:"):
            _run(tmp_path, tmp_path / "a.jsonl.zst", skip_bad_lines=True)
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    with open_input(str(tmp_path / "a.jsonl.zst")) as file:
        assert file.read() == b""
