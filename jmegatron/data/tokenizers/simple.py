"""Tokenizers without a file: bytes, and text that is token ids already (no communication).

Megatron-LM 0.16: core/tokenizers/text/libraries/null_tokenizer.py; the byte tokenizer is our own.
"""

from collections.abc import Sequence

import numpy as np

from jmegatron.data.tokenizers.base import Ids, checked_ids
from jmegatron.errors import DataFileError


class ByteTokenizer:
    """The ids 0..255 are the bytes of the text in UTF-8, 256 ends a document."""

    vocab_size = 257
    eod = 256

    def special_id(self, name: str) -> None:
        """Return None: there are no special tokens but `eod`, which has no name."""
        return None

    def tokenize(self, text: str) -> np.ndarray:
        """Return the bytes of a text: int32 [bytes]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of several texts: views of one array, so that many short ones cost one conversion."""
        pieces = [text.encode("utf-8") for text in texts]
        whole = np.frombuffer(b"".join(pieces), dtype=np.uint8).astype(np.int32)
        arrays, start = [], 0
        for piece in pieces:
            end = start + len(piece)
            arrays.append(whole[start:end])
            start = end
        return arrays

    def detokenize(self, ids: Ids) -> str:
        """Return the text; bytes that are no UTF-8 (a sample may start inside a character) become U+FFFD.

        Raises:
            ValueError: an id outside 0 .. 256.
        """
        numbers = np.array(checked_ids(ids, self.vocab_size), dtype=np.int64)
        return numbers[numbers != self.eod].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class NullTokenizer:
    """Text is token ids written as numbers with white space between; `vocab_size` of the option, plus one for `eod`."""

    def __init__(self, vocab_size: int):
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1

    def special_id(self, name: str) -> None:
        """Return None: numbers have no names."""
        return None

    def tokenize(self, text: str) -> np.ndarray:
        """Return the numbers of a text: int32 [tokens].

        Raises:
            DataFileError: something that is no number, or one outside the vocabulary.
        """
        try:
            ids = np.array([int(word) for word in text.split()], dtype=np.int64)
        except (ValueError, OverflowError):
            ids = np.array([-1])
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.eod:
            raise DataFileError(
                f"--tokenizer-type NullTokenizer: got the text {text[:60]!r}, expected token ids 0 .. {self.eod - 1} "
                "with white space between; fix: another tokenizer for plain text, or a larger --vocab-size"
            )
        return ids.astype(np.int32)

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the numbers of several texts."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Ids) -> str:
        """Return the numbers with a space between, without `eod`."""
        return " ".join(str(int(token)) for token in ids if int(token) != self.eod)
