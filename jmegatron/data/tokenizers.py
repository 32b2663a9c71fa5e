"""Text to token ids and back (no communication).

Three kinds, by the names of `--tokenizer-type`: `ByteTokenizer` needs no file and is what the demo uses,
`HuggingFaceTokenizer` reads a `tokenizer.json`, `NullTokenizer` takes text that is token ids already (synthetic data).
Megatron-LM: core/tokenizers/text/libraries/.
"""

import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np

from jmegatron.errors import DataFileError, UsageError

TOKENIZER_TYPES = ("ByteTokenizer", "HuggingFaceTokenizer", "NullTokenizer")

Ids = Sequence[int | np.integer] | np.ndarray

# Tried in this order when no file beside tokenizer.json says which token ends a text.
_USUAL_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


@runtime_checkable
class Tokenizer(Protocol):
    """What preprocessing and sampling need of a tokenizer.

    Attributes:
        vocab_size: ids are below this.
        eod: id that ends a document, or None if the tokenizer has no such token.
    """

    @property
    def vocab_size(self) -> int:
        """Return the number of ids."""
        ...

    @property
    def eod(self) -> int | None:
        """Return the id that ends a document, or None."""
        ...

    def tokenize(self, text: str) -> np.ndarray:
        """Return the ids of a text: int32 [tokens]."""
        ...

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts, faster than one by one: a list of int32 [tokens]."""
        ...

    def detokenize(self, ids: Ids) -> str:
        """Return the text of ids; ids that end a document give no text."""
        ...


class ByteTokenizer:
    """The ids 0..255 are the bytes of the text in UTF-8, 256 ends a document."""

    vocab_size = 257
    eod = 256

    def tokenize(self, text: str) -> np.ndarray:
        """Return the bytes of a text: int32 [bytes]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of several texts."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Ids) -> str:
        """Return the text; bytes that are no UTF-8 (a sample may start inside a character) become U+FFFD.

        Raises:
            ValueError: an id outside 0 .. 256.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise ValueError(f"ids {ids.min()}..{ids.max()}: expected 0 .. {self.vocab_size - 1}")
        return ids[ids != self.eod].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class NullTokenizer:
    """Text is token ids written as numbers with white space between; `vocab_size` of the option, plus one for `eod`."""

    def __init__(self, vocab_size: int):
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1

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


class HuggingFaceTokenizer:
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

    def __init__(self, path: str | os.PathLike[str]):
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        self._path = file
        self._tokenizer = _load_tokenizer(file)
        # Ids may have gaps, so their number can be smaller than the table of embeddings must be.
        self.vocab_size: int = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size == 0:
            _bad_tokenizer(file, "an empty vocabulary")
        self.eod: int | None = _find_eod(self._tokenizer, file.parent)

    def tokenize(self, text: str) -> np.ndarray:
        """Return the ids of a text: int32 [tokens]."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def tokenize_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts, on all the cores the library takes."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def detokenize(self, ids: Ids) -> str:
        """Return the text of ids, without special tokens."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | os.PathLike[str] | None = None, vocab_size: int | None = None
) -> Tokenizer:
    """Return the tokenizer of `--tokenizer-type`.

    Args:
        tokenizer_type: one of TOKENIZER_TYPES.
        tokenizer_model: file or folder, for HuggingFaceTokenizer.
        vocab_size: number of ids without the end of document, for NullTokenizer.

    Raises:
        UsageError: unknown type, or what the type needs is not given.
        DataFileError: the tokenizer's file cannot be used.
    """
    if tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    if tokenizer_type == "HuggingFaceTokenizer":
        if tokenizer_model is None:
            raise UsageError(
                "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model, a tokenizer.json or its folder"
            )
        return HuggingFaceTokenizer(tokenizer_model)
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            raise UsageError(f"--tokenizer-type NullTokenizer needs --vocab-size, 1 or more; got {vocab_size}")
        return NullTokenizer(vocab_size)
    nearest = difflib.get_close_matches(tokenizer_type, TOKENIZER_TYPES, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise UsageError(f"--tokenizer-type: got {tokenizer_type!r}, expected one of {', '.join(TOKENIZER_TYPES)}{hint}")


def _load_tokenizer(file: Path) -> Any:
    """Read a tokenizer.json."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        _bad_tokenizer(file, f"an unreadable file ({error})", error)
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        _bad_tokenizer(file, f"a file that is not JSON ({error})", error)
    try:
        import tokenizers
    except ImportError as error:
        raise UsageError(
            "--tokenizer-type HuggingFaceTokenizer needs the Python package tokenizers, which is not installed"
        ) from error
    try:
        return tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library's Rust part is no Exception
        _bad_tokenizer(file, f"JSON the tokenizers library refuses ({error})", error)


def _bad_tokenizer(file: Path, got: str, cause: BaseException | None = None) -> NoReturn:
    raise DataFileError(
        f"--tokenizer-model {file}: got {got}, expected a tokenizer.json as Hugging Face's tokenizers write it, or a "
        "folder that holds one; fix: check the path, or download the file again"
    ) from cause


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
    if not file.is_file():
        return None
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        _bad_tokenizer(file, f"a file that is not JSON ({error})", error)
    name = settings.get("eos_token") if isinstance(settings, dict) else None
    name = name.get("content") if isinstance(name, dict) else name
    return name if isinstance(name, str) else None
