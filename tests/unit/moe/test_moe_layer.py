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
from jmegatron.moe.dispatch import capacity_of, within_capacity
from jmegatron.moe.experts import EXPERTS_EXCHANGED, ExpertSettings, ladder
from jmegatron.moe.layer import NUM_FIGURES, ExpertParallel, MoESettings, moe, moe_specs
from jmegatron.moe.router import RouterSettings

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
    seq = x.shape[1]
    scores = jax.nn.softmax(logits, -1).reshape(-1, seq, EXPERTS)
    counts = chosen.reshape(-1, seq, EXPERTS).sum(1)
    balance = (scores.sum(1) * counts).sum(-1).mean() * EXPERTS / (s.top_k * seq**2)
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


def sharded(settings, parameters, x, *, dp=1, ep=1, cp=1, tp=1, divided=False, sequence_parallel=False, ragged=False):
    """(y, figures, gradients) of the objective above at a mesh."""
    mesh = build_mesh(jax.devices()[: dp * ep * cp * tp], dp=dp, ep=ep, cp=cp, tp=tp)
    parallel = ExpertParallel("ep", ep, ("dp", "ep"), divided_over_tp=divided, ragged=ragged)
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
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(partition.partition_specs(specs), lie, lie), out_specs=outputs)
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


# ---- the exchange -------------------------------------------------------------------------------------------------
def documented_ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What JAX documents, row by row: rows input_offsets[d] + i of each rank go to output_offsets[d] + i of rank d."""
    gathered = jax.lax.all_gather((operand, input_offsets, send_sizes, output_offsets), axis_name)
    me = jax.lax.axis_index(axis_name)
    for source in range(gathered[0].shape[0]):
        rows, inputs, sizes, outputs = (each[source] for each in gathered)
        for i in range(len(rows)):
            place = jnp.where(i < sizes[me], outputs[me] + i, len(output))
            row = rows[jnp.clip(inputs[me] + i, 0, len(rows) - 1)]
            output = output.at[place].set(row, mode="drop")
    return output


def test_the_exchange_of_gpus_gets_the_right_offsets_forward_and_backward(monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", documented_ragged_all_to_all)
    settings = settings_of()
    parameters, x = start(settings), tokens()[:, :2]
    (y, *_), gradients = expected(settings, parameters, x)
    got_y, _, got = sharded(settings, parameters, x, ep=2, ragged=True)
    close(got_y, y, LAYER_RELATIVE)
    close(got, gradients, GRADIENT_RELATIVE)


def test_rows_beyond_the_bound_are_dropped_and_counted():
    settings = settings_of(bound_factor=1.0)
    parameters, x = start(settings), tokens()
    # Nearly all go to the first two experts, which lie on one rank of two.
    x[..., 0] = 3.0
    parameters["router"]["kernel"][0] = [4.0, 4.0, -4.0, -4.0]
    logits = x.reshape(-1, HIDDEN) @ parameters["router"]["kernel"]
    chosen = np.argsort(-logits, 1)[:, :2]
    half = len(chosen) // 2
    # A rank takes as many rows as it has itself: those of the first source, expert by expert, then of the second.
    kept = np.zeros((len(chosen), EXPERTS))
    for target in range(2):
        left = 2 * half
        for source in range(2):
            for expert in range(2 * target, 2 * target + 2):
                for token in range(source * half, (source + 1) * half):
                    if expert in chosen[token] and left > 0:
                        kept[token, expert], left = 1.0, left - 1
    (y, *_), gradients = expected(settings, parameters, x, kept)
    got_y, figures, got = sharded(settings, parameters, x, ep=2)
    assert figures[EXPERTS + 2] == chosen.size - kept.sum() > 10
    close(got_y, y, LAYER_RELATIVE)
    close(got, gradients, GRADIENT_RELATIVE)


# ---- capacity -----------------------------------------------------------------------------------------------------
def test_padding_fills_no_capacity_and_counts_nowhere():
    """8 tokens of which 4 are padding, capacity 1.0: the real ones' outputs are those without the padding."""
    settings = settings_of(capacity_factor=1.0)
    parameters = jax.tree.map(jnp.asarray, start(settings))
    x = jnp.asarray(np.random.default_rng(11).normal(0, 1, (1, 8, HIDDEN)), jnp.float32)
    padding = np.array([[False, True, True, False, True, False, False, True]])
    real = ~padding[0]

    def run(x, padding):
        return moe(parameters, x, settings, ExpertParallel(), axis=None, padding=padding)

    got = run(x, jnp.asarray(padding))
    wanted = run(x[:, real], None)
    np.testing.assert_allclose(got[:, real], wanted, rtol=LAYER_RELATIVE, atol=1e-6)
    assert not got[:, ~real].any()
    assert np.abs(run(x, None)[:, real] - wanted).max() > 1e-2, "with these tokens the padding would matter"


