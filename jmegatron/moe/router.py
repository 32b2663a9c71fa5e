"""Which experts each token goes to, with which weights, and the losses that keep the experts' loads even.

Talks on the axes that divide a sequence (cp, tp) with one sum of counts a layer, for the balancing losses alone.
Source: arXiv:2101.03961 section 2.2 (balancing loss), arXiv:2202.08906 (z-loss), arXiv:2408.15664 (expert bias),
Megatron-LM transformer/moe/router.py, moe_utils.py.

    kernel       [hidden, experts]     replicated; over tp each rank's gradient is that of its own tokens
    expert_bias  [experts]             with expert_bias, fp32: added to the scores that choose; has no gradient
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Integer

from jmegatron.collectives import axis_size, sum_over, vary_like
from jmegatron.partition import Initializer, ParameterSpec, Tree, zeros

ScoreFunction = Literal["softmax", "sigmoid"]
Balancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]
ROUTED = "expert_choice"
"""Name of the choice, which recomputation keeps: a logit that it rounded otherwise would move all rows behind."""
_TINY = 1e-20
_SCALE = 2.0**40
"""Brings sums as small as _TINY to where the square that a quotient's derivative divides by is a number in fp32."""


@dataclasses.dataclass(frozen=True)
class RouterSettings:
    """Plain numbers of a router."""

    num_experts: int
    top_k: int = 2
    score_function: ScoreFunction = "softmax"
    pre_softmax: bool = False
    """Softmax over all experts before the choice (the weights then do not sum to 1) instead of over the chosen."""
    expert_bias: bool = False
    bias_update_rate: float = 1e-3
    num_groups: int | None = None
    """Experts are in so many groups, and a token's experts in `group_top_k` of them."""
    group_top_k: int | None = None
    scaling_factor: float | None = None
    fp32: bool = False
    """Multiply hidden states and kernel in fp32; the rest is in fp32 always."""
    balancing: Balancing = "none"
    coefficient: float = 0.0
    z_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k {self.top_k}: expected 1 to num_experts {self.num_experts}")
        if self.num_groups is not None:
            groups, chosen = self.num_groups, self.group_top_k or 0
            fits = groups >= 1 and self.num_experts % groups == 0 and 1 <= chosen <= groups
            if not fits or self.top_k % chosen or self.top_k // chosen > self.num_experts // groups:
                raise ValueError(
                    f"num_groups {groups}, group_top_k {chosen}: expected num_groups to divide num_experts"
                    f" {self.num_experts}, and group_top_k, at most num_groups, to divide top_k {self.top_k} into no"
                    " more than the experts of a group"
                )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What a router says about this rank's tokens. A pytree."""

    experts: Any
    """Integer [tokens, k]: global numbers of each token's experts."""
    weights: Any
    """fp32 [tokens, k]: weight of each."""
    counts: Any
    """Integer [experts]: this rank's tokens of each expert, padding left out."""
    balancing_loss: Any
    """fp32 []: this rank's part of it, without its coefficient: the sum over cp and tp is the micro-batch's."""
    z_loss: Any
    """Likewise."""


def router_specs(
    settings: RouterSettings, hidden_size: int, *, partial_axes: tuple[str, ...], init: Initializer
) -> Tree:
    """Returns the declarations above. `partial_axes`: that divide a sequence's tokens outside cp."""
    shape = (hidden_size, settings.num_experts)
    specs: Tree = {"kernel": ParameterSpec(shape, P(None, None), init, partial_axes)}
    if settings.expert_bias:
        specs["expert_bias"] = ParameterSpec(
            (settings.num_experts,), P(None), zeros, partial_axes, weight_decay=False, fp32=True
        )
    return specs


def route(
    parameters: Tree,
    x: Float[Array, "batch seq_local hidden"],
    settings: RouterSettings,
    *,
    sequence_axes: tuple[str, ...] = (),
    batch_axes: tuple[str, ...] = (),
    padding: Bool[Array, "batch seq_local"] | None = None,
) -> Routing:
    """Returns where the tokens go; tokens are numbered sequence by sequence.

    Communication: with a balancing loss, forward an all-reduce of `experts` counts over the sequence axes (global: and
    the batch axes; per sequence: of batch x experts), backward none.

    Args:
      parameters: `router_specs`.
      x: this rank's tokens.
      settings: numbers of the router.
      sequence_axes: axes that divide the tokens of a sequence (cp, and tp).
      batch_axes: axes that divide the sequences of a micro-batch.
      padding: tokens that are none: they count nowhere.
    """
    batch, seq, hidden = x.shape
    logits = _logits(x.reshape(batch * seq, hidden), parameters["kernel"], settings.fp32)
    bias = lax.stop_gradient(parameters["expert_bias"]) if settings.expert_bias else None
    experts, weights = choose(logits, settings, bias)
    real = jnp.ones((batch, seq), jnp.float32) if padding is None else 1.0 - padding.astype(jnp.float32)
    real = vary_like(real, x)  # or a sum over ranks would take it for one that has been made
    counted = lambda chosen: _counts(chosen, settings.num_experts, real)  # noqa: E731
    balancing = jnp.zeros((), jnp.float32)
    if settings.balancing != "none":
        balancing = _balancing_loss(logits, counted, real, settings, sequence_axes, batch_axes)
    z_loss = jnp.zeros((), jnp.float32)
    if settings.z_coefficient:
        squares = jnp.square(jax.nn.logsumexp(logits, -1)) * real.reshape(-1)
        z_loss = squares.sum() / jnp.maximum(sum_over(real.sum(), sequence_axes or None), 1.0)
    return Routing(experts, weights, counted(experts).sum(0).astype(jnp.int32), balancing, z_loss)


