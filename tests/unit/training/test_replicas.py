"""--check-weight-hash-across-dp-replicas-interval: replicas stay equal, and a device with another copy is named."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import damaged
from training_runs import OPTIONS, train

from jmegatron.config import load_config
from jmegatron.errors import TrainingError
from jmegatron.mesh import build_mesh
from jmegatron.training import program as training_program
from jmegatron.training.loop import Trainer
from jmegatron.training.program import Program, build_program, resolve_for_run
from jmegatron.training.replicas import ReplicaCheck, checksum

INTERVAL = "--check-weight-hash-across-dp-replicas-interval"
PARALLEL = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]


def arrays(dtype: Any = jnp.float32) -> tuple[Any, Any, Any]:
    """(mesh, shardings, state) of 8 devices: dp 2 x tp 2 x pp 2."""
    mesh = build_mesh(jax.devices(), pp=2, dp=2, tp=2)
    shapes = {"all": (P(), (3, 5)), "tp": (P(None, "tp"), (3, 4)), "part": (P("pp", ("tp", "dp", "ep", "cp")), (4, 8))}
    shardings = {name: NamedSharding(mesh, spec) for name, (spec, _) in shapes.items()}
    rng = np.random.default_rng(0)
    state = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, (_, shape) in shapes.items()}
    return mesh, shardings, jax.device_put(state, shardings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_equal_replicas_pass(dtype: str) -> None:
    mesh, shardings, state = arrays(jnp.dtype(dtype))
    ReplicaCheck(mesh, shardings)(1, state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("leaf", "device", "expected"),
    [
        ("all", 5, "ranks 0, 1, 2, 3, 4, 6, 7 against rank 5 (rank 5 is pp 1, dp 0, ep 0, cp 0, tp 1)"),
        ("all", 0, "rank 0 against ranks 1, 2, 3, 4, 5, 6, 7 (rank 0 is pp 0, dp 0"),
        ("tp", 6, "ranks 0, 2, 4 against rank 6 (rank 6 is pp 1, dp 1"),
    ],
)
def test_one_bit_on_one_device_is_found_and_named(leaf: str, device: int, expected: str, dtype: str) -> None:
    mesh, shardings, state = arrays(jnp.dtype(dtype))
    state[leaf] = damaged(state[leaf], device, place=4)
    with pytest.raises(TrainingError) as error:
        ReplicaCheck(mesh, shardings)(7, state)
    assert f"step 7: replicas of {leaf} differ: {expected}" in str(error.value)


def test_the_first_leaf_is_named_and_the_others_counted() -> None:
    mesh, shardings, state = arrays()
    state = {**state, "all": damaged(state["all"], 2), "tp": damaged(state["tp"], 3)}
    with pytest.raises(TrainingError, match=r"replicas of all \(and 1 more leaves\) differ: .* against rank 2 "):
        ReplicaCheck(mesh, shardings)(1, state)


def test_parts_that_nobody_else_holds_have_nothing_to_be_compared_with() -> None:
    mesh, shardings, state = arrays()
    state["part"] = damaged(state["part"], 4)
    ReplicaCheck(mesh, shardings)(1, state)


def test_a_checksum_sees_every_bit_of_every_element_and_their_order() -> None:
    values = np.random.default_rng(1).normal(size=37).astype(np.float32)

    def expected(values: np.ndarray) -> int:
        factors = 2 * np.arange(values.size, dtype=np.uint32) + 1
        return int(np.sum(values.view(np.uint32) * factors, dtype=np.uint32))

    assert int(checksum(jnp.asarray(values))) == expected(values)
    assert expected(values[::-1].copy()) != expected(values)
    for place in range(values.size):
        for bit in range(32):
            other = values.copy()
            other.view(np.uint32)[place] ^= np.uint32(1 << bit)
            assert expected(other) != expected(values)


# ---- runs ---------------------------------------------------------------------------------------------------------
def test_a_run_stops_at_the_first_check_after_a_replica_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Program.init

    def init(self: Program) -> Any:
        state = start(self)
        state.parameters["final_norm"]["scale"] = damaged(state.parameters["final_norm"]["scale"], 1, bits=1 << 22)
        return state

    monkeypatch.setattr(training_program.Program, "init", init)
    with pytest.raises(TrainingError, match=r"step 2: replicas of .*final_norm/scale.* differ: .*rank 1 "):
        train(tmp_path, INTERVAL, "2", "--save", str(tmp_path / "save"), "--save-interval", "2", devices=4)
    assert not list((tmp_path / "save").glob("[0-9]*"))  # what is broken is not saved


@pytest.mark.parametrize(
    "options",
    [
        ("--bf16",),
        (*PARALLEL, "--sequence-parallel"),
        (*PARALLEL, "--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        ("--fp16", "--use-distributed-optimizer", "--initial-loss-scale", "65536"),
    ],
    ids=["bf16", "parallel", "parallel_sharded_bf16", "sharded_fp16"],
)
def test_after_ten_steps_every_replica_is_equal_bit_by_bit(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    steps = Trainer._steps

    def run(self: Trainer) -> int:
        last = steps(self)
        kept.append(self.state)
        return last

    monkeypatch.setattr(Trainer, "_steps", run)
    train(tmp_path, *options, INTERVAL, "5", "--train-iters", "10", devices=8)
    replicas = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(kept[0])[0]:
        first: dict[str, bytes] = {}
        for shard in leaf.addressable_shards:
            held = first.setdefault(str(shard.index), np.asarray(shard.data).tobytes())
            assert held == np.asarray(shard.data).tobytes(), (path, shard.device)
        replicas += len(leaf.addressable_shards) - len(first)
    assert replicas > 0


def test_the_check_moves_four_bytes_a_leaf_and_device() -> None:
    config, _ = resolve_for_run(load_config([*OPTIONS, *PARALLEL]), 8)
    program = build_program(config, jax.devices()[:8])
    check = ReplicaCheck(program.mesh, program.state_shardings)
    text = check._checksums.lower(program.abstract_state()).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert len(gathers) == 1
    count = len(jax.tree.leaves(program.abstract_state()))
    assert f"u32[8,{count}]" in gathers[0]
    assert not any(f" {kind}(" in text for kind in ("all-reduce", "all-to-all", "collective-permute"))
