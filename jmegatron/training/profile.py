"""The JAX trace of a few steps (`--profile`). No communication."""

from typing import Any

import jax

from jmegatron.config import Config
from jmegatron.training import startup


class Profile:
    """Records a JAX trace of the steps [profile_step_start, profile_step_end) in process 0."""

    def __init__(self, config: Config):
        logging = config.logging
        self._folder = startup.profile_dir(config)
        self._first, self._end = logging.profile_step_start, logging.profile_step_end
        # Traces of processes on one machine would overwrite one another.
        self._wanted, self._running = logging.profile and jax.process_index() == 0, False

    def misses(self, first: int, last: int) -> bool:
        """Returns whether a trace is wanted of which no step lies in first .. last."""
        return self._wanted and (self._first > last or self._end <= first)

    def before(self, step: int) -> None:
        """Starts the trace if `step` is the first one to record."""
        if self._wanted and not self._running and self._first <= step < self._end:
            jax.profiler.start_trace(self._folder)
            self._running = True

    def after(self, step: int, results: Any) -> None:
        """Stops the trace after the last step to record."""
        if self._running and step + 1 >= self._end:
            jax.block_until_ready(results)
            self.stop()

    def stop(self) -> None:
        """Ends a running trace."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = self._wanted = False
