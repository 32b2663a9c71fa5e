"""The layer against a dense formula: every expert computes every token, weights choose."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tolerances import GRADIENT_RELATIVE, LAYER_RELATIVE

from jmegatron import partition
from jmegatron.collectives import sum_over, vary
from jmegatron.mesh import build_mesh
from jmegatron.moe.dispatch import within_capacity
from jmegatron.moe.experts import ExpertSettings
from jmegatron.moe.layer import NUM_FIGURES, ExpertParallel, MoESettings, moe, moe_specs
from jmegatron.moe.router import RouterSettings, choose, updated_bias

EXPERTS, HIDDEN, FFN, BATCH, SEQ = 4, 8, 6, 4, 8
INIT = partition.normal(0.5)


def settings_of(activation="swiglu", bias=False, **changes):
    router = RouterSettings(EXPERTS, balancing="seq_aux_loss", coefficient=0.3, z_coefficient=0.1)
    experts = ExpertSettings(EXPERTS, HIDDEN, FFN, activation, bias)
    return dataclasses.replace(MoESettings(router, experts), **changes)


def start(settings):
    rng = np.random.default_rng(3)
    specs = moe_specs(settings, ExpertParallel(), axis=None, kernel_init=INIT, output_init=INIT)
    return partition.map_specs(lambda s: rng.normal(0, 0.5, s.shape).astype(np.float32), specs)


def tokens():
    return np.random.default_rng(5).normal(0, 1, (BATCH, SEQ, HIDDEN)).astype(np.float32)


def dense(parameters, x, settings, kept=None):
    """Objective, written out: weights [tokens, experts] times every expert's output, and both losses."""
    flat, s = x.reshape(-1, HIDDEN), settings.router
    logits = flat @ parameters["router"]["kernel"]
    top = jnp.sort(logits, -1)[:, -s.top_k][:, None]
    chosen = logits >= top
    weights = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf), -1)
    if kept is not None:
        weights = weights * kept
    up, down = parameters["experts"]["up"], parameters["experts"]["down"]
    y = jnp.einsum("th,eh...f->te...f", flat, up["kernel"]) + up.get("bias", 0.0)
    gated = settings.experts.activation == "swiglu"
    y = jax.nn.silu(y[..., 0, :]) * y[..., 1, :] if gated else jnp.square(jax.nn.relu(y))
    y = jnp.einsum("tef,efh->teh", y, down["kernel"]) + down.get("bias", 0.0)
    y = (y * weights[:, :, None]).sum(1).reshape(x.shape)
    scores = jax.nn.softmax(logits, -1).reshape(BATCH, SEQ, EXPERTS)
    counts = chosen.reshape(BATCH, SEQ, EXPERTS).sum(1)
    balance = (scores.sum(1) * counts).sum(-1).mean() * EXPERTS / (s.top_k * SEQ**2)
    z_loss = jnp.square(jax.nn.logsumexp(logits, -1)).mean()
    return y, balance, z_loss, counts.sum(0)


def weigh(y):
    return (y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()


def expected(settings, parameters, x, kept=None):
    def objective(parameters, x):
        y, balance, z_loss, counts = dense(parameters, x, settings, kept)
        return weigh(y) + 2.0 * (settings.router.coefficient * balance + 0.1 * z_loss), (y, balance, z_loss, counts)

    (_, rest), gradients = jax.value_and_grad(objective, (0, 1), has_aux=True)(parameters, x)
    return rest, gradients


def sharded(settings, parameters, x, *, dp=1, ep=1, cp=1, tp=1, divided=False, sequence_parallel=False):
    """(y, figures, gradients) of the objective above at a mesh."""
    mesh = build_mesh(jax.devices()[: dp * ep * cp * tp], dp=dp, ep=ep, cp=cp, tp=tp)
    parallel = ExpertParallel("ep", ep, ("dp", "ep"), divided_over_tp=divided)
    specs = moe_specs(settings, parallel, axis="tp", kernel_init=INIT, output_init=INIT)
    data = ("dp", "ep", "cp")
    lie = P(("dp", "ep"), ("cp", "tp") if sequence_parallel else "cp")
    place = jnp.arange(x.size).reshape(x.shape)

    def body(parameters, x, place):
        marked = partition.map_specs(lambda s, p: vary(p, (*data, *s.partial_axes)), specs, parameters)
        to = vary(jnp.zeros(EXPERTS + NUM_FIGURES), (*data, "tp"))
        y, vjp = jax.vjp(
            lambda parameters, x, to: moe(
                parameters,
                x,
                settings,
                parallel,
                axis="tp",
                sequence_parallel=sequence_parallel,
                context_axis="cp",
                auxiliary_weight=jnp.float32(2.0 / (dp * ep)),
                figures_to=to,
            ),
            marked,
            x,
            to,
        )
        gradients, dx, figures = vjp(vary(jnp.cos(place.astype(jnp.float32)), jax.typeof(y).manual_axis_type.varying))
        reduce = lambda s, g: sum_over(g, (*partition.replica_axes(s, data), *s.partial_axes))  # noqa: E731
        return y, dx, partition.map_specs(reduce, specs, gradients), sum_over(figures, (*data, "tp"))

    outputs = (lie, lie, partition.partition_specs(specs), P())
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(partition.partition_specs(specs), lie, lie), out_specs=outputs
    )
    y, dx, gradients, figures = jax.jit(mapped)(parameters, x, place)
    return y, figures, (gradients, dx)


def close(got, wanted, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= tolerance * np.abs(np.asarray(b)).max()


LAYOUTS = [
    dict(),
    dict(ep=2),
    dict(ep=4),
    dict(ep=2, dp=2, cp=2),
    dict(tp=2),
    dict(ep=2, tp=2, divided=True),
    dict(ep=2, tp=2, sequence_parallel=True),
    dict(ep=2, tp=2, cp=2, divided=True, sequence_parallel=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(f"{k}={v}" for k, v in layout.items()) or "one")
def test_output_losses_and_every_gradient_equal_the_dense_formula(layout):
    settings = settings_of("squared_relu", True) if layout.get("divided") else settings_of()
    parameters, x = start(settings), tokens()
    (y, balance, z_loss, counts), gradients = expected(settings, parameters, x)
    got_y, figures, got = sharded(settings, parameters, x, **layout)
    close(got_y, y, LAYER_RELATIVE)
    close(got, gradients, GRADIENT_RELATIVE)
    replicas = layout.get("dp", 1) * layout.get("ep", 1)
    np.testing.assert_array_equal(figures[:EXPERTS], counts)
    np.testing.assert_allclose(figures[EXPERTS:] / replicas, [balance, z_loss, 0.0], rtol=LAYER_RELATIVE)
