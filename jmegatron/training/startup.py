"""Before the first step: devices, caches, paths, and what the start-up log says. No communication."""

import collections
import dataclasses
import importlib.metadata
import os
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jmegatron
from jmegatron import partition
from jmegatron.config import Config
from jmegatron.errors import UsageError
from jmegatron.mesh import AXES, DATA_AXES, rank_coordinates
from jmegatron.pipeline.schedule import Schedule, simulate
from jmegatron.planner import cards, formulas
from jmegatron.training.build import attention_line, compute_dtype, formula_shape
from jmegatron.training.report import import_wandb, open_for_append, unwritable

MIB = 2**20


# ---- devices and caches -------------------------------------------------------------------------------------------
def configure_devices(config: Config) -> None:
    """Asks JAX for virtual CPU devices if the options do; must run before JAX looks at its devices.

    Raises:
      UsageError: JAX has started already.
    """
    count = config.hardware.num_cpu_devices
    if count is None:
        return
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise UsageError(f"--num-cpu-devices {count}: JAX has been started before ({error})") from error


def user_cache_dir() -> Path:
    """Returns the folder for this project's caches: $XDG_CACHE_HOME/jmegatron or ~/.cache/jmegatron."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "jmegatron"


def configure_compilation_cache(config: Config) -> str:
    """Turns the persistent compilation cache on (or off) and returns what the log says about it.

    Raises:
      UsageError: a folder that was asked for cannot be written. (The default folder is given up with a word instead.)
    """
    hardware = config.hardware
    if hardware.no_compilation_cache:
        jax.config.update("jax_enable_compilation_cache", False)
        return "off (--no-compilation-cache)"
    folder = hardware.compilation_cache_dir or str(user_cache_dir() / "xla")
    try:
        check_writable_folder(folder, "compilation_cache_dir")
    except UsageError as error:
        if hardware.compilation_cache_dir:
            raise
        jax.config.update("jax_enable_compilation_cache", False)
        return f"off ({error})"
    jax.config.update("jax_compilation_cache_dir", folder)
    return folder


# ---- paths --------------------------------------------------------------------------------------------------------
def check_writable_folder(folder: str, option: str) -> None:
    """Creates the folder and writes a file into it.

    Raises:
      UsageError: that fails.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise unwritable(option, folder, error) from error


def check_outputs(config: Config) -> None:
    """Checks every place that the run will write to, and every optional package, before any device work.

    Raises:
      UsageError: a folder cannot be written.
      ConfigError: an optional package is missing.
    """
    if config.checkpoint.save:
        check_writable_folder(config.checkpoint.save, "save")
    if config.logging.tensorboard_dir:
        check_writable_folder(config.logging.tensorboard_dir, "tensorboard_dir")
    if config.logging.metrics_file:
        open_for_append(config.logging.metrics_file).close()
    if config.logging.profile:
        check_writable_folder(profile_dir(config), "profile_dir")
    if config.logging.wandb_project:
        import_wandb()


def profile_dir(config: Config) -> str:
    """Returns the folder of the JAX trace."""
    return config.logging.profile_dir or config.logging.tensorboard_dir or "profile"


# ---- the log ------------------------------------------------------------------------------------------------------
def versions() -> dict[str, str]:
    """Returns the versions of everything that decides a run's numbers."""
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")}
    packages["orbax-checkpoint"] = importlib.metadata.version("orbax-checkpoint")
    return {"jmegatron": jmegatron.__version__, "python": platform.python_version(), **packages}


def startup_lines(config: Config, mesh: Mesh, specs: Any, cache: str, xla_options: Sequence[str] = ()) -> list[str]:
    """Returns the start-up log: versions, devices, flags, mesh, attention, parameters and memory by part."""
    devices = mesh.devices.flatten()
    lines = [
        "versions: " + ", ".join(f"{name} {version}" for name, version in versions().items()),
        f"devices: {devices.size} x {devices[0].device_kind} ({devices[0].platform}), {jax.process_count()} processes",
        f"XLA_FLAGS: {os.environ.get('XLA_FLAGS') or '(none)'}",
        *xla_options,
        f"compilation cache: {cache}",
        "mesh: "
        + ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
        + (", sequence parallel" if config.parallel.sequence_parallel and mesh.shape["tp"] > 1 else ""),
    ]
    lines.append(attention_line(config, devices[0].platform))
    lines += [f"ignored: {flag} ({reason})" for flag, reason in config.ignored_flags]
    lines += _parameter_lines(config, specs) + _memory_lines(config, mesh, specs)
    return [*lines, _flops_line(config, devices[0].device_kind), _evaluation_line(config)]


def rank_lines(mesh: Mesh, hosts: Sequence[str]) -> list[str]:
    """Returns the table of `--log-ranks`: who holds which place of the mesh.

    Args:
      mesh: the mesh.
      hosts: name of each process's machine.
    """
    lines = ["  rank " + " ".join(f"{axis:>4}" for axis in AXES) + "  process  device  host"]
    before: collections.Counter[int] = collections.Counter()
    for rank, device in enumerate(mesh.devices.flat):
        places = " ".join(f"{place:4d}" for place in rank_coordinates(mesh, rank).values())
        process = device.process_index
        lines.append(f"{rank:6d} {places}  {process:7d}  {before[process]:6d}  {hosts[process]}")
        before[process] += 1
    return lines


