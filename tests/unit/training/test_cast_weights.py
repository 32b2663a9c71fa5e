"""What a step computes with is the cast of what a checkpoint stores, bit for bit: else a restart would not go on."""

import jax
import numpy as np
import pytest
from training_runs import OPTIONS

from jmegatron.config import load_config
from jmegatron.training.program import build_program, resolve_for_run


@pytest.mark.parametrize("precision", [("--bf16",), ("--fp16", "--initial-loss-scale", str(2**19))], ids=str)
@pytest.mark.parametrize("distributed", [(), ("--use-distributed-optimizer",)], ids=["replicated", "distributed"])
def test_parameters_are_the_cast_of_the_master_weights_after_every_step(precision, distributed):
    config = resolve_for_run(load_config([*OPTIONS, *precision, *distributed]), 2)[0]
    program = build_program(config, jax.devices()[:2])
    state, step = program.init(), program.train_step()
    rng = np.random.default_rng(0)
    changed = 0
    for number in range(4):
        text = rng.integers(0, 61, (8, 17)).astype(np.uint16)
        batch = program.put({"text": text, "sample_ids": np.arange(8, dtype=np.uint32) + 8 * number})
        before = jax.device_get(state.master)
        state, _ = step(state, batch, program.dropout_key())
        for (path, master), parameter, old in zip(
            jax.tree_util.tree_flatten_with_path(jax.device_get(state.master))[0],
            jax.tree.leaves(jax.device_get(state.parameters)),
            jax.tree.leaves(before),
            strict=True,
        ):
            np.testing.assert_array_equal(parameter, master.astype(parameter.dtype), err_msg=f"step {number} {path}")
            changed += int((master != old).sum())
    assert changed > 10_000
