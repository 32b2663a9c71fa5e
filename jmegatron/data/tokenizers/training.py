"""A byte-level BPE vocabulary learnt from text (no communication).

The alphabet is the 256 bytes, so every text has ids and comes back; merges never cross a word, in GPT-2's sense.
Reference: arXiv:1508.07909 section 3.2 for BPE, GPT-2's report section 2.2 for bytes.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from jmegatron.data.files import atomic_outputs
from jmegatron.data.tokenizers.base import require_library
from jmegatron.errors import UsageError

END_OF_TEXT = "<|endoftext|>"


def train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: Iterable[str] = (), min_frequency: int = 2) -> str:
    """Return the tokenizer.json of a vocabulary learnt from `texts`, which are read once and one at a time.

    Args:
        texts: where to learn from.
        vocab_size: ids wanted; fewer come out where the texts have too few pairs that occur often enough.
        special_tokens: tokens beside `<|endoftext|>`, which is id 0.
        min_frequency: how often a pair must occur to be merged.

    Raises:
        UsageError: fewer ids than bytes and special tokens, a number out of range, no text, or the `tokenizers` library
            is not installed.
    """
    special = list(dict.fromkeys([END_OF_TEXT, *special_tokens]))
    if vocab_size < 256 + len(special):
        raise UsageError(
            f"--vocab-size: got {vocab_size}, expected {256 + len(special)} or more: 256 bytes and {len(special)} "
            "special tokens"
        )
    if vocab_size >= 2**31 or not 0 <= min_frequency < 2**63:
        raise UsageError(
            f"got --vocab-size {vocab_size} and --min-frequency {min_frequency}, expected less than 2**31 and 0 or more"
        )
    library = require_library("tokenizers", "HuggingFaceTokenizer")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=special,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    num_texts = 0

    def counted() -> Iterator[str]:
        nonlocal num_texts
        for text in texts:
            num_texts += bool(text)
            yield text

    tokenizer.train_from_iterator(counted(), trainer)
    if not num_texts:
        raise UsageError("--input: no text to learn from; fix: check the files and --json-keys")
    return tokenizer.to_str(pretty=True)


def save_tokenizer(tokenizer_json: str, folder: Path) -> None:
    """Write `tokenizer.json`, and `tokenizer_config.json`, which says that `<|endoftext|>` ends a text.

    Raises:
        UsageError: the folder cannot be made.
        DataFileError: it cannot be written to; then neither file is left.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output: the folder {folder} cannot be made: {error.strerror or error}") from error
    settings = json.dumps({"eos_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}, indent=2)
    with atomic_outputs(folder / "tokenizer_config.json", folder / "tokenizer.json") as files:
        for file, content in zip(files, (settings, tokenizer_json), strict=True):
            file.write(content.encode("utf-8"))
