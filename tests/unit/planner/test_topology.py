"""Compile-only devices: what is refused, and what is said where the GPU compiler is absent."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jmegatron.errors import UsageError
from jmegatron.planner import topology
from jmegatron.planner.cards import CARDS


@pytest.fixture
def pretend(monkeypatch):
    """Sets what `gpu_compiler_available` finds; its answer is cached, so the cache is cleared around the test."""
    topology.gpu_compiler_available.cache_clear()
    yield monkeypatch
    topology.gpu_compiler_available.cache_clear()


@pytest.mark.parametrize("target", sorted(CARDS))
def test_every_card_has_a_description(target):
    assert "gpu_device_info {" in topology.gpu_target_config(target)


def test_an_unknown_target_is_refused_before_the_compiler_is_asked():
    with pytest.raises(UsageError, match="did you mean 'h100'"):
        topology.compile_only_devices("h1000", 8)


@pytest.mark.parametrize(("num_gpus", "per_node"), [(0, 8), (12, 8), (8, 0), (-8, 8)])
def test_numbers_that_do_not_fit_are_refused(num_gpus, per_node):
    with pytest.raises(UsageError, match="--num-gpus"):
        topology.compile_only_devices("h100", num_gpus, per_node)


def test_an_old_python_is_told_what_to_install(pretend):
    pretend.setattr(topology.sys, "version_info", (3, 11, 9))
    available, reason = topology.gpu_compiler_available()
    assert not available
    assert "this is 3.11" in reason
    with pytest.raises(UsageError, match=r"--target-gpu h200.*jmegatron\[dryrun\]"):
        topology.compile_only_devices("h200", 8)


def test_a_missing_plugin_is_told_what_to_install(pretend):
    pretend.setattr(topology.sys, "version_info", (3, 13, 0))
    pretend.setattr(topology, "_PLUGINS", ("jax_plugins.no_such_plugin", "no_such_package.at_all"))
    available, reason = topology.gpu_compiler_available()
    assert (available, "not installed" in reason, "jmegatron[dryrun]" in reason) == (False, True, True)


def test_a_plugin_that_fails_is_reported_with_its_own_words(pretend):
    def broken(*_):
        raise NotImplementedError("topology not implemented for cuda\nmore")

    pretend.setattr(topology.sys, "version_info", (3, 13, 0))
    pretend.setattr(topology, "_PLUGINS", ("json",))
    pretend.setattr(topology, "_devices", broken)
    available, reason = topology.gpu_compiler_available()
    assert not available
    assert "(topology not implemented for cuda)" in reason
    assert "JAX_PLATFORMS=cpu" in reason


def test_compile_for_serves_cpu_devices_too():
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=SingleDeviceSharding(jax.devices("cpu")[0]))
    compiled = topology.compile_for(jax.jit(lambda a: a @ a), x)
    assert "dot" in compiled.as_text()
