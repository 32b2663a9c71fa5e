"""Devices of a cluster that is not there, to compile a step for it.

No communication. XLA's GPU compiler needs a description of the GPU, not a GPU: with the CUDA plugin installed,
`compile_only_devices("h100", 512)` gives 512 devices for a mesh, and `compile_for` compiles a jitted step for them on
any machine. The result has the scheduled program, its memory and its collectives, and cannot run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.resources
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache

from jmegatron.errors import UsageError
from jmegatron.planner.cards import card

# Autotuning runs kernels, which needs the GPU.
COMPILER_OPTIONS: Mapping[str, Any] = {"xla_gpu_autotune_level": 0}

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def gpu_target_config(target: str) -> str:
    """XLA's description of the GPU `target` as a text proto.

    Raises:
        UsageError: `target` is not described here.
    """
    name = card(target).name
    folder = importlib.resources.files("jmegatron.planner") / "gpus"
    return (folder / f"{name}.textproto").read_text(encoding="utf-8")


@functools.cache
def gpu_compiler_available() -> tuple[bool, str]:
    """Whether this Python can compile for GPUs, and if not, why and what to do."""
    install = "pip install 'jmegatron[dryrun]' (Python 3.12 or newer)"
    if sys.version_info < (3, 12):
        version = ".".join(map(str, sys.version_info[:2]))
        return False, f"compiling for GPUs needs Python 3.12 or newer, this is {version}: {install}"
    if not any(_is_installed(plugin) for plugin in _PLUGINS):
        return False, f"JAX's CUDA plugin is not installed: {install}"
    try:
        _devices(gpu_target_config("h100"), "1x1x1")
    except (NotImplementedError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return False, (
            f"JAX's CUDA plugin gives no compile-only devices ({reason}); on a machine without a GPU set "
            f"JAX_PLATFORMS=cpu before Python starts, and check that jax >= 0.11 is installed: {install}"
        )
    return True, ""


def compile_only_devices(target: str, num_gpus: int, gpus_per_node: int = 8) -> list[jax.Device]:
    """`num_gpus` devices of kind `target` to compile for, node by node.

    Build meshes from them in this order (`numpy.array(devices).reshape(...)`): XLA's GPU compiler knows no other.

    Args:
        target: name of the GPU, one of `cards.CARDS`.
        num_gpus: devices in all.
        gpus_per_node: devices that share NVLink.

    Raises:
        UsageError: the target is unknown, the numbers do not fit, or the GPU compiler is not installed.
    """
    config = gpu_target_config(target)
    per_node = min(num_gpus, gpus_per_node)
    if num_gpus < 1 or gpus_per_node < 1 or num_gpus % per_node:
        raise UsageError(
            f"--num-gpus {num_gpus} with --gpus-per-node {gpus_per_node}: expected a positive multiple of the GPUs of "
            "a node, or fewer than one node has"
        )
    available, reason = gpu_compiler_available()
    if not available:
        raise UsageError(f"--target-gpu {target}: {reason}")
    # XLA's slice is what NVLink joins: a node each, or it would take the whole cluster for one NVLink domain.
    return _devices(config, f"{num_gpus // per_node}x1x{per_node}")


def compile_for(step: Any, *args: Any, compiler_options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
    """Compile a jitted step for the devices that its arguments' shardings name.

    Args:
        step: what `jax.jit` returned.
        *args: trees of `jax.ShapeDtypeStruct` with shardings over `compile_only_devices`, or over real ones.
        compiler_options: XLA options by name, over `COMPILER_OPTIONS`.
    """
    return compile_traced(step.trace(*args), args, compiler_options)


def compile_traced(
    traced: Any,
    args: Any,
    compiler_options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] = lambda phase: None,
) -> jax.stages.Compiled:
    """`compile_for` of a step that has been traced (`step.trace(*args)`).

    Args:
        traced: the trace.
        args: what it was traced with.
        compiler_options: XLA options by name, over `COMPILER_OPTIONS`.
        progress: is told "lowering" and "compiling" when each begins.
    """
    platforms = {device.platform for leaf in jax.tree.leaves(args) for device in leaf.sharding.device_set}
    options = dict(COMPILER_OPTIONS) if "gpu" in platforms else {}
    progress("lowering")
    lowered = traced.lower(lowering_platforms=("cuda",) if "gpu" in platforms else None)
    options |= compiler_options or {}
    progress("compiling")
    if "gpu" not in platforms:
        return lowered.compile(compiler_options=options)
    with _without_persistent_cache():
        return lowered.compile(compiler_options=options)


@contextlib.contextmanager
def _without_persistent_cache() -> Iterator[None]:
    """Keeps compile-only programs out of JAX's cache on disk: reading one back needs the GPU."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    # JAX decides once whether the cache is used, and remembers.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _devices(target_config: str, shape: str) -> list[jax.Device]:
    """Devices of a topology of `slices x hosts x GPUs of a host`."""
    return list(topologies.get_topology_desc(platform="cuda", target_config=target_config, topology=shape).devices)
