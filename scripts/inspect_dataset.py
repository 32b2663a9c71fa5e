"""Say what a corpus holds: counts, a histogram of lengths, and some documents as text.

    python scripts/inspect_dataset.py --input data/docs_text_document
    python scripts/inspect_dataset.py --input data/docs_text_document --tokenizer-type ByteTokenizer --documents 0 1 -1

Exit status: 0 done, 2 an option or a file cannot be used, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence

from jmegatron.data.inspect import describe, describe_documents
from jmegatron.data.preprocess_output import open_corpus
from jmegatron.data.script import run_script
from jmegatron.data.tokenizers import build_tokenizer, tokenizer_settings
from jmegatron.data.tokenizers.command_line import add_tokenizer_arguments
from jmegatron.errors import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(description="Say what a corpus holds.", allow_abbrev=False)
    parser.add_argument("--input", required=True, help="prefix of the .bin/.idx pair")
    parser.add_argument("--documents", type=int, nargs="*", default=[0], help="documents to show (default: 0)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to show of each sequence (default: 64)")
    add_tokenizer_arguments(parser, default=None)
    given = parser.parse_args(arguments)

    def body() -> None:
        if given.tokens < 0:
            raise UsageError(f"--tokens: got {given.tokens}, expected 0 or more")
        corpus = open_corpus(given.input)
        tokenizer = None
        if given.tokenizer_type is not None:
            tokenizer = build_tokenizer(**tokenizer_settings(given), vocab_size=given.vocab_size)
        for line in describe(corpus):
            print(line)
        numbers = given.documents if len(corpus.document_indices) > 1 else []
        for line in describe_documents(corpus, numbers, tokenizer, given.tokens):
            print(line)

    return run_script(body)


if __name__ == "__main__":
    sys.exit(main())
