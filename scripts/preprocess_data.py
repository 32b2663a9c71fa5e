"""Turn text into the corpus that `--data-path` reads.

    python scripts/preprocess_data.py --input docs.jsonl --output-prefix data/docs --append-eod
    python train.py --config configs/gpt_tiny.yaml --data-path data/docs_text_document

Option names are those of Megatron-LM's tools/preprocess_data.py; the work is done in jmegatron/data/preprocess.py. Exit
status: 0 done, 2 an option or a file cannot be used, 1 anything else.
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from jmegatron.data.preprocess import PreprocessOptions, preprocess
from jmegatron.data.tokenizers import TOKENIZER_TYPES
from jmegatron.errors import UsageError


def parse_options(arguments: Sequence[str] | None) -> PreprocessOptions:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        description="Turn text into the corpus that --data-path reads.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files, patterns or folders: .jsonl, .jsonl.gz or plain text")
    add("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    add("--json-keys", nargs="+", default=["text"], help="keys of the JSON objects to take (default: text)")
    add(
        "--tokenizer-type",
        default="ByteTokenizer",
        help=f"one of {', '.join(TOKENIZER_TYPES)} (default: ByteTokenizer)",
    )
    add("--tokenizer-model", help="tokenizer.json or its folder, for HuggingFaceTokenizer")
    add("--vocab-size", type=int, help="number of ids, for NullTokenizer")
    add("--append-eod", action="store_true", help="end each document with the tokenizer's end-of-document token")
    add("--workers", type=int, default=1, help="processes that tokenise (default: 1)")
    add("--log-interval", type=int, default=1000, help="documents between progress lines, 0 for none (default: 1000)")
    add("--skip-bad-lines", action="store_true", help="count lines that cannot be read instead of stopping")
    return PreprocessOptions(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    options = parse_options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        report = preprocess(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bad = f", {report.num_bad_lines} bad lines left out" if options.skip_bad_lines else ""
    print(f"{report.num_documents} documents, {report.num_tokens} tokens in {report.seconds:.1f} s{bad}")
    for prefix in report.prefixes:
        print(f"--data-path {prefix}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
