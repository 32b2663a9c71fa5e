"""A folder of Orbax checkpoints, one sub-folder a step. Each process writes and reads its own shards.

    <folder>/<step>/state   the TrainState, every leaf with its global shape: it restores onto any mesh
    <folder>/<step>/meta    JSON: step, consumed_samples, schedule_position (updates done and samples that they had),
                            the resolved config as YAML, versions

Megatron-LM training/checkpointing.py. Retention, integrity and fallback are not here yet: Orbax alone decides which
step is complete.
"""

import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jmegatron.errors import UsageError


class CheckpointFolder:
    """Saves to and restores from one folder; use as a context manager, or `close()` it.

    Args:
      path: the folder; created when saving.
      option: name of the option it came from, for messages.
      read_only: for restoring only: nothing is created.

    Raises:
      UsageError: the path is a file.
    """

    def __init__(self, path: str, *, option: str, read_only: bool = False):
        # Orbax logs each save in several lines and warns of what it was asked for (read_only); the training log says
        # it in one.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._path = Path(path).absolute()
        self._option = option
        self._manager = None
        if self._path.exists() and not self._path.is_dir():
            raise UsageError(f"--{option} {path}: is a file, expected a folder; fix: give the folder of checkpoints")
        if not read_only or self._path.is_dir():
            options = ocp.CheckpointManagerOptions(create=not read_only, read_only=read_only)
            self._manager = ocp.CheckpointManager(self._path, options=options, item_handlers=_handlers())

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

        Raises:
          UsageError: an earlier save could not be written.
        """
        assert self._manager is not None
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        try:
            saved = self._manager.save(step, args=args, force=True)
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error
        if not saved:
            raise RuntimeError(f"--{self._option} {self._path}: Orbax refused to save step {step}")

    def read_meta(self, step: int) -> dict[str, Any]:
        """Returns the JSON of a step, with at least `step`, `consumed_samples`, `schedule_position` and `config`.

        Where the position is not there, as in checkpoints of old, it follows from the other two: no step was skipped.

        Raises:
          UsageError: it cannot be read.
        """
        assert self._manager is not None
        try:
            meta = dict(self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"])
            consumed = meta["consumed_samples"]
            position = meta.get("schedule_position", {"updates": step, "samples": consumed})
            position = {name: position[name] for name in ("updates", "samples")}
            for name, value in {"consumed_samples": consumed, **position}.items():
                if not isinstance(value, int) or not 0 <= value < 2**63:
                    raise ValueError(f"{name} is {value!r}, expected a whole number from 0 on")
            if meta["step"] != step:
                raise ValueError(f"the folder says step {step}, its meta file step {meta['step']!r}")
            return {**meta, "schedule_position": position, "config": str(meta["config"])}
        except Exception as error:  # Orbax's own, or a key that is not there
            raise self._unreadable(step, error) from error

    def restore(self, step: int, abstract_state: Any) -> Any:
        """Returns the state of a step with the shapes, dtypes and shardings of `abstract_state`.

        Raises:
          UsageError: it cannot be read, or its arrays have another structure or shape.
        """
        assert self._manager is not None
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        try:
            self._compare(step, abstract_state)
            return self._manager.restore(step, args=args)["state"]
        except Exception as error:  # Orbax raises a bare Exception for a damaged array
            raise self._unreadable(step, error) from error

    def _compare(self, step: int, abstract_state: Any) -> None:
        """Names what differs; Orbax would cast dtypes silently and leave out which array has another shape."""
        assert self._manager is not None
        saved = _shapes(self._manager.item_metadata(step)["state"].tree)
        expected = _shapes(abstract_state)
        for name in sorted(saved.keys() | expected.keys()):
            if saved.get(name) != expected.get(name):
                raise ValueError(f"{name} is {saved.get(name, 'not there')}, expected {expected.get(name, 'none')}")

    def close(self) -> None:
        """Waits until everything is written.

        Raises:
          UsageError: it could not be written.
        """
        manager, self._manager = self._manager, None
        if manager is None:
            return
        try:
            manager.wait_until_finished()
            manager.close()
        except (OSError, ValueError) as error:
            raise self._unwritable(error) from error

    def _unreadable(self, step: int, error: BaseException) -> UsageError:
        # TensorStore's messages go on with pages of its own settings.
        what = f"{type(error).__name__}: {str(error).partition(' See full')[0][:500]}"
        return UsageError(
            f"--{self._option} {self._path}: the checkpoint of step {step} cannot be restored into this run: {what};"
            " fix: give a folder that was saved by the same model, or remove the damaged step"
        )

    def _unwritable(self, error: BaseException) -> UsageError:
        return UsageError(
            f"--{self._option} {self._path}: a checkpoint could not be written: {error}; the last complete one is step"
            f" {self._newest_on_disk()}; fix: make room, or give another folder, and --load {self._path} to go on"
        )

    def _newest_on_disk(self) -> int | None:
        try:
            with CheckpointFolder(str(self._path), option=self._option, read_only=True) as folder:
                return folder.latest_step()
        except (OSError, ValueError):
            return None


def _handlers() -> dict[str, Any]:
    """Returns what Orbax needs to know to tell shapes without reading arrays."""
    return {"state": ocp.StandardCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}


def _shapes(tree: Any) -> dict[str, str]:
    """Returns path -> dtype and shape of each array in a tree of arrays, abstract arrays or Orbax's records of them."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        ".".join(
            str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
        ): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in leaves
        if hasattr(leaf, "shape")
    }
