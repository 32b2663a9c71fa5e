"""A gradient that is not finite on one rank skips the step on all of them, or stops the run with a message."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import damaged
from training_runs import OPTIONS, train, train_process

from jmegatron import partition
from jmegatron.config import load_config
from jmegatron.data.loader import build_global_batch
from jmegatron.errors import TrainingError
from jmegatron.training import step as training_step
from jmegatron.training.program import Program, build_program, resolve_for_run
from jmegatron.training.samples import build_data

LEAF = "embedding/word"
POISONED = {"dp": 1, "pp": 1, "tp": 0}
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
FP16 = ("--fp16", "--initial-loss-scale", "1024", "--hysteresis", "1")
PARALLEL = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the function that lets one rank's gradient of one element of one leaf be something else from now on."""
    reduce = training_step.GradientLayout.reduce

    def let(value: float) -> None:
        def poisoned(self: Any, gradients: Any, *, but: str | None = None) -> Any:
            here = jnp.stack([jax.lax.axis_index(axis) == rank for axis, rank in POISONED.items()]).all()
            word = gradients["embedding"]["word"]
            name, table = next(iter(word.items())) if isinstance(word, dict) else (None, word)
            table = table.at[0, 0].set(jnp.where(here, value, table[0, 0]))
            word = table if name is None else {**word, name: table}
            gradients = {**gradients, "embedding": {**gradients["embedding"], "word": word}}
            return reduce(self, gradients, but=but)

        monkeypatch.setattr(training_step.GradientLayout, "reduce", poisoned)

    return let


def bits(tree: Any) -> list[bytes]:
    """Of every copy and part of every leaf."""
    return [np.asarray(shard.data).tobytes() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


@pytest.mark.parametrize(("value", "sharded"), [(np.nan, ()), (np.inf, SHARDED)], ids=["nan-replicated", "inf-sharded"])
def test_one_ranks_bad_gradient_skips_the_step_on_every_rank(value: float, sharded: Any, poison: Any) -> None:
    options = [*OPTIONS, *NO_DROPOUT, *FP16, *PARALLEL, *sharded]
    config, tokenizer = resolve_for_run(load_config(options), 8)
    program = build_program(config, jax.devices()[:8])
    source = build_data(config, tokenizer, None)[0]
    batch = program.put(build_global_batch(source, 0, 8, rows=program.placer.rows))
    clean = program.train_step()
    state, metrics = clean(program.init(), batch, None)
    assert int(metrics["skipped"]) == 0
    before = {name: bits(getattr(state, name)) for name in ("parameters", "master", "optimizer")}
    tracker = int(state.loss_scale.growth_tracker)
    assert tracker == 1
    poison(value)
    state, metrics = program.train_step()(state, batch, None)
    for name, held in before.items():
        assert bits(getattr(state, name)) == held, name
    paths = [path for path, _ in partition.named_specs(program.specs)]
    bad = [path for path, norm in zip(paths, metrics["leaf_norms"], strict=True) if not np.isfinite(norm)]
    assert len(bad) == 1
    assert bad[0].startswith(LEAF)
    assert np.isfinite(float(metrics["loss"]))
    assert (int(state.step), int(state.skipped), int(metrics["skipped"])) == (2, 1, 1)
    assert float(metrics["loss_scale"]) == 1024  # that of this step
    assert float(state.loss_scale.scale) == 512
    assert int(state.loss_scale.growth_tracker) == 0
    rate = float(metrics["lr"])
    state, metrics = clean(state, batch, None)  # the schedule did not move
    assert float(metrics["lr"]) == rate
    assert (int(state.step), int(state.skipped)) == (3, 1)
    assert bits(state.parameters) != before["parameters"]


def test_skipped_steps_use_up_samples_and_nothing_else(tmp_path: Path, poison: Any) -> None:
    poison(np.inf)
    run = train(tmp_path, *NO_DROPOUT, *FP16, *PARALLEL, *SHARDED, "--lr-warmup-iters", "3", devices=8)
    lines = [line for line in run.metrics if "split" not in line]
    assert [line["skipped"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["consumed_samples"] for line in lines] == [8, 16, 24, 32, 40, 48]
    assert {line["lr"] for line in lines} == {0.0}  # of the first update, which never came
    assert [line["loss_scale"] for line in lines] == [1024 / 2**n for n in range(6)]


def test_float16_finds_its_scale_from_two_to_the_32_and_says_what_it_skipped(tmp_path: Path) -> None:
    run = train(tmp_path, *NO_DROPOUT, "--fp16", "--train-iters", "40", devices=2)
    lines = [line for line in run.metrics if "split" not in line]
    skipped = [line["skipped"] for line in lines]
    assert skipped[0] == 1
    assert 1 < skipped[-1] < 30
    assert skipped[-1] == skipped[-5]
    # Two overflows are free once, and each one after them halves.
    assert lines[-1]["loss_scale"] == 2.0 ** (32 - (skipped[-1] - 1))
    assert run.losses[-1] < run.losses[0]
    assert f"number of skipped iterations: {skipped[-1]:3d}" in run.out


@pytest.mark.parametrize("sharded", [(), SHARDED], ids=["replicated", "sharded"])
def test_a_bad_gradient_stops_the_run_with_step_and_leaf(sharded: Any, tmp_path: Path, poison: Any) -> None:
    poison(np.nan)
    with pytest.raises(TrainingError, match=rf"step 1: not finite: gradient of {LEAF}\S*, with a finite loss on every"):
        train(tmp_path, *NO_DROPOUT, *PARALLEL, *sharded, devices=8)
    run = train(tmp_path, *NO_DROPOUT, *PARALLEL, *sharded, "--no-check-for-nan-in-loss-and-grad", devices=8)
    assert len(run.metrics) == 6


def test_a_bad_loss_stops_the_run_with_step_leaf_and_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Program.init

    def init(self: Program) -> Any:
        state = start(self)
        scale = state.parameters["final_norm"]["scale"]
        state.parameters["final_norm"]["scale"] = damaged(scale, 2, bits=0x40400000)  # 1.0 to NaN
        return state

    monkeypatch.setattr(Program, "init", init)
    with pytest.raises(TrainingError, match=r"step 1: not finite: loss nan, gradient of .* on data-parallel ranks 2;"):
        train(tmp_path, *NO_DROPOUT, devices=4)


def test_a_run_whose_loss_explodes_ends_with_status_1_and_one_message(tmp_path: Path) -> None:
    done = train_process(tmp_path, *NO_DROPOUT, "--lr", "1e30", "--num-cpu-devices", "2", "--no-compilation-cache")
    assert done.returncode == 1
    assert re.search(r"step \d+: not finite: .*gradient of \S+.* on data-parallel ranks 0, 1; fix: ", done.stderr)
    assert "Traceback" not in done.stderr
