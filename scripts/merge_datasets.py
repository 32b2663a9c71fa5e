"""Join several corpora into one; the same bytes as preprocessing all their inputs at once.

    python scripts/merge_datasets.py --input data/a_text_document data/b_text_document --output-prefix data/ab
    python scripts/merge_datasets.py --input data --output-prefix all      # every corpus of a folder, by name

Exit status: 0 done, 2 an option or a file cannot be used, 130 interrupted.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jmegatron.data.merge import find_prefixes, merge_corpora
from jmegatron.data.script import run_script


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(description="Join several corpora into one.", allow_abbrev=False)
    parser.add_argument("--input", nargs="+", required=True, help="prefixes of .bin/.idx pairs, or one folder of them")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin and PREFIX.idx")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)

    def body() -> None:
        prefixes = given.input
        if len(prefixes) == 1 and os.path.isdir(prefixes[0]):
            prefixes = find_prefixes(Path(prefixes[0]))
        documents, tokens = merge_corpora(prefixes, given.output_prefix)
        print(f"{documents} documents, {tokens} tokens from {len(prefixes)} corpora\n--data-path {given.output_prefix}")

    return run_script(body)


if __name__ == "__main__":
    sys.exit(main())
