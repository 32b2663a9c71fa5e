"""Self-attention with its heads divided over ranks. Talks on the axis it is given (tp), and on cp.

Source: arXiv:1909.08053 section 3, grouped queries arXiv:2305.13245; Megatron-LM transformer/attention.py.

Parameters (d = head_dim; the same tree on every mesh, only the division differs):

    query      kernel [hidden, heads, d]          bias [heads, d]
    key_value  kernel [hidden, kv_heads, 2, d]    bias [kv_heads, 2, d]     per kv head: its key, then its value
    output     kernel [heads, d, hidden]          bias [hidden]
    query_norm, key_norm  scale [d] (bias [d])    with qk_norm

Query head i uses kv head i // (heads / kv_heads). With n ranks and n a divisor of kv_heads, rank r holds whole groups.
With fewer kv heads than ranks (kv_heads a divisor of n) key_value is replicated, a rank computes the one kv head that
its query heads use, and the gradient parts are summed over the axis once a step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer

from jmegatron import random
from jmegatron.collectives import axis_rank, axis_size, enter_region
from jmegatron.context_parallel.attention import context_parallel_attention
from jmegatron.context_parallel.layout import WHOLE_SEQUENCE, CommType, ContextParallel
from jmegatron.layers.linear import column_parallel_specs, matmul, row_parallel_linear, row_parallel_specs
from jmegatron.layers.norm import norm, norm_specs
from jmegatron.ops.attention import ATTENTION_LSE, ATTENTION_OUT, AttentionDropout, Backend
from jmegatron.ops.rotary import apply_rotary
from jmegatron.partition import Initializer, ParameterSpec, Tree, normal, zeros

ATTENTION_KEPT = ("query", "key", "value", ATTENTION_OUT, ATTENTION_LSE)
"""Names of what selective recompute keeps of this layer: the core's inputs and output, 8 seq hidden bytes in half
precision (fewer with grouped queries), and an fp32 log-sum-exp a token and head, divided over the axis. The core does
not run again: at long sequences it is most of the work, and over cp most of the traffic."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenContext:
    """What a layer may need to know about the tokens of a cp rank (all tp ranks' together). A pytree."""

    sample_ids: Any
    """Unsigned [batch]: place of each sequence in the run's stream of samples (dropout key)."""
    token_index: Any
    """Integer [seq_cp]: place of each token in the whole sequence (dropout key)."""
    rotary: Any = None
    """fp32 [batch or 1, seq_cp, half]: rotary angles, or None."""
    dropout_key: Any = None
    """Key []; None: no dropout."""
    segments: Any = None
    """Integer [batch, seq], of the whole sequence: tokens see only those of their own segment (packed documents); None:
    one segment."""
    auxiliary_weight: Any = None
    """fp32 []: weight in the objective of the routers' losses of this micro-batch; None: they have no gradient."""
    padding: Any = None
    """bool [batch, seq_cp]: tokens that are none, and go to no expert; None: all are."""


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """Plain numbers of a self-attention layer."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    use_bias: bool = True
    use_qkv_bias: bool = True
    qk_norm: str | None = None
    """Normalization of queries and keys per head, or None."""
    norm_eps: float = 1e-5
    zero_centered_norm: bool = False
    rotary_interleaved: bool = False
    dropout: float = 0.0
    """Of the probabilities."""
    backend: Backend = "unfused"
    window: int | None = None
    """Tokens before itself that a token sees; None: all."""
    comm_type: CommType | None = None
    """How keys and values get about over cp in this layer; None: as `ContextParallel` says."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} must be a multiple of num_query_groups {self.num_kv_heads}"
            )


def check_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> None:
    """Checks that heads can be divided over the ranks.

    Raises:
      ValueError: num_heads is no multiple of num_ranks, or of num_kv_heads and num_ranks neither divides the other.
    """
    if num_heads % num_ranks:
        raise ValueError(f"num_attention_heads {num_heads} must be divisible by tensor_model_parallel_size {num_ranks}")
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        raise ValueError(
            f"num_query_groups {num_kv_heads} and tensor_model_parallel_size {num_ranks}: one must divide the other"
            " (kv heads are divided over ranks, or replicated on equally many ranks each)"
        )


def attention_specs(
    settings: AttentionSettings,
    *,
    axis: str | None,
    num_ranks: int = 1,
    sequence_parallel: bool = False,
    kernel_init: Initializer | None = None,
    output_init: Initializer | None = None,
) -> Tree:
    """Returns the declarations above; `num_ranks` is the size that `axis` will have.

    Raises:
      ValueError: heads cannot be divided over num_ranks (`check_heads`).
    """
    s = settings
    if axis is not None:
        check_heads(s.num_heads, s.num_kv_heads, num_ranks)
    init = kernel_init or normal(0.02)
    specs: Tree = {
        "query": column_parallel_specs(
            s.hidden_size,
            (s.num_heads, s.head_dim),
            axis=axis,
            sharded_dim=0,
            use_bias=s.use_qkv_bias,
            kernel_init=init,
        ),
        "key_value": _key_value_specs(s, axis if s.num_kv_heads % num_ranks == 0 else None, axis, init),
        "output": row_parallel_specs(
            (s.num_heads, s.head_dim),
            s.hidden_size,
            axis=axis,
            use_bias=s.use_bias,
            sequence_parallel=sequence_parallel,
            kernel_init=output_init or init,
        ),
    }
    if s.qk_norm:
        partial = () if axis is None else (axis,)
        for name in ("query_norm", "key_norm"):
            specs[name] = norm_specs(s.head_dim, s.qk_norm, partial_axes=partial, zero_centered=s.zero_centered_norm)
    return specs


