"""Text to token ids and back (no communication).

The types are named as `--tokenizer-type` of Megatron-LM names them (0.16, core/tokenizers/utils/build_tokenizer.py):

    ByteTokenizer            no file; a token a byte. Own; what the demo uses
    HuggingFaceTokenizer     --tokenizer-model tokenizer.json, or its folder
    SentencePieceTokenizer   --tokenizer-model file.model
    TikTokenizer             --tokenizer-model vocabulary.json, see `tik_token`
    GPT2BPETokenizer         --vocab-file vocab.json --merge-file merges.txt
    NullTokenizer            --vocab-size N; text is ids already, N ends a document
"""

import difflib
from collections.abc import Sequence
from typing import Any

from jmegatron.data.tokenizers.base import Ids, StrPath, Tokenizer
from jmegatron.data.tokenizers.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from jmegatron.data.tokenizers.sentence_piece import SentencePieceTokenizer
from jmegatron.data.tokenizers.simple import ByteTokenizer, NullTokenizer
from jmegatron.data.tokenizers.tik_token import DEFAULT_SPECIAL_TOKENS, PATTERNS, TikTokenizer
from jmegatron.errors import UsageError

__all__ = [
    "PATTERNS",
    "TOKENIZER_TYPES",
    "ByteTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "Ids",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
    "Tokenizer",
    "build_tokenizer",
    "tokenizer_settings",
]

TOKENIZER_TYPES = (
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
    "GPT2BPETokenizer",
    "NullTokenizer",
)

_SETTINGS = (
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
    "tiktoken_special_tokens",
)
_MODEL_FILES = {
    "HuggingFaceTokenizer": "a tokenizer.json or its folder",
    "SentencePieceTokenizer": "a SentencePiece model",
    "TikTokenizer": "a JSON vocabulary",
}


def tokenizer_settings(options: Any) -> dict[str, Any]:
    """Return the arguments of `build_tokenizer`, but for `vocab_size`, that stand in an object of options."""
    return {name: getattr(options, name) for name in _SETTINGS if hasattr(options, name)}


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: StrPath | None = None,
    vocab_size: int | None = None,
    *,
    vocab_file: StrPath | None = None,
    merge_file: StrPath | None = None,
    tiktoken_pattern: str | None = None,
    tiktoken_num_special_tokens: int = 1000,
    tiktoken_special_tokens: Sequence[str] | None = None,
) -> Tokenizer:
    """Return the tokenizer of `--tokenizer-type`.

    Args:
        tokenizer_type: one of TOKENIZER_TYPES.
        tokenizer_model: file or folder, for HuggingFaceTokenizer, SentencePieceTokenizer, TikTokenizer.
        vocab_size: number of ids, for NullTokenizer without the end of document, for TikTokenizer with it.
        vocab_file: for GPT2BPETokenizer.
        merge_file: for GPT2BPETokenizer.
        tiktoken_pattern: for TikTokenizer, and so are the next two.
        tiktoken_num_special_tokens: ids kept for special tokens.
        tiktoken_special_tokens: names of the first of them; none means DEFAULT_SPECIAL_TOKENS.

    Raises:
        UsageError: unknown type, what the type needs is not given, or its library is not installed.
        DataFileError: the tokenizer's file cannot be used.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        nearest = difflib.get_close_matches(tokenizer_type, TOKENIZER_TYPES, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise UsageError(
            f"--tokenizer-type: got {tokenizer_type!r}, expected one of {', '.join(TOKENIZER_TYPES)}{hint}"
        )
    if tokenizer_model is not None and tokenizer_type not in _MODEL_FILES:
        raise UsageError(
            f"--tokenizer-model {tokenizer_model}: --tokenizer-type {tokenizer_type} does not read it; fix: add "
            "--tokenizer-type HuggingFaceTokenizer for a tokenizer.json, or leave --tokenizer-model out"
        )
    if tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None or not 1 <= vocab_size < 2**31:
            raise UsageError(f"--tokenizer-type NullTokenizer needs --vocab-size, 1 .. {2**31 - 1}; got {vocab_size}")
        return NullTokenizer(vocab_size)
    if tokenizer_type == "GPT2BPETokenizer":
        if vocab_file is None or merge_file is None:
            raise UsageError(
                "--tokenizer-type GPT2BPETokenizer needs --vocab-file (vocab.json) and --merge-file (merges.txt); got "
                f"{vocab_file} and {merge_file}"
            )
        return GPT2BPETokenizer(vocab_file, merge_file)
    if tokenizer_model is None:
        raise UsageError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model, {_MODEL_FILES[tokenizer_type]}")
    if tokenizer_type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(tokenizer_model)
    if tokenizer_type == "SentencePieceTokenizer":
        return SentencePieceTokenizer(tokenizer_model)
    return TikTokenizer(
        tokenizer_model,
        vocab_size,
        tiktoken_pattern,
        tiktoken_num_special_tokens,
        tiktoken_special_tokens or DEFAULT_SPECIAL_TOKENS,
    )
