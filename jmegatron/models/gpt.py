"""GPT: embedding, transformer stack, final norm, output layer, loss. Talks on tp, through its layers.

Source: Megatron-LM models/gpt/gpt_model.py, models/common/embeddings/language_model_embedding.py.

    embedding/word/embedding      [padded vocabulary, hidden]      rows over tp
    embedding/position/embedding  [max positions, hidden]          learned positions only
    layers/...                    stacked, see transformer.py
    final_norm/...                [hidden]
    output/kernel                 [hidden, padded vocabulary]      columns over tp; absent when tied

The tree's shapes do not depend on the mesh (but for the vocabulary's padding, which `padded_vocab_size` fixes).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer, Key

from jmegatron import partition, random
from jmegatron.collectives import enter_region, own_slice
from jmegatron.layers.attention import TokenContext
from jmegatron.layers.cross_entropy import linear_cross_entropy
from jmegatron.layers.embedding import padded_rows, vocab_parallel_embedding, vocab_parallel_embedding_specs
from jmegatron.layers.linear import matmul
from jmegatron.layers.norm import norm, norm_specs
from jmegatron.models.transformer import LayerSettings, TensorParallel, layer_specs, transformer_stack
from jmegatron.ops.rotary import rotary_angles
from jmegatron.partition import ParameterSpec, Tree

POSITIONS = ("learned_absolute", "rope", "none")


@dataclasses.dataclass(frozen=True)
class GPTSettings:
    """Plain numbers of a GPT; `from_config` of the training package fills them from the options."""

    num_layers: int
    layer: LayerSettings
    vocab_size: int
    padded_vocab_size: int
    max_positions: int
    position_embedding: str = "learned_absolute"
    rotary_dim: int = 0
    rotary_base: float = 10000.0
    rotary_interpolation: float = 1.0
    tied: bool = True
    mask_padded_vocab: bool = True
    label_smoothing: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.position_embedding not in POSITIONS:
            raise ValueError(f"position_embedding: got {self.position_embedding!r}, expected one of {POSITIONS}")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}")

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.layer.attention.hidden_size

    @property
    def loss_vocab_size(self) -> int | None:
        """Columns that take part in the softmax; None: all."""
        masked = self.mask_padded_vocab and self.padded_vocab_size != self.vocab_size
        return self.vocab_size if masked else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """One micro-batch of this rank. A pytree."""

    tokens: Any
    """Integer [batch, seq]. (A pytree's fields also hold specs and abstract arrays.)"""
    labels: Any
    """Integer [batch, seq]: the next token of each."""
    weights: Any
    """fp32 [batch, seq]: weight of each token's loss in the objective (0: does not count)."""
    sample_ids: Any
    """Unsigned [batch]: place of each sequence in the run's stream of samples (dropout key)."""
    position_ids: Any = None
    """Integer [batch, seq]: position of each token; None: its place in the sequence."""
    segment_ids: Any = None
    """Integer [batch, seq]: tokens see only those of their own segment; None: one segment."""


# ---- parameters ---------------------------------------------------------------------------------------------------
def gpt_specs(settings: GPTSettings, parallel: TensorParallel) -> Tree:
    """Returns the declarations of every parameter: the only place where shapes, axes and start values are stated.

    Start values as the reference's: N(0, std), output projections N(0, std / sqrt(2 num_layers)), biases 0, scales 1.

    Raises:
      ValueError: heads or vocabulary cannot be divided over the ranks.
    """
    s = settings
    if s.padded_vocab_size % parallel.num_ranks:
        raise ValueError(
            f"padded_vocab_size {s.padded_vocab_size} must be divisible by the {parallel.num_ranks} tp ranks"
        )
    init = partition.normal(s.init_std)
    output_init = partition.normal(s.init_std / (2 * s.num_layers) ** 0.5)
    rows = padded_rows(init, s.vocab_size) if s.mask_padded_vocab else init
    per_layer = layer_specs(s.layer, parallel, kernel_init=init, output_init=output_init)
    specs: Tree = {
        "embedding": {
            "word": vocab_parallel_embedding_specs(s.padded_vocab_size, s.hidden_size, axis=parallel.axis, init=rows)
        },
        "layers": partition.stack(per_layer, s.num_layers),
        "final_norm": norm_specs(
            s.hidden_size,
            s.layer.normalization,
            partial_axes=parallel.norm_partial_axes,
            zero_centered=s.layer.zero_centered_norm,
        ),
    }
    if s.position_embedding == "learned_absolute":
        specs["embedding"]["position"] = {
            "embedding": ParameterSpec(
                (s.max_positions, s.hidden_size), P(None, None), init, parallel.norm_partial_axes
            )
        }
    if not s.tied:
        # Drawn as rows: a row's numbers then do not depend on how many rows of padding follow.
        columns = lambda key, shape, dtype: rows(key, shape[::-1], dtype).T  # noqa: E731
        specs["output"] = {
            "kernel": ParameterSpec((s.hidden_size, s.padded_vocab_size), P(None, parallel.axis), columns)
        }
    return specs


# ---- forward ------------------------------------------------------------------------------------------------------
def _embed(
    parameters: Tree,
    tokens: Array,
    positions: Array,
    context: TokenContext,
    settings: GPTSettings,
    parallel: TensorParallel,
) -> Array:
    x = vocab_parallel_embedding(
        parameters["word"], tokens, axis=parallel.axis, sequence_parallel=parallel.sequence_parallel
    )
    if "position" in parameters:
        # After the reduce-scatter: each rank adds the positions of its own tokens only.
        local = own_slice(positions, parallel.sequence_axis, 1)
        x = x + jnp.take(parameters["position"]["embedding"], local, axis=0)
    if context.dropout_key is not None:
        key = random.site_key(context.dropout_key, 0, random.Site.EMBEDDING)
        token_index = own_slice(context.token_index, parallel.sequence_axis, 0)
        x = random.dropout(x, settings.layer.hidden_dropout, key, context.sample_ids, token_index)
    return x


def gpt_hidden(
    parameters: Tree,
    tokens: Integer[Array, "batch seq"],
    sample_ids: Integer[Array, "batch"],
    settings: GPTSettings,
    parallel: TensorParallel,
    *,
    positions: Integer[Array, "#batch seq"] | None = None,
    segments: Integer[Array, "batch seq"] | None = None,
    dropout_key: Key[Array, ""] | None = None,
) -> Float[Array, "batch seq_local hidden"]:
    """Returns the normed states of the last layer, this rank's sequence shard under sequence parallelism.

    Communication over tp, B = bytes of the whole states: forward (2 num_layers + 1) all-reduces, backward 2
    num_layers + 1, counting the output layer's (sequence parallel: the same bytes as gathers and scatters).

    Args:
      parameters: this rank's part of `gpt_specs`, in the compute dtype.
      tokens: whole sequences.
      sample_ids: place of each sequence in the run's stream of samples.
      settings: numbers of the model.
      parallel: how layers are divided.
      positions: position of each token; None: 0 .. seq - 1.
      segments: tokens see only those of their own segment (packed documents); None: one segment.
      dropout_key: None: no dropout.
    """
    token_index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    if positions is None:
        positions = token_index[None]
    rotary = None
    if settings.position_embedding == "rope":
        rotary = rotary_angles(
            positions,
            settings.rotary_dim,
            base=settings.rotary_base,
            interpolation_factor=settings.rotary_interpolation,
        )
    context = TokenContext(sample_ids, token_index, rotary, dropout_key, segments)
    x = _embed(parameters["embedding"], tokens, positions, context, settings, parallel)
    layers = jnp.arange(settings.num_layers, dtype=jnp.int32)
    x = transformer_stack(parameters["layers"], x, context, settings.layer, parallel, layers)
    return norm(
        parameters["final_norm"],
        x,
        settings.layer.normalization,
        eps=settings.layer.norm_eps,
        zero_centered=settings.layer.zero_centered_norm,
    )


def _output_kernel(parameters: Tree, settings: GPTSettings) -> tuple[Array, bool]:
    """Returns (kernel, transposed): the word embedding itself when tied."""
    if settings.tied:
        return parameters["embedding"]["word"]["embedding"], True
    return parameters["output"]["kernel"], False


def gpt_loss(
    parameters: Tree,
    batch: Tokens,
    settings: GPTSettings,
    parallel: TensorParallel,
    *,
    dropout_key: Key[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Float[Array, "batch seq"]]:
    """Returns (sum of weight x loss, fp32 loss of each token); only the sum is differentiable.

    Communication: that of `gpt_hidden` and `linear_cross_entropy`, over tp.
    """
    x = gpt_hidden(
        parameters,
        batch.tokens,
        batch.sample_ids,
        settings,
        parallel,
        positions=batch.position_ids,
        segments=batch.segment_ids,
        dropout_key=dropout_key,
    )
    kernel, transposed = _output_kernel(parameters, settings)
    return linear_cross_entropy(
        enter_region(x, parallel.axis, sequence_parallel=parallel.sequence_parallel),
        kernel,
        batch.labels,
        batch.weights,
        axis=parallel.axis,
        vocab_size=settings.loss_vocab_size,
        label_smoothing=settings.label_smoothing,
        transposed=transposed,
    )


def gpt_logits(
    parameters: Tree,
    tokens: Integer[Array, "batch seq"],
    settings: GPTSettings,
    parallel: TensorParallel,
) -> Float[Array, "batch seq vocab_local"]:
    """Returns this rank's columns of the logits over the padded vocabulary; no dropout.

    Communication: that of `gpt_hidden`, over tp.
    """
    ids = jnp.zeros(tokens.shape[0], jnp.uint32)
    x = gpt_hidden(parameters, tokens, ids, settings, parallel)
    kernel, transposed = _output_kernel(parameters, settings)
    x = enter_region(x, parallel.axis, sequence_parallel=parallel.sequence_parallel)
    return matmul(x, kernel.T if transposed else kernel)
