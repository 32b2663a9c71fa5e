"""Build the demo corpus (Python's own library as byte tokens) if it is not there yet, and print its path.

    python train.py --config configs/gpt_tiny.yaml --data-path "$(python scripts/make_demo_corpus.py)"

Exit status: 0 done, 2 the folder cannot be used.
"""

import argparse
import sys
from collections.abc import Sequence

from jmegatron.data.demo_corpus import ensure_demo_corpus
from jmegatron.errors import UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    parser = argparse.ArgumentParser(description="Build the demo corpus and print its --data-path.", allow_abbrev=False)
    parser.add_argument("--cache-dir", help="folder to keep it in (default: jmegatron/demo_corpus in the user's cache)")
    options = parser.parse_args(arguments)
    try:
        print(ensure_demo_corpus(options.cache_dir))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
