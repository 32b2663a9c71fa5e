"""Trains a GPT: python train.py --config configs/gpt_tiny.yaml [--any-option value ...].

Exit status: 0 done; 2 an option, a file or a folder cannot be used (one message says which); 1 anything else.
"""

import sys

from jmegatron.config import parse_or_exit
from jmegatron.errors import UsageError


def main(argv: list[str]) -> int:
    """Parses the options, trains, and returns the exit status."""
    config = parse_or_exit(argv)
    # After parsing: a wrong option must not wait for jax to load.
    from jmegatron.training.loop import run

    try:
        run(config)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
