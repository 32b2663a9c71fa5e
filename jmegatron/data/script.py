"""How the scripts around corpora end: one line instead of a traceback, and an exit status (no communication)."""

import os
import sys
from collections.abc import Callable

from jmegatron.errors import UsageError

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 and the number of the signal."""
_PIPE_CLOSED = 141


def run_script(body: Callable[[], None]) -> int:
    """Run a program and return its exit status: 0 done, 2 a UsageError, 130 Ctrl-C, 141 nobody reads what it prints."""
    try:
        body()
        sys.stdout.flush()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing unfinished is kept", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes once more at its end, which must find somewhere to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    return 0
