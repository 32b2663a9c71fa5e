"""Options of the optimizer and the schedules as they reach the step: in samples, whatever they are counted in."""

import shlex

import numpy as np
import pytest

from jmegatron.config import Config, load_config, resolve
from jmegatron.optimizer.schedules import LearningRateSchedule, Position, WeightDecaySchedule
from jmegatron.training.build import (
    decoupled_schedule,
    learning_rate_schedule,
    optimizer_settings,
    step_settings,
    weight_decay_schedule,
)

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --mock-data "
    "--lr 1.5e-4 --min-lr 1.5e-5 --micro-batch-size 2 --global-batch-size 8 "
)


def config(options: str) -> Config:
    return resolve(load_config(shlex.split(BASE + options)))


def test_lengths_in_iterations_are_so_many_batches_and_a_fraction_may_end_within_one():
    got = learning_rate_schedule(config("--train-iters 250 --lr-warmup-fraction 0.01 --lr-decay-style cosine"))
    assert got == LearningRateSchedule("cosine", 1.5e-4, 1.5e-5, 20.0, 2000.0, samples_per_update=8)
    got = learning_rate_schedule(
        config(
            "--train-iters 250 --lr-decay-iters 200 --lr-warmup-iters 10 --lr-warmup-init 1e-5 --lr-decay-style WSD "
            "--lr-wsd-decay-iters 20 --lr-wsd-decay-style minus_sqrt"
        )
    )
    assert got == LearningRateSchedule(
        "WSD", 1.5e-4, 1.5e-5, 80.0, 1600.0, 1e-5, "minus_sqrt", 160.0, samples_per_update=8
    )


def test_lengths_in_samples_may_end_within_an_update():
    options = "--train-samples 1003 --lr-warmup-samples 20 --lr-decay-style WSD --lr-wsd-decay-samples 100"
    got = learning_rate_schedule(config(options))
    assert got == LearningRateSchedule("WSD", 1.5e-4, 1.5e-5, 20.0, 1003.0, wsd_decay=100.0, samples_per_update=8)
    assert config(options).training.train_iters == 125
    got = learning_rate_schedule(config("--train-samples 1003 --lr-decay-samples 500 --lr-warmup-fraction 0.1"))
    assert got == LearningRateSchedule("linear", 1.5e-4, 1.5e-5, 50.0, 500.0, samples_per_update=8)


@pytest.mark.parametrize("style", ["linear", "cosine", "inverse-square-root", "constant", "WSD"])
def test_the_same_lengths_in_samples_and_iterations_are_the_same_schedule(style):
    options = f"--lr-decay-style {style} "
    iters = options + "--train-iters 40 --lr-warmup-iters 3 --lr-decay-iters 30 --lr-wsd-decay-iters 5"
    samples = options + "--train-samples 320 --lr-warmup-samples 24 --lr-decay-samples 240 --lr-wsd-decay-samples 40"
    assert learning_rate_schedule(config(iters)) == learning_rate_schedule(config(samples))
    assert weight_decay_schedule(config(iters)) == weight_decay_schedule(config(samples))


def test_the_decoupled_schedule_has_its_own_peak_and_minimum_alone():
    assert decoupled_schedule(config("--train-iters 40")) is None
    options = "--train-iters 40 --lr-warmup-iters 4 --decoupled-lr 1e-3"
    common = learning_rate_schedule(config(options))
    for minimum, expected in (("", 1.5e-5), (" --decoupled-min-lr 1e-4", 1e-4)):
        got = decoupled_schedule(config(options + minimum))
        assert got is not None
        rates = got.in_float64(np.array([2, 4, 22, 40]))
        np.testing.assert_allclose(rates, [5e-4, 1e-3, (1e-3 + expected) / 2, expected])
        assert (got.style, got.warmup, got.decay) == (common.style, common.warmup, common.decay)


def test_weight_decay_grows_over_the_run_whatever_the_learning_rate_does():
    growing = " --lr-decay-iters 20 --weight-decay-incr-style cosine --start-weight-decay 0.01 --end-weight-decay 0.1"
    got = weight_decay_schedule(config("--train-iters 40" + growing))
    assert got == WeightDecaySchedule("cosine", 0.01, 0.1, 320.0, samples_per_update=8)
    constant = weight_decay_schedule(config("--train-iters 40 --weight-decay 0.3"))
    np.testing.assert_array_equal(constant.in_float64(np.arange(50)), 0.3)


def test_where_a_run_goes_on_reaches_every_schedule():
    position = Position(updates=3, samples=50)
    growing = " --weight-decay-incr-style linear --start-weight-decay 0.0 --end-weight-decay 0.1"
    options = config("--vocab-size 61 --padded-vocab-size 64 --train-iters 40 --decoupled-lr 1e-3" + growing)
    decoupled = decoupled_schedule(options, position)
    assert decoupled is not None
    for schedule in (
        learning_rate_schedule(options, position),
        decoupled,
        weight_decay_schedule(options, position),
        optimizer_settings(options, position).weight_decay,
        step_settings(options, "cpu", position).optimizer.weight_decay,
    ):
        assert schedule.position == position
        assert float(schedule(13)) == pytest.approx(float(schedule.in_float64(np.array(13))))
    assert float(decoupled(13)) == pytest.approx(1e-3 + (1.5e-5 - 1e-3) * (50 + 10 * 8) / 320)


def test_every_option_of_an_optimizer_reaches_it():
    got = optimizer_settings(
        config(
            "--train-iters 40 --optimizer muon --adam-beta1 0.11 --adam-beta2 0.12 --adam-eps 0.13 --sgd-momentum 0.14 "
            "--lion-beta1 0.15 --lion-beta2 0.16 --muon-momentum 0.17 --muon-extra-scale-factor 0.18 --clip-grad 0.19"
        )
    )
    assert (got.name, got.beta1, got.beta2, got.eps, got.sgd_momentum) == ("muon", 0.11, 0.12, 0.13, 0.14)
    assert (got.lion_beta1, got.lion_beta2, got.muon_momentum, got.muon_scale) == (0.15, 0.16, 0.17, 0.18)
    assert got.clip_grad == 0.19
