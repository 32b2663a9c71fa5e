"""A gradient that is not finite on one rank skips the step on all of them, or stops the run with a message."""

import dataclasses
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
from jmegatron.training.loop import check_finite
from jmegatron.training.program import Program, build_program, resolve_for_run
from jmegatron.training.samples import build_data

POISONED = {"pp": 1, "dp": 1, "ep": 0, "cp": 0, "tp": 0}
RANK = "on rank 6 (pp 1, dp 1, ep 0, cp 0, tp 0)"
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
FP16 = ("--fp16", "--initial-loss-scale", "1024", "--hysteresis", "1")
PARALLEL = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


def poisoned(parameters: Any, path: list[str], value: float) -> Any:
    """The parameters, of which the gradient of one element at `path` is `value` on one rank."""
    if path:
        return {**parameters, path[0]: poisoned(parameters[path[0]], path[1:], value)}

    def backward(_: None, gradient: Any) -> Any:
        here = jnp.stack([jax.lax.axis_index(axis) == rank for axis, rank in POISONED.items()]).all()
        first = (0,) * gradient.ndim
        return (gradient.at[first].set(jnp.where(here, value, gradient[first])),)

    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), backward)
    return same(parameters)


EMBEDDING, LAYER = "embedding/word/embedding", "layers/mlp/up/kernel"


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns the function that lets one rank's gradient of one element of a leaf be something else from now on.

    The forward, and so the loss, stays as it is.
    """
    build = training_step.gpt_pipeline_model

    def let(value: float, leaf: str = EMBEDDING) -> None:
        def model_of(*args: Any) -> Any:
            model, path = build(*args), leaf.split("/")
            if path[0] != model.layers:
                embed = lambda parameters, one: model.embed(poisoned(parameters, path, value), one)  # noqa: E731
                return dataclasses.replace(model, embed=embed)

            def run_of(run: Any) -> Any:
                layer = lambda parameters, *rest: run.layer(poisoned(parameters, path[1:], value), *rest)  # noqa: E731
                return dataclasses.replace(run, layer=layer)

            return dataclasses.replace(model, runs=tuple(run_of(run) for run in model.runs))

        monkeypatch.setattr(training_step, "gpt_pipeline_model", model_of)

    return let


def program_of(*options: str) -> Program:
    """Two stages of two data-parallel ranks of two tp ranks."""
    config, _ = resolve_for_run(load_config([*OPTIONS, *NO_DROPOUT, *PARALLEL, *options]), 8)
    return build_program(config, jax.devices()[:8])


@pytest.fixture
def program() -> Program:
    return program_of()


def bits(tree: Any) -> list[bytes]:
    """Of every copy and part of every leaf."""
    return [np.asarray(shard.data).tobytes() for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


@pytest.mark.parametrize(("value", "sharded"), [(np.nan, ()), (np.inf, SHARDED)], ids=["nan-replicated", "inf-sharded"])
def test_one_ranks_bad_gradient_skips_the_step_on_every_rank(value: float, sharded: Any, poison: Any) -> None:
    program = program_of(*FP16, *sharded)
    source = build_data(program.config, None, None)[0]
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
    assert [p for p, norm in zip(paths, metrics["leaf_norms"], strict=True) if not np.isfinite(norm)] == [EMBEDDING]
    assert "finite_gradients" not in metrics  # the check is off where overflows are expected
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


@pytest.mark.parametrize(
    ("sharded", "leaf"),
    [((), LAYER), (SHARDED, LAYER), (SHARDED, EMBEDDING)],
    ids=["replicated", "sharded-in-the-loop", "sharded-behind-it"],
)
def test_one_ranks_bad_gradient_stops_the_run_with_step_leaf_and_rank_where_every_loss_is_finite(
    sharded: Any, leaf: str, tmp_path: Path, poison: Any
) -> None:
    poison(np.nan if sharded else np.inf, leaf)
    with pytest.raises(TrainingError, match=re.escape(f"step 1: not finite: gradient of {leaf}, {RANK}; fix: ")):
        train(tmp_path, *NO_DROPOUT, *PARALLEL, *sharded, devices=8)


def test_without_the_check_a_bad_gradient_stops_nothing(tmp_path: Path, poison: Any) -> None:
    poison(np.nan)
    run = train(tmp_path, *NO_DROPOUT, *PARALLEL, "--no-check-for-nan-in-loss-and-grad", devices=8)
    assert len(run.metrics) == 6


def test_a_sum_that_overflows_over_finite_gradients_is_told_from_a_rank_that_is_bad(program: Program) -> None:
    paths = [path for path, _ in partition.named_specs(program.specs)]
    norms, finite = np.ones(len(paths)), np.ones((8, len(paths)), bool)
    norms[[3, 5]] = np.inf
    metrics = {"grad_norm": np.inf, "leaf_norms": norms, "finite_gradients": finite}
    named = f"step 7: not finite: gradient of {paths[3]} and 1 more, "
    with pytest.raises(TrainingError, match=f"{named}finite on every rank: their sum or its norm is not; fix: "):
        check_finite(program, 7, 1.0, metrics)
    finite[[4, 6, 7], 3] = False
    finite[0, 5] = False
    coordinates = re.escape("on rank 4 (pp 1, dp 0, ep 0, cp 0, tp 0) and 2 more; fix: ")
    with pytest.raises(TrainingError, match=named + coordinates):
        check_finite(program, 7, 1.0, metrics)
    check_finite(program, 7, 1.0, {**metrics, "grad_norm": 1.0})


def test_a_bad_loss_stops_the_run_with_step_leaf_and_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Program.init

    def init(self: Program) -> Any:
        state = start(self)
        scale = state.parameters["final_norm"]["scale"]
        state.parameters["final_norm"]["scale"] = damaged(scale, 2, bits=0x40400000)  # 1.0 to NaN
        return state

    monkeypatch.setattr(Program, "init", init)
    said = (
        r"step 1: not finite: loss nan \(data-parallel ranks 2\), gradient of .*, on rank 2 \(pp 0, dp 2, .*\); fix: "
    )
    with pytest.raises(TrainingError, match=said):
        train(tmp_path, *NO_DROPOUT, devices=4)


def test_a_run_whose_loss_explodes_ends_with_status_1_and_one_message(tmp_path: Path) -> None:
    done = train_process(tmp_path, *NO_DROPOUT, "--lr", "1e30", "--num-cpu-devices", "2", "--no-compilation-cache")
    assert done.returncode == 1
    said = r"step \d+: not finite: loss \w+ \(data-parallel ranks 0, 1\), gradient of \S+.*, on rank 0 .* and 1 more;"
    assert re.search(said, done.stderr)
    assert "Traceback" not in done.stderr
