"""Schedules of learning rate and weight decay against curves recorded from the reference's OptimizerParamScheduler."""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.megatron_weights import DATA, recorded
from tolerances import LEARNING_RATE_RELATIVE

from jmegatron.optimizer.schedules import START, STYLES, WSD_STYLES, LearningRateSchedule, Position, WeightDecaySchedule

SETTINGS = json.loads((DATA / "tables" / "lr_schedules.json").read_text())
COUNTS = np.arange(101)
EXACT = 1e-12
"""Relative, in float64: the same formula in another order of operations."""


def learning_rate(s: dict, **batch: Any) -> LearningRateSchedule:
    """The recorded schedule, whose steps are samples."""
    wsd = s.get("wsd_decay_steps")
    return LearningRateSchedule(
        s["lr_decay_style"],
        peak=s["max_lr"],
        minimum=s["min_lr"],
        warmup=float(s["lr_warmup_steps"]),
        decay=float(s["lr_decay_steps"]),
        warmup_start=s["init_lr"],
        wsd_style=s.get("lr_wsd_decay_style", "exponential"),
        wsd_decay=None if wsd is None else float(wsd),
        **batch,
    )


def weight_decay(s: dict, **batch: Any) -> WeightDecaySchedule:
    return WeightDecaySchedule(s["wd_incr_style"], s["start_wd"], s["end_wd"], float(s["wd_incr_steps"]), **batch)


# ---- the recorded curves ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SETTINGS)
def test_curve_equals_the_recorded_one_at_every_step(name):
    schedule, expected = learning_rate(SETTINGS[name]), recorded("tables", "lr_schedules")[f"{name}/lr"]
    np.testing.assert_allclose(schedule.in_float64(COUNTS), expected, rtol=EXACT, atol=1e-18)
    got = jax.jit(jax.vmap(schedule))(jnp.arange(101))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=LEARNING_RATE_RELATIVE, atol=0)


@pytest.mark.parametrize("batch", [3, 8])
@pytest.mark.parametrize("name", SETTINGS)
def test_updates_of_several_samples_see_every_so_manieth_value_of_the_curve(name, batch):
    """Warm-up, decay and last phase then end within an update."""
    schedule = learning_rate(SETTINGS[name], samples_per_update=batch)
    expected = recorded("tables", "lr_schedules")[f"{name}/lr"][::batch]
    counts = np.arange(len(expected))
    np.testing.assert_allclose(schedule.in_float64(counts), expected, rtol=EXACT, atol=1e-18)
    got = jax.jit(jax.vmap(schedule))(jnp.asarray(counts))
    np.testing.assert_allclose(got, expected, rtol=LEARNING_RATE_RELATIVE, atol=0)


@pytest.mark.parametrize("name", SETTINGS)
def test_weight_decay_equals_the_recorded_one_at_every_step(name):
    schedule, expected = weight_decay(SETTINGS[name]), recorded("tables", "lr_schedules")[f"{name}/wd"]
    np.testing.assert_array_equal(expected[:, 1], 0)  # what does not decay
    np.testing.assert_allclose(schedule.in_float64(COUNTS), expected[:, 0], rtol=EXACT)
    got = jax.jit(jax.vmap(schedule))(jnp.arange(101))
    np.testing.assert_allclose(got, expected[:, 0], rtol=LEARNING_RATE_RELATIVE)


SEGMENTS = ((3, 4), (4, 7), (5, 3), (2, 17))
"""(updates, samples of each) of one run that was restarted with other batches: 89 samples in all."""


def restarted(build: Callable[..., Any]) -> list[tuple[Any, np.ndarray, np.ndarray]]:
    """(schedule, its counts, the samples before each of those updates) of each segment."""
    position, updates, samples, parts = START, 0, 0, []
    for number, batch in SEGMENTS:
        schedule = build(samples_per_update=batch, position=position)
        parts.append((schedule, updates + np.arange(number), samples + batch * np.arange(number)))
        updates, samples = updates + number, samples + batch * number
        position = position.after(updates, batch)
        assert position == Position(updates, samples)
    return parts


