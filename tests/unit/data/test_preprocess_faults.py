"""What goes wrong around preprocessing and merging: full disks, two writers at once, closed folders, Ctrl-C."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jmegatron.data.files import AtomicFile, atomic_outputs
from jmegatron.data.indexed_dataset import IndexedDatasetBuilder
from jmegatron.data.merge import merge_corpora
from jmegatron.data.preprocess import PreprocessOptions, preprocess
from jmegatron.data.preprocess_output import open_corpus, sole_writer
from jmegatron.data.tokenizers.training import save_tokenizer
from jmegatron.errors import DataFileError, UsageError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def permissions(tmp_path_factory):
    """Permissions have a meaning; for root they have none."""
    file = tmp_path_factory.mktemp("permissions") / "file"
    file.touch(mode=0)
    if os.access(file, os.R_OK):
        pytest.skip("root reads and writes everything")


def _jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _corpus(prefix, documents=((1, 2), (3,)), modes=None):
    with IndexedDatasetBuilder(prefix, np.uint16, multimodal=modes is not None) as builder:
        for number, tokens in enumerate(documents):
            builder.add_document(np.array(tokens), modes=None if modes is None else [modes[number]])
        builder.finalize()
    return str(prefix)


def _run(tmp_path, *inputs, **options):
    return preprocess(PreprocessOptions(list(inputs), tmp_path / "out" / "c", **options))


# ------------------------------------------------------------------------------------------------------ two writers


def test_merge_and_preprocess_of_one_name_do_not_destroy_each_other(tmp_path):
    a = _corpus(tmp_path / "a")
    (tmp_path / "out").mkdir()
    name = str(tmp_path / "out" / "c_text_document")
    live = tmp_path / "out" / ".c_text_document.bin.1.0a.tmp"
    with sole_writer([name]):
        live.write_bytes(b"tokens of the one that runs")
        with pytest.raises(UsageError, match="another process is writing there"):
            merge_corpora([a], name)
        with pytest.raises(UsageError, match="another process is writing there"):
            _run(tmp_path, _jsonl(tmp_path / "a.jsonl", ["a"]), json_keys=["text"])
        assert live.exists()
    merge_corpora([a], name)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["c_text_document.bin", "c_text_document.idx"]


def test_runs_for_different_keys_share_a_prefix(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "title": "b"}\n')
    (tmp_path / "out").mkdir()
    with sole_writer([str(tmp_path / "out" / "c_title_document")]):
        _run(tmp_path, tmp_path / "a.jsonl", partitions=2)
        with pytest.raises(UsageError, match="c_title_document"):
            _run(tmp_path, tmp_path / "a.jsonl", json_keys=["text", "title"])


# -------------------------------------------------------------------------------------------------------- full disk


@pytest.fixture
def small_disk():
    """Files of at most 4096 bytes, in the processes that start as well: an error where a full disk gives one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("options", [{}, {"workers": 2}, {"partitions": 2}, {"partitions": 2, "workers": 2}])
@pytest.mark.parametrize("texts", [["word" * 100] * 100, ["a"] * 400])
def test_full_disk_is_said_whoever_writes(tmp_path, small_disk, options, texts):
    """Either the tokens do not fit, or (short documents) their index."""
    for number, text in enumerate(texts):  # a file each: the input has to fit as well
        _jsonl(tmp_path / f"{number}.jsonl", [text])
    with pytest.raises(DataFileError, match=r"(writing stopped|cannot write .*|copying .* stopped): File too large"):
        _run(tmp_path, tmp_path / "*.jsonl", **options)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("documents", [[[1] * 3000], [[1]] * 400])
def test_merge_on_a_full_disk_leaves_nothing(tmp_path, documents, request):
    parts = [
        _corpus(tmp_path / "a", documents[: len(documents) // 2] or [[1] * 1500]),
        _corpus(tmp_path / "b", documents),
    ]
    request.getfixturevalue("small_disk")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataFileError, match=r"(copying .*b\.bin to .*|cannot write .*\.idx.*): File too large"):
        merge_corpora(parts, str(tmp_path / "out"))
    assert sorted(tmp_path.iterdir()) == before


def test_vocabulary_on_a_full_disk_leaves_no_file(tmp_path, small_disk):
    with pytest.raises(DataFileError, match=r"cannot write .*tokenizer\.json.*: File too large"):
        save_tokenizer("x" * 10_000, tmp_path / "t")
    assert list((tmp_path / "t").iterdir()) == []


def test_files_that_belong_together_appear_together(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with atomic_outputs(tmp_path / "a", tmp_path / "b") as (a, b):
        a.write(b"1")
        b.write(b"2")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataFileError, match="No space left"), atomic_outputs(tmp_path / "a", tmp_path / "b") as (a, b):
        a.write(b"3")
    assert sorted(path.read_bytes() for path in tmp_path.iterdir()) == [b"1", b"2"]
    file = AtomicFile(tmp_path / "c")
    with pytest.raises(DataFileError, match="No space left"):
        file.commit()
    assert len(list(tmp_path.iterdir())) == 2


# ------------------------------------------------------------------------------------------------------ permissions


def test_a_missing_corpus_is_named_with_the_option_of_the_scripts(tmp_path):
    with pytest.raises(DataFileError, match=r"no corpus under --input .*give --input"):
        open_corpus(str(tmp_path / "nowhere"))


@pytest.mark.usefixtures("permissions")
def test_closed_files_and_folders_give_one_message(tmp_path):
    source, prefix = _jsonl(tmp_path / "a.jsonl", ["a"]), _corpus(tmp_path / "c")
    (tmp_path / "c.bin").chmod(0)
    with pytest.raises(DataFileError, match="Permission denied"):
        merge_corpora([prefix], str(tmp_path / "d"))
    (tmp_path / "out").mkdir(mode=0o500)
    for options in ({}, {"workers": 2}, {"partitions": 2}):
        with pytest.raises(UsageError, match=r"cannot write .*: Permission denied"):
            _run(tmp_path, source, **options)
    (tmp_path / "out").chmod(0)
    with pytest.raises(UsageError, match="Permission denied"):
        open_corpus(str(tmp_path / "out" / "x"))
    (tmp_path / "out").chmod(0o700)


def test_partitions_in_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(self, *_, **__):
        if self.name.endswith(".parts"):
            raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "out").mkdir()
    source = _jsonl(tmp_path / "a.jsonl", ["a", "b"])
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DataFileError, match=r"cannot write .*\.parts: Permission denied"):
        _run(tmp_path, source, partitions=2)


