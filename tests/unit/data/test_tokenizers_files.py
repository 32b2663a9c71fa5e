"""GPT2BPETokenizer, SentencePieceTokenizer, TikTokenizer on small files made here: ids, round trips, hostile files."""

import base64
import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jmegatron.data.tokenizers import (
    GPT2BPETokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    Tokenizer,
    build_tokenizer,
    tokenizer_settings,
)
from jmegatron.data.tokenizers.tik_token import DEFAULT_SPECIAL_TOKENS
from jmegatron.errors import DataFileError, UsageError

SENTENCES = ["the cat sat on the mat", "a dog sat on a log", "the dog saw the cat"] * 20


# ---------------------------------------------------------------------------------------------------------- GPT-2


def _gpt2_files(folder):
    """GPT-2's 256 single bytes as it writes them, two merges, and the end of document."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [*sorted(ByteLevel.alphabet()), "he", "hel", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")
    return folder / "vocab.json", folder / "merges.txt"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return GPT2BPETokenizer(*_gpt2_files(tmp_path_factory.mktemp("gpt2")))


def test_gpt2_merges_by_rank_and_ends_documents(gpt2):
    assert isinstance(gpt2, Tokenizer)
    assert (gpt2.vocab_size, gpt2.eod) == (259, 258)
    ids = gpt2.tokenize("hello<|endoftext|>")
    assert ids.dtype == np.int32
    assert (ids[0], ids[-1], len(ids)) == (257, 258, 4)  # hel, l, o, end
    assert gpt2.special_id("<|endoftext|>") == 258
    assert gpt2.special_id("he") is None
    assert [list(a) for a in gpt2.tokenize_batch(["he", ""])] == [[256], []]


@given(st.text())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_gpt2_text_comes_back(gpt2, text):
    text = text.replace("<|endoftext|>", "")
    assert gpt2.detokenize([*gpt2.tokenize(text), gpt2.eod]) == text


GPT2_HOSTILE = {
    "vocab is no JSON": ("vocab.json", b"{", "--vocab-file .*not JSON"),
    "vocab is a list": ("vocab.json", b"[1]", "--vocab-file .*a JSON list"),
    "vocab is nested deeply": ("vocab.json", b"[" * 100_000, "--vocab-file .*not JSON"),
    "an id is no number": ("vocab.json", b'{"a": true}', "--vocab-file .*id True for 'a'"),
    "an id is negative": ("vocab.json", b'{"a": -1}', "--vocab-file .*gaps"),
    "no end of document": ("vocab.json", b'{"a": 0}', r"--vocab-file .*no token <\|endoftext\|>"),
    "vocab is binary": ("vocab.json", b"\xff\xfe\x00", "--vocab-file .*unreadable"),
    "merge of another vocabulary": ("merges.txt", b"#version: 0.2\nx y\n", "--merge-file .*'x y' in line 2"),
    "merge of one word": ("merges.txt", b"he\n", "--merge-file .*'he' in line 1"),
    "merges are binary": ("merges.txt", b"\xff\xff", "--merge-file .*unreadable"),
}


@pytest.mark.parametrize("kind", GPT2_HOSTILE)
def test_gpt2_hostile_file_gives_one_message(tmp_path, kind):
    name, content, message = GPT2_HOSTILE[kind]
    files = _gpt2_files(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataFileError, match=message):
        GPT2BPETokenizer(*files)
    (tmp_path / name).unlink()
    with pytest.raises(DataFileError, match=rf"{name}.*No such file"):
        GPT2BPETokenizer(*files)


# -------------------------------------------------------------------------------------------------- SentencePiece


@pytest.fixture(scope="module")
def piece_model(tmp_path_factory):
    """A model of 60 pieces trained here, whose ends of sentence are <s> 1 and </s> 2."""
    library = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


def test_pieces_have_the_ids_of_the_library_and_come_back(piece_model):
    import sentencepiece

    tokenizer = SentencePieceTokenizer(piece_model)
    library = sentencepiece.SentencePieceProcessor(model_file=str(piece_model))
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (library.get_piece_size(), 2)
    assert tokenizer.special_id("<s>") == 1
    assert tokenizer.special_id("the") is None
    assert tokenizer.special_id("nothing") is None
    for text in ("the cat", "", "  two  spaces ", "ünï", "a\nb", "</s>"):
        ids = tokenizer.tokenize(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == library.encode(text)
        assert tokenizer.eod not in ids  # special tokens in the text are text
        assert tokenizer.detokenize([*ids, tokenizer.eod]) == text
    assert [len(ids) > 0 for ids in tokenizer.tokenize_batch(["cat", ""])] == [True, False]
    with pytest.raises(ValueError, match=r"expected 0 \.\. "):
        tokenizer.detokenize([tokenizer.vocab_size])


@pytest.mark.parametrize("content", [b"", b"hello", b"\x00" * 100, b"\xff" * 1000])
def test_hostile_model_gives_one_message(tmp_path, content):
    pytest.importorskip("sentencepiece")
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(DataFileError, match=r"--tokenizer-model .*x\.model: got .*expected a SentencePiece model"):
        SentencePieceTokenizer(tmp_path / "x.model")
    with pytest.raises(DataFileError, match=r"nowhere: got an unreadable file"):
        SentencePieceTokenizer(tmp_path / "nowhere")


def test_model_that_is_cut_gives_one_message(tmp_path, piece_model):
    whole = piece_model.read_bytes()
    (tmp_path / "x.model").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataFileError, match="expected a SentencePiece model"):
        SentencePieceTokenizer(tmp_path / "x.model")


# ------------------------------------------------------------------------------------------------------- tiktoken


def _entries(*merged):
    tokens = [*(bytes([i]) for i in range(256)), *merged]
    return [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": t.decode(errors="replace")}
        for i, t in enumerate(tokens)
    ]


@pytest.fixture
def vocabulary(tmp_path):
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps(_entries(b"he", b"hel")))
    return path


def test_tiktoken_ids_follow_the_special_tokens(vocabulary):
    pytest.importorskip("tiktoken")
    tokenizer = TikTokenizer(vocabulary, vocab_size=268, num_special_tokens=10)
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (268, 2)
    ids = tokenizer.tokenize("helo</s><SPECIAL_9>")
    assert ids.dtype == np.int32
    assert ids.tolist() == [10 + 257, 10 + ord("o"), 2, 9]
    assert tokenizer.detokenize(ids) == "helo"
    assert tokenizer.special_id("<SPECIAL_9>") == 9
    assert tokenizer.special_id("he") is None
    shorter = TikTokenizer(vocabulary, vocab_size=267, num_special_tokens=10)  # without the last entry
    assert shorter.tokenize("hel").tolist() == [10 + 256, 10 + ord("l")]
    for text in ("Hé llo\n\nWorld 123", "", "\u4e2d\U0001f600 x"):
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    with pytest.raises(ValueError, match=r"expected 0 \.\. 267"):
        tokenizer.detokenize([268])


def test_tiktoken_pattern_says_where_text_is_cut(tmp_path):
    pytest.importorskip("tiktoken")
    path = tmp_path / "vocabulary.json"
    path.write_text(json.dumps(_entries(b"aB")))
    sizes = {"vocab_size": 267, "num_special_tokens": 10}
    assert TikTokenizer(path, pattern="v1", **sizes).tokenize("aB").tolist() == [10 + 256]
    assert TikTokenizer(path, pattern="v2", **sizes).tokenize("aB").tolist() == [10 + ord("a"), 10 + ord("B")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "v3"}, "--tiktoken-pattern: got 'v3', expected v1 or v2"),
        ({"num_special_tokens": 3}, "--tiktoken-num-special-tokens: got 3"),
        ({"vocab_size": 20}, "--tiktoken-num-special-tokens: got 10 .* --vocab-size 20"),
        ({"special_tokens": ["<s>"]}, "--tiktoken-special-tokens: .*<unk>"),
        ({"special_tokens": [*DEFAULT_SPECIAL_TOKENS, "<s>"]}, "--tiktoken-special-tokens: .*different"),
    ],
)
def test_tiktoken_option_that_cannot_work(vocabulary, options, message):
    with pytest.raises(UsageError, match=message):
        TikTokenizer(vocabulary, **({"vocab_size": 268, "num_special_tokens": 10} | options))


TIK_HOSTILE = {
    "no JSON": b"[",
    "an object": b"{}",
    "nested deeply": b"[" * 100_000,
    "numbers": json.dumps(list(range(258))).encode(),
    "wrong rank": json.dumps(_entries(b"he", b"hel")[::-1]).encode(),
    "no base64": json.dumps([{"rank": i, "token_bytes": "?", "token_str": ""} for i in range(258)]).encode(),
    "twice the same": json.dumps(_entries(b"he", b"he")).encode(),
    "bytes out of order": json.dumps([*_entries()[1:2], *_entries(b"a1", b"b1")[1:]]).encode(),
    "binary": b"\xff\xfe",
}


@pytest.mark.parametrize("kind", TIK_HOSTILE)
def test_tiktoken_hostile_file_gives_one_message(tmp_path, kind):
    pytest.importorskip("tiktoken")
    (tmp_path / "v.json").write_bytes(TIK_HOSTILE[kind])
    with pytest.raises(DataFileError, match=r"--tokenizer-model .*v\.json: got .* expected a JSON list"):
        TikTokenizer(tmp_path / "v.json", vocab_size=268, num_special_tokens=10)


def test_tiktoken_vocabulary_that_is_too_short_says_the_size_that_fits(vocabulary):
    pytest.importorskip("tiktoken")
    with pytest.raises(DataFileError, match=r"258 entries, expected 130072.*--vocab-size 1258"):
        TikTokenizer(vocabulary)


# -------------------------------------------------------------------------------------------------------- the rest


def test_build_tokenizer_hands_the_files_on(tmp_path, vocabulary, piece_model):
    pytest.importorskip("tiktoken")
    vocab, merges = _gpt2_files(tmp_path)
    options = SimpleNamespace(
        tokenizer_type="TikTokenizer",
        tokenizer_model=vocabulary,
        tiktoken_pattern="v1",
        tiktoken_num_special_tokens=10,
        tiktoken_special_tokens=(),
    )
    assert build_tokenizer(**tokenizer_settings(options), vocab_size=268).vocab_size == 268
    assert build_tokenizer("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges).eod == 258
    assert build_tokenizer("SentencePieceTokenizer", piece_model).eod == 2


@pytest.mark.parametrize(
    ("tokenizer_type", "package"), [("SentencePieceTokenizer", "sentencepiece"), ("TikTokenizer", "tiktoken")]
)
def test_missing_library_says_what_to_install(tmp_path, monkeypatch, tokenizer_type, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"needs the Python package {package}.*jmegatron\[tokenizers\]"):
        build_tokenizer(tokenizer_type, tmp_path / "x")