def _parameter_lines(config: Config, specs: Any) -> list[str]:
    parts = formulas.parameters(formula_shape(config))
    by_part = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in vars(parts).items() if count)
    vocab = f"vocabulary {config.model.vocab_size} padded to {config.model.padded_vocab_size}"
    return [f"parameters: {partition.num_parameters(specs):,} ({by_part}; {vocab})"]


def pipeline_lines(schedule: Schedule) -> list[str]:
    """Returns what the log says about a pipeline: its bubble by both definitions, and what stages keep."""
    if schedule.num_stages == 1:
        return []
    costs = simulate(schedule)
    chunks = f" x {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    return [
        f"pipeline: {schedule.num_stages} stages{chunks}, {schedule.name}, {schedule.num_microbatches} micro-batches;"
        f" bubble {costs.bubble:.1%} of the ideal time ({costs.bubble_of_total:.1%} of the total), backward counted as"
        f" two forwards; chunks of activations in flight by stage {', '.join(map(str, costs.in_flight))}"
    ]


def state_bytes(config: Config, mesh: Mesh, specs: Any) -> dict[str, int]:
    """Returns the bytes on one device of parameters, master weights (mixed precision), moments and gradients."""
    shape, dtype = dict(mesh.shape), np.dtype(compute_dtype(config))
    fp32 = partition.local_bytes(specs, shape, 4)
    own = fp32
    if config.parallel.use_distributed_optimizer:
        divided = partition.map_specs(
            lambda s: dataclasses.replace(s, spec=partition.data_sharded(s, DATA_AXES, shape)[0]), specs
        )
        own = partition.local_bytes(divided, shape, 4)
    moments = 1 if config.optimizer.optimizer in ("sgd", "lion") else 2  # muon: at most
    return {
        f"parameters {dtype.name}": partition.local_bytes(specs, shape, dtype.itemsize),
        "master weights float32": own if dtype.itemsize != 4 else 0,
        "moments float32": moments * own,
        "gradients float32": fp32,
    }


def _memory_lines(config: Config, mesh: Mesh, specs: Any) -> list[str]:
    parts = state_bytes(config, mesh, specs)
    text = ", ".join(f"{name} {size / MIB:,.1f}" for name, size in parts.items() if size)
    return [f"model state per device (MiB): {text}; sum {sum(parts.values()) / MIB:,.1f}"]


def check_memory(specs: Any, config: Config, mesh: Mesh) -> None:
    """Refuses a model whose state alone exceeds the memory, before anything is allocated.

    Raises:
      UsageError: it does.
    """
    device = mesh.local_devices[0]
    need = sum(state_bytes(config, mesh, specs).values())
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform == "cpu":
        # All virtual devices live in this machine's memory.
        need *= len(mesh.local_devices)
        limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit is not None and need > limit:
        where = "this machine" if device.platform == "cpu" else "a device"
        raise UsageError(
            f"--num-layers {config.model.num_layers}, --hidden-size {config.model.hidden_size}: parameters, optimizer"
            f" state and gradients need {need / 2**30:,.1f} GiB of {where}'s {limit / 2**30:,.1f} GiB; fix: a smaller"
            " model, or a larger --tensor-model-parallel-size on more devices"
        )


def _flops_line(config: Config, device_kind: str) -> str:
    training = config.training
    assert training.global_batch_size is not None
    tokens = training.global_batch_size * config.model.seq_length
    shape = formula_shape(config)
    flops = formulas.model_flops_per_step(shape, tokens, causal_skip=True)
    seen = "as half" if shape.window is None else f"inside its window of {shape.window + 1} tokens"
    card = cards.card_of_device_kind(device_kind)
    peak = f"not reported: no peak known for {device_kind}"
    if card is not None:
        peak = f"against {card.peak_bf16_flops / 1e12:,.0f} TFLOP/s dense bf16 a device ({card.name})"
    return (
        f"FLOPs: {flops:.4g} a step ({tokens:,} tokens): 3 x forward matmuls, causal attention counted {seen}, output"
        f" layer with padding included, recompute not; MFU {peak}"
    )


def _evaluation_line(config: Config) -> str:
    training = config.training
    if not training.eval_iters:
        return "evaluation: off (--eval-iters 0)"
    return (
        f"evaluation: every {training.eval_interval} steps and after the last, on the first {training.eval_iters} x"
        f" {training.global_batch_size} sequences of the validation split"
    )


def compiled_line(compiled: Any, seconds: float) -> str:
    """Returns what compiling the step took and what the compiler says it needs."""
    line = f"compiled the training step in {seconds:.1f} s"
    memory = compiled.memory_analysis()
    if memory is None:
        return line
    return (
        f"{line}; per device (MiB): arguments {memory.argument_size_in_bytes / MIB:,.1f}, of which reused for outputs"
        f" {memory.alias_size_in_bytes / MIB:,.1f}, temporaries {memory.temp_size_in_bytes / MIB:,.1f}"
    )
