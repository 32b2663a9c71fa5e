"""The scripts around corpora: merging, inspecting, learning a vocabulary, and the options of preprocessing."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from jmegatron.data.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from jmegatron.data.tokenizers import HuggingFaceTokenizer

ROOT = Path(__file__).parents[3]


def _script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda *arguments: module.main(list(map(str, arguments)))


def _corpus(prefix, documents, dtype="uint16"):
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for sequences in documents:
            tokens = [token for sequence in sequences for token in sequence]
            builder.add_document(np.array(tokens, dtype), [len(sequence) for sequence in sequences])
        builder.finalize()
    return prefix


A = [[[1, 2, 3]], [], [[4], [5, 6]]]
B = [[[7]]]
C = [[], [[8, 9]], []]


# ---------------------------------------------------------------------------------------------------------- merging


def test_merged_corpora_have_the_bytes_of_one_built_at_once(tmp_path, capsys):
    parts = [_corpus(str(tmp_path / name), documents) for name, documents in zip("abc", (A, B, C), strict=True)]
    _corpus(str(tmp_path / "whole"), A + B + C)
    assert _script("merge_datasets")("--input", *parts, "--output-prefix", tmp_path / "out") == 0
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"out{ending}").read_bytes() == (tmp_path / f"whole{ending}").read_bytes()
    assert f"7 documents, 9 tokens from 3 corpora\n--data-path {tmp_path / 'out'}" in capsys.readouterr().out
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_folder_of_corpora_is_merged_by_name(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, documents in (("b", B), ("a", A)):
        _corpus(str(folder / name), documents)
    assert _script("merge_datasets")("--input", folder, "--output-prefix", tmp_path / "out") == 0
    corpus = IndexedDataset(tmp_path / "out")
    assert [corpus.get(i).tolist() for i in range(len(corpus))] == [[1, 2, 3], [4], [5, 6], [7]]
    assert corpus.document_indices.tolist() == [0, 1, 1, 3, 4]


def test_what_cannot_be_merged_is_status_2_and_leaves_nothing(tmp_path, capsys):
    a = _corpus(str(tmp_path / "a"), A)
    wide = _corpus(str(tmp_path / "wide"), B, "int32")
    merge = _script("merge_datasets")
    (tmp_path / "empty").mkdir()
    for inputs, output, message in (
        ([a, wide], "out", "wide.bin holds int32 tokens, expected uint16 as in"),
        ([a, tmp_path / "nowhere"], "out", "no corpus under"),
        ([a, a], "a", "it is one of the corpora to merge"),
        ([tmp_path / "empty"], "out", "expected a folder with .idx files"),
    ):
        assert merge("--input", *inputs, "--output-prefix", tmp_path / output) == 2
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "empty", "wide.bin", "wide.idx"]
    assert len(IndexedDataset(a)) == 3


# ------------------------------------------------------------------------------------------------------- inspecting


def test_inspection_counts_and_shows_documents(tmp_path, capsys):
    prefix = _corpus(str(tmp_path / "a"), [[[72, 105, 256]], [], [[97] * 100, [98]]])
    arguments = ["--input", prefix, "--tokenizer-type", "ByteTokenizer", "--documents", 0, 1, -1, "--tokens", 4]
    assert _script("inspect_dataset")(*arguments) == 0
    out = capsys.readouterr().out
    for wanted in (
        "token type            uint16 (2 bytes)",
        "documents             3, of them 1 empty",
        "sequences             3",
        "tokens                104 (208 bytes)",
        "1 to 100, mean 34.7, median 3",
        "document 0, sequence 0: 72 105 256\n    'Hi'",
        "document 1: empty",
        "document 2, sequence 1: 97 97 97 97 and 96 more\n    'aaaa'",
    ):
        assert wanted in out
    rows = [line.split() for line in out.splitlines() if " .. " in line]
    assert [(row[0], row[2], row[3]) for row in rows if row[3] != "0"] == [
        ("1", "1", "1"),
        ("2", "3", "1"),
        ("64", "127", "1"),
    ]


def test_inspection_of_an_empty_corpus_and_without_tokenizer(tmp_path, capsys):
    assert _script("inspect_dataset")("--input", _corpus(str(tmp_path / "a"), [])) == 0
    assert "documents             0" in capsys.readouterr().out
    assert _script("inspect_dataset")("--input", _corpus(str(tmp_path / "b"), B)) == 0
    assert capsys.readouterr().out.endswith("sequence 0: 7\n")


def test_what_cannot_be_inspected_is_status_2(tmp_path, capsys):
    prefix = _corpus(str(tmp_path / "a"), [[[300]]])
    for arguments, message in (
        (["--input", tmp_path / "nowhere"], "no corpus under"),
        (["--input", prefix, "--documents", 5], "--documents: got 5, expected -1 .. 0"),
        (["--input", prefix, "--tokenizer-type", "ByteTokenizer"], "holds token id 300, expected 0 .. 256"),
        (["--input", prefix, "--tokenizer-type", "Byte"], "did you mean ByteTokenizer"),
        (["--input", prefix, "--tokens", -3], "--tokens: got -3, expected 0 or more"),
    ):
        assert _script("inspect_dataset")(*arguments) == 2
        assert message in capsys.readouterr().err


def test_reader_that_goes_away_gets_no_traceback(tmp_path):
    prefix = _corpus(str(tmp_path / "a"), [[[1]]] * 20_000)
    command = [sys.executable, str(ROOT / "scripts" / "inspect_dataset.py"), "--input", prefix, "--documents"]
    process = subprocess.Popen(
        [*command, *map(str, range(20_000))], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(30) == 141


# --------------------------------------------------------------------------------------------------------- learning


def test_learnt_vocabulary_serves_preprocessing(tmp_path, capsys):
    texts = ["the quick brown fox", "the lazy dog", "thé"] * 20
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "b.txt").write_text("the " * 50)
    arguments = ["--input", tmp_path, "--vocab-size", 300, "--output", tmp_path / "t", "--special-tokens", "<|im_end|>"]
    assert _script("train_tokenizer")(*arguments) == 0
    out = capsys.readouterr().out
    tokenizer = HuggingFaceTokenizer(tmp_path / "t")
    assert f"{tokenizer.vocab_size} ids\n--tokenizer-type HuggingFaceTokenizer" in out
    assert 258 < tokenizer.vocab_size <= 300
    assert tokenizer.eod == tokenizer.special_id("<|endoftext|>") == 0
    assert tokenizer.special_id("<|im_end|>") == 1
    assert len(tokenizer.tokenize(" the")) == 1
    for text in ("thé quick\n 中文", ""):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    options = ["--input", tmp_path / "a.jsonl", "--append-eod", "--tokenizer-type", "HuggingFaceTokenizer"]
    options += ["--tokenizer-model", tmp_path / "t", "--output-prefix", tmp_path / "c", "--workers", 2]
    assert _script("preprocess_data")(*options) == 0
    corpus = IndexedDataset(tmp_path / "c_text_document")
    for number, text in enumerate(texts):
        assert tokenizer.detokenize(corpus.get(number)) == text
        assert corpus.get(number)[-1] == 0


def test_learning_twice_gives_the_same_file_and_stops_at_max_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "aaa aaa"}\n' * 10 + "broken\n")
    learn = _script("train_tokenizer")
    for name in "xy":
        arguments = ["--input", tmp_path / "a.jsonl", "--vocab-size", 260, "--output", tmp_path / name]
        assert learn(*arguments, "--max-documents", 10) == 0
    assert (tmp_path / "x" / "tokenizer.json").read_bytes() == (tmp_path / "y" / "tokenizer.json").read_bytes()
    assert learn(*arguments) == 2
    assert learn(*arguments, "--skip-bad-lines") == 0


def test_vocabulary_that_is_too_small_is_status_2(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    arguments = ["--input", tmp_path / "a.txt", "--output", tmp_path / "t"]
    assert _script("train_tokenizer")(*arguments, "--vocab-size", 200) == 2
    assert "--vocab-size: got 200, expected 257 or more" in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


def test_what_nothing_can_be_learnt_from_is_status_2(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    output = ["--output", tmp_path / "t", "--vocab-size", 300]
    for arguments, message in (
        (["--input", tmp_path / "empty.jsonl", *output], "no text to learn from"),
        (
            ["--input", tmp_path / "a.jsonl", *output, "--max-documents", 0],
            "--max-documents: got 0, expected at least 1",
        ),
        (["--input", tmp_path / "a.jsonl", *output, "--max-documents", -1], "--max-documents: got -1"),
        (["--input", tmp_path / "a.jsonl", *output, "--min-frequency", -1], "--min-frequency -1"),
        (["--input", tmp_path / "a.jsonl", "--output", tmp_path / "t", "--vocab-size", 2**70], "less than 2**31"),
        (["--input", tmp_path / "a.jsonl", "--output", ""], "--output: got ''"),
    ):
        assert _script("train_tokenizer")(*arguments) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "t").exists()


# ---------------------------------------------------------------------------------------------- preprocess options


def test_options_of_the_reference_are_taken_or_refused_with_a_reason(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    preprocess = _script("preprocess_data")
    required = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "c"]
    taken = ["--json-keys", "text", "--tokenizer-type", "NullTokenizer", "--vocab-size", 5, "--partitions", 1]
    taken += ["--append-eod", "--workers", 1, "--keep-sequential-samples", "--log-interval", 10]
    (tmp_path / "a.jsonl").write_text('{"text": "1 2"}\n')
    assert preprocess(*required, *taken) == 0
    assert "documents/s" in capsys.readouterr().out
    assert IndexedDataset(tmp_path / "c_text_document").get(0).tolist() == [1, 2, 5]
    for flag, reason in (("--split-sentences", "sentences"), ("--find-optimal-num-workers", "benchmark_preprocess")):
        assert preprocess(*required, flag) == 2
        assert f"error: {flag} is not supported: " in (err := capsys.readouterr().err)
        assert reason in err


def test_preprocess_benchmark_runs(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "benchmark_preprocess.py"), "--megabytes", "1", "--repeats", "1"]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for start in ("tokenizer alone", "1 worker ", "2 workers : 1 worker", "memory, 2 workers"):
        assert any(line.startswith(start) for line in lines), start
    assert list(tmp_path.iterdir()) == []
