"""The steps in a folder of checkpoints: which there are, which are complete, and how one goes. No communication.

<step>            a step, complete if its manifest is whole
<step>.tmp        one that is being written, or was when the run was killed
<step>.removing   one that is being removed
<step>.damaged    one that was found damaged and set aside: nothing reads it, nothing removes it
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

from jmegatron.checkpoint.manifest import MANIFEST, Manifest

BUILDING = ".tmp"
_REMOVING = ".removing"
_DAMAGED = ".damaged"


def all_steps(folder: Path) -> list[int]:
    """Returns the steps that have a folder, complete or not, in ascending order.

    Raises:
      OSError: the folder cannot be read.
    """
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir() if re.fullmatch(r"0|[1-9][0-9]{0,17}", entry.name))
    return sorted(int(name) for name in names)


def complete_steps(folder: Path) -> list[int]:
    """Returns the steps with a manifest (whether it is whole is not looked at), in ascending order.

    Raises:
      OSError: the folder cannot be read.
    """
    return [step for step in all_steps(folder) if (folder / str(step) / MANIFEST).is_file()]


def complete(building: Path, target: Path, manifest: Manifest) -> None:
    """Writes the manifest of a step whose files are all on the disk, and gives the step its name: the commit.

    What already has that name is set aside.

    Raises:
      OSError: it cannot be written.
    """
    for path, _, _ in os.walk(building):
        sync_folder(Path(path))
    write_synced(building / MANIFEST, manifest.to_text())
    sync_folder(building)
    if target.exists():
        set_aside(target)
    building.rename(target)
    sync_folder(target.parent)


def write_synced(path: Path, text: str) -> None:
    """Writes a file, through to the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Brings a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a step; one that is killed meanwhile leaves no step, only a folder that `tidy` removes.

    Raises:
      OSError: it cannot be removed.
    """
    going = path.with_name(path.name + _REMOVING)
    path.rename(going)
    shutil.rmtree(going)


def set_aside(path: Path) -> Path:
    """Renames a step that cannot be used, so that it is in nobody's way, and returns its new path.

    Raises:
      OSError: it cannot be renamed.
    """
    number = 1
    while (target := path.with_name(f"{path.name}{_DAMAGED}{'' if number == 1 else f'-{number}'}")).exists():
        number += 1
    path.rename(target)
    return target


def tidy(folder: Path) -> list[str]:
    """Removes what killed runs have left half written or half removed, and returns the names.

    Only the run that saves into the folder may do so.
    """
    found: list[str] = []
    with contextlib.suppress(OSError):
        left = re.compile(rf"(0|[1-9][0-9]*)({re.escape(BUILDING)}|{re.escape(_REMOVING)})")
        for entry in sorted(folder.iterdir()):
            if left.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
                found.append(entry.name)
    return found
