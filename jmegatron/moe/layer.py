"""A mixture-of-experts layer: router, tokens to their experts, experts, and back. Talks on ep, tp and cp.

Source: arXiv:2006.16668, Megatron-LM transformer/moe/moe_layer.py. See README.md.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jmegatron.collectives import axis_size, gather_from, own_slice, scatter_to, vary_like
from jmegatron.moe.dispatch import (
    capacity_of,
    combine,
    exchange,
    gathered_over,
    order_by_expert,
    permute,
    plan,
    within_capacity,
)
from jmegatron.moe.experts import EXPERT_OUTPUT, ExpertSettings, expert_specs, experts, ladder
from jmegatron.moe.router import ROUTED, RouterSettings, Routing, route, router_specs
from jmegatron.partition import Initializer, Tree

NUM_FIGURES = 3
"""Figures of a layer beside its experts' tokens: balancing loss, z-loss, dropped rows."""


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """How experts and tokens are divided."""

    axis: str | None = None
    """Mesh axis of the experts (ep)."""
    num_ranks: int = 1
    """Its size."""
    batch_axes: tuple[str, ...] = ()
    """Axes that divide the sequences of a micro-batch: (dp, ep)."""
    divided_over_tp: bool = False
    """Whether each expert's ffn is divided over tp (an expert-tensor-parallel size of tp); else whole on each rank."""
    ragged: bool = False
    """Exchange by `ragged_all_to_all`, which XLA has on GPUs alone."""


@dataclasses.dataclass(frozen=True)
class MoESettings:
    """Plain numbers of a mixture-of-experts layer."""

    router: RouterSettings
    experts: ExpertSettings
    shared_ffn_hidden_size: int | None = None
    """Width of a feed-forward layer that every token passes as well (`models.transformer` adds it)."""
    capacity_factor: float | None = None
    """Rows beyond ceil(tokens k / experts x factor) of an expert and rank are dropped; None: none are."""
    drop_policy: Literal["probs", "position"] = "probs"
    """What stays: rows of the highest weights, or the first tokens'."""
    pad_to_capacity: bool = False
    """Multiply as many rows as the capacity allows, whatever the router says: one size instead of a ladder."""
    bound_factor: float | None = None
    """Rows that a rank can receive over those of an even load; more are dropped and counted. None: all there can be."""


def moe_specs(
    settings: MoESettings,
    parallel: ExpertParallel,
    *,
    axis: str | None,
    kernel_init: Initializer,
    output_init: Initializer,
) -> Tree:
    """Returns the declarations of router and experts.

    Args:
      settings: numbers of the layer.
      parallel: how experts are divided.
      axis: mesh axis of tensor parallelism, or None.
      kernel_init: of router and up.
      output_init: of down.

    Raises:
      ValueError: the experts cannot be divided.
    """
    if settings.router.num_experts % parallel.num_ranks:
        raise ValueError(
            f"num_experts {settings.router.num_experts} must be divisible by expert_model_parallel_size"
            f" {parallel.num_ranks}"
        )
    # Outside the experts each tp rank has its own tokens.
    partial = () if axis is None else (axis,)
    tensor_axis = axis if parallel.divided_over_tp else None
    return {
        "router": router_specs(settings.router, settings.experts.hidden_size, partial_axes=partial, init=kernel_init),
        "experts": expert_specs(
            settings.experts,
            expert_axis=parallel.axis,
            tensor_axis=tensor_axis,
            partial_axes=() if tensor_axis else partial,
            kernel_init=kernel_init,
            output_init=output_init,
        ),
    }


def moe(
    parameters: Tree,
    x: Float[Array, "batch seq_in hidden"],
    settings: MoESettings,
    parallel: ExpertParallel,
    *,
    axis: str | None,
    sequence_parallel: bool = False,
    context_axis: str | None = None,
    auxiliary_weight: Float[Array, ""] | None = None,
    padding: Array | None = None,
    figures_to: Float[Array, "figures"] | None = None,
) -> Float[Array, "batch seq_in hidden"]:
    """Returns the sum over each token's experts of weight x expert(token).

    Communication, T = tokens of this rank (of a tp rank its own): over ep forward T k hidden elements there and as many
    back, backward the same; over tp without sequence parallelism forward and backward an all-gather of x, and where it
    divides the experts an all-gather and a reduce-scatter of the received rows each way; integers besides.

    Args:
      parameters: this rank's part of `moe_specs`.
      x: this cp rank's tokens, or the tp rank's shard of them with sequence_parallel.
      settings: numbers of the layer.
      parallel: how experts are divided.
      axis: mesh axis of tensor parallelism, or None.
      sequence_parallel: see x.
      context_axis: mesh axis that divides sequences outside tp, or None.
      auxiliary_weight: weight in the objective of this micro-batch's balancing and z-loss; None: they have no gradient.
      padding: bool [batch, seq of this cp rank]: tokens that are none. They go to no expert, and count nowhere.
      figures_to: fp32 zeros [experts + NUM_FIGURES] whose gradient becomes this micro-batch's figures: tokens of each
        expert, and those of NUM_FIGURES; this rank's part of them. None: they go nowhere.

    Raises:
      ValueError: tp does not divide the sequence.
    """
    own = x if sequence_parallel else scatter_to(x, axis, 1)
    batch, seq, hidden = own.shape
    if padding is not None:
        padding = own_slice(padding, axis, 1)
    sequence_axes = tuple(each for each in (context_axis, axis) if each is not None)
    routing = route(
        parameters["router"],
        own,
        settings.router,
        sequence_axes=sequence_axes,
        batch_axes=parallel.batch_axes,
        padding=padding,
    )
    kept = _kept(routing, settings, batch, padding)
    order = order_by_expert(routing.experts, kept, settings.router.num_experts)
    rows = permute(own.reshape(batch * seq, hidden), order)
    rows, overflow = _through_experts(parameters["experts"], rows, order.counts, settings, parallel, axis)
    rows = checkpoint_name(rows, EXPERT_OUTPUT)
    y = combine(rows, routing.weights, order).reshape(own.shape)
    dropped = routing.counts.sum() - order.counts.sum() + overflow
    y = _with_losses(y, routing, dropped, settings.router, auxiliary_weight, figures_to)
    return y if sequence_parallel else gather_from(y, axis, 1)


