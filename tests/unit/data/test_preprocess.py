"""From text to corpora: the inputs, empty documents, bad lines, workers, kill-safety, the command line, the demo."""

import gzip
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jmegatron.data import demo_corpus
from jmegatron.data.demo_corpus import demo_documents, ensure_demo_corpus
from jmegatron.data.indexed_dataset import IndexedDataset
from jmegatron.data.preprocess import PreprocessOptions, find_input_files, preprocess
from jmegatron.data.tokenizers import ByteTokenizer
from jmegatron.errors import DataFileError, UsageError

ROOT = Path(__file__).parents[3]
EOD = ByteTokenizer.eod


def _jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def _run(tmp_path, *inputs, **options):
    return preprocess(PreprocessOptions(list(inputs), tmp_path / "out" / "c", **options))


def _documents(prefix):
    """Each document's sequences, as lists of ids."""
    corpus = IndexedDataset(prefix)
    marks = corpus.document_indices.tolist()
    return [[corpus.get(i).tolist() for i in range(a, b)] for a, b in itertools.pairwise(marks)]


def _text(*texts):
    return [[list(text.encode())] for text in texts]


# ---------------------------------------------------------------------------------------------------------- input


def test_json_lines_become_documents_with_eod(tmp_path):
    report = _run(tmp_path, _jsonl(tmp_path / "a.jsonl", ["hé", "b"]), append_eod=True)
    assert report.prefixes == [str(tmp_path / "out" / "c_text_document")]
    assert _documents(report.prefixes[0]) == [[[*"hé".encode(), EOD]], [[98, EOD]]]
    assert (report.num_documents, report.num_tokens, report.num_bytes, report.num_bad_lines) == (2, 6, 4, 0)
    assert IndexedDataset(report.prefixes[0]).dtype == "uint16"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["c_text_document.bin", "c_text_document.idx"]


def test_empty_text_is_a_document_without_sequence_and_without_eod(tmp_path):
    report = _run(tmp_path, _jsonl(tmp_path / "a.jsonl", ["a", "", "b"]), append_eod=True)
    assert _documents(report.prefixes[0]) == [[[97, EOD]], [], [[98, EOD]]]
    assert report.num_documents == 3


def test_all_kinds_of_files_in_the_order_given(tmp_path):
    _jsonl(tmp_path / "b.jsonl", ["two"])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n\n  \n{"text": "four"}'))
    (tmp_path / "a.txt").write_text("one\nwith lines\n")
    report = _run(tmp_path, tmp_path / "a.txt", tmp_path / "[bc].json*")
    assert _documents(report.prefixes[0]) == _text("one\nwith lines\n", "two", "three", "four")


def test_folder_is_searched_to_the_bottom_and_no_file_comes_twice(tmp_path):
    folder = tmp_path / "in" / "deep"
    folder.mkdir(parents=True)
    (folder / "z.txt").write_text("z")
    (folder / "ignored.bin").write_bytes(b"x")
    (tmp_path / "in" / "a.md").write_text("a")
    files = find_input_files([tmp_path / "in", folder / "z.txt"])
    assert [file.name for file in files] == ["a.md", "z.txt"]


def test_several_json_keys_give_several_corpora(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"title": "t", "body": "bb"}\n{"title": "u", "body": ""}\n')
    report = _run(tmp_path, tmp_path / "a.jsonl", json_keys=["title", "body"])
    assert [Path(prefix).name for prefix in report.prefixes] == ["c_title_document", "c_body_document"]
    assert _documents(report.prefixes[0]) == _text("t", "u")
    assert _documents(report.prefixes[1]) == [*_text("bb"), []]


