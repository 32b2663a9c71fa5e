"""Runs of the training program for tests: in this process on some of its eight CPU devices, or as a real process."""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jmegatron.config import load_config
from jmegatron.data.indexed_dataset import IndexedDatasetBuilder
from jmegatron.training.loop import run

ROOT = Path(__file__).resolve().parents[1]
SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
VOCABULARY = "--vocab-size 61 --padded-vocab-size 64"
MODEL = f"{SHAPE} {VOCABULARY} --micro-batch-size 1 --global-batch-size 8 --lr 1e-2 --log-interval 1".split()
OPTIONS = [*MODEL, *["--train-iters", "6", "--eval-iters", "0", "--mock-data"]]
"""A run of six steps; an option given again after these wins."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run left behind."""

    out: str
    metrics: list[dict[str, Any]]

    @property
    def steps(self) -> dict[int, dict[str, Any]]:
        """Step -> its line of the metrics file, without the times, which differ between equal runs."""
        timed = ("step_time_s", "tokens_per_s", "tflops_per_device", "mfu")
        return {
            line["step"]: {k: v for k, v in line.items() if k not in timed}
            for line in self.metrics
            if "split" not in line
        }

    @property
    def losses(self) -> list[float]:
        """Training losses in order."""
        return [line["loss"] for line in self.metrics if "split" not in line]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Lines of the metrics file that are of evaluations."""
        return [line for line in self.metrics if "split" in line]


def train(folder: Path, *options: str, devices: int = 4, defaults: list[str] = OPTIONS) -> Run:
    """Trains in this process, in `folder`'s name only for the metrics file."""
    metrics = folder / f"metrics{len(list(folder.glob('metrics*')))}.jsonl"
    cache = ["--compilation-cache-dir", str(jax.config.jax_compilation_cache_dir)]
    config = load_config([*defaults, *cache, "--metrics-file", str(metrics), *options])
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run(config, jax.devices()[:devices])
    return Run(out.getvalue(), read_metrics(metrics))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads a metrics file as strict JSON (NaN and Infinity are none)."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def command(*options: str, defaults: list[str] = OPTIONS) -> list[str]:
    """The command line of a run in a process of its own."""
    return [sys.executable, str(ROOT / "train.py"), *defaults, *options]


def environment() -> dict[str, str]:
    """Variables of such a process: no virtual devices but those it asks for, a cache that all of a session share."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    cache = Path(str(jax.config.jax_compilation_cache_dir)).parent / "processes"
    return {**env, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"}


def quick_environment() -> dict[str, str]:
    """The same, and it compiles as quickly as this process: where the compiler's optimisation is not what is tested."""
    flags = (flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
    return {**environment(), "XLA_FLAGS": " ".join(flags)}


def train_process(folder: Path, *options: str, defaults: list[str] = OPTIONS) -> subprocess.CompletedProcess[str]:
    """Runs train.py as a user does, in `folder`."""
    return subprocess.run(
        command(*options, defaults=defaults),
        env=quick_environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def saved_arrays(folder: Path, step: int) -> dict[str, np.ndarray]:
    """Name -> array of every leaf in a checkpoint, as stored; read by Orbax alone."""
    path = folder.absolute() / str(step) / "state"
    with ocp.PyTreeCheckpointer() as reader:
        names = reader.metadata(path).item_metadata.tree
        arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return dict(reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=arguments)))


def write_corpus(
    prefix: Path, *, vocab: int = 61, documents: int = 40, length: int = 50, seed: int = 0, eod: int | None = None
) -> str:
    """Writes a corpus of random tokens, each document with `eod` at its end, and returns its prefix."""
    rng = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as writer:
        for _ in range(documents):
            tokens = rng.integers(0, vocab, length)
            writer.add_document(tokens if eod is None else np.append(tokens[1:], eod))
        writer.finalize()
    return str(prefix)
