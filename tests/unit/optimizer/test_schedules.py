"""Learning-rate schedules against curves recorded from the reference's OptimizerParamScheduler."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.megatron_weights import DATA, recorded
from tolerances import LEARNING_RATE_OF_PEAK, LEARNING_RATE_RELATIVE

from jmegatron.optimizer.schedules import STYLES, LearningRateSchedule

SETTINGS = json.loads((DATA / "tables" / "lr_schedules.json").read_text())
OURS = [name for name, setting in SETTINGS.items() if setting["lr_decay_style"] in STYLES]


@pytest.mark.parametrize("name", OURS)
def test_curve_equals_the_recorded_one_at_every_step(name):
    s = SETTINGS[name]
    schedule = LearningRateSchedule(
        s["lr_decay_style"],
        peak=s["max_lr"],
        minimum=s["min_lr"],
        warmup=float(s["lr_warmup_steps"]),
        decay=float(s["lr_decay_steps"]),
        warmup_start=s["init_lr"],
    )
    got = jax.jit(jax.vmap(schedule))(jnp.arange(101))
    np.testing.assert_allclose(
        got,
        recorded("tables", "lr_schedules")[f"{name}/lr"],
        rtol=LEARNING_RATE_RELATIVE,
        atol=LEARNING_RATE_OF_PEAK * s["max_lr"],
    )


def test_the_recorded_curves_cover_every_style_with_and_without_warm_up():
    assert {SETTINGS[name]["lr_decay_style"] for name in OURS} == set(STYLES)
    assert {SETTINGS[name]["lr_warmup_steps"] for name in OURS} == {0, 10}
    assert {SETTINGS[name]["init_lr"] for name in OURS} == {0.0, 1e-5}


# parity.md section 5: lr 1.5e-4 to 1.5e-5, cosine, warm-up of 1 % of 250000 iterations.
@pytest.mark.parametrize(
    ("iteration", "expected"),
    [
        (1, 0.0),
        (2, 6e-08),
        (3, 1.2e-07),
        (101, 6e-06),
        (2500, 1.4994e-4),
        (2501, 1.5e-4),
        (2502, 1.499999999945622e-4),
        (125001, 8.357095255884952e-05),
        (126251, 8.25e-05),
        (250000, 1.5000000005437801e-05),
    ],
)
def test_iteration_of_the_long_run_uses_the_recorded_rate(iteration, expected):
    schedule = LearningRateSchedule("cosine", peak=1.5e-4, minimum=1.5e-5, warmup=2500.0, decay=250000.0)
    assert float(schedule(iteration - 1)) == pytest.approx(expected, rel=LEARNING_RATE_RELATIVE, abs=0)


def test_a_warm_up_may_end_within_an_iteration():
    schedule = LearningRateSchedule("linear", peak=1.0, minimum=0.0, warmup=2.5, decay=10.0)
    np.testing.assert_allclose([schedule(i) for i in (0, 2, 3, 10, 11)], [0, 0.8, 1 - 0.5 / 7.5, 0, 0], atol=1e-6)


def test_constant_ignores_the_minimum_also_after_the_decay():
    schedule = LearningRateSchedule("constant", peak=1.0, minimum=0.1, warmup=0.0, decay=10.0)
    np.testing.assert_array_equal([schedule(i) for i in (0, 10, 1000)], 1.0)


def test_an_unknown_style_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="'step', expected one of constant, linear, cosine"):
        LearningRateSchedule("step", peak=1.0, minimum=0.0, warmup=0.0, decay=1.0)


@pytest.mark.parametrize(("warmup", "decay"), [(10.0, 10.0), (-1.0, 10.0), (0.0, 0.0)])
def test_a_warm_up_that_does_not_fit_before_the_decays_end_stops_with_both_numbers(warmup, decay):
    with pytest.raises(ValueError, match=f"lr_decay_iters {decay} and lr_warmup_iters {warmup}"):
        LearningRateSchedule("cosine", peak=1.0, minimum=0.0, warmup=warmup, decay=decay)
