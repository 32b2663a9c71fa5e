"""Eight virtual CPU devices for every test; shapes and types are checked at run time at every layer boundary."""

import os
from importlib.metadata import version
from pathlib import Path

# LLVM's optimisation takes most of a CPU compile and changes neither the HLO nor what it computes.
QUICK_COMPILE = ["--xla_backend_optimization_level=0"]
# Where there are still two ways to emit a fusion, the older one takes half the time; the other end of the supported
# versions tests the newer. (XLA ends a process whose flags it does not know.)
if version("jaxlib").startswith("0.10."):
    QUICK_COMPILE += [
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_llvm_disable_expensive_passes=true",
    ]
# Before jax is imported. Autotuning needs a GPU, which the compile-only tests do not have.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_gpu_autotune_level=0",
        *QUICK_COMPILE,
    ]
).strip()

import jax  # noqa: E402
import pytest  # noqa: E402

ONCE = (
    # No JAX in them, and slow.
    "unit/data",
    "golden/test_dataset_reference.py",
    "multiprocess/test_launch_local.py",
    # The CPU's program stands for the GPU's, which is read itself where its compiler is.
    "compiled",
    # What JAX computes in them, others compute as well; what they add is the host's.
    "faults/test_resume.py",
    "multiprocess/test_failures.py",
    "parallel/test_checkpoint_layouts.py",
    "unit/interop",
    "unit/pipeline/test_executor.py",
    "unit/planner",
)
"""Files and folders whose tests need not run again on another Python with another JAX."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what stands under a path of `ONCE`."""
    paths = tuple(Path(__file__).parent / path for path in ONCE)
    for item in items:
        if any(item.path == path or path in item.path.parents for path in paths):
            item.add_marker("once")


@pytest.fixture(scope="session", autouse=True)
def _compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Shares compiled programs within a run only, so that no test depends on what an earlier run left."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
