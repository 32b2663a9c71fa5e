"""The tokenizer's options of the scripts; `train.py` has the same ones in its data section (no communication)."""

import argparse

from jmegatron.data.tokenizers import PATTERNS, TOKENIZER_TYPES


def add_tokenizer_arguments(parser: argparse.ArgumentParser, default: str | None = "ByteTokenizer") -> None:
    """Add `--tokenizer-type` and what the types need; `tokenizer_settings` reads them back.

    Args:
        parser: where to add them.
        default: the type if none is given; None if there may be no tokenizer.
    """
    add = parser.add_argument_group("tokenizer").add_argument
    add("--tokenizer-type", default=default, help=f"one of {', '.join(TOKENIZER_TYPES)} (default: {default})")
    add(
        "--tokenizer-model",
        help="tokenizer.json or its folder (HuggingFaceTokenizer), SentencePiece model or TikTokenizer's JSON",
    )
    add("--vocab-file", help="vocab.json, for GPT2BPETokenizer")
    add("--merge-file", help="merges.txt, for GPT2BPETokenizer")
    add("--vocab-size", type=int, help="number of ids: for NullTokenizer without the end of document, for TikTokenizer")
    add("--tiktoken-pattern", choices=tuple(PATTERNS), help="how TikTokenizer cuts text (default: v2)")
    add("--tiktoken-num-special-tokens", type=int, default=1000, help="ids TikTokenizer keeps for special tokens")
    add("--tiktoken-special-tokens", nargs="+", help="names of TikTokenizer's first special tokens")
