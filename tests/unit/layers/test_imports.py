"""Using the layers costs jax alone until a module class is asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def loaded_after(statement: str) -> set[str]:
    script = f"{statement}; import sys; print('\\n'.join(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    )
    return set(run.stdout.split())


def test_importing_the_layers_loads_neither_orbax_nor_optax_nor_flax_nor_the_configuration():
    loaded = loaded_after("import jmegatron.layers")
    assert "jmegatron.layers.linear" in loaded
    for name in ("orbax", "optax", "flax", "jmegatron.config", "omegaconf", "jmegatron.models", "jmegatron.training"):
        assert name not in loaded


def test_asking_for_a_module_class_loads_flax_and_still_no_configuration():
    loaded = loaded_after("from jmegatron.layers import ColumnParallelLinear")
    assert "flax.nnx" in loaded
    assert not {"jmegatron.config", "omegaconf", "jmegatron.training"} & loaded


def test_every_public_name_of_the_package_exists_and_an_unknown_one_is_an_attribute_error():
    import jmegatron.layers as layers

    assert all(getattr(layers, name) is not None for name in layers.__all__)
    with pytest.raises(AttributeError, match="no attribute 'ColumnLinear'"):
        _ = layers.ColumnLinear
