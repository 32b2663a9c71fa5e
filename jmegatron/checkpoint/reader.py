"""Finds the checkpoint to go on from, and reads it. Nothing is believed that its checksums do not bear out.

Communication: through the store, one short value a process and candidate; on the devices two integers an array.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from jmegatron.checkpoint import steps
from jmegatron.checkpoint.arrays import read_arrays
from jmegatron.checkpoint.checksums import array_checksums, as_text
from jmegatron.checkpoint.manifest import MANIFEST, STATE, ArrayRecord, Damaged, Manifest, check_files, read_manifest
from jmegatron.checkpoint.peers import Peers
from jmegatron.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete step."""

    path: Path
    """Its folder."""
    step: int
    manifest: Manifest

    def read(self, layout: Mapping[str, jax.ShapeDtypeStruct], option: str = "load") -> dict[str, jax.Array]:
        """Returns arrays by name with the shardings of `layout`, in the dtypes that they were saved in.

        Each device reads what it holds, no more than a chunk beyond.

        Args:
          layout: names, shapes and shardings, all of them in the checkpoint (see `differences`).
          option: whose folder it is, for messages.

        Raises:
          UsageError: they cannot be read, or are not what was saved.
        """
        records = {name: self.manifest.arrays[name] for name in layout}
        try:
            wanted = {
                name: jax.ShapeDtypeStruct(records[name].shape, records[name].dtype, sharding=a.sharding)
                for name, a in layout.items()
            }
            arrays = read_arrays(self.path / STATE, wanted)
        except Exception as error:  # TensorStore and Orbax raise many types, also bare Exception
            what = f"{type(error).__name__}: {str(error).partition(' See full')[0][:500]}"
            raise UsageError(_unusable(option, self.path.parent, self.step, what)) from error
        found = as_text(array_checksums(arrays))
        bad = [n for n, text in zip(sorted(arrays), found, strict=True) if text != records[n].checksum]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            what = f"{bad[0]}{more} came out with another checksum than what was saved, though its files are as written"
            raise UsageError(_unusable(option, self.path.parent, self.step, what))
        return arrays


def differences(arrays: Mapping[str, ArrayRecord], layout: Mapping[str, jax.ShapeDtypeStruct]) -> list[str]:
    """Returns a line for each array that is missing, too many, or of another shape; dtypes may differ."""
    lines = []
    for name in sorted(arrays.keys() | layout.keys()):
        if name not in arrays:
            lines.append(f"{name} is missing, expected {list(layout[name].shape)}")
        elif name not in layout:
            lines.append(f"{name} {list(arrays[name].shape)} is not part of this run")
        elif arrays[name].shape != tuple(layout[name].shape):
            lines.append(f"{name} is {list(arrays[name].shape)}, expected {list(layout[name].shape)}")
    return lines


def find(
    path: str,
    *,
    step: int | None = None,
    peers: Peers | None = None,
    say: Callable[[str], None] = lambda _: None,
    option: str = "load",
) -> tuple[Checkpoint | None, list[int]]:
    """Returns (the newest step that is whole, newer ones that are not); reads every file of it once.

    Args:
      path: the folder.
      step: this one alone.
      peers: the processes, which share the reading.
      say: is told of each step that is passed over, and why.
      option: where the path comes from, for messages.

    Raises:
      UsageError: the path is no folder; the step is not there or not whole; there are steps and none is whole.
    """
    peers = peers or Peers()
    folder = Path(path).absolute()
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--{option} {path}: is a file, expected a folder; fix: give the folder of checkpoints")
        if (folder / MANIFEST).is_file():
            raise UsageError(
                f"--{option} {path}: is a step, expected the folder that holds it; fix: --{option} {Path(path).parent}"
                f" --ckpt-step {folder.name}"
            )
        there = steps.all_steps(folder)
    except OSError as error:
        raise UsageError(f"--{option} {path}: cannot be read: {error}; fix: check its permissions") from error
    there = list(map(int, peers.share("steps", there)))  # type: ignore[call-overload]
    if step is not None and step not in there:
        known = f"it holds {', '.join(map(str, there[-8:]))}" if there else "it holds none"
        fix = "give one of these" if there else "check the path"
        raise UsageError(f"--ckpt-step {step}: no such step in --{option} {path}; {known}; fix: {fix}")
    passed: dict[int, str] = {}
    for candidate in [step] if step is not None else there[::-1]:
        manifest, problem = _check(folder / str(candidate), peers)
        if manifest is not None:
            for number, why in passed.items():
                say(f"WARNING: --{option} {path}: step {number} cannot be used and is passed over: {why}")
            return Checkpoint(folder / str(candidate), candidate, manifest), list(passed)
        passed[candidate] = problem
    if not passed:
        return None, []
    what = "; ".join(f"step {number}: {why}" for number, why in list(passed.items())[:4])
    if step is not None:
        raise UsageError(_unusable(option, folder, step, passed[step]))
    raise UsageError(
        f"--{option} {path}: none of its steps can be used: {what}; fix: give another folder, or remove these steps to"
        " start anew"
    )


def _check(folder: Path, peers: Peers) -> tuple[Manifest | None, str]:
    manifest, problem = None, ""
    try:
        if folder.is_symlink():
            raise Damaged("it is a symbolic link")
        manifest = read_manifest(folder)
        check_files(folder, manifest, peers.index, peers.count)
    except Damaged as error:
        # A file's name may hold what no terminal and no store takes.
        problem = str(error).encode(errors="backslashreplace").decode()
    problem = peers.collect("check", problem)
    return (None, problem) if problem else (manifest, "")


def _unusable(option: str, folder: Path, step: int, what: str) -> str:
    return (
        f"--{option} {folder}: the checkpoint of step {step} cannot be restored into this run: {what}; fix: give"
        " another --ckpt-step, or a folder that was saved by the same model"
    )
