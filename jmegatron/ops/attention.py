"""Attention of the heads that a rank holds, with its log-sum-exp: one entry for every platform. No communication.

Two backends: "unfused", blocks in plain XLA (any platform, dtype, dropout and masks), and "fused", cuDNN's flash
attention (NVIDIA GPUs, half precision, no dropout). Which one serves is decided before tracing (`choose_backend`).
Memory is O(seq) forward and backward with both. Megatron-LM transformer/dot_product_attention.py; query head i uses kv
head i // group. See README.md.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, DTypeLike, Float

from jmegatron.collectives import vary_like
from jmegatron.ops import blockwise_attention, fused_attention
from jmegatron.ops.attention_mask import AttentionDropout, AttentionMask, TokenIds
from jmegatron.ops.blockwise_attention import BLOCK_SIZE

Backend = Literal["fused", "unfused"]

ATTENTION_OUT = "attention_out"
ATTENTION_LSE = "attention_lse"
"""Names of output and log-sum-exp: a checkpoint policy that keeps both spares the backward a second forward."""


def fused_obstacles(
    *,
    platform: str,
    dtype: DTypeLike,
    dropout: float,
    head_dim: int,
    packed: bool = False,
    window: int | None = None,
    in_order: bool = True,
) -> list[str]:
    """Returns every reason why the fused backend cannot serve, in the words of the options; empty where it can.

    Args:
      platform: of the devices ("gpu", "cuda", "cpu", ...).
      dtype: of the matmul inputs.
      dropout: rate of dropped probabilities.
      head_dim: width of a head.
      packed: documents of a sequence are kept apart.
      window: tokens before itself that a token sees; None: all.
      in_order: the queries and keys of a call stand in their true order (not so in a ring of ranks).
    """
    reasons = []
    if platform not in ("gpu", "cuda"):
        reasons.append(f"the platform is {platform}, not an NVIDIA GPU")
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        reasons.append(f"the compute dtype is {jnp.dtype(dtype).name}, not bfloat16 or float16")
    if dropout > 0:
        reasons.append(f"attention_dropout is {dropout}, not 0")
    if packed:
        reasons.append("reset_attention_mask needs a mask")
    if window is not None and not in_order:
        reasons.append("window_size needs true token indices where the sequence is divided over cp")
    if head_dim % 8 or head_dim > 128:
        reasons.append(f"kv_channels is {head_dim}, not a multiple of 8 up to 128")
    missing = fused_attention.missing_parts()
    return [*reasons, missing] if missing else reasons


def choose_backend(requested: str, **facts: Any) -> Backend:
    """Returns the backend that serves, for `requested` in auto, fused, unfused; `facts`: see `fused_obstacles`.

    Raises:
      ValueError: "fused" was asked for and cannot serve (the message says why), or an unknown name.
    """
    if requested not in ("auto", "fused", "unfused"):
        raise ValueError(f"attention_backend: got {requested!r}, expected auto, fused or unfused")
    obstacles = fused_obstacles(**facts)
    if requested == "fused" and obstacles:
        raise ValueError(f"attention_backend fused cannot serve: {'; '.join(obstacles)}; fix: use auto or unfused")
    return "unfused" if requested == "unfused" or obstacles else "fused"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Call:
    """The keywords of one attention, checked. A pytree: what is static about them is in its structure."""

    mask: AttentionMask
    backend: Backend = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})

    def forward(self, query, key, value, out_dtype):
        if self.backend == "unfused":
            return blockwise_attention.forward(
                query, key, value, self.mask, scale=self.scale, out_dtype=out_dtype, block_size=self.block_size
            )
        out, lse = fused_attention.forward(
            query, key, value, causal=self.mask.causal, window=self.mask.window, scale=self.scale
        )
        return out.astype(out_dtype), lse

    def backward(self, query, key, value, out, lse, d_out, out_dtype):
        arrays = query, key, value, out, lse, d_out
        if self.backend == "unfused":
            return blockwise_attention.backward(
                *arrays, self.mask, scale=self.scale, out_dtype=out_dtype, block_size=self.block_size
            )
        gradients = fused_attention.backward(
            *arrays, causal=self.mask.causal, window=self.mask.window, scale=self.scale
        )
        return tuple(x.astype(out_dtype or x.dtype) for x in gradients)


def _call(
    query: Array, key: Array, mask: AttentionMask, backend: Backend, scale: float | None, block_size: int
) -> _Call:
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads cannot be divided over {key.shape[2]} kv heads")
    if (mask.query_tokens.segments is None) != (mask.key_tokens.segments is None):
        raise ValueError("attention: segments are those of queries and of keys, or of neither")
    if mask.window is not None and mask.window < 0:
        raise ValueError(f"attention: got window {mask.window}, expected the number of tokens before itself, 0 or more")
    if backend == "fused":
        if mask.has_segments or mask.dropout is not None:
            raise ValueError("attention: the fused backend takes neither segments nor dropout; use unfused")
        if mask.causal and query.shape[1] != key.shape[1]:
            # cuDNN would let query i see the keys 0 .. i.
            raise ValueError(
                f"attention: the fused backend is causal for equally many queries and keys, got {query.shape[1]} and"
                f" {key.shape[1]}; use unfused"
            )
        if mask.window is not None and not (mask.causal and mask.in_order):
            raise ValueError("attention: the fused backend has a window for causal tokens in order alone; use unfused")
    return _Call(mask, backend, query.shape[-1] ** -0.5 if scale is None else scale, block_size)


def attention_forward(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq_kv kv_heads head_dim"],
    value: Float[Array, "batch seq_kv kv_heads head_dim"],
    mask: AttentionMask,
    *,
    backend: Backend = "unfused",
    scale: float | None = None,
    block_size: int = BLOCK_SIZE,
    out_dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch heads seq"]]:
    """Returns `attention`'s (out, lse), for callers that write their own backward (a ring of blocks).

    Communication: none.

    Args:
      query: see `attention`, as all that is not here.
      key: the same.
      value: the same.
      mask: what counts of the scores.
      backend: the same.
      scale: the same.
      block_size: the same.
      out_dtype: of out, None: the query's. fp32 leaves it unrounded ("unfused"; cuDNN rounds to the query's dtype).

    Raises:
      ValueError: see `attention`.
    """
    call = _call(query, key, mask, backend, scale, block_size)
    return call.forward(query, key, value, out_dtype or query.dtype)


def attention_backward(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq_kv kv_heads head_dim"],
    value: Float[Array, "batch seq_kv kv_heads head_dim"],
    out: Float[Array, "batch seq heads head_dim"],
    lse: Float[Array, "batch heads seq"],
    d_out: Float[Array, "batch seq heads head_dim"],
    mask: AttentionMask,
    *,
    backend: Backend = "unfused",
    scale: float | None = None,
    block_size: int = BLOCK_SIZE,
    out_dtype: DTypeLike | None = None,
) -> tuple[
    Float[Array, "batch seq heads head_dim"],
    Float[Array, "batch seq_kv kv_heads head_dim"],
    Float[Array, "batch seq_kv kv_heads head_dim"],
]:
    """Returns (d_query, d_key, d_value) of these queries and keys, which may be a part of a larger attention.

    Communication: none. Probabilities are exp(scores - lse): summed over the parts, the results are the gradients of
    the whole.

    Args:
      query: see `attention`, as all that is not here.
      key: the same.
      value: the same.
      out: of the whole attention, for these queries.
      lse: of the whole attention, for these queries.
      d_out: gradient of `out`.
      mask: what counts of the scores.
      backend: the same.
      scale: the same.
      block_size: the same.
      out_dtype: of the gradients, None: those of query, key and value.

    Raises:
      ValueError: see `attention`.
    """
    call = _call(query, key, mask, backend, scale, block_size)
    return call.backward(query, key, value, out, lse, d_out, out_dtype)


def attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq_kv kv_heads head_dim"],
    value: Float[Array, "batch seq_kv kv_heads head_dim"],
    *,
    causal: bool,
    window: int | None = None,
    query_tokens: TokenIds | None = None,
    key_tokens: TokenIds | None = None,
    dropout: AttentionDropout | None = None,
    backend: Backend = "unfused",
    scale: float | None = None,
    block_size: int = BLOCK_SIZE,
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch heads seq"]]:
    """Returns (softmax(scale query key^T) value per head in the query's dtype, fp32 log-sum-exp of the scores).

    Communication: none. FLOPs of the blocks that can be visible by place (half of them and the diagonal if causal):
    forward 4, backward 10 times batch heads head_dim a score. A query that sees no key has out 0, lse -inf and
    gradients of 0. Out is differentiable with respect to query, key and value; lse is cut from the gradient.

    Args:
      query: queries of this rank's heads.
      key: keys; heads must be a multiple of kv_heads, keys and values are not repeated.
      value: values.
      causal: query i sees keys 0 .. i + seq_kv - seq, by place in the arrays.
      window: the query of token i sees the keys of tokens i - window .. i, so itself and `window` before it, the left
        size of Megatron's --window-size; None: no bound.
      query_tokens: true indices and segments of the queries; None: in order, one segment.
      key_tokens: the same of the keys.
      dropout: of the probabilities; lse is that of all of them.
      backend: "fused" or "unfused" (`choose_backend`).
      scale: of the scores, None: 1 / sqrt(head_dim).
      block_size: most tokens of a block, "unfused" alone.

    Raises:
      ValueError: heads is not a multiple of kv_heads; segments of queries alone or keys alone; a negative window; what
        "fused" cannot do: segments, dropout, causal with seq != seq_kv, a window of tokens that are not in order.
    """
    mask = AttentionMask(causal, window, query_tokens or TokenIds(), key_tokens or TokenIds(), dropout)
    call = _call(query, key, mask, backend, scale, block_size)
    # What the backward returns varies like all of its inputs together, and must be typed like each.
    query, key, value = vary_like((query, key, value), query, key, value, call)
    out, lse = _attention(query, key, value, call)
    return out, jax.lax.stop_gradient(lse)


@jax.custom_vjp
def _attention(query: Array, key: Array, value: Array, call: _Call) -> tuple[Array, Array]:
    return _attention_forward(query, key, value, call)[0]


def _attention_forward(query, key, value, call):
    out, lse = call.forward(query, key, value, query.dtype)
    out, lse = checkpoint_name(out, ATTENTION_OUT), checkpoint_name(lse, ATTENTION_LSE)
    return (out, lse), (query, key, value, out, lse, call)


def _attention_backward(residuals, cotangents):
    *arrays, call = residuals
    return *call.backward(*arrays, cotangents[0], None), None


_attention.defvjp(_attention_forward, _attention_backward)
