"""A folder of Orbax checkpoints, one sub-folder a step. Each process writes and reads its own shards.

    <folder>/<step>/state   the TrainState, every leaf with its global shape: it restores onto any mesh
    <folder>/<step>/meta    JSON: step, consumed_samples, the resolved config as YAML, versions

Megatron-LM training/checkpointing.py. Retention, integrity and fallback are not here yet: Orbax alone decides which
step is complete.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jmegatron.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint holds."""

    step: int
    state: Any
    meta: dict[str, Any]


class CheckpointFolder:
    """Saves to and restores from one folder; use as a context manager, or `close()` it.

    Args:
      path: the folder; created when saving.
      option: name of the option it came from, for messages.
      read_only: for restoring only: nothing is created.
    """

    def __init__(self, path: str, *, option: str, read_only: bool = False):
        # Orbax logs each save in several lines at INFO; the training log says it in one.
        logging.getLogger("absl").setLevel(logging.WARNING)
        self._path = Path(path).absolute()
        self._option = option
        self._manager = None
        if not read_only or self._path.is_dir():
            options = ocp.CheckpointManagerOptions(create=not read_only, read_only=read_only)
            self._manager = ocp.CheckpointManager(self._path, options=options)

    def __enter__(self) -> "CheckpointFolder":
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for the last save."""
        self.close()

    def latest_step(self) -> int | None:
        """Returns the newest complete step, or None if the folder is missing or empty."""
        return None if self._manager is None else self._manager.latest_step()

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Starts writing a checkpoint; the arrays may be donated as soon as this returns.

        Does nothing if the step is already there (a run that resumed and had nothing left to do).
        """
        assert self._manager is not None
        if step in self._manager.all_steps():
            return
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        if not self._manager.save(step, args=args, force=True):
            raise RuntimeError(f"{self._option} {self._path}: Orbax refused to save step {step}")

    def read_meta(self, step: int) -> dict[str, Any]:
        """Returns the JSON of a step.

        Raises:
          UsageError: it cannot be read.
        """
        assert self._manager is not None
        try:
            return dict(self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._unreadable(step, error) from error

    def restore(self, step: int, abstract_state: Any) -> Any:
        """Returns the state of a step with the shapes, dtypes and shardings of `abstract_state`.

        Raises:
          UsageError: it cannot be read, or its arrays have another structure or shape.
        """
        assert self._manager is not None
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        try:
            state = self._manager.restore(step, args=args)["state"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._unreadable(step, error) from error
        for path, (got, expected) in zip(
            jax.tree_util.tree_flatten_with_path(abstract_state)[0],
            zip(jax.tree.leaves(state), jax.tree.leaves(abstract_state), strict=True),
            strict=True,
        ):
            if got.shape != expected.shape:
                name = jax.tree_util.keystr(path[0])
                raise self._unreadable(step, ValueError(f"{name} has shape {got.shape}, expected {expected.shape}"))
        return state

    def close(self) -> None:
        """Waits until everything is written, and raises what went wrong while writing."""
        if self._manager is not None:
            self._manager.wait_until_finished()
            self._manager.close()
            self._manager = None

    def _unreadable(self, step: int, error: BaseException) -> UsageError:
        return UsageError(
            f"--{self._option} {self._path}: the checkpoint of step {step} cannot be restored into this run: {error};"
            " fix: give a folder that was saved by the same model, or remove the damaged step"
        )
