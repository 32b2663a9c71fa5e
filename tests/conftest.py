"""Eight virtual CPU devices for every test; shapes and types are checked at run time at every layer boundary."""

import os

# Before jax is imported. Autotuning needs a GPU, which the compile-only tests do not have.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_gpu_autotune_level=0",
        # LLVM's optimisation takes most of a CPU compile and changes neither the HLO nor what it computes.
        "--xla_backend_optimization_level=0",
    ]
).strip()

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Shares compiled programs within a run only, so that no test depends on what an earlier run left."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
