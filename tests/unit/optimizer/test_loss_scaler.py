"""The loss scaler against the reference's recorded traces and its rule written out in plain Python."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmegatron.optimizer import loss_scaler
from jmegatron.optimizer.loss_scaler import LossScale, LossScalerSettings

TRACES = json.loads((Path(__file__).parents[2] / "golden/data/tables/grad_scaler.json").read_text())


def settings_of(config):
    return LossScalerSettings(
        initial=config["initial_scale"],
        minimum=config["min_scale"],
        window=config["growth_interval"],
        hysteresis=config["hysteresis"],
        growth=config["growth_factor"],
        backoff=config["backoff_factor"],
    )


def columns(state):
    return [state.scale, 1.0 / state.scale, state.growth_tracker, state.hysteresis_tracker]


def eagerly(numbers, flags):
    state, rows = loss_scaler.init(numbers), []
    for flag in flags:
        state = loss_scaler.update(numbers, state, bool(flag))
        rows.append([float(column) for column in columns(state)])
    return np.array(rows)


def scanned(numbers, flags):
    def body(state, flag):
        state = loss_scaler.update(numbers, state, flag)
        return state, columns(state)

    last, rows = jax.jit(lambda state, flags: jax.lax.scan(body, state, flags))(
        loss_scaler.init(numbers), jnp.array(flags, bool)
    )
    assert [leaf.dtype for leaf in jax.tree.leaves(last)] == [jnp.float32, jnp.int32, jnp.int32]
    return np.stack([np.asarray(column, np.float64) for column in rows], axis=1)


def written_out(numbers, flags):
    """grad_scaler.py:131-153 in Python's own numbers."""
    scale, growth, hysteresis, rows = numbers.initial, 0, numbers.hysteresis, []
    for flag in flags:
        if flag:
            growth, hysteresis = 0, hysteresis - 1
            if hysteresis <= 0:
                scale = max(scale * numbers.backoff, numbers.minimum)
        else:
            growth += 1
            if growth == numbers.window:
                growth, hysteresis, scale = 0, numbers.hysteresis, scale * numbers.growth
        rows.append([scale, 1.0 / scale, growth, hysteresis])
    return np.array(rows)


@pytest.mark.parametrize("run", [eagerly, scanned])
@pytest.mark.parametrize("name", TRACES)
def test_the_recorded_traces_of_the_reference_are_reproduced(name, run):
    trace = TRACES[name]
    assert trace["columns"] == ["scale", "inv_scale", "growth_tracker", "hysteresis_tracker"]
    np.testing.assert_array_equal(run(settings_of(trace["config"]), trace["found_inf"]), trace["after"])


@pytest.mark.parametrize("run", [eagerly, scanned])
def test_hysteresis_is_refilled_only_when_the_scale_grows(run):
    numbers = LossScalerSettings(initial=256.0, window=3, hysteresis=2, minimum=64.0)
    rows = run(numbers, [1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1])
    assert rows[:, 0].tolist() == [256, 256, 256, 128, 64, 64, 64, 128, 128, 64, 64, 64, 64]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.booleans(), min_size=40, max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_any_sequence_follows_the_rule(flags, window, hysteresis):
    numbers = LossScalerSettings(initial=2.0**10, minimum=2.0**4, window=window, hysteresis=hysteresis)
    np.testing.assert_array_equal(scanned(numbers, flags), written_out(numbers, flags))


def test_the_defaults_are_the_reference_s_and_two_to_the_32_is_exact():
    state = loss_scaler.init(LossScalerSettings())
    assert (float(state.scale), int(state.growth_tracker), int(state.hysteresis_tracker)) == (4294967296.0, 0, 2)
    numbers = LossScalerSettings()
    assert (numbers.minimum, numbers.window, numbers.growth, numbers.backoff) == (1, 1000, 2, 0.5)


def test_a_constant_scale_stays():
    numbers = LossScalerSettings(constant=128.0, window=1)
    state = loss_scaler.init(numbers)
    for flag in (True, True, False, True):
        state = loss_scaler.update(numbers, state, jnp.array(flag))
        assert float(state.scale) == 128.0


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"constant": 0.0}, "loss_scale"),
        ({"constant": float("nan")}, "loss_scale"),
        ({"initial": 1.0, "minimum": 2.0}, "min_loss_scale 2.0"),
        ({"minimum": 0.0}, "min_loss_scale 0.0"),
        ({"window": 0}, "loss_scale_window 0"),
        ({"hysteresis": 0}, "hysteresis 0"),
        ({"growth": 1.0}, "growth 1.0"),
        ({"backoff": 1.0}, "backoff 1.0"),
    ],
)
def test_numbers_out_of_range_are_refused(values, word):
    with pytest.raises(ValueError, match=word):
        LossScalerSettings(**values)


def test_scaling_saves_gradients_that_float16_cannot_hold():
    def objective(x, scale):
        # As in a step: the objective is fp32, what the layers compute with is float16.
        return scale * 1e-9 * jnp.square(x.astype(jnp.float16)).astype(jnp.float32).sum()

    x, state = jnp.array([0.5, -3.0]), LossScale(jnp.float32(2.0**20), jnp.int32(0), jnp.int32(2))
    plain, scaled = (jax.grad(objective)(x, scale) for scale in (jnp.float32(1.0), state.scale))
    assert not plain.any()
    np.testing.assert_allclose(loss_scaler.unscale({"x": scaled}, state)["x"], [1e-9, -6e-9], rtol=2e-3)
    # A scale that is too large gives inf, which the step's check finds.
    assert not jnp.isfinite(jax.grad(objective)(x, jnp.float32(2.0**60))).all()


def test_unscaled_gradients_are_float32_whatever_they_were():
    gradients = {"a": jnp.full(2, 2.0**-10, jnp.float16), "b": jnp.full(2, 3.0, jnp.float32)}
    state = loss_scaler.init(LossScalerSettings())
    unscaled = loss_scaler.unscale(gradients, state)
    assert {leaf.dtype for leaf in jax.tree.leaves(unscaled)} == {jnp.dtype(jnp.float32)}
    assert unscaled["a"].tolist() == [2.0**-42] * 2  # float16 would have given 0
    assert unscaled["b"].tolist() == [3.0 * 2.0**-32] * 2
