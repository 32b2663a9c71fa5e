"""Saving and restoring a training state against writing the same bytes with dd, in one run and one folder.

    python scripts/benchmark_checkpoint.py [--hidden-size 1024] [--folder PATH] [--repeats 3] [--json PATH]

The state is that of a GPT in fp32 (weights and two moments) on 8 virtual CPU devices, saved at tp 2, pp 2, dp 2, and
once more with two chunks a stage, whose layers have to be brought in order first. What is compared takes turns; a ratio
is the median of the ratios of each turn, a time the median, for disks differ from one moment to the next. Before a
restore the files' pages are dropped from the cache where the system lets us (root), else they come from memory: it says
which.

    dd              dd if=/dev/zero conv=fsync, the bytes of the state
    blocking save   from the call until the checkpoint is committed: copied, written, hashed, fsynced
    stall           how long the call of an asynchronous save holds up training
    restore         find (sizes and checksums of all files), read, checksums of the arrays, arrangement for the step
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jmegatron.checkpoint import reader
from jmegatron.checkpoint.writer import CheckpointWriter
from jmegatron.config import load_config
from jmegatron.optimizer.schedules import START
from jmegatron.training.program import Program, build_program, resolve_for_run
from jmegatron.training.resume import checkpoint_meta

SAVED_AT = "tp 2, pp 2, dp 2"
CHUNKS = "tp 2, pp 2 x 2 chunks, dp 2"
_TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
LAYOUTS = {
    SAVED_AT: (8, _TP2_PP2),
    CHUNKS: (8, f"{_TP2_PP2} --num-virtual-stages-per-pipeline-rank 2"),
    "tp 8": (8, "--tensor-model-parallel-size 8"),
    "pp 4, dp 2, distributed optimizer": (8, "--pipeline-model-parallel-size 4 --use-distributed-optimizer"),
    "dp 8, distributed optimizer": (8, "--use-distributed-optimizer"),
    "one device": (1, ""),
}


def program_of(layout: str, hidden: int) -> Program:
    """Returns the program of a layout."""
    count, options = LAYOUTS[layout]
    line = (
        f"--num-layers 8 --hidden-size {hidden} --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64"
        " --vocab-size 8191 --micro-batch-size 1 --global-batch-size 16 --lr 1e-3 --train-iters 1 --mock-data"
        f" {options}"
    )
    return build_program(resolve_for_run(load_config(line.split()), count)[0], jax.devices()[:count])


def timed(action: Callable[[], Any]) -> float:
    """Returns the seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def dd(folder: Path, size: int) -> None:
    """Writes so many bytes with dd, synced, and removes them."""
    path, block = folder / "dd", 4 << 20
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={path}", f"bs={block}", f"count={-(-size // block)}", "conv=fsync"],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    path.unlink()


def drop_cache() -> bool:
    """Lets the system forget the pages of files; returns whether it did."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def restore(folder: Path, program: Program) -> None:
    """Restores the newest checkpoint as a run does."""
    checkpoint, _ = reader.find(str(folder))
    assert checkpoint is not None
    jax.block_until_ready(program.state_of(checkpoint.read(program.saved_layout())))


def save(folder: Path, program: Program, state: Any, step: int, in_background: bool) -> tuple[float, float]:
    """Returns the seconds until the call of a save returned, and until the checkpoint was there."""
    meta = checkpoint_meta(program.config, step, step, START, None)
    writer = CheckpointWriter(str(folder), in_background=in_background)
    os.sync()
    start = time.perf_counter()
    writer.save(step, program.saved_arrays(state), meta)
    returned = time.perf_counter() - start
    writer.wait()
    total = time.perf_counter() - start
    (outcome,) = writer.outcomes()
    assert not outcome.problem, outcome.problem
    return returned, total


def measure(folder: Path, hidden: int, repeats: int) -> dict[str, Any]:
    """Returns the figures."""
    turns: list[dict[str, float]] = [{} for _ in range(repeats)]
    size = 0
    for layout in (CHUNKS, SAVED_AT):  # the second is what restores read
        program = program_of(layout, hidden)
        state = program.init()
        size = sum(a.nbytes for a in program.saved_arrays(state).values())
        save(folder, program, state, 1, True)  # compiles
        for turn in turns:
            shutil.rmtree(folder / "1")
            os.sync()
            turn[f"dd beside {layout}"] = timed(lambda size=size: dd(folder, size))
            turn[f"blocking save at {layout}"] = save(folder, program, state, 1, False)[0]
            shutil.rmtree(folder / "1")
            turn[f"stall at {layout}"], turn[f"asynchronous save at {layout}"] = save(folder, program, state, 1, True)
        del state
        if layout != SAVED_AT:
            shutil.rmtree(folder / "1")
    programs = {layout: program_of(layout, hidden) for layout in LAYOUTS}
    dropped = True
    for turn in [{}, *turns]:  # the first one compiles
        for layout, here in programs.items():
            dropped = drop_cache() and dropped
            turn[f"restore at {layout}"] = timed(lambda here=here: restore(folder, here))

    def ratio(above: str, below: str) -> float:
        return statistics.median(turn[above] / turn[below] for turn in turns)

    ratios = {}
    for layout in (SAVED_AT, CHUNKS):
        ratios[f"dd / blocking save, at {layout}"] = ratio(f"dd beside {layout}", f"blocking save at {layout}")
        ratios[f"stall / blocking save, at {layout}"] = ratio(f"stall at {layout}", f"blocking save at {layout}")
    for layout in LAYOUTS:
        if layout != SAVED_AT:
            ratios[f"restore at {layout} / at the same mesh"] = ratio(f"restore at {layout}", f"restore at {SAVED_AT}")
    return {
        "bytes": size,
        "files": "dropped from the cache before a restore" if dropped else "in the cache",
        "seconds": {name: statistics.median(turn[name] for turn in turns) for name in turns[0]},
        "ratios": ratios,
    }


def table(result: dict[str, Any]) -> str:
    """Returns the figures as text."""
    rows = [f"state of {result['bytes'] / 1e9:.2f} GB, saved at {SAVED_AT}; files {result['files']}"]
    rows += [
        f"{name:60} {value:8.3f} s  {result['bytes'] / 1e9 / value:7.2f} GB/s"
        for name, value in result["seconds"].items()
    ]
    return "\n".join([*rows, *(f"{name:60} {value:8.3f}" for name, value in result["ratios"].items())])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--folder", help="where files are written (default: a temporary folder)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="file for the figures")
    given = parser.parse_args(arguments)
    if given.hidden_size < 8 or given.hidden_size % 8 or given.repeats < 1:
        parser.error("--hidden-size: expected a multiple of 8; --repeats: expected at least 1")
    if len(jax.devices()) < 8:
        parser.error("expected 8 devices; fix: XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        result = measure(Path(folder), given.hidden_size, given.repeats)
    print(table(result))
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
