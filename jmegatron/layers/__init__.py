"""Parallel layers that any JAX or Flax code can use. Each talks on the one mesh axis it is given.

Pure functions with their parameter declarations (`*_specs`), and thin Flax NNX modules over them. Importing this
package costs jax alone; Flax (which brings optax along) is loaded when a module class is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jmegatron.layers.attention import AttentionSettings, TokenContext, attention_specs, self_attention
from jmegatron.layers.cross_entropy import linear_cross_entropy, vocab_parallel_cross_entropy
from jmegatron.layers.embedding import pad_vocab_size, vocab_parallel_embedding, vocab_parallel_embedding_specs
from jmegatron.layers.linear import (
    column_parallel_linear,
    column_parallel_specs,
    row_parallel_linear,
    row_parallel_specs,
)
from jmegatron.layers.mlp import MLPSettings, mlp, mlp_specs
from jmegatron.layers.norm import norm, norm_specs

if TYPE_CHECKING:
    from jmegatron.layers.modules import (
        MLP,
        ColumnParallelLinear,
        LayerNorm,
        RMSNorm,
        RowParallelLinear,
        SelfAttention,
        VocabParallelEmbedding,
    )

_MODULES = (
    "MLP",
    "ColumnParallelLinear",
    "LayerNorm",
    "RMSNorm",
    "RowParallelLinear",
    "SelfAttention",
    "VocabParallelEmbedding",
)

__all__ = [
    "MLP",
    "AttentionSettings",
    "ColumnParallelLinear",
    "LayerNorm",
    "MLPSettings",
    "RMSNorm",
    "RowParallelLinear",
    "SelfAttention",
    "TokenContext",
    "VocabParallelEmbedding",
    "attention_specs",
    "column_parallel_linear",
    "column_parallel_specs",
    "linear_cross_entropy",
    "mlp",
    "mlp_specs",
    "norm",
    "norm_specs",
    "pad_vocab_size",
    "row_parallel_linear",
    "row_parallel_specs",
    "self_attention",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_embedding_specs",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module("jmegatron.layers.modules"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
