"""Learn a byte-level BPE vocabulary from text.

    python scripts/train_tokenizer.py --input docs.jsonl --vocab-size 8192 --output data/tokenizer
    python scripts/preprocess_data.py --input docs.jsonl --output-prefix data/docs --append-eod \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model data/tokenizer

Inputs are those of preprocess_data.py and are read as a stream. Exit status: 0 done, 2 an option or a file cannot be
used, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jmegatron.data.preprocess_encode import read_texts
from jmegatron.data.script import run_script
from jmegatron.data.tokenizers import HuggingFaceTokenizer
from jmegatron.data.tokenizers.training import END_OF_TEXT, save_tokenizer, train_bpe
from jmegatron.errors import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(description="Learn a byte-level BPE vocabulary from text.", allow_abbrev=False)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files, patterns or folders, as for preprocess_data.py")
    add("--output", required=True, help="folder for tokenizer.json and tokenizer_config.json")
    add("--vocab-size", type=int, default=32000, help="ids wanted, special tokens included (default: 32000)")
    add("--json-keys", nargs="+", default=["text"], help="keys of the JSON objects to take (default: text)")
    add("--special-tokens", nargs="*", default=[], help=f"special tokens beside {END_OF_TEXT}")
    add("--min-frequency", type=int, default=2, help="how often a pair must occur to be merged (default: 2)")
    add("--max-documents", type=int, help="learn from the first so many documents only")
    add("--skip-bad-lines", action="store_true", help="leave out lines that cannot be read instead of stopping")
    given = parser.parse_args(arguments)

    def body() -> None:
        if not given.output:
            raise UsageError("--output: got '', expected a folder")
        if given.max_documents is not None and given.max_documents < 1:
            raise UsageError(f"--max-documents: got {given.max_documents}, expected at least 1")
        texts = read_texts(given.input, given.json_keys, given.skip_bad_lines, given.max_documents)
        content = train_bpe(texts, given.vocab_size, given.special_tokens, given.min_frequency)
        save_tokenizer(content, Path(given.output))
        size = HuggingFaceTokenizer(given.output).vocab_size
        print(f"{size} ids\n--tokenizer-type HuggingFaceTokenizer --tokenizer-model {given.output}")

    return run_script(body)


if __name__ == "__main__":
    sys.exit(main())