@pytest.mark.parametrize("name", SETTINGS)
def test_restarts_with_other_batches_go_on_along_the_recorded_curves(name):
    """The bounds of warm-up, decay and last phase lie within updates, and at counts of another batch."""
    curves = recorded("tables", "lr_schedules")
    for build, expected in (
        (functools.partial(learning_rate, SETTINGS[name]), curves[f"{name}/lr"]),
        (functools.partial(weight_decay, SETTINGS[name]), curves[f"{name}/wd"][:, 0]),
    ):
        for schedule, counts, samples in restarted(build):
            np.testing.assert_allclose(schedule.in_float64(counts), expected[samples], rtol=EXACT, atol=1e-18)
            got = jax.vmap(schedule)(jnp.asarray(counts))
            np.testing.assert_allclose(got, expected[samples], rtol=LEARNING_RATE_RELATIVE, atol=0)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_restart_with_the_same_batch_is_the_same_schedule_bit_by_bit(name):
    once = learning_rate(SETTINGS[name], samples_per_update=3)
    again = learning_rate(SETTINGS[name], samples_per_update=3, position=START.after(7, 3).after(12, 3))
    counts = jnp.arange(12, 33)
    np.testing.assert_array_equal(jax.vmap(again)(counts), jax.vmap(once)(counts))


def test_the_recorded_curves_cover_every_style_with_and_without_warm_up():
    assert {s["lr_decay_style"] for s in SETTINGS.values()} == set(STYLES)
    assert {s["lr_warmup_steps"] for s in SETTINGS.values()} == {0, 10}
    assert {s["init_lr"] for s in SETTINGS.values()} == {0.0, 1e-5}
    assert {s["wd_incr_style"] for s in SETTINGS.values()} == {"constant", "linear", "cosine"}


# ---- parity.md section 5: lr 1.5e-4 to 1.5e-5, warm-up of 1 % of 250000 iterations of 1024 samples -----------------
LONG = dict(peak=1.5e-4, minimum=1.5e-5, warmup=2500 * 1024.0, decay=250000 * 1024.0, samples_per_update=1024)


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
    schedule = LearningRateSchedule("cosine", **LONG)
    assert float(schedule.in_float64(np.array(iteration - 1))) == pytest.approx(expected, rel=EXACT, abs=0)
    assert float(schedule(iteration - 1)) == pytest.approx(expected, rel=LEARNING_RATE_RELATIVE, abs=0)


@pytest.mark.parametrize(
    ("style", "halfway"),
    [
        ("linear", 8.25e-05),
        ("cosine", 8.25e-05),
        ("exponential", 7.091883092036783e-05),
        ("minus_sqrt", 5.454058453981607e-05),
    ],
)
def test_the_last_tenth_of_wsd_falls_as_recorded(style, halfway):
    schedule = LearningRateSchedule("WSD", wsd_style=style, wsd_decay=25000 * 1024.0, **LONG)
    for count, expected in ((225_000, 1.5e-4), (237_500, halfway), (250_000, 1.5e-5)):
        assert float(schedule.in_float64(np.array(count))) == pytest.approx(expected, rel=EXACT, abs=0)
        assert float(schedule(count)) == pytest.approx(expected, rel=LEARNING_RATE_RELATIVE, abs=0)


def test_the_inverse_root_of_the_long_run_is_half_after_four_warm_ups():
    schedule = LearningRateSchedule("inverse-square-root", **LONG)
    assert float(schedule.in_float64(np.array(10_000))) == pytest.approx(7.5e-5, rel=EXACT)
    assert float(schedule(10_000)) == pytest.approx(7.5e-5, rel=LEARNING_RATE_RELATIVE)