def _key_value_specs(
    s: AttentionSettings, sharded_axis: str | None, axis: str | None, init: Initializer
) -> dict[str, ParameterSpec]:
    partial = (axis,) if axis is not None and sharded_axis is None else ()
    shape = (s.num_kv_heads, 2, s.head_dim)
    kernel_spec = P(None, sharded_axis, None, None)
    matrix = (-4,), (-3, -1)  # keys and values are two matrices
    specs = {"kernel": ParameterSpec((s.hidden_size, *shape), kernel_spec, init, partial, matrix=matrix)}
    if s.use_qkv_bias:
        specs["bias"] = ParameterSpec(shape, P(sharded_axis, None, None), zeros, partial, weight_decay=False)
    return specs


def self_attention(
    parameters: Tree,
    x: Float[Array, "batch seq_in hidden"],
    context: TokenContext,
    settings: AttentionSettings,
    *,
    axis: str | None,
    sequence_parallel: bool = False,
    context_parallel: ContextParallel = WHOLE_SEQUENCE,
    layer: int | Integer[Array, ""] = 0,
) -> Float[Array, "batch seq_in hidden"]:
    """Returns causal self-attention of x, output bias included.

    Communication over axis, B = bytes of a cp rank's x: forward one all-reduce of B, backward one all-reduce of B
    (sequence_parallel: one all-gather and one reduce-scatter of B each way); over cp that of
    `context_parallel_attention`.

    Args:
      parameters: this rank's part of `attention_specs`.
      x: this cp rank's tokens, replicated over axis, or this rank's shard of them with sequence_parallel.
      context: of this cp rank's tokens.
      settings: numbers of the layer.
      axis: mesh axis of the heads, or None.
      sequence_parallel: see x.
      context_parallel: how the sequence is divided.
      layer: global layer number (dropout key).
    """
    x = enter_region(x, axis, sequence_parallel=sequence_parallel)
    query, key, value = _project(parameters, x, settings, axis)
    value = checkpoint_name(value, "value")
    if settings.qk_norm:
        # Kept before the norms, whose backward needs their inputs: norms are computed again, the projection is not.
        query, key = checkpoint_name(query, "query"), checkpoint_name(key, "key")
        eps, centered = settings.norm_eps, settings.zero_centered_norm
        query = norm(parameters["query_norm"], query, settings.qk_norm, eps=eps, zero_centered=centered)
        key = norm(parameters["key_norm"], key, settings.qk_norm, eps=eps, zero_centered=centered)
    if context.rotary is not None:
        query = apply_rotary(query, context.rotary, interleaved=settings.rotary_interleaved)
        key = apply_rotary(key, context.rotary, interleaved=settings.rotary_interleaved)
    if not settings.qk_norm:
        query, key = checkpoint_name(query, "query"), checkpoint_name(key, "key")
    dropout = _probability_dropout(context, settings, layer, query.shape[2], axis)
    comm_type = settings.comm_type or context_parallel.comm_type
    out = context_parallel_attention(
        query,
        key,
        value,
        dataclasses.replace(context_parallel, comm_type=comm_type),
        window=settings.window,
        segments=context.segments,
        dropout=dropout,
        backend=settings.backend,
    )
    return row_parallel_linear(parameters["output"], out, axis=axis, sequence_parallel=sequence_parallel)


def _project(parameters: Tree, x: Array, s: AttentionSettings, axis: str | None) -> tuple[Array, Array, Array]:
    query = matmul(x, parameters["query"]["kernel"])
    if "bias" in parameters["query"]:
        query = query + parameters["query"]["bias"]
    kernel, bias = parameters["key_value"]["kernel"], parameters["key_value"].get("bias")
    ranks = axis_size(axis)
    if ranks > 1 and kernel.shape[1] == s.num_kv_heads:
        # Replicated, since there are fewer kv heads than ranks: compute only those that this rank's query heads use.
        # Asked of the kernel and not of the numbers, so that a layer declared for another rank count is right as well.
        first, count = axis_rank(axis) * s.num_kv_heads // ranks, max(1, s.num_kv_heads // ranks)
        kernel = lax.dynamic_slice_in_dim(kernel, first, count, 1)
        bias = bias if bias is None else lax.dynamic_slice_in_dim(bias, first, count, 0)
    key_value = matmul(x, kernel)
    if bias is not None:
        key_value = key_value + bias
    return query, key_value[..., 0, :], key_value[..., 1, :]


def _probability_dropout(context: TokenContext, s: AttentionSettings, layer, heads_local: int, axis):
    if context.dropout_key is None or s.dropout == 0.0:
        return None
    key = random.site_key(context.dropout_key, layer, random.Site.ATTENTION_PROBABILITIES)
    heads = axis_rank(axis) * heads_local + jnp.arange(heads_local)
    return AttentionDropout(key, context.sample_ids, heads, s.dropout)
