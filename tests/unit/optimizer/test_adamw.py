"""AdamW, clipping and the norm against plain numpy in float64; what decays; where the state lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layer_support import mesh_of, normal
from support import start_parameters, tiny_gpt

from jmegatron import partition
from jmegatron.models.gpt import gpt_specs
from jmegatron.models.transformer import TensorParallel
from jmegatron.optimizer.adamw import AdamWSettings, adamw, clip_by_norm, global_norm, state_shardings
from jmegatron.optimizer.schedules import LearningRateSchedule

SCHEDULE = LearningRateSchedule("linear", peak=0.1, minimum=0.01, warmup=2.0, decay=6.0)
SETTINGS = AdamWSettings(beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.1)


def numpy_adamw(parameters, gradients, decays):
    """5 steps of AdamW as written in its paper: bias correction, eps outside the root, decay times the rate."""
    p, m, v = parameters.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        rate = float(SCHEDULE(t - 1))
        m = SETTINGS.beta1 * m + (1 - SETTINGS.beta1) * g
        v = SETTINGS.beta2 * v + (1 - SETTINGS.beta2) * g**2
        m_hat, v_hat = m / (1 - SETTINGS.beta1**t), v / (1 - SETTINGS.beta2**t)
        p = p - rate * (m_hat / (np.sqrt(v_hat) + SETTINGS.eps) + (SETTINGS.weight_decay * p if decays else 0))
    return p


def test_five_updates_equal_adamw_written_out():
    parameters = {"kernel": normal(3, 4), "bias": normal(4, seed=2)}
    gradients = [{"kernel": normal(3, 4, seed=10 + i), "bias": normal(4, seed=20 + i)} for i in range(5)]
    optimizer = adamw(SETTINGS, SCHEDULE, {"kernel": True, "bias": False})
    state, updated = optimizer.init(parameters), parameters
    for g in gradients:
        updates, state = optimizer.update(g, state, updated)
        updated = jax.tree.map(jnp.add, updated, updates)
    for name in parameters:
        expected = numpy_adamw(
            np.asarray(parameters[name]), [np.asarray(g[name], np.float64) for g in gradients], name == "kernel"
        )
        np.testing.assert_allclose(updated[name], expected, rtol=1e-5, atol=1e-6)


def test_with_zero_gradients_matrices_shrink_by_lr_times_decay_and_norms_and_biases_stay():
    """Of a stacked model, in which a norm's scale has two dims as a matrix has."""
    settings = tiny_gpt(qk_norm=True, normalization="RMSNorm")
    specs = gpt_specs(settings, TensorParallel())
    parameters = start_parameters(settings, 0)
    constant = LearningRateSchedule("constant", peak=0.5, minimum=0.0, warmup=0.0, decay=1.0)
    optimizer = adamw(AdamWSettings(weight_decay=0.1), constant, partition.weight_decay_mask(specs))

    @jax.jit
    def update(parameters):
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        updates = optimizer.update(zeros, optimizer.init(parameters), parameters)[0]
        return jax.tree.map(jnp.add, parameters, updates)

    decayed = []

    def check(path, before, after):
        name = partition.path_of(path)
        if name.split("/")[-1] in ("kernel", "embedding"):
            decayed.append(name)
            np.testing.assert_allclose(after, before * (1 - 0.5 * 0.1), rtol=1e-6, err_msg=name)
        else:
            assert np.abs(before).max() > 0, name
            np.testing.assert_array_equal(after, before, err_msg=name)

    jax.tree_util.tree_map_with_path(check, parameters, update(parameters))
    assert {"layers/mlp/up/kernel", "embedding/word/embedding", "embedding/position/embedding"} <= set(decayed)


# ---- norm and clip ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("limit", "scale"), [(1.0, 1.0), (3.0, 1.0), (1e6, 1.0), (1.0, 1e-8)])
def test_gradients_are_scaled_by_limit_over_norm_plus_1e_6_where_that_is_below_1(limit, scale):
    gradients = {"a": normal(3, 4) * scale, "b": normal(5, seed=2) * scale}
    flat = np.concatenate([np.asarray(g, np.float64).ravel() for g in gradients.values()])
    norm = np.linalg.norm(flat)
    got_norm = global_norm(gradients)
    np.testing.assert_allclose(got_norm, norm, rtol=1e-6)
    clipped = clip_by_norm(gradients, got_norm, limit)
    coefficient = min(1.0, limit / (norm + 1e-6))
    for name in gradients:
        np.testing.assert_allclose(clipped[name], gradients[name] * coefficient, rtol=1e-6)


def test_the_small_constant_is_in_the_divisor():
    """At norm 1e-6 and limit 1e-6 the coefficient is 1/2: optax's clip_by_global_norm would give 1."""
    clipped = clip_by_norm({"a": jnp.array([1e-6])}, jnp.float32(1e-6), 1e-6)
    np.testing.assert_allclose(clipped["a"], [0.5e-6], rtol=1e-5)


def test_limit_0_does_not_clip_and_zero_gradients_stay_zero():
    gradients = {"a": 1e3 * normal(3)}
    assert clip_by_norm(gradients, global_norm(gradients), 0.0) is gradients
    zeros = {"a": jnp.zeros(3)}
    np.testing.assert_array_equal(clip_by_norm(zeros, global_norm(zeros), 1.0)["a"], 0.0)


def test_the_norm_counts_each_global_element_once_however_the_leaves_lie():
    gradients = {"divided": normal(8, 4), "replicated": normal(6, seed=2), "half": normal(4, 3, seed=3)}
    specs = {"divided": P(("dp", "tp")), "replicated": P(), "half": P("tp")}
    mesh = mesh_of(2, 4)
    placed = {name: jax.device_put(g, jax.NamedSharding(mesh, specs[name])) for name, g in gradients.items()}
    np.testing.assert_allclose(jax.jit(global_norm)(placed), global_norm(gradients), rtol=1e-6)


def test_the_norm_of_half_precision_gradients_is_fp32():
    gradients = {"a": jnp.full(10_000, 0.01, jnp.bfloat16)}
    norm = global_norm(gradients)
    assert norm.dtype == jnp.float32
    assert float(norm) == pytest.approx(100 * float(jnp.bfloat16(0.01)), rel=1e-5)


# ---- where the state lies -----------------------------------------------------------------------------------------
def test_moments_lie_as_their_parameters_and_counters_on_every_device():
    specs = gpt_specs(tiny_gpt(), TensorParallel("tp", 4))
    mesh = mesh_of(2, 4)
    optimizer = adamw(SETTINGS, SCHEDULE, partition.weight_decay_mask(specs))
    parameters = partition.shardings(specs, mesh)
    got = state_shardings(optimizer, partition.abstract(specs, jnp.float32, mesh), parameters, mesh)
    abstract = jax.eval_shape(optimizer.init, partition.abstract(specs, jnp.float32, mesh))
    assert jax.tree.structure(got) == jax.tree.structure(abstract)
    moments = got[0]
    assert moments.mu == parameters
    assert moments.nu == parameters
    counters = [s for s, a in zip(jax.tree.leaves(got), jax.tree.leaves(abstract), strict=True) if a.ndim == 0]
    assert len(counters) == 2
    assert all(s == jax.NamedSharding(mesh, P()) for s in counters)