def _kept(routing: Routing, settings: MoESettings, batch: int, padding: Array | None) -> Array:
    """Returns which rows go to their experts."""
    tokens, k = routing.experts.shape
    kept = jnp.ones((tokens, k), bool) if padding is None else jnp.broadcast_to(~padding.reshape(-1, 1), (tokens, k))
    if settings.capacity_factor is None:
        return kept
    number, factor = settings.router.num_experts, settings.capacity_factor
    if padding is None:
        capacity: int | Array = capacity_of(tokens, k, number, factor)
    else:
        # From a table in Python's numbers: fp32 rounds otherwise, and the buffers have the size of the former.
        table = np.array([capacity_of(real, k, number, factor) for real in range(tokens + 1)], np.int32)
        capacity = jnp.asarray(table)[(~padding).sum()]
    if settings.drop_policy == "probs":
        priority = routing.weights
    else:
        # The first places of all sequences before the second ones, as the reference numbers tokens.
        place = jnp.arange(tokens).reshape(batch, -1)
        early = place % place.shape[1] * batch + place // place.shape[1]
        priority = jnp.broadcast_to(-early.reshape(-1, 1).astype(jnp.float32), (tokens, k))
    kept = within_capacity(routing.experts, jax.lax.stop_gradient(priority), kept, number, capacity)
    return checkpoint_name(kept, ROUTED)


def _through_experts(
    parameters: Tree,
    rows: Array,
    counts: Array,
    settings: MoESettings,
    parallel: ExpertParallel,
    axis: str | None,
) -> tuple[Array, Array]:
    """Returns (what the experts make of the rows, rows that found no place)."""
    tensor_axis = axis if parallel.divided_over_tp else None
    ranks, number, k = parallel.num_ranks, settings.router.num_experts, settings.router.top_k
    tokens = len(rows) // k
    exchanged = parallel.axis if ranks > 1 else None
    of_expert = tokens  # rows that one source may have for one expert
    if settings.capacity_factor is not None:
        of_expert = capacity_of(tokens, k, number, settings.capacity_factor)
    largest = min(ranks * tokens * min(k, number // ranks), ranks * of_expert * (number // ranks))
    bound = largest if exchanged else len(rows)
    if settings.bound_factor is not None and exchanged:
        bound = min(largest, -int(-settings.bound_factor * len(rows) // 1))
    there, back, received, overflow = plan(counts, exchanged, ranks, bound)
    if exchanged:
        assert there is not None and back is not None
        sent = exchange(rows, there, back, bound, exchanged, parallel.ragged)
    else:
        sent = rows
    tensor_ranks = axis_size(tensor_axis)
    sources = ranks * tensor_ranks
    joined = gathered_over(received, tensor_axis, bound)
    sizes = ladder(-(-sources * len(rows) // number), min(sources * of_expert, tensor_ranks * bound))
    if settings.pad_to_capacity:
        sizes = sizes[-1:]
    done = experts(parameters, sent, received, joined, settings.experts, tensor_axis=tensor_axis, sizes=sizes)
    if exchanged:
        assert there is not None and back is not None
        done = exchange(done, back, there, len(rows), exchanged, parallel.ragged)
    return done, overflow


# ---- losses and figures -------------------------------------------------------------------------------------------
def _with_losses(
    y: Array,
    routing: Routing,
    dropped: Array,
    settings: RouterSettings,
    weight: Array | None,
    figures_to: Array | None,
) -> Array:
    """Returns y; its backward adds the gradient of the router's losses, and hands over the figures."""
    if figures_to is not None:
        parts = jnp.stack([routing.balancing_loss, routing.z_loss, dropped.astype(jnp.float32)])
        figures = jax.lax.stop_gradient(jnp.concatenate([routing.counts.astype(jnp.float32), parts]))
        y, figures_to, figures = vary_like((y, figures_to, figures), y, figures_to, figures)
        y = _with_figures(y, figures_to, figures)
    if weight is None:
        return y
    for loss, coefficient in (
        (routing.balancing_loss, settings.coefficient if settings.balancing != "none" else 0.0),
        (routing.z_loss, settings.z_coefficient),
    ):
        if coefficient:
            y, loss, scale = vary_like((y, loss, weight * coefficient), y, loss, weight)
            y = _with_loss(y, loss, scale)
    return y


@jax.custom_vjp
def _with_loss(y: Array, loss: Array, weight: Array) -> Array:
    """Returns y, and adds weight x loss to the objective."""
    return y


_with_loss.defvjp(lambda y, loss, weight: (y, weight), lambda weight, dy: (dy, weight, jnp.zeros_like(weight)))


@jax.custom_vjp
def _with_figures(y: Array, to: Array, figures: Array) -> Array:
    """Returns y, and makes the figures the gradient of `to`."""
    return y


_with_figures.defvjp(lambda y, to, figures: (y, figures), lambda figures, dy: (dy, figures, jnp.zeros_like(figures)))
