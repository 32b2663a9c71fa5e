"""cuDNN's flash attention for NVIDIA GPUs: out and log-sum-exp, and the backward from a *given* log-sum-exp.

No communication. Touches a private module of JAX, for two reasons: `jax.nn.dot_product_attention` rounds the
log-sum-exp to the query's dtype (bfloat16: 8 bits, which is per cents of every probability), and its gradient drops
the cotangent of the log-sum-exp, so that blocks of a ring could not be merged.
"""

import importlib
import inspect
from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Float

from jmegatron.collectives import vary_like

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
_NEEDED = (
    "dot_product_attention",
    "_dot_product_attention_bwd_p_wrapper",
    "_dot_product_attention_bwd_impl",
    "MaskType",
)


def missing_parts() -> str | None:
    """Returns what this version of JAX lacks of the cuDNN interface, None where all is there."""
    try:
        module = importlib.import_module(_MODULE)
    except ImportError as error:
        return str(error)
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    return f"{_MODULE} has no {', '.join(missing)}" if missing else None


def _module() -> ModuleType:
    missing = missing_parts()
    if missing:
        raise ValueError(f"attention: this JAX version does not offer cuDNN attention ({missing}); use unfused")
    return importlib.import_module(_MODULE)


def _mask(module: ModuleType, causal: bool, window: int | None) -> dict:
    # cuDNN counts the query itself to its window.
    mask_type = module.MaskType.CAUSAL if causal else module.MaskType.NO_MASK
    return dict(mask_type=mask_type, sliding_window_length=None if window is None else window + 1)


def forward(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq_kv kv_heads head_dim"],
    value: Float[Array, "batch seq_kv kv_heads head_dim"],
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch heads seq"]]:
    """Returns (out in the query's dtype, fp32 log-sum-exp). Communication: none.

    Raises:
      ValueError: this JAX version lacks the interface.
    """
    module = _module()
    out, lse = module.dot_product_attention(
        query, key, value, scale=scale, return_residual=True, **_mask(module, causal, window)
    )
    return vary_like((out, lse), query, key, value)  # jax before 0.11 forgets that they vary


def backward(
    query: Float[Array, "batch seq heads head_dim"],
    key: Float[Array, "batch seq_kv kv_heads head_dim"],
    value: Float[Array, "batch seq_kv kv_heads head_dim"],
    out: Float[Array, "batch seq heads head_dim"],
    lse: Float[Array, "batch heads seq"],
    d_out: Float[Array, "batch seq heads head_dim"],
    *,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[
    Float[Array, "batch seq heads head_dim"],
    Float[Array, "batch seq_kv kv_heads head_dim"],
    Float[Array, "batch seq_kv kv_heads head_dim"],
]:
    """Returns (d_query, d_key, d_value) in the inputs' dtype, from the whole attention's `out` and `lse`.

    Communication: none.

    Raises:
      ValueError: this JAX version lacks the interface.
    """
    module = _module()
    unused = jnp.zeros(0, query.dtype)
    options = dict(
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        layout=module.AttentionLayout.BTNH.value,
        **_mask(module, causal, window),
    )
    if "score_mod" in inspect.signature(module._dot_product_attention_bwd_impl).parameters:  # jax 0.12
        options["score_mod"] = None
    gradients = module._dot_product_attention_bwd_p_wrapper.bind(
        query,
        key,
        value,
        *(unused,) * 7,  # bias, lengths of queries and keys, their offsets, two page tables
        lse,
        out.astype(query.dtype),
        d_out.astype(query.dtype),
        **options,
    )
    return vary_like(tuple(gradients), query, key, value, lse, out, d_out)
