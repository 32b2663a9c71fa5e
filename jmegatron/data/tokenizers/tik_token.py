"""BPE vocabularies in the JSON form that Megatron-LM gives to the tiktoken library (no communication).

Megatron-LM 0.16: core/tokenizers/text/libraries/tiktoken_tokenizer.py. The file is a list of
`{"rank": 0, "token_bytes": base64, "token_str": text}` in order of rank. Ids below `num_special_tokens` are special
tokens, rank r has the id `num_special_tokens + r`; what lies beyond `vocab_size` is left out. Nothing is downloaded.
"""

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jmegatron.data.tokenizers.base import Ids, StrPath, bad_file, checked_ids, read_json, require_library
from jmegatron.errors import UsageError

DEFAULT_VOCAB_SIZE = 1 << 17
DEFAULT_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_VOCABULARY = 'a JSON list of {"rank": 0, "token_bytes": "base64", "token_str": "..."} with ranks 0, 1, 2, ...'

_NO_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s+(?!\S)|\s+"
PATTERNS = {
    # Words of any letters, single digits, punctuation.
    "v1": rf"{_NO_WORD}+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}",
    # The same, but a word ends where an upper-case letter follows a lower-case one.
    "v2": rf"{_NO_WORD}{_UPPER}*{_LOWER}+|{_NO_WORD}{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}",
}
"""What `--tiktoken-pattern` chooses from: how text is cut before bytes are merged."""


class TikTokenizer:
    """A vocabulary of byte sequences, merged by the tiktoken library; `eod` is `</s>`, also where the text has it.

    Args:
        path: the JSON file (`--tokenizer-model`).
        vocab_size: number of ids, special tokens included; the file must have as many (`--vocab-size`).
        pattern: a key of PATTERNS (`--tiktoken-pattern`).
        num_special_tokens: ids kept for special tokens (`--tiktoken-num-special-tokens`).
        special_tokens: names of the first of them; the rest are called `<SPECIAL_7>` and so on
            (`--tiktoken-special-tokens`).

    Raises:
        UsageError: an option cannot be used, or the `tiktoken` library is not installed.
        DataFileError: the file is missing or damaged, or has too few entries.
    """

    def __init__(
        self,
        path: StrPath,
        vocab_size: int | None = None,
        pattern: str | None = None,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] = DEFAULT_SPECIAL_TOKENS,
    ):
        self.vocab_size = DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
        pattern = "v2" if pattern is None else pattern
        _check_options(self.vocab_size, pattern, num_special_tokens, special_tokens)
        library = require_library("tiktoken", "TikTokenizer", extra="tokenizers")
        ranks = _read_ranks(Path(path), self.vocab_size, num_special_tokens)
        names = [*special_tokens, *(f"<SPECIAL_{i}>" for i in range(len(special_tokens), num_special_tokens))]
        self._special = {name: number for number, name in enumerate(names)}
        self.eod: int | None = self._special["</s>"]
        self._encoding = library.Encoding(
            name="local", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=self._special
        )

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token, or None."""
        return self._special.get(name)

    def tokenize(self, text: str) -> np.ndarray:
        """Return the ids of a text: int32 [tokens]. Special tokens in the text are found."""
        return np.array(self._encoding.encode(text, allowed_special="all"), dtype=np.int32)

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Ids) -> str:
        """Return the text of ids without special tokens.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        return self._encoding.decode(
            [token for token in checked_ids(ids, self.vocab_size) if token >= len(self._special)]
        )


def _check_options(vocab_size: int, pattern: str, num_special: int, names: Sequence[str]) -> None:
    """Refuse options that contradict one another."""
    if pattern not in PATTERNS:
        raise UsageError(f"--tiktoken-pattern: got {pattern!r}, expected {' or '.join(PATTERNS)}")
    if len(set(names)) != len(names) or not set(DEFAULT_SPECIAL_TOKENS) <= set(names):
        raise UsageError(
            f"--tiktoken-special-tokens: got {list(names)}, expected different names, among them "
            f"{' '.join(DEFAULT_SPECIAL_TOKENS)}"
        )
    if not len(names) <= num_special <= vocab_size - 256:
        raise UsageError(
            f"--tiktoken-num-special-tokens: got {num_special} with {len(names)} names and --vocab-size {vocab_size}, "
            f"expected {len(names)} or more, and 256 ids left for the single bytes"
        )


def _read_ranks(path: Path, vocab_size: int, num_special: int) -> dict[bytes, int]:
    """Return byte sequence -> id."""
    option, wanted = "--tokenizer-model", vocab_size - num_special
    entries = read_json(path, option, _VOCABULARY)
    if not isinstance(entries, list):
        bad_file(path, option, f"a JSON {type(entries).__name__}", _VOCABULARY)
    if len(entries) < wanted:
        bad_file(
            path,
            option,
            f"{len(entries)} entries",
            f"{wanted}, which is --vocab-size {vocab_size} less {num_special} special tokens (for this file: "
            f"--vocab-size {len(entries) + num_special})",
        )
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(entries[:wanted]):
        token = _token_bytes(entry, rank)
        if token is None or token in ranks or (rank < 256 and token != bytes([rank])):
            bad_file(
                path, option, f"{str(entry)[:80]} as entry {rank}", f"{_VOCABULARY}; the first 256 the single bytes"
            )
        ranks[token] = num_special + rank
    return ranks


def _token_bytes(entry: Any, rank: int) -> bytes | None:
    """Return the bytes of an entry, None if it is none."""
    if not isinstance(entry, dict) or entry.get("rank") != rank or not isinstance(entry.get("token_bytes"), str):
        return None
    try:
        return base64.b64decode(entry["token_bytes"], validate=True) or None
    except (binascii.Error, ValueError):
        return None
