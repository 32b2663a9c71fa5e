"""The example works as the README says."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "flax_research.py"


def test_flax_example_trains_a_users_own_model_in_under_80_lines():
    assert len(EXAMPLE.read_text().splitlines()) < 80
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", done.stdout).groups())
    assert last < 0.1 * first


def test_tensor_parallel_example_gives_the_losses_of_the_unsharded_one():
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r}); import flax_research as f;"
        "import numpy as np; np.testing.assert_allclose(f.train(5), f.train(5, None), rtol=1e-5)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
