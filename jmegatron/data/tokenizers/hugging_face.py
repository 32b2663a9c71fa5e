"""Tokenizers run by the `tokenizers` library: a `tokenizer.json`, or GPT-2's two files (no communication).

Megatron-LM 0.16: core/tokenizers/text/libraries/{huggingface,megatron_hf}_tokenizer.py, which go through transformers;
here the library below it is used directly, and nothing is downloaded.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jmegatron.data.tokenizers.base import Ids, StrPath, bad_file, read_json, read_text, require_library
from jmegatron.errors import DataFileError

# Tried in this order when no file beside tokenizer.json says which token ends a text.
_USUAL_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_TOKENIZER_JSON = "a tokenizer.json as Hugging Face's tokenizers write it, or a folder that holds one"
_VOCAB_JSON = "the vocab.json of a GPT-2 tokenizer: one JSON object, token -> id, with the ids 0, 1, 2, ..."
_MERGES = "the merges.txt of a GPT-2 tokenizer: two tokens of the vocabulary a line"
GPT2_EOD = "<|endoftext|>"


class _LibraryTokenizer:
    """What the two classes below share, once the library's object exists."""

    def __init__(self, library: Any, vocab_size: int, eod: int | None):
        # A file may bring settings of the inference it was exported for; they would cut or pad the corpus silently.
        library.no_truncation()
        library.no_padding()
        self._tokenizer = library
        self.vocab_size = vocab_size
        self.eod = eod

    def special_id(self, name: str) -> int | None:
        """Return the id of an added token; a word of the ordinary vocabulary is none."""
        added = {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}
        return added.get(name)

    def tokenize(self, text: str) -> np.ndarray:
        """Return the ids of a text: int32 [tokens]."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts, on all the cores the library takes."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # such as an unknown token that the vocabulary lacks
            raise DataFileError(
                f"--tokenizer-model: the tokenizers library fails on a text ({error}); fix: repair the tokenizer"
            ) from error
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def detokenize(self, ids: Ids) -> str:
        """Return the text of ids, without special tokens."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)


class HuggingFaceTokenizer(_LibraryTokenizer):
    """A tokenizer of the `tokenizers` library.

    No beginning-of-text or other special token is added: where documents end is said by `eod` alone, which
    preprocessing appends. `eod` is the `eos_token` of `tokenizer_config.json` or `special_tokens_map.json` beside the
    file, else the first of the usual names that the vocabulary has.

    Args:
        path: a `tokenizer.json`, or the folder that holds it.

    Raises:
        DataFileError: missing, no JSON, or nothing the library can read.
        UsageError: the `tokenizers` library is not installed.
    """

    def __init__(self, path: StrPath):
        file = Path(path)
        if os.path.isdir(file):
            file = file / "tokenizer.json"
        library = _load_tokenizer(file)
        # Ids may have gaps, so their number can be smaller than the table of embeddings must be.
        vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if vocab_size > 2**31:
            bad_file(file, "--tokenizer-model", f"the token id {vocab_size - 1}", "ids below 2**31")
        if vocab_size == 0:
            bad_file(file, "--tokenizer-model", "an empty vocabulary", _TOKENIZER_JSON)
        super().__init__(library, vocab_size, _find_eod(library, file.parent))


class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's byte-level BPE from its two files; `eod` is `<|endoftext|>`, also where it stands in the text.

    Args:
        vocab_file: JSON object, token -> id (`--vocab-file`).
        merge_file: merges in order of their rank, two tokens a line, after a line `#version` (`--merge-file`).

    Raises:
        DataFileError: a file is missing, damaged, or does not belong to the other one.
        UsageError: the `tokenizers` library is not installed.
    """

    def __init__(self, vocab_file: StrPath, merge_file: StrPath):
        vocab = _read_vocab(Path(vocab_file))
        merges = _read_merges(Path(merge_file), vocab)
        library = require_library("tokenizers", "GPT2BPETokenizer")
        try:
            tokenizer = library.Tokenizer(library.models.BPE(vocab, merges))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the library's Rust part is no Exception
            bad_file(
                Path(merge_file), "--merge-file", f"merges the tokenizers library refuses ({error})", _MERGES, error
            )
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        tokenizer.add_special_tokens([GPT2_EOD])
        super().__init__(tokenizer, len(vocab), vocab[GPT2_EOD])


def _load_tokenizer(file: Path) -> Any:
    """Read a tokenizer.json."""
    option = "--tokenizer-model"
    read_json(file, option, _TOKENIZER_JSON)
    library = require_library("tokenizers", "HuggingFaceTokenizer")
    try:
        return library.Tokenizer.from_str(read_text(file, option, _TOKENIZER_JSON))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library's Rust part is no Exception
        bad_file(file, option, f"JSON the tokenizers library refuses ({error})", _TOKENIZER_JSON, error)


def _find_eod(tokenizer: Any, folder: Path) -> int | None:
    """Return the id of the token that ends a text, or None."""
    names = [_eos_name(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
    for name in (*names, *_USUAL_EOD_TOKENS):
        token = tokenizer.token_to_id(name) if name else None
        if token is not None:
            return int(token)
    return None


def _eos_name(file: Path) -> str | None:
    """Return `eos_token` of a file beside the tokenizer; None if there is none."""
    if not os.path.isfile(file):
        return None
    settings = read_json(file, "--tokenizer-model", _TOKENIZER_JSON)
    name = settings.get("eos_token") if isinstance(settings, dict) else None
    name = name.get("content") if isinstance(name, dict) else name
    return name if isinstance(name, str) else None


def _read_vocab(path: Path) -> dict[str, int]:
    """Read token -> id and check that every id from 0 on has one token, and that documents can be ended."""
    vocab = read_json(path, "--vocab-file", _VOCAB_JSON)
    if not isinstance(vocab, dict) or not vocab:
        bad_file(path, "--vocab-file", f"a JSON {type(vocab).__name__} of {str(vocab)[:40]!r}", _VOCAB_JSON)
    wrong = [token for token, number in vocab.items() if type(number) is not int]
    if wrong or sorted(vocab.values()) != list(range(len(vocab))):
        got = f"id {vocab[wrong[0]]!r} for {wrong[0]!r}" if wrong else "ids with gaps or twice the same"
        bad_file(path, "--vocab-file", got, _VOCAB_JSON)
    if GPT2_EOD not in vocab:
        bad_file(path, "--vocab-file", f"no token {GPT2_EOD}", f"{_VOCAB_JSON}, among them {GPT2_EOD}")
    return vocab


def _read_merges(path: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Read the merges and check that both halves and the whole are tokens."""
    merges = []
    for number, line in enumerate(read_text(path, "--merge-file", _MERGES).split("\n"), start=1):
        line = line.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            bad_file(path, "--merge-file", f"{line[:60]!r} in line {number}", f"{_MERGES} (here --vocab-file's)")
        merges.append((left, right))
    return merges
