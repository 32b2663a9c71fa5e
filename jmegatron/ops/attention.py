"""Attention over whole sequences of the heads that a rank holds: one entry for every platform. No communication.

Two backends: "unfused", plain XLA with fp32 softmax (any platform, dropout and masks), and "fused", cuDNN's flash
attention (NVIDIA GPUs, half precision, no dropout). Which one serves is decided before tracing (`choose_backend`).
Megatron-LM transformer/dot_product_attention.py; scale 1/sqrt(head_dim), query head i uses kv head i // group.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Backend = Literal["fused", "unfused"]


def choose_backend(
    requested: str, *, platform: str, dtype: jnp.dtype, dropout: float, head_dim: int, packed: bool = False
) -> Backend:
    """Returns the backend that serves, for `requested` in auto, fused, unfused; `packed`: documents are kept apart.

    Raises:
      ValueError: "fused" was asked for and cannot serve (the message says why), or an unknown name.
    """
    if requested not in ("auto", "fused", "unfused"):
        raise ValueError(f"attention_backend: got {requested!r}, expected auto, fused or unfused")
    reasons = []
    if platform not in ("gpu", "cuda"):
        reasons.append(f"the platform is {platform}, not an NVIDIA GPU")
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        reasons.append(f"the compute dtype is {jnp.dtype(dtype).name}, not bfloat16 or float16")
    if dropout > 0:
        reasons.append(f"attention_dropout is {dropout}, not 0")
    if packed:
        reasons.append("reset_attention_mask needs a mask")
    if head_dim % 8 or head_dim > 128:
        reasons.append(f"kv_channels is {head_dim}, not a multiple of 8 up to 128")
    if requested == "fused" and reasons:
        raise ValueError(f"attention_backend fused cannot serve: {'; '.join(reasons)}; fix: use auto or unfused")
    return "unfused" if requested == "unfused" or reasons else "fused"


def attention(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq_kv kv_heads head_dim"],
    value: Float[Array, "batch seq_kv kv_heads head_dim"],
    *,
    causal: bool = True,
    mask: Bool[Array, "batch seq seq_kv"] | None = None,
    dropout: Callable[[Array], Array] | None = None,
    backend: Backend = "unfused",
) -> Float[Array, "batch seq heads head_dim"]:
    """Returns softmax(query key^T / sqrt(head_dim)) value per head, in the query's dtype.

    Communication: none. FLOPs: 4 batch seq seq_kv heads head_dim (the causal half is not skipped by "unfused").

    Args:
      query: queries of this rank's heads.
      key: keys; heads must be a multiple of kv_heads.
      value: values.
      causal: query i sees keys 0..i.
      mask: True where a query may see a key. A row that sees nothing gives 0 and finite gradients.
      dropout: maps probabilities [batch, heads, seq, seq_kv] to dropped-out ones.
      backend: "fused" or "unfused".

    Raises:
      ValueError: heads is not a multiple of kv_heads; mask or dropout with "fused".
    """
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads cannot be divided over {key.shape[2]} kv heads")
    if backend == "fused":
        if mask is not None or dropout is not None:
            raise ValueError("attention: the fused backend takes neither a mask nor dropout; use unfused")
        return jax.nn.dot_product_attention(query, key, value, is_causal=causal, implementation="cudnn")
    return _unfused(query, key, value, causal, mask, dropout)


@jax.custom_vjp
def _scores(query: Array, key: Array) -> Array:
    """[batch, seq, n, group, d] x [batch, seq_kv, n, d] -> fp32 [batch, n, group, seq, seq_kv]."""
    # fp32 from the matmul on: a half-precision softmax loses the tail of long rows.
    return jnp.einsum("bsngd,btnd->bngst", query, key, preferred_element_type=jnp.float32)


def _scores_backward(residuals: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    query, key = residuals
    # Autodiff would multiply the fp32 cotangent with widened operands: matmuls outside the tensor cores' fast path.
    cotangent = cotangent.astype(query.dtype)
    return jnp.einsum("bngst,btnd->bsngd", cotangent, key), jnp.einsum("bngst,bsngd->btnd", cotangent, query)


_scores.defvjp(lambda query, key: (_scores(query, key), (query, key)), _scores_backward)


def _unfused(query, key, value, causal, mask, dropout):
    batch, seq, heads, head_dim = query.shape
    seq_kv, kv_heads = key.shape[1], key.shape[2]
    grouped = query.reshape(batch, seq, kv_heads, heads // kv_heads, head_dim)
    scores = _scores(grouped, key) * (head_dim**-0.5)
    visible = _visible(seq, seq_kv, causal, mask)
    if visible is not None:
        scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    probabilities = jax.nn.softmax(scores, axis=-1)
    if mask is not None and visible is not None:
        # A row that sees nothing came out uniform: zero it, so that hidden values never leak.
        probabilities = jnp.where(visible, probabilities, 0.0)
    if dropout is not None:
        flat = dropout(probabilities.reshape(batch, heads, seq, seq_kv))
        probabilities = flat.reshape(probabilities.shape)
    out = jnp.einsum("bngst,btnd->bsngd", probabilities.astype(value.dtype), value)
    return out.reshape(batch, seq, heads, head_dim)


def _visible(seq: int, seq_kv: int, causal: bool, mask: Array | None) -> Array | None:
    lower = jnp.tril(jnp.ones((seq, seq_kv), bool), seq_kv - seq) if causal else None
    if mask is None:
        return lower
    mask = mask[:, None, None]
    return mask if lower is None else mask & lower
