"""SentencePiece models (no communication).

Megatron-LM 0.16: core/tokenizers/text/libraries/sentencepiece_tokenizer.py with its defaults.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jmegatron.data.tokenizers.base import Ids, StrPath, bad_file, checked_ids, require_library

_MODEL = "a SentencePiece model (a protocol buffer, often named tokenizer.model)"


class SentencePieceTokenizer:
    """A SentencePiece model; no beginning-of-text token is added and `eod` is the model's end of sentence.

    Special tokens in the text are plain text, as SentencePiece has it. White space is what the model makes of it: most
    models lose a space at the start of a text.

    Args:
        path: the model file (`--tokenizer-model`).

    Raises:
        DataFileError: missing, empty, or nothing the library can read.
        UsageError: the `sentencepiece` library is not installed.
    """

    def __init__(self, path: StrPath):
        file = Path(path)
        library = require_library("sentencepiece", "SentencePieceTokenizer", extra="tokenizers")
        try:
            content = file.read_bytes()
        except OSError as error:
            bad_file(file, "--tokenizer-model", f"an unreadable file ({error})", _MODEL, error)
        if not content:
            bad_file(file, "--tokenizer-model", "an empty file", _MODEL)
        self._processor = library.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
            self.vocab_size = int(self._processor.get_piece_size())
        except (RuntimeError, OSError, ValueError) as error:
            bad_file(file, "--tokenizer-model", f"bytes the sentencepiece library refuses ({error})", _MODEL, error)
        if self.vocab_size < 1:
            bad_file(file, "--tokenizer-model", "an empty vocabulary", _MODEL)
        end = int(self._processor.eos_id())
        self.eod: int | None = end if end >= 0 else None

    def special_id(self, name: str) -> int | None:
        """Return the id of a control or user-defined piece, or None."""
        number = int(self._processor.piece_to_id(name))
        return number if self._processor.is_control(number) and self._processor.id_to_piece(number) == name else None

    def tokenize(self, text: str) -> np.ndarray:
        """Return the ids of a text: int32 [tokens]."""
        return np.array(self._processor.encode(text), dtype=np.int32)

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Ids) -> str:
        """Return the text of ids; control pieces such as `eod` give none.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        return self._processor.decode(checked_ids(ids, self.vocab_size))
