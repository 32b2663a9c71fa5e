"""Options of the optimizer and the schedules as they reach the step: in updates, whatever they are counted in."""

import shlex

import numpy as np
import pytest

from jmegatron.config import Config, load_config, resolve
from jmegatron.optimizer.schedules import LearningRateSchedule, WeightDecaySchedule
from jmegatron.training.build import (
    decoupled_schedule,
    learning_rate_schedule,
    optimizer_settings,
    weight_decay_schedule,
)

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --mock-data "
    "--lr 1.5e-4 --min-lr 1.5e-5 --micro-batch-size 2 --global-batch-size 8 "
)


def config(options: str) -> Config:
    return resolve(load_config(shlex.split(BASE + options)))


def test_lengths_in_iterations_are_updates_and_a_fraction_may_end_within_one():
    got = learning_rate_schedule(config("--train-iters 250 --lr-warmup-fraction 0.01 --lr-decay-style cosine"))
    assert got == LearningRateSchedule("cosine", 1.5e-4, 1.5e-5, 2.5, 250.0, samples_per_update=8)
    got = learning_rate_schedule(
        config(
            "--train-iters 250 --lr-decay-iters 200 --lr-warmup-iters 10 --lr-warmup-init 1e-5 --lr-decay-style WSD "
            "--lr-wsd-decay-iters 20 --lr-wsd-decay-style minus_sqrt"
        )
    )
    assert got == LearningRateSchedule("WSD", 1.5e-4, 1.5e-5, 10.0, 200.0, 1e-5, "minus_sqrt", 20.0, 8)


def test_lengths_in_samples_may_end_within_an_update():
    options = "--train-samples 1003 --lr-warmup-samples 20 --lr-decay-style WSD --lr-wsd-decay-samples 100"
    got = learning_rate_schedule(config(options))
    assert got == LearningRateSchedule("WSD", 1.5e-4, 1.5e-5, 2.5, 1003 / 8, wsd_decay=12.5, samples_per_update=8)
    assert config(options).training.train_iters == 125
    got = learning_rate_schedule(config("--train-samples 1003 --lr-decay-samples 500 --lr-warmup-fraction 0.1"))
    assert got == LearningRateSchedule("linear", 1.5e-4, 1.5e-5, 6.25, 62.5, samples_per_update=8)


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
    assert weight_decay_schedule(config("--train-iters 40" + growing)) == WeightDecaySchedule("cosine", 0.01, 0.1, 40.0)
    constant = weight_decay_schedule(config("--train-iters 40 --weight-decay 0.3"))
    np.testing.assert_array_equal(constant.in_float64(np.arange(50)), 0.3)


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
