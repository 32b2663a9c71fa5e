"""P1 for mixtures of experts: every mesh equals one device; checkpoints of one division of experts serve any other."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from checkpoint_support import meta
from compiled_support import program_of
from support import assert_equal_steps, random_batch, run_gradients, start_parameters, tiny_gpt
from tolerances import LOSS_RELATIVE
from training_runs import OPTIONS, saved_arrays, train

from jmegatron.checkpoint import reader
from jmegatron.checkpoint.writer import CheckpointWriter
from jmegatron.models.transformer import MOE_FIGURES
from jmegatron.moe.experts import ExpertSettings
from jmegatron.moe.layer import MoESettings
from jmegatron.moe.router import RouterSettings
from jmegatron.training.state import named_arrays

EXPERTS, BATCH, SEQ = 4, 8, 16


def settings_of(pattern=None, layers=2, shared=None, **router):
    settings = tiny_gpt(num_layers=layers, max_positions=SEQ)
    numbers = {**dict(balancing="seq_aux_loss", coefficient=0.1, z_coefficient=0.01), **router}
    experts = ExpertSettings(EXPERTS, 32, 24, "gelu_tanh", True)
    layer = dataclasses.replace(
        settings.layer, moe=MoESettings(RouterSettings(EXPERTS, **numbers), experts, shared_ffn_hidden_size=shared)
    )
    places = () if pattern is None else tuple(layer if one else dataclasses.replace(layer, moe=None) for one in pattern)
    return dataclasses.replace(settings, layer=layer, place_settings=places)


@functools.cache
def batch():
    return random_batch(BATCH, SEQ, 29, masked_rows=(3,))


@functools.cache
def one_device(settings):
    return run_gradients(settings, batch())


def figures(result):
    """Balancing and z-loss, mean over the replicas and micro-batches, and tokens of each expert; [layers]."""
    return np.asarray(result.report[MOE_FIGURES]).reshape(-1, EXPERTS + 3)


ALL = ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
LAYOUTS = {
    "ep 2 dp 2": dict(ep=2, dp=2, num_microbatches=2),
    "ep 2 tp 2": dict(ep=2, tp=2),
    "ep 2 tp 2 sequence parallel": dict(ep=2, tp=2, sequence_parallel=True),
    "ep 4 tp 2 whole experts": dict(ep=4, tp=2, divided_experts=False),
    "ep 2 pp 2": dict(ep=2, pp=2, num_microbatches=4),
    "ep 2 cp 2": dict(ep=2, cp=2),
    "ep 4 dp 2": dict(ep=4, dp=2),
    "tp 2 cp 2": dict(tp=2, cp=2, num_microbatches=2),
    "ep 2 dp 2 cp 2 sharded state and overlaps": dict(ep=2, dp=2, cp=2, distributed=ALL),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_equals_one_device(layout):
    options = LAYOUTS[layout]
    settings = settings_of(shared=16 if "tp 2" in layout else None)
    got, expected = run_gradients(settings, batch(), **options), one_device(settings)
    assert_equal_steps(got, expected)
    parts = options.get("dp", 1) * options.get("ep", 1) * options.get("num_microbatches", 1)
    np.testing.assert_array_equal(figures(got)[:, :EXPERTS], figures(expected)[:, :EXPERTS])
    wanted = figures(expected)[:, EXPERTS:]
    np.testing.assert_allclose(figures(got)[:, EXPERTS:] / parts, wanted, rtol=LOSS_RELATIVE)


PATTERN = dict(pattern=(0, 1), layers=4)
"""Of a chunk of two places: the second has experts, on both stages or in both chunks."""


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", dict(ep=2, dp=2, distributed=ALL)),
        ("1f1b-low-memory", dict(ep=2)),
    ],
)
def test_layers_with_and_without_experts_in_a_pipeline_equal_one_device(schedule, options):
    whole = settings_of(pattern=(0, 1, 0, 1), layers=4)
    expected = one_device(whole)
    got = run_gradients(
        settings_of(**PATTERN),
        batch(),
        pp=2,
        places=((0, 1, 2, 3),),
        schedule=schedule,
        num_microbatches=2,
        parameters=start_parameters(whole, 7),
        **options,
    )
    assert_equal_steps(got, expected)


def test_the_balancing_loss_of_micro_batches_does_not_care_which_replica_has_them():
    settings = settings_of(balancing="aux_loss")
    one = run_gradients(settings, batch(), num_microbatches=4)
    two = run_gradients(settings, batch(), dp=2, num_microbatches=2)
    # A micro-batch of both replicas is the first two of one replica: the same pairs of sequences.
    assert_equal_steps(two, one)


def test_the_global_balancing_loss_is_that_of_all_replicas_tokens():
    settings = settings_of(balancing="global_aux_loss")
    assert_equal_steps(run_gradients(settings, batch(), ep=2, cp=2), one_device(settings))


def test_a_coefficient_of_zero_is_no_loss_bit_for_bit():
    none = run_gradients(settings_of(balancing="none", z_coefficient=0.0), batch())
    zero = run_gradients(settings_of(coefficient=0.0, z_coefficient=0.0), batch())
    assert none.loss == zero.loss
    for name, gradient in none.gradients.items():
        np.testing.assert_array_equal(gradient, zero.gradients[name], err_msg=name)


@pytest.mark.parametrize("recompute", [dict(recompute="selective", recompute_mlp=True), dict(recompute="full")])
def test_recompute_changes_no_number(recompute):
    plain = settings_of()
    again = dataclasses.replace(plain, layer=dataclasses.replace(plain.layer, **recompute))
    got, expected = run_gradients(again, batch(), ep=2), one_device(plain)
    assert_equal_steps(got, expected)
    # The router runs twice, and counts once.
    np.testing.assert_array_equal(figures(got)[:, :EXPERTS], figures(expected)[:, :EXPERTS])


def test_tokens_of_padding_change_nothing_that_is_learned():
    """With a capacity that they would fill, and a balancing loss that would count them."""
    settings = settings_of(balancing="aux_loss")
    layer = dataclasses.replace(settings.layer, moe=dataclasses.replace(settings.layer.moe, capacity_factor=1.0))
    settings = dataclasses.replace(settings, layer=layer)
    arrays = dict(batch())
    # Two documents and padding, a segment of its own that counts nowhere.
    arrays["segment_ids"] = np.repeat([[0] * 5 + [1] * 5 + [2] * 6], BATCH, 0).astype(np.int32)
    arrays["loss_mask"] = np.array(arrays["loss_mask"])
    arrays["loss_mask"][:, 10:] = 0.0
    arrays["loss_mask"][:, :10:5] = 1.0
    other = {**arrays, "tokens": np.array(arrays["tokens"])}
    other["tokens"][:, 10:] = 7
    got, expected = run_gradients(settings, other), run_gradients(settings, arrays)
    assert got.loss == expected.loss
    for name, gradient in expected.gradients.items():
        np.testing.assert_array_equal(got.gradients[name], gradient, err_msg=name)
    assert (figures(got)[:, :EXPERTS].sum(1) == 10 * BATCH * 2).all()


# ---- rows beyond a bound ------------------------------------------------------------------------------------------
BOUND = "--num-experts 4 --hidden-dropout 0 --attention-dropout 0 --expert-model-parallel-size 4"


def test_rows_cut_off_are_counted_in_every_step_and_in_an_evaluation_there_are_none(tmp_path):
    """An lr that moves nothing: each run evaluates the same weights."""
    words = [*BOUND.split(), "--lr", "1e-30", "--train-iters", "4", "--eval-iters", "2", "--moe-receive-bound-factor"]
    each = train(tmp_path, *words, "1")
    some = train(tmp_path, *words, "1", "--log-interval", "4")
    none = train(tmp_path, *words, "4")
    dropped = [each.steps[step]["dropped_tokens"] for step in (1, 2, 3, 4)]
    assert min(dropped) > 0
    assert [some.steps[step]["dropped_tokens"] for step in (1, 4)] == [dropped[0], sum(dropped[1:])]
    assert [line["dropped_tokens"] for line in none.steps.values()] == [0] * 4
    assert each.losses[0] != none.losses[0]
    losses = [[line["loss"] for line in run.metrics if "split" in line] for run in (each, none)]
    assert losses[0] == losses[1] != []


# ---- checkpoints --------------------------------------------------------------------------------------------------
WORDS = (
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.01 --hidden-dropout 0 --attention-dropout 0"
    " --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
RUN = WORDS.split()


RESUMED = {
    "ep 2 dp 2": "--expert-model-parallel-size 2 --use-distributed-optimizer",
    # The second stage's second layer alone has experts; the first stage has none there, and no layer.
    "ep 2 pp 2, uneven stages, bf16": "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 3"
    " --decoder-first-pipeline-num-layers 1 --moe-layer-freq [0,0,1] --bf16 --use-distributed-optimizer",
    "pp 2 of two chunks, every other layer": "--pipeline-model-parallel-size 2 --num-layers 8 --moe-layer-freq 2"
    " --num-layers-per-virtual-pipeline-stage 2 --use-distributed-optimizer --overlap-grad-reduce"
    " --overlap-param-gather",
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) if "chunks" in name else name for name in RESUMED]
)
def test_four_steps_are_two_and_two_bit_for_bit(layout, tmp_path):
    layout = [*RUN, *RESUMED[layout].split(), "--save-interval", "2"]
    whole = train(tmp_path, *layout, "--train-iters", "4", "--lr-decay-iters", "4", "--save", str(tmp_path / "whole"))
    first = [*layout, "--lr-decay-iters", "4", "--save", str(tmp_path / "parts")]
    train(tmp_path, *first, "--train-iters", "2")
    second = train(tmp_path, *first, "--train-iters", "4", "--load", str(tmp_path / "parts"))
    assert second.steps == {step: line for step, line in whole.steps.items() if step > 2}
    expected, got = saved_arrays(tmp_path / "whole", 4), saved_arrays(tmp_path / "parts", 4)
    assert expected.keys() == got.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)
    bias = expected["parameters/layers/moe/router/expert_bias"]
    assert bias.dtype == np.float32
    # Each of the four steps moved it by the rate, up or down, or not at all.
    moves = bias / 1e-3
    np.testing.assert_allclose(moves, np.round(moves), atol=1e-3)
    assert 1 <= np.abs(np.round(moves)).max() <= 4
    assert any("moe_aux_loss" in line for line in whole.steps.values())


@pytest.mark.parametrize("words", ["--expert-model-parallel-size 2", ""])
def test_expert_e_is_expert_e_after_a_checkpoint_of_ep_4(words, tmp_path):
    options = [*OPTIONS, *RUN]
    saved = program_of([*options, "--expert-model-parallel-size", "4"], "cpu", 4)
    arrays = {}
    for name, a in saved.saved_layout().items():
        value = np.zeros(a.shape, a.dtype)
        if "/experts/" in name:
            value += np.arange(EXPERTS, dtype=np.float32).reshape(1, EXPERTS, *[1] * (len(a.shape) - 2))
        arrays[name] = jax.device_put(value, a.sharding)
    writer = CheckpointWriter(str(tmp_path), in_background=False)
    writer.save(1, arrays, meta(1))
    assert [outcome.problem for outcome in writer.outcomes()] == [""]
    other = program_of([*options, *words.split()], "cpu", 4 if words else 1)
    checkpoint, _ = reader.find(str(tmp_path))
    assert checkpoint is not None
    state = other.state_of(checkpoint.read(other.saved_layout()))
    found = 0
    for name, a in named_arrays(state).items():
        if "/experts/" in name:
            found += 1
            for expert in range(EXPERTS):
                assert (np.asarray(a)[:, expert] == expert).all(), name
    assert found >= 12  # weights and two moments of four leaves