# ------------------------------------------------------------------------------------------------- order and limits


def test_earliest_bad_line_of_all_partitions_is_reported(tmp_path):
    """The first part takes long enough for the last one to fail before it."""
    texts = [json.dumps({"text": "1 " * 200_000})] * 20 + ["first"] + [json.dumps({"text": "1 " * 200_000})] * 20
    (tmp_path / "a.jsonl").write_text("\n".join([*texts, "second"]) + "\n")
    options = {"tokenizer_type": "NullTokenizer", "vocab_size": 5, "partitions": 3}
    with pytest.raises(DataFileError, match=r"line 21: "):
        _run(tmp_path, tmp_path / "a.jsonl", **options)


@pytest.mark.parametrize("workers", [1, 2])
def test_text_that_a_tokenizer_refuses_has_a_place_and_can_be_left_out(tmp_path, workers):
    source = _jsonl(tmp_path / "a.jsonl", ["1 2", "words", "", ["3", "x"], "4"])
    options = {"tokenizer_type": "NullTokenizer", "vocab_size": 5, "append_eod": True, "workers": workers}
    with pytest.raises(
        DataFileError, match=r"a\.jsonl, line 2: .*got the text 'words'.*with --skip-bad-lines"
    ) as error:
        _run(tmp_path, source, **options)
    assert str(error.value).count("fix:") == 1
    report = _run(tmp_path, source, skip_bad_lines=True, **options)
    assert (report.num_documents, report.num_bad_lines, report.num_tokens, report.num_bytes) == (3, 2, 5, 4)


@pytest.mark.parametrize("partitions", [1, 2])
def test_nothing_but_bad_lines_says_how_many(tmp_path, partitions):
    source = tmp_path / "a.jsonl"
    source.write_text("bad\n" * 7)
    with pytest.raises(UsageError, match=r"1 files hold no token \(7 bad lines left out\)"):
        _run(tmp_path, source, skip_bad_lines=True, partitions=partitions)


def test_document_above_the_limit_is_a_bad_line(tmp_path):
    source = _jsonl(tmp_path / "a.jsonl", ["a", "é" * 6])
    with pytest.raises(DataFileError, match="line 2: 12 bytes of text, expected at most 11, see --max-document-bytes"):
        _run(tmp_path, source, max_document_bytes=11)
    assert _run(tmp_path, source, max_document_bytes=11, skip_bad_lines=True).num_bad_lines == 1
    assert _run(tmp_path, source, max_document_bytes=12).num_documents == 2


@pytest.mark.parametrize("prefix", ["", "dir/", ".", "dir/.."])
def test_output_without_a_file_name_is_refused(tmp_path, monkeypatch, prefix):
    monkeypatch.chdir(tmp_path)
    source, corpus = _jsonl(tmp_path / "a.jsonl", ["a"]), _corpus(tmp_path / "c")
    with pytest.raises(UsageError, match=r"--output-prefix: got .* ends in the start of a file name"):
        preprocess(PreprocessOptions([source], prefix))
    with pytest.raises(UsageError, match=r"--output-prefix: got .* ends in the start of a file name"):
        merge_corpora([corpus], prefix)


# ------------------------------------------------------------------------------------------------------ multimodal


def test_modes_are_merged_and_not_mixed_with_corpora_without(tmp_path):
    a, b = _corpus(tmp_path / "a", modes=(0, 1)), _corpus(tmp_path / "b", [[4]], modes=(-5,))
    plain, empty = _corpus(tmp_path / "plain"), _corpus(tmp_path / "empty", [])
    merge_corpora([a, empty, b], str(tmp_path / "out"))
    corpus = open_corpus(str(tmp_path / "out"))
    assert corpus.sequence_modes.tolist() == [0, 1, -5]
    with pytest.raises(DataFileError, match=r"a is multimodal and .*plain is not"):
        merge_corpora([a, plain], str(tmp_path / "mixed"))
    assert not list(tmp_path.glob("*mixed*"))


# ----------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("options", [[], ["--workers", "2"], ["--partitions", "2"]])
def test_interrupt_is_one_line_and_leaves_nothing(tmp_path, options):
    os.mkfifo(tmp_path / "b.jsonl")  # never ends
    _jsonl(tmp_path / "a.jsonl", ["a"] * 10)
    command = [
        sys.executable,
        str(ROOT / "scripts" / "preprocess_data.py"),
        "--output-prefix",
        str(tmp_path / "o" / "c"),
    ]
    command += ["--input", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("o/.*.tmp")) + list(tmp_path.glob("o/.*.parts")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "interrupted: nothing unfinished is kept\n")
    assert list((tmp_path / "o").iterdir()) == []
    with open(os.open(tmp_path / "b.jsonl", os.O_RDWR | os.O_NONBLOCK), "wb"):
        pass  # whoever still reads the pipe sees its end
