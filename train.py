"""Trains a GPT: python train.py --config configs/gpt_tiny.yaml [--any-option value ...].

Exit status: 0 done; 2 an option, a file or a folder cannot be used (one message says which); 1 anything else.
"""

import logging
import os
import signal
import sys

from jmegatron.config import parse_or_exit
from jmegatron.errors import TrainingError, UsageError


def main(argv: list[str]) -> int:
    """Parses the options, trains, and returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    config = parse_or_exit(argv)
    try:
        # After parsing: a wrong option must not wait for jax to load.
        from jmegatron.training.loop import run

        run(config)
    except UsageError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    except TrainingError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train.py: interrupted; what was not saved is lost", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read the log has gone (`| head`); at exit Python would try to write the rest once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("train.py: standard output was closed, stopping", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    # As Ctrl-C: files and running saves are finished before the process ends.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
