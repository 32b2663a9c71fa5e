"""The parallel layers as Flax NNX modules: thin shells over the pure functions. They talk on `axis`.

    layer = ColumnParallelLinear(512, 2048, axis="tp", rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    jax.shard_map(lambda state, x: nnx.merge(graph, state)(x),
                  mesh=mesh, in_specs=(nnx.get_partition_spec(state), P()), out_specs=P(None, None, "tp"))

The mesh is a plain `jax.sharding.Mesh` (automatic axes). With `jax.make_mesh`'s explicit axes, JAX wants arguments that
already lie as in_specs say: `jax.device_put` the state by its specs first, or pass axis_types=(AxisType.Auto, ...).

Parameters are created whole, with global shapes, and carry their PartitionSpec as Flax metadata; shard_map hands each
rank its part. `axis=None` makes a module its own unsharded reference. With sequence parallelism (and for q/k norms and
replicated kv kernels) a replicated parameter's gradient is a part on each rank: differentiate outside the shard_map,
or with check_vma=True inside, and JAX sums it.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from jmegatron.context_parallel.layout import WHOLE_SEQUENCE, ContextParallel, token_index
from jmegatron.layers.attention import AttentionSettings, TokenContext, attention_specs, self_attention
from jmegatron.layers.embedding import pad_vocab_size, vocab_parallel_embedding, vocab_parallel_embedding_specs
from jmegatron.layers.linear import (
    column_parallel_linear,
    column_parallel_specs,
    row_parallel_linear,
    row_parallel_specs,
)
from jmegatron.layers.mlp import MLPSettings, mlp, mlp_specs
from jmegatron.layers.norm import norm, norm_specs
from jmegatron.ops.rotary import rotary_angles
from jmegatron.partition import Initializer, ParameterSpec, Tree


class ParameterGroup(nnx.Module):
    """Holds the parameters of a declaration tree as nnx.Param, nested as declared. Communication: none."""

    def __init__(self, specs: Tree, *, rngs: nnx.Rngs, param_dtype: Any = jnp.float32):
        """Draws every parameter whole; `rngs` needs a "params" (or default) stream."""
        self.names = tuple(specs)
        for name, spec in specs.items():
            if isinstance(spec, ParameterSpec):
                value = spec.init(rngs.params(), spec.shape, param_dtype)
                # eager_sharding=False: inside shard_map the value is a rank's part, which no mesh describes.
                child: Any = nnx.Param(value, out_sharding=tuple(spec.spec), eager_sharding=False)
            else:
                child = ParameterGroup(spec, rngs=rngs, param_dtype=param_dtype)
            setattr(self, name, child)

    def tree(self, dtype: Any = None) -> Tree:
        """Returns the arrays as a nested dict, cast to `dtype` if given."""

        def value(child: Any) -> Any:
            if isinstance(child, ParameterGroup):
                return child.tree(dtype)
            return child[...] if dtype is None else child[...].astype(dtype)

        return {name: value(getattr(self, name)) for name in self.names}


class _ParallelModule(ParameterGroup):
    """A parameter group that knows its axis and compute dtype."""

    def __init__(self, specs: Tree, *, axis: str | None, rngs: nnx.Rngs, dtype: Any, param_dtype: Any):
        super().__init__(specs, rngs=rngs, param_dtype=param_dtype)
        self.axis = axis
        self.dtype = dtype

    def _cast(self, x: Array) -> Array:
        return x if self.dtype is None else x.astype(self.dtype)


class ColumnParallelLinear(_ParallelModule):
    """x K + bias with the columns of K divided over axis; see `column_parallel_linear` for shapes and communication."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: str | None,
        rngs: nnx.Rngs,
        use_bias: bool = True,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        kernel_init: Initializer | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        """Declares kernel [in_features, out_features] and bias [out_features]."""
        specs = column_parallel_specs(in_features, out_features, axis=axis, use_bias=use_bias, kernel_init=kernel_init)
        super().__init__(specs, axis=axis, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.sequence_parallel = sequence_parallel
        self.gather_output = gather_output

    def __call__(self, x: Float[Array, "batch seq in_features"]) -> Float[Array, "batch seq_out out_local"]:
        """Returns this rank's columns (all of them with gather_output)."""
        return column_parallel_linear(
            self.tree(self.dtype),
            self._cast(x),
            axis=self.axis,
            sequence_parallel=self.sequence_parallel and self.axis is not None,
            gather_output=self.gather_output,
        )


class RowParallelLinear(_ParallelModule):
    """Sum over ranks of x_r K_r, plus the bias once; see `row_parallel_linear` for shapes and communication."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: str | None,
        rngs: nnx.Rngs,
        use_bias: bool = True,
        sequence_parallel: bool = False,
        input_is_parallel: bool = True,
        kernel_init: Initializer | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        """Declares kernel [in_features, out_features] and bias [out_features]."""
        specs = row_parallel_specs(
            in_features,
            out_features,
            axis=axis,
            use_bias=use_bias,
            sequence_parallel=sequence_parallel,
            kernel_init=kernel_init,
        )
        super().__init__(specs, axis=axis, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.sequence_parallel = sequence_parallel
        self.input_is_parallel = input_is_parallel

    def __call__(self, x: Float[Array, "batch seq in_local"]) -> Float[Array, "batch seq_out out_features"]:
        """Returns the whole output features of every token (of this rank's tokens with sequence_parallel)."""
        return row_parallel_linear(
            self.tree(self.dtype),
            self._cast(x),
            axis=self.axis,
            sequence_parallel=self.sequence_parallel and self.axis is not None,
            input_is_parallel=self.input_is_parallel,
        )


class VocabParallelEmbedding(_ParallelModule):
    """Embedding with its rows divided over axis; see `vocab_parallel_embedding` for shapes and communication."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        axis: str | None,
        rngs: nnx.Rngs,
        make_vocab_size_divisible_by: int = 128,
        num_ranks: int = 1,
        sequence_parallel: bool = False,
        embedding_init: Initializer | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        """Declares embedding [padded vocabulary, hidden_size]; `num_ranks` is the size that `axis` will have."""
        self.padded_vocab_size = pad_vocab_size(vocab_size, make_vocab_size_divisible_by, num_ranks)
        specs = vocab_parallel_embedding_specs(self.padded_vocab_size, hidden_size, axis=axis, init=embedding_init)
        super().__init__(specs, axis=axis, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.sequence_parallel = sequence_parallel

    def __call__(self, tokens: Integer[Array, "batch seq"]) -> Float[Array, "batch seq_out hidden"]:
        """Returns the tokens' rows."""
        return vocab_parallel_embedding(
            self.tree(self.dtype),
            tokens,
            axis=self.axis,
            sequence_parallel=self.sequence_parallel and self.axis is not None,
        )


class _Norm(_ParallelModule):
    normalization = "LayerNorm"

    def __init__(
        self, features: int, *, rngs: nnx.Rngs, eps: float = 1e-5, dtype: Any = None, param_dtype: Any = jnp.float32
    ):
        """Declares scale [features] (and bias [features] for LayerNorm)."""
        specs = norm_specs(features, self.normalization)
        super().__init__(specs, axis=None, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        """Returns the normed x, statistics in fp32."""
        return norm(self.tree(), self._cast(x), self.normalization, eps=self.eps)


class LayerNorm(_Norm):
    """LayerNorm over the last dim, the same with and without sequence parallelism. Communication: none."""


class RMSNorm(_Norm):
    """RMSNorm over the last dim, the same with and without sequence parallelism. Communication: none."""

    normalization = "RMSNorm"


class SelfAttention(_ParallelModule):
    """Causal self-attention, heads divided over axis; see `self_attention` for shapes and communication."""

    def __init__(
        self,
        settings: AttentionSettings,
        *,
        axis: str | None,
        rngs: nnx.Rngs,
        num_ranks: int = 1,
        sequence_parallel: bool = False,
        rotary_base: float | None = None,
        context_parallel: ContextParallel = WHOLE_SEQUENCE,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        """Declares the parameters of `attention_specs`; `num_ranks` is the size that `axis` will have.

        With `context_parallel` x holds this rank's tokens as `context_parallel.layout.own_tokens` cuts them.
        """
        specs = attention_specs(settings, axis=axis, num_ranks=num_ranks, sequence_parallel=sequence_parallel)
        super().__init__(specs, axis=axis, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.settings = settings
        self.sequence_parallel = sequence_parallel
        self.rotary_base = rotary_base
        self.context_parallel = context_parallel

    def __call__(
        self, x: Float[Array, "batch seq_in hidden"], context: TokenContext | None = None
    ) -> Float[Array, "batch seq_in hidden"]:
        """Returns attention of x. `context` defaults to x's tokens in order, rotary if rotary_base is set.

        Raises:
          ValueError: the settings ask for dropout and no context brings its key. (With `dropout_key=None` in a context
            nothing is dropped: evaluation.)
        """
        sharded = self.sequence_parallel and self.axis is not None
        if context is None:
            if self.settings.dropout > 0:
                raise ValueError(
                    f"SelfAttention: dropout is {self.settings.dropout}, but there is no TokenContext with a"
                    " dropout_key; fix: pass one (dropout_key=None in it for evaluation), or set dropout to 0"
                )
            context = self._default_context(x, sharded)
        return self_attention(
            self.tree(self.dtype),
            self._cast(x),
            context,
            self.settings,
            axis=self.axis,
            sequence_parallel=sharded,
            context_parallel=self.context_parallel,
        )

    def _default_context(self, x: Array, sharded: bool) -> TokenContext:
        from jmegatron.collectives import axis_size

        seq = x.shape[1] * (axis_size(self.axis) if sharded else 1)
        index = token_index(seq, self.context_parallel.axis, self.context_parallel.order)
        rotary = None
        if self.rotary_base is not None:
            rotary = rotary_angles(index[None], self.settings.head_dim, base=self.rotary_base)
        return TokenContext(jnp.zeros(x.shape[0], jnp.uint32), index, rotary)


class MLP(_ParallelModule):
    """Feed-forward layer, inner size divided over axis; see `mlp` for shapes and communication."""

    def __init__(
        self,
        settings: MLPSettings,
        *,
        axis: str | None,
        rngs: nnx.Rngs,
        sequence_parallel: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        """Declares the parameters of `mlp_specs`."""
        specs = mlp_specs(settings, axis=axis, sequence_parallel=sequence_parallel)
        super().__init__(specs, axis=axis, rngs=rngs, dtype=dtype, param_dtype=param_dtype)
        self.settings = settings
        self.sequence_parallel = sequence_parallel

    def __call__(self, x: Float[Array, "batch seq_in hidden"]) -> Float[Array, "batch seq_in hidden"]:
        """Returns down(activation(up(x)))."""
        sharded = self.sequence_parallel and self.axis is not None
        return mlp(self.tree(self.dtype), self._cast(x), self.settings, axis=self.axis, sequence_parallel=sharded)
