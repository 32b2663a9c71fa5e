"""The arrays of a step on the disk: Orbax writes and reads them, each process its own shards. No communication.

Orbax's handler is used, not its managers: what is complete, how processes wait for one another, what is kept and what
is believed are decided here (see README.md).
"""

import asyncio
import functools
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

CHUNK_BYTES = 16 << 20
"""Largest piece of an array on the disk: what another mesh reads in vain of a neighbour's part."""

SHARED_BYTES = 1 << 20
"""Smallest part of an array that the processes which all hold it share the writing of."""


def start_writing(folder: Path, arrays: Mapping[str, jax.Array]) -> list[Any]:
    """Starts writing this process's shards into a folder; returns the futures of it.

    On return the arrays have been copied: they may be donated.

    Raises:
      OSError, ValueError: the folder cannot be written to.
    """
    save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in arrays}
    args = ocp.args.PyTreeSave(dict(arrays), save_args=save_args)
    writing = _handler().async_save(epath.Path(folder), args=args)
    return asyncio.run_coroutine_threadsafe(writing, _loop()).result() or []


def finish_writing(folder: Path) -> None:
    """Makes one whole of what the processes have written; process 0 calls it."""
    _handler().finalize(epath.Path(folder))


def read_arrays(folder: Path, layout: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns arrays of a folder with the shape, dtype and sharding of `layout`; others there are left alone.

    Raises:
      Exception: of many types, also of bare Exception: something cannot be read.
    """
    restore_args = {
        name: ocp.ArrayRestoreArgs(sharding=a.sharding, global_shape=a.shape, dtype=a.dtype, strict=True)
        for name, a in layout.items()
    }
    args = ocp.args.PyTreeRestore(dict(layout), restore_args=restore_args, partial_restore=True)
    return dict(_handler().restore(epath.Path(folder), args=args))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns an event loop that runs as long as the process: writes that fail call back long after the call."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="checkpoint-loop", daemon=True).start()
    return loop


def _handler() -> Any:
    # Orbax logs each save in several lines, and each failure in pages, some at the end of the process; the training log
    # says it in one.
    for name in ("absl", "asyncio", "concurrent.futures"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    arrays = type_handlers.ArrayHandler(
        enable_write_sharding_file=False,
        # Copies on several processes share the writing; within one process that is only more pieces.
        use_replica_parallel=jax.process_count() > 1,
        min_slice_bytes_for_replica_parallel=SHARED_BYTES,
    )
    # Random bits do not compress, and a second to try is a second lost.
    return ocp.PyTreeCheckpointHandler(
        use_compression=False,
        type_handler_registry=type_handlers.create_type_handler_registry((jax.Array, arrays)),
    )