def _logits(x: Array, kernel: Array, fp32: bool) -> Array:
    if fp32:
        x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
    # Scarce work, and a rounding may send a token elsewhere: no TF32.
    logits = lax.dot_general(x, kernel, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
    return logits.astype(jnp.float32)


def choose(
    logits: Float[Array, "tokens experts"], settings: RouterSettings, bias: Float[Array, "experts"] | None = None
) -> tuple[Integer[Array, "tokens k"], Float[Array, "tokens k"]]:
    """Returns (chosen experts, their weights) from fp32 logits. Communication: none.

    softmax: of the k largest logits, or with pre_softmax the k largest of the softmax over all. sigmoid: the k largest
    of sigmoid + bias; the weights are the sigmoids, divided by their sum if k > 1. Both times scaling_factor.
    """
    s = settings
    top_k = lambda scores: checkpoint_name(_top_k(scores, s), ROUTED)  # noqa: E731
    if s.score_function == "softmax" and not s.pre_softmax:
        experts = top_k(logits)
        weights = jax.nn.softmax(jnp.take_along_axis(logits, experts, 1), -1)
    elif s.score_function == "softmax":
        scores = jax.nn.softmax(logits, -1)
        experts = top_k(scores)
        weights = jnp.take_along_axis(scores, experts, 1)
    else:
        scores = jax.nn.sigmoid(logits)
        experts = top_k(scores if bias is None else scores + bias)
        weights = jnp.take_along_axis(scores, experts, 1)
        if s.top_k > 1:
            weights = _normalised(weights)
    return experts, weights if s.scaling_factor is None else weights * s.scaling_factor


def _normalised(scores: Array) -> Array:
    """Returns scores / (their sum + _TINY)."""
    scores = scores * _SCALE
    return scores / (scores.sum(-1, keepdims=True) + _TINY * _SCALE)


def _top_k(scores: Array, s: RouterSettings) -> Array:
    """Returns the numbers of the k largest scores; with groups, of those in the groups that score best.

    A group's score is the sum of its top_k / group_top_k largest.
    """
    scores = lax.stop_gradient(scores)
    if s.num_groups is not None:
        assert s.group_top_k is not None
        grouped = scores.reshape(len(scores), s.num_groups, -1)
        best = lax.top_k(grouped, s.top_k // s.group_top_k)[0].sum(-1)
        chosen = jax.nn.one_hot(lax.top_k(best, s.group_top_k)[1], s.num_groups, dtype=jnp.float32).sum(1) > 0
        scores = jnp.where(chosen[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    return lax.top_k(scores, s.top_k)[1]


def _counts(experts: Array, num_experts: int, real: Array) -> Array:
    """Returns how many tokens each expert has of each sequence, fp32 [batch, experts]; exact below 2^24."""
    batch, seq = real.shape
    chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32).sum(1)
    return (chosen.reshape(batch, seq, num_experts) * real[:, :, None]).sum(1)


def _balancing_loss(logits, counted, real: Array, s: RouterSettings, sequence_axes, batch_axes) -> Array:
    """Returns experts / (k T^2) sum over experts of (sum of scores) (number of tokens), this rank's part of it.

    Scores are over all experts, and the numbers of tokens those of the k best scores, whatever groups, bias or
    capacity make of the choice. T tokens are those of the micro-batch, of each sequence, or of all ranks together.
    """
    batch, seq = real.shape
    if s.score_function == "softmax":
        scores = jax.nn.softmax(logits, -1)
    else:
        scores = _normalised(jax.nn.sigmoid(logits))
    chosen = lax.top_k(lax.stop_gradient(scores), s.top_k)[1]
    counts = counted(chosen)
    sums = (scores.reshape(batch, seq, -1) * real[:, :, None]).sum(1)
    tokens = real.sum(1, keepdims=True)
    if s.balancing != "seq_aux_loss":
        counts, sums, tokens = (each.sum(0, keepdims=True) for each in (counts, sums, tokens))
    axes = (*sequence_axes, *batch_axes) if s.balancing == "global_aux_loss" else sequence_axes
    counts, tokens = sum_over((counts, tokens), axes or None)
    products = (sums * counts / jnp.square(jnp.maximum(tokens, 1.0))).sum(-1)
    # The objective takes the mean over the ranks of the batch axes, of which each holds a part of the global one.
    ranks = axis_size(batch_axes or None) if s.balancing == "global_aux_loss" else 1
    return products.mean() * (ranks * s.num_experts / s.top_k)


def updated_bias(
    bias: Float[Array, "*layers experts"], counts: Float[Array, "*layers experts"], rate: float | Array
) -> Float[Array, "*layers experts"]:
    """Returns the bias of the next global batch: a step up for experts with fewer tokens than the mean, down for more.

    Communication: none; `counts` are of the whole global batch.
    """
    # In whole numbers: a rounded mean is no expert's load.
    whole, experts = counts.astype(jnp.int32), counts.shape[-1]
    total = whole.sum(-1, keepdims=True)
    return bias + rate * jnp.sign(2 * (total // experts - whole) + (total % experts > 0))
