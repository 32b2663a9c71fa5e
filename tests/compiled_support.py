"""The program of a run, on CPU devices or on GPUs that are only compiled for."""

import jax
import pytest

from jmegatron.config import load_config
from jmegatron.planner.topology import compile_only_devices, gpu_compiler_available
from jmegatron.training.program import build_program, resolve_for_run


def program_of(words, target, num_devices):
    """The program of command-line words on `cpu` or a GPU target; skips the test without the GPU compiler."""
    if target == "cpu":
        devices = jax.devices()[:num_devices]
    else:
        available, reason = gpu_compiler_available()
        if not available:
            pytest.skip(reason)
        devices = compile_only_devices(target, num_devices)
    config, _ = resolve_for_run(load_config(words), num_devices)
    return build_program(config, devices)
