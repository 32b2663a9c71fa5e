"""Rotary positions against tables recorded from the reference, and the property that makes them relative."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from golden.megatron_weights import recorded
from tolerances import LAYER_RELATIVE

from jmegatron.ops.rotary import RotaryScaling, apply_rotary, rotary_angles

TABLE = recorded("tables", "rope")
POSITIONS = jnp.arange(32)[None]
KINDS = {
    "plain": dict(),
    "percent0.5": dict(rotary_dim=8),
    "interleaved": dict(interleaved=True),
    "base500000": dict(base=500000.0),
    "interp2": dict(interpolation_factor=2.0),
    "llama3_scaled": dict(base=500000.0, scaling=RotaryScaling()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rotated_heads_equal_the_recorded_ones(kind):
    options = dict(KINDS[kind])
    interleaved = options.pop("interleaved", False)
    angles = rotary_angles(POSITIONS, options.pop("rotary_dim", 16), **options)
    # The reference's arrays are [seq, batch, heads, head_dim].
    x = jnp.asarray(TABLE["x"]).swapaxes(0, 1)
    got = apply_rotary(x, angles, interleaved=interleaved)
    np.testing.assert_allclose(got.swapaxes(0, 1), TABLE[f"{kind}/y"], atol=2e-5)


@pytest.mark.parametrize("kind", ["plain", "percent0.5", "base500000", "interp2", "llama3_scaled"])
def test_angles_equal_the_recorded_ones(kind):
    options = dict(KINDS[kind])
    angles = rotary_angles(POSITIONS, options.pop("rotary_dim", 16), **options)
    recorded_angles = TABLE[f"{kind}/emb"][:, 0, 0]
    np.testing.assert_allclose(angles[0], recorded_angles[:, : recorded_angles.shape[1] // 2], rtol=1e-6)


def slowed_down(frequency: float, scaling: RotaryScaling) -> tuple[str, float]:
    """Returns (case, frequency) by Llama 3.1's rule as it is written down, by wavelengths in tokens, in float64."""
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_positions / scaling.high_turns:
        return "short", frequency
    if wavelength > scaling.original_positions / scaling.low_turns:
        return "long", frequency / scaling.factor
    share = scaling.original_positions / wavelength - scaling.low_turns
    share /= scaling.high_turns - scaling.low_turns
    return "between", (1 - share) * frequency / scaling.factor + share * frequency


@pytest.mark.parametrize(
    ("dim", "base", "scaling", "interpolation"),
    [
        (128, 500000.0, RotaryScaling(), 1.0),
        (64, 500000.0, RotaryScaling(factor=32.0), 1.0),
        (128, 10000.0, RotaryScaling(4.0, 2.0, 16.0, 2048), 2.0),
    ],
    ids=["Llama 3.1", "Llama 3.2", "other numbers"],
)
def test_scaled_angles_equal_the_rule_by_wavelengths_in_float64(dim, base, scaling, interpolation):
    positions = np.array([0, 1, 77, 8191, 131071])
    cases = [slowed_down(base ** (-2 * i / dim), scaling) for i in range(dim // 2)]
    assert {case for case, _ in cases} == {"short", "between", "long"}
    expected = positions[:, None] / interpolation * np.array([frequency for _, frequency in cases])
    options = dict(base=base, interpolation_factor=interpolation)
    got = rotary_angles(jnp.asarray(positions)[None], dim, scaling=scaling, **options)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got[0], expected, rtol=LAYER_RELATIVE)
    plain = rotary_angles(jnp.asarray(positions)[None], dim, **options)
    short = np.array([case == "short" for case, _ in cases])
    np.testing.assert_array_equal(got[..., short], plain[..., short])


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_of_positions_only(interleaved):
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(at_query: int, at_key: int) -> float:
        rotate = lambda x, at: apply_rotary(  # noqa: E731
            x, rotary_angles(jnp.array([[at]]), 16), interleaved=interleaved
        )
        return float((rotate(query, at_query) * rotate(key, at_key)).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(7, 5)) > 1e-2


def test_position_0_is_left_alone_and_half_precision_stays_half_precision():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 1, 2, 16)), jnp.bfloat16)
    got = apply_rotary(x, rotary_angles(jnp.array([[0]]), 16))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(x, np.float32))


@pytest.mark.parametrize("dim", [0, 7])
def test_an_odd_or_empty_rotary_dim_is_refused(dim):
    with pytest.raises(ValueError, match=f"even and at least 2, got {dim}"):
        rotary_angles(POSITIONS, dim)


def test_a_rotary_dim_above_the_head_dim_is_refused():
    with pytest.raises(ValueError, match="rotary dim 16 exceeds the head dim 8"):
        apply_rotary(jnp.zeros((1, 32, 1, 8)), rotary_angles(POSITIONS, 16))