def test_the_capacity_is_the_same_number_with_and_without_padding():
    """50 x 2 / 8 x 1.2 is 15 exactly, and in fp32 a little more: a row too many would read another expert's place."""
    router = RouterSettings(8, balancing="none")
    settings = MoESettings(router, ExpertSettings(8, HIDDEN, FFN), capacity_factor=1.2)
    parameters = jax.tree.map(jnp.asarray, start(settings))
    # Everyone wants experts 0 and 1.
    parameters["router"]["kernel"] = jnp.zeros((HIDDEN, 8)).at[0].set(jnp.array([9.0, 8.0, *[0.0] * 6]))
    x = np.random.default_rng(4).normal(0, 1, (1, 50, HIDDEN)).astype(np.float32)
    x[..., 0] = 1 + np.arange(50) / 50
    run = jax.jit(lambda x, padding: moe(parameters, x, settings, ExpertParallel(), axis=None, padding=padding))
    got = np.asarray(run(x, jnp.zeros((1, 50), bool)))
    np.testing.assert_array_equal(got, run(x, None))
    assert (got != 0).any(-1).sum() <= 30


def test_a_capacity_beyond_all_tokens_drops_none():
    assert capacity_of(64, 2, 8, 1e30) == 64


def test_capacity_keeps_the_largest_weights_or_the_first_places():
    experts = jnp.array([[0, 1], [0, 2], [0, 1], [0, 2]])
    weights = jnp.array([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.8, 0.2]])
    kept = within_capacity(experts, weights, jnp.ones((4, 2), bool), 3, 2)
    np.testing.assert_array_equal(kept, [[False, True], [True, True], [False, True], [True, True]])
    first = within_capacity(experts, -jnp.arange(4.0)[:, None] * jnp.ones((1, 2)), jnp.ones((4, 2), bool), 3, 2)
    np.testing.assert_array_equal(first, [[True, True], [True, True], [False, True], [False, True]])


def test_recompute_does_not_choose_again():
    """Another rounding of a logit, or of a weight that decides who is dropped, would move the rows that were kept."""
    settings = settings_of(router=RouterSettings(EXPERTS), capacity_factor=1.0)
    kept = jax.checkpoint_policies.save_only_these_names(*EXPERTS_EXCHANGED)
    layer = lambda p: moe(p, jnp.asarray(tokens()), settings, ExpertParallel(), axis=None).sum()  # noqa: E731
    program = str(jax.make_jaxpr(jax.grad(jax.checkpoint(layer, policy=kept)))(start(settings)))
    assert program.count("top_k[") == 1
    # Forward the order within experts and that of all rows, and backward this one alone from the kept choice.
    assert program.count(" sort[") == 3


def test_the_ladder_starts_at_the_even_load_and_ends_at_all_that_can_come():
    assert ladder(256, 2048) == (256, 320, 384, 512, 768, 2048)
    assert ladder(5, 40) == (40,)
