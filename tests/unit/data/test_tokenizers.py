"""Tokenizers: round trips, a real tokenizer.json built here, hostile files."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmegatron.data.tokenizers import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    Tokenizer,
    build_tokenizer,
)
from jmegatron.errors import DataFileError, UsageError


@pytest.fixture
def folder(tmp_path):
    """A folder with a tokenizer.json of six words, whose ids have a gap."""
    from tokenizers import Tokenizer as Library
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    library = Library(WordLevel({"<unk>": 0, "a": 1, "b": 2, "<s>": 3, "</s>": 4, "stop": 9}, unk_token="<unk>"))
    library.pre_tokenizer = Whitespace()
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@given(st.text())
def test_bytes_come_back(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.tokenize(text)
    assert ids.tolist() == list(text.encode("utf-8"))
    assert ids.dtype == np.int32
    assert tokenizer.detokenize([*ids, tokenizer.eod]) == text


def test_byte_tokenizer_numbers_and_batch():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert [ids.tolist() for ids in tokenizer.tokenize_batch(["ab", "", "é"])] == [[97, 98], [], [0xC3, 0xA9]]
    assert tokenizer.detokenize([0xA9, 97]) == "\ufffda"
    assert tokenizer.detokenize([]) == ""
    with pytest.raises(ValueError, match=r"expected 0 \.\. 256"):
        tokenizer.detokenize([257])


def test_null_tokenizer_reads_numbers():
    tokenizer = NullTokenizer(100)
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("5 0\n99").tolist() == [5, 0, 99]
    assert tokenizer.detokenize([5, 0, 99, 100]) == "5 0 99"
    assert tokenizer.tokenize_batch(["", "7"])[1].tolist() == [7]


@pytest.mark.parametrize("text", ["100", "-1", "words", "1.5", "9" * 30])
def test_null_tokenizer_refuses_what_is_no_id(text):
    with pytest.raises(DataFileError, match=r"NullTokenizer: got the text .* expected token ids 0 \.\. 99"):
        NullTokenizer(100).tokenize(text)


@pytest.mark.parametrize("whole_folder", [True, False])
def test_hugging_face_tokenizer_of_a_file_or_folder(folder, whole_folder):
    tokenizer = HuggingFaceTokenizer(folder if whole_folder else folder / "tokenizer.json")
    assert tokenizer.vocab_size == 10  # the largest id + 1, not the 6 entries
    assert tokenizer.tokenize("a b zzz").tolist() == [1, 2, 0]  # and no <s> in front
    assert [ids.tolist() for ids in tokenizer.tokenize_batch(["b", "", "a a"])] == [[2], [], [1, 1]]
    assert tokenizer.tokenize("a").dtype == np.int32
    assert tokenizer.detokenize(np.array([1, 2, 4])) == "a b"


def test_eod_is_a_usual_name_or_what_the_files_beside_it_say(folder):
    assert HuggingFaceTokenizer(folder).eod == 4
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<s>"}}))
    assert HuggingFaceTokenizer(folder).eod == 3
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "stop"}))
    assert HuggingFaceTokenizer(folder).eod == 9


def test_tokenizer_without_end_token_has_no_eod(folder):
    text = (folder / "tokenizer.json").read_text().replace("</s>", "<end>")
    (folder / "tokenizer.json").write_text(text)
    assert HuggingFaceTokenizer(folder).eod is None


HOSTILE = {
    "not JSON": "hello",
    "empty": "",
    "another object": "{}",
    "a list": "[]",
    "a wrong model": '{"version": "1.0", "model": {"type": "Nothing"}}',
    "broken merges": '{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}',
    "nested deeply": "[" * 100_000,
    "empty vocabulary": '{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":null,'
    '"post_processor":null,"decoder":null,"model":{"type":"WordLevel","vocab":{},"unk_token":"x"}}',
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizer_file_gives_one_message(tmp_path, name):
    content = HOSTILE[name]
    (tmp_path / "tokenizer.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataFileError, match=r"--tokenizer-model .*tokenizer\.json: got .*expected a tokenizer\.json"):
        HuggingFaceTokenizer(tmp_path)


def test_hostile_file_beside_the_tokenizer_gives_one_message(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataFileError, match=r"tokenizer_config\.json: got a file that is not JSON"):
        HuggingFaceTokenizer(folder)


def test_missing_tokenizer_file_is_named(tmp_path):
    with pytest.raises(DataFileError, match=r"nowhere: got an unreadable file \(No such file") as error:
        HuggingFaceTokenizer(tmp_path / "nowhere")
    assert "not JSON" not in str(error.value)
    assert str(error.value).count("fix:") == 1


def test_build_tokenizer_knows_the_type_names(folder):
    built = [
        build_tokenizer("ByteTokenizer"),
        build_tokenizer("HuggingFaceTokenizer", folder),
        build_tokenizer("NullTokenizer", vocab_size=5),
    ]
    assert [type(tokenizer) for tokenizer in built] == [ByteTokenizer, HuggingFaceTokenizer, NullTokenizer]
    assert all(isinstance(tokenizer, Tokenizer) for tokenizer in built)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bytetokeniser",), "did you mean ByteTokenizer"),
        (("BertWordPieceCase",), "expected one of ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer"),
        (("GPT2BPETokenizer",), "needs --vocab-file .* and --merge-file"),
        (("HuggingFaceTokenizer",), "needs --tokenizer-model, a tokenizer.json"),
        (("SentencePieceTokenizer",), "needs --tokenizer-model, a SentencePiece"),
        (("TikTokenizer",), "needs --tokenizer-model, a JSON"),
        (("NullTokenizer",), "needs --vocab-size"),
        (("NullTokenizer", None, 2**31), "needs --vocab-size, 1 .. 2147483647; got 2147483648"),
    ],
)
def test_build_tokenizer_says_what_is_missing(arguments, message):
    with pytest.raises(UsageError, match=message):
        build_tokenizer(*arguments)
    assert build_tokenizer("NullTokenizer", vocab_size=2**31 - 1).eod == 2**31 - 1


def test_truncation_and_padding_stored_in_a_tokenizer_file_do_not_touch_the_corpus(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.enable_truncation(3)
    library.enable_padding(length=5)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", tmp_path)
    assert tokenizer.tokenize("a b").tolist() == [0, 1]
    assert tokenizer.tokenize("a b " * 9).tolist() == [0, 1] * 9


def test_a_model_file_that_the_type_does_not_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match="add --tokenizer-type HuggingFaceTokenizer"):
        build_tokenizer("ByteTokenizer", tmp_path / "tokenizer.json")


def test_a_text_that_the_library_cannot_encode_names_the_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="[missing]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataFileError, match="--tokenizer-model"):
        build_tokenizer("HuggingFaceTokenizer", tmp_path).tokenize("b")