def test_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfb")
    assert _documents(_run(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.txt").prefixes[0]) == _text("a", "b")


def test_chunks_and_workers_do_not_change_the_corpus(tmp_path, monkeypatch):
    source = _jsonl(tmp_path / "a.jsonl", [f"document {number} " * (number % 7) for number in range(100)])
    whole = preprocess(PreprocessOptions([source], tmp_path / "one", append_eod=True))
    monkeypatch.setattr("jmegatron.data.preprocess_input.CHUNK_BYTES", 300)
    parts = preprocess(PreprocessOptions([source], tmp_path / "many", append_eod=True, workers=2))
    for ending in (".bin", ".idx"):
        left, right = (Path(report.prefixes[0] + ending).read_bytes() for report in (whole, parts))
        assert left == right
    assert (whole.num_documents, whole.num_tokens) == (parts.num_documents, parts.num_tokens)


def test_progress_is_logged_with_rates(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        _run(tmp_path, _jsonl(tmp_path / "a.jsonl", ["a"] * 25), log_interval=10)
    assert "25 documents, " in caplog.text
    assert "documents/s" in caplog.text
    assert "MB/s" in caplog.text


# ------------------------------------------------------------------------------------------------------ bad input

BAD_LINES = {
    "broken JSON": (b'{"text": "a', "Unterminated string"),
    "no object": (b'["text"]', "a JSON list, expected an object"),
    "no such key": (b'{"body": "a"}', "no key 'text' among \\['body'\\]"),
    "no string": (b'{"text": 5}', "key 'text' holds a int, expected a string or a list of strings"),
    "not UTF-8": (b'{"text": "\xff"}', "can't decode byte 0xff"),
    "lone surrogate": (b'{"text": "\\ud800"}', "surrogates not allowed"),
    "nested deeply": (b"[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_bad_line_is_fatal_and_named_or_counted(tmp_path, kind):
    line, message = BAD_LINES[kind]
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(DataFileError, match=f"a.jsonl, line 3: .*{message}.*--skip-bad-lines"):
        _run(tmp_path, source)
    assert list((tmp_path / "out").iterdir()) == []
    report = _run(tmp_path, source, skip_bad_lines=True)
    assert _documents(report.prefixes[0]) == _text("a", "b")
    assert report.num_bad_lines == 1


def test_bad_line_in_a_worker_stops_the_run_with_its_place(tmp_path):
    source = _jsonl(tmp_path / "a.jsonl", ["a"] * 3)
    source.write_text(source.read_text() + "broken\n")
    with pytest.raises(DataFileError, match=r"a\.jsonl, line 4"):
        _run(tmp_path, source, workers=2)
    assert list((tmp_path / "out").iterdir()) == []


def test_cut_gzip_file_is_named(tmp_path):
    whole = gzip.compress(b'{"text": "a"}\n' * 10_000)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataFileError, match=r"a\.jsonl\.gz cannot be read"):
        _run(tmp_path, tmp_path / "a.jsonl.gz")
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip at all")
    with pytest.raises(DataFileError, match=r"b\.jsonl\.gz cannot be read"):
        _run(tmp_path, tmp_path / "b.jsonl.gz")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": ["nothing*.jsonl"]}, "--input nothing"),
        ({"workers": 0}, "--workers 0"),
        ({"json_keys": []}, "--json-keys"),
        ({"json_keys": ["a", "a"]}, "--json-keys"),
        ({"json_keys": ["a", "b"]}, r"--json-keys: .* is plain text"),
        ({"tokenizer_type": "Byte"}, "did you mean ByteTokenizer"),
        ({"input": ["empty.txt"]}, "hold no token"),
        ({"output_prefix": "a.txt/c"}, "--output-prefix: the folder a.txt cannot be made"),
    ],
)
def test_option_that_cannot_work_stops_before_anything_is_written(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    Path("empty.txt").write_text("")
    with pytest.raises(UsageError, match=message):
        preprocess(PreprocessOptions(**({"input": ["a.txt"], "output_prefix": "c"} | options)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "empty.txt"]


# --------------------------------------------------------------------------------------------------- command line


def _command(*arguments):
    return [sys.executable, str(ROOT / "scripts" / "preprocess_data.py"), *map(os.fspath, arguments)]


def test_command_line_writes_the_corpus_and_prints_the_data_path(tmp_path):
    source = _jsonl(tmp_path / "a.jsonl", ["a", "b"])
    done = subprocess.run(
        _command("--input", source, "--output-prefix", tmp_path / "c", "--append-eod"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"--data-path {tmp_path / 'c_text_document'}" in done.stdout
    assert _documents(tmp_path / "c_text_document") == [[[97, EOD]], [[98, EOD]]]


@pytest.mark.parametrize("arguments", [["--input", "nothing"], ["--input", "a.jsonl", "--no-such-option"]])
def test_command_line_error_is_status_2_without_traceback(tmp_path, arguments):
    _jsonl(tmp_path / "a.jsonl", ["a"])
    command = _command(*arguments, "--output-prefix", "c")
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_killed_preprocessing_leaves_no_final_name(tmp_path):
    source = tmp_path / "pipe.jsonl"
    os.mkfifo(source)  # never ends, so the process is surely in the middle when it is killed
    _jsonl(tmp_path / "first.jsonl", ["a"] * 10)
    code = (
        "import jmegatron.data.preprocess as p\n"
        f"p.preprocess(p.PreprocessOptions([{str(tmp_path / 'first.jsonl')!r}, {str(source)!r}], "
        f"{str(tmp_path / 'out' / 'c')!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("out/.c_text_document.bin.*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    names = [p.name for p in (tmp_path / "out").iterdir()]
    assert len(names) == 2
    assert all(name.endswith((".tmp", ".lock")) for name in names)
    report = _run(tmp_path, tmp_path / "first.jsonl")  # the next start sweeps
    assert _documents(report.prefixes[0]) == _text(*"a" * 10)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["c_text_document.bin", "c_text_document.idx"]


# ----------------------------------------------------------------------------------------------------------- demo


def test_demo_corpus_is_a_few_megabytes_of_the_same_text_each_time(tmp_path):
    prefix = ensure_demo_corpus(tmp_path)
    corpus = IndexedDataset(prefix)
    assert 3e6 < corpus.sequence_lengths.sum() < 6e6
    assert len(corpus) > 300
    assert corpus.get(0)[-1] == EOD
    documents = demo_documents()
    assert len(documents) == len(corpus)
    for number in (0, 7, len(corpus) - 1):
        assert ByteTokenizer().detokenize(corpus.get(number)) == documents[number]
    assert sorted(p.name for p in Path(prefix).parent.iterdir()) == [
        ".lock",
        "demo_text_document.bin",
        "demo_text_document.idx",
    ]


@pytest.fixture
def short_demo(monkeypatch):
    """A demo corpus of two documents; returns the list of builds."""
    builds = []

    def documents():
        builds.append(1)
        return ["one", "two"]

    monkeypatch.setattr(demo_corpus, "demo_documents", documents)
    return builds


def test_demo_corpus_is_built_once_and_again_when_damaged(tmp_path, short_demo, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    prefix = ensure_demo_corpus()
    assert prefix.startswith(str(tmp_path / "jmegatron" / "demo_corpus"))
    assert ensure_demo_corpus() == prefix
    assert len(short_demo) == 1
    os.truncate(f"{prefix}.bin", 3)
    assert _documents(ensure_demo_corpus()) == [[[*b"one", EOD]], [[*b"two", EOD]]]
    assert len(short_demo) == 2


def test_demo_corpus_in_a_folder_that_cannot_be_written_names_option_and_variable(tmp_path, short_demo):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--data-cache-path or the environment variable XDG_CACHE_HOME"):
        ensure_demo_corpus(tmp_path / "file")


def test_demo_script_in_a_folder_that_cannot_be_written_is_status_2_without_traceback(tmp_path):
    (tmp_path / "file").write_text("")
    command = [sys.executable, str(ROOT / "scripts" / "make_demo_corpus.py"), "--cache-dir", str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the demo corpus cannot be written")


def test_demo_corpus_of_two_processes_at_once_is_whole(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "make_demo_corpus.py"), "--cache-dir", str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    prefixes = {process.communicate(timeout=60)[0].strip() for process in running}
    assert len(prefixes) == 1
    assert len(IndexedDataset(prefixes.pop())) > 300