# ---- accuracy in fp32 ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("style", [*STYLES, *(f"WSD {style}" for style in WSD_STYLES)])
def test_fp32_keeps_its_digits_up_to_the_last_update_of_a_decay_to_0(style):
    """Where 1 + cos, 1 - ratio or count / decay cancel, seven digits would be lost."""
    name, _, wsd_style = style.partition(" ")
    schedule = LearningRateSchedule(
        name, 1e-3, 0.0, 2000.3, 3_000_000.7, wsd_style=wsd_style or "exponential", wsd_decay=300_000.9
    )
    around = [np.arange(-3, 4) + edge for edge in (2000, 1_000_000, 2_700_000, 3_000_000)]
    counts = np.concatenate([np.arange(3), *around])
    got = jax.jit(jax.vmap(schedule))(jnp.asarray(counts))
    np.testing.assert_allclose(got, schedule.in_float64(counts), rtol=LEARNING_RATE_RELATIVE, atol=0)


def test_bounds_are_not_missed_where_fp32_rounds_them_to_the_next_update():
    schedule = LearningRateSchedule("inverse-square-root", 1.0, 0.1, 0.0, 250_000.999, samples_per_update=1)
    assert schedule(250_000) == pytest.approx(0.1)
    steep = LearningRateSchedule("inverse-square-root", 1.0, 0.1, 100_000.0, 250_000.999)
    assert float(steep(250_000)) == pytest.approx(math.sqrt(0.4), rel=1e-6)
    assert float(steep(250_001)) == pytest.approx(0.1)


def test_a_warm_up_may_end_within_an_iteration():
    schedule = LearningRateSchedule("linear", peak=1.0, minimum=0.0, warmup=2.5, decay=10.0)
    np.testing.assert_allclose([schedule(i) for i in (0, 2, 3, 10, 11)], [0, 0.8, 1 - 0.5 / 7.5, 0, 0], atol=1e-6)


def test_constant_ignores_the_minimum_also_after_the_decay():
    schedule = LearningRateSchedule("constant", peak=1.0, minimum=0.1, warmup=0.0, decay=10.0)
    np.testing.assert_array_equal([schedule(i) for i in (0, 10, 1000)], 1.0)


def test_lengths_beyond_the_counters_range_do_not_overflow():
    schedule = LearningRateSchedule("linear", peak=1.0, minimum=0.0, warmup=0.0, decay=2.0**40)
    assert float(schedule(2**31 - 1)) == pytest.approx(1 - 2.0**-9, rel=1e-6)


# ---- refusals -----------------------------------------------------------------------------------------------------
def test_an_unknown_style_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="'step', expected one of constant, linear, cosine"):
        LearningRateSchedule("step", peak=1.0, minimum=0.0, warmup=0.0, decay=1.0)
    with pytest.raises(ValueError, match="lr_wsd_decay_style: got 'step'"):
        LearningRateSchedule("WSD", peak=1.0, minimum=0.0, warmup=0.0, decay=1.0, wsd_style="step", wsd_decay=1.0)
    with pytest.raises(ValueError, match="weight_decay_incr_style: got 'step'"):
        WeightDecaySchedule("step", 0.0, 0.1, 1.0)


@pytest.mark.parametrize(("warmup", "decay"), [(10.0, 10.0), (-1.0, 10.0), (0.0, 0.0)])
def test_a_warm_up_that_does_not_fit_before_the_decays_end_stops_with_both_numbers(warmup, decay):
    with pytest.raises(ValueError, match=f"lr_decay_samples {decay} and lr_warmup_samples {warmup}"):
        LearningRateSchedule("cosine", peak=1.0, minimum=0.0, warmup=warmup, decay=decay)


@pytest.mark.parametrize("wsd_decay", [None, 0.0])
def test_wsd_without_a_last_phase_is_refused(wsd_decay):
    with pytest.raises(ValueError, match=f"lr_wsd_decay_samples {wsd_decay}"):
        LearningRateSchedule("WSD", peak=1.0, minimum=0.0, warmup=0.0, decay=10.0, wsd_decay=wsd_decay)


@pytest.mark.parametrize(("start", "end"), [(0.2, 0.1), (-0.1, 0.1)])
def test_weight_decay_that_falls_or_is_negative_is_refused(start, end):
    with pytest.raises(ValueError, match=f"start_weight_decay {start} and end_weight_decay {end}"):
        WeightDecaySchedule("linear", start, end, 10.0)
