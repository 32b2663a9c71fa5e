"""Turn text into the corpus that `--data-path` reads.

    python scripts/preprocess_data.py --input docs.jsonl --output-prefix data/docs --append-eod
    python train.py --config configs/gpt_tiny.yaml --data-path data/docs_text_document

Option names are those of Megatron-LM's tools/preprocess_data.py; the work is done in jmegatron/data/preprocess.py. Exit
status: 0 done, 2 an option or a file cannot be used, 130 interrupted, 1 anything else.
"""

import argparse
import logging
import sys
from collections.abc import Sequence

from jmegatron.data.preprocess import PreprocessOptions, PreprocessReport, preprocess
from jmegatron.data.script import run_script
from jmegatron.data.tokenizers.command_line import add_tokenizer_arguments
from jmegatron.errors import UsageError

_REFUSED = {
    "split_sentences": "corpora of sentences serve BERT's and T5's sentence tasks and need a model of a language that "
    "would have to be downloaded; fix: leave it out, or cut the text yourself (a key may hold a list of strings)",
    "find_optimal_num_workers": "fix: compare --workers with scripts/benchmark_preprocess.py",
}


def parse_options(arguments: Sequence[str] | None) -> PreprocessOptions:
    """Return the options of a command line.

    Raises:
        UsageError: an option of the reference's tool that is not supported.
    """
    parser = argparse.ArgumentParser(
        description="Turn text into the corpus that --data-path reads.", allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        help="files, patterns or folders: JSON lines (.jsonl, .ndjson, .json; also .gz, .zst, and /dev/stdin), "
        ".parquet or plain text",
    )
    add("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    add("--json-keys", nargs="+", default=["text"], help="keys of the JSON objects to take (default: text)")
    add_tokenizer_arguments(parser)
    add("--append-eod", action="store_true", help="end each document with the tokenizer's end-of-document token")
    add("--workers", type=int, default=1, help="processes that tokenise, per partition (default: 1)")
    add("--partitions", type=int, default=1, help="parts of the input worked on at the same time (default: 1)")
    add("--keep-sequential-samples", action="store_true", help="accepted: documents always keep their order")
    add("--log-interval", type=int, default=1000, help="documents between progress lines, 0 for none (default: 1000)")
    add("--skip-bad-lines", action="store_true", help="count lines that cannot be read instead of stopping")
    add(
        "--max-document-bytes",
        type=int,
        help="a document with more text is a bad line (default: no limit; HuggingFaceTokenizer takes some 200 bytes of "
        "memory for a byte of one document)",
    )
    for name in _REFUSED:
        add(f"--{name.replace('_', '-')}", action="store_true", help=argparse.SUPPRESS)
    given = vars(parser.parse_args(arguments))
    for name, reason in _REFUSED.items():
        if given.pop(name):
            raise UsageError(f"--{name.replace('_', '-')} is not supported: {reason}")
    del given["keep_sequential_samples"]
    return PreprocessOptions(**given)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    def body() -> None:
        options = parse_options(arguments)
        _print_report(preprocess(options), options)

    return run_script(body)


def _print_report(report: PreprocessReport, options: PreprocessOptions) -> None:
    bad = f", {report.num_bad_lines} bad lines left out" if options.skip_bad_lines else ""
    seconds = max(report.seconds, 1e-9)
    print(
        f"{report.num_documents} documents, {report.num_tokens} tokens in {report.seconds:.1f} s "
        f"({report.num_documents / seconds:.1f} documents/s, {report.num_bytes / 1e6 / seconds:.2f} MB/s){bad}"
    )
    for prefix in report.prefixes:
        print(f"--data-path {prefix}")


if __name__ == "__main__":
    sys.exit(main())
