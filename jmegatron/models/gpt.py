"""GPT: embedding, transformer stack, final norm, output layer, loss. Talks on tp through its layers, and on pp.

Source: Megatron-LM models/gpt/gpt_model.py, models/common/embeddings/language_model_embedding.py.

    embedding/word/embedding      [padded vocabulary, hidden]      rows over (pp, tp)
    embedding/position/embedding  [max positions, hidden]          learned positions only; rows over (pp, tp) if pp > 1
    layers/...                    stacked, see transformer.py      layers over pp; [chunks, places, ...] with chunks
    final_norm/...                [hidden]
    output/kernel                 [hidden, padded vocabulary]      columns over (pp, tp); absent when tied

Every stage of a pipeline holds and computes its share of the embedding and of the output layer, so that no stage
carries them alone. `gpt_context`, `gpt_embed`, `gpt_layer` and `gpt_output_loss` are the parts that a pipeline runs;
`gpt_hidden`, `gpt_loss` and `gpt_logits` put them together for one stage.

The tree's shapes do not depend on the mesh, but for the vocabulary's padding, which `padded_vocab_size` fixes, and for
the leading dims of stacked layers, which the pipeline's layout fixes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Integer, Key

from jmegatron import partition, random
from jmegatron.collectives import Axes, axis_rank, copy_to, enter_region, leave_region, own_slice, sum_over
from jmegatron.context_parallel.layout import token_index
from jmegatron.layers.attention import TokenContext
from jmegatron.layers.cross_entropy import linear_cross_entropy
from jmegatron.layers.embedding import padded_rows, vocab_parallel_embedding_specs, vocab_parallel_lookup
from jmegatron.layers.linear import matmul
from jmegatron.layers.norm import norm, norm_specs
from jmegatron.models.transformer import (
    LayerParallel,
    LayerSettings,
    layer_specs,
    partial_stacks,
    stacked_layer,
    transformer_stack,
)
from jmegatron.ops.rotary import RotaryScaling, rotary_angles
from jmegatron.partition import ParameterSpec, Tree


@dataclasses.dataclass(frozen=True)
class PipelineParallel:
    """How the model is cut into the stages of a pipeline."""

    axis: str | None = None
    num_stages: int = 1
    places: tuple[tuple[int, ...], ...] = ()
    """Global layer number of each place of the stacked layers, [chunks, stages * layers of a chunk], -1: none; see
    `PipelineLayout.places`. Empty: all layers in order on one stage."""

    @property
    def may_be_absent(self) -> bool:
        """Whether a place may hold no layer."""
        return any(layer < 0 for row in self.places for layer in row)


ONE_STAGE = PipelineParallel()

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
    rotary_scaling: RotaryScaling | None = None
    tied: bool = True
    mask_padded_vocab: bool = True
    label_smoothing: float = 0.0
    init_std: float = 0.02
    place_settings: tuple[LayerSettings, ...] = ()
    """Numbers of the layer at each place of a chunk (with one stage: of each layer) where they are not all `layer`.
    Shapes of parameters may not differ, but for layers without the experts that `layer` has."""

    def __post_init__(self) -> None:
        if self.position_embedding not in POSITIONS:
            raise ValueError(f"position_embedding: got {self.position_embedding!r}, expected one of {POSITIONS}")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}")

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.layer.attention.hidden_size

    def settings_at(self, num_places: int) -> tuple[LayerSettings, ...]:
        """Returns the numbers of the layer at each place of a chunk.

        Raises:
          ValueError: `place_settings` are for another number of places.
        """
        settings = self.place_settings or (self.layer,) * num_places
        if len(settings) != num_places:
            raise ValueError(f"place_settings for {len(settings)} places: expected the {num_places} of a chunk")
        return settings

    @property
    def loss_vocab_size(self) -> int | None:
        """Columns that take part in the softmax; None: all."""
        masked = self.mask_padded_vocab and self.padded_vocab_size != self.vocab_size
        return self.vocab_size if masked else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """One micro-batch of this rank: its tokens of each sequence, in the order of `context_parallel.layout`.

    A pytree.
    """

    tokens: Any
    """Integer [batch, seq_cp] of seq / cp tokens. (A pytree's fields also hold specs and abstract arrays.)"""
    labels: Any
    """Integer [batch, seq_cp]: the next token of each."""
    weights: Any
    """fp32 [batch, seq_cp]: weight of each token's loss in the objective (0: does not count)."""
    sample_ids: Any
    """Unsigned [batch]: place of each sequence in the run's stream of samples (dropout key)."""
    position_ids: Any = None
    """Integer [batch, seq_cp]: position of each token; None: its place in the sequence."""
    segment_ids: Any = None
    """Integer [batch, seq]: of the whole sequence; tokens see only those of their own segment; None: one segment."""
    auxiliary_weight: Any = None
    """fp32 []: see `TokenContext`."""
    padding: Any = None
    """bool [batch, seq_cp]: see `TokenContext`."""


# ---- parameters ---------------------------------------------------------------------------------------------------
def vocab_axes(parallel: LayerParallel, pipeline: PipelineParallel = ONE_STAGE) -> Axes:
    """Returns the mesh axes that divide the vocabulary: (pp, tp), or one of them, or None."""
    axes = tuple(axis for axis in (pipeline.axis, parallel.axis) if axis is not None)
    return axes if len(axes) > 1 else (axes[0] if axes else None)


def without_receive_bound(settings: GPTSettings) -> GPTSettings:
    """Returns the model whose experts receive all rows that there are (`MoESettings.bound_factor`)."""

    def unbounded(layer: LayerSettings) -> LayerSettings:
        if layer.moe is None:
            return layer
        return dataclasses.replace(layer, moe=dataclasses.replace(layer.moe, bound_factor=None))

    places = tuple(map(unbounded, settings.place_settings))
    return dataclasses.replace(settings, layer=unbounded(settings.layer), place_settings=places)


def gpt_specs(settings: GPTSettings, parallel: LayerParallel, pipeline: PipelineParallel = ONE_STAGE) -> Tree:
    """Returns the declarations of every parameter: the only place where shapes, axes and start values are stated.

    Start values as the reference's: N(0, std), output projections N(0, std / sqrt(2 num_layers)), biases 0, scales 1.

    Raises:
      ValueError: heads or vocabulary cannot be divided over the ranks.
    """
    s = settings
    ranks = parallel.num_ranks * pipeline.num_stages
    if s.padded_vocab_size % ranks:
        raise ValueError(
            f"padded_vocab_size {s.padded_vocab_size} must be divisible by the {ranks} ranks of tp and pp together"
        )
    axes = vocab_axes(parallel, pipeline)
    init = partition.normal(s.init_std)
    output_init = partition.normal(s.init_std / (2 * s.num_layers) ** 0.5)
    rows = padded_rows(init, s.vocab_size) if s.mask_padded_vocab else init
    stacked = _stacked_specs(s, parallel, pipeline, init, output_init)
    specs: Tree = {
        "embedding": {"word": vocab_parallel_embedding_specs(s.padded_vocab_size, s.hidden_size, axis=axes, init=rows)},
        "layers": stacked,
        "final_norm": norm_specs(
            s.hidden_size,
            s.layer.normalization,
            partial_axes=parallel.norm_partial_axes,
            zero_centered=s.layer.zero_centered_norm,
        ),
    }
    if s.position_embedding == "learned_absolute":
        specs["embedding"]["position"] = {"embedding": _position_spec(s, parallel, pipeline, init)}
    if not s.tied:
        # Drawn as rows: a row's numbers then do not depend on how many rows of padding follow.
        columns = lambda key, shape, dtype: rows(key, shape[::-1], dtype).T  # noqa: E731
        shape = (s.hidden_size, s.padded_vocab_size)
        specs["output"] = {"kernel": ParameterSpec(shape, P(None, axes), columns, vocabulary=True)}
    if s.mask_padded_vocab and s.vocab_size != s.padded_vocab_size:
        word = specs["embedding"]["word"]
        word["embedding"] = dataclasses.replace(word["embedding"], padded=(0, s.vocab_size))
        if not s.tied:
            specs["output"]["kernel"] = dataclasses.replace(specs["output"]["kernel"], padded=(1, s.vocab_size))
    return specs


def _stacked_specs(
    s: GPTSettings,
    parallel: LayerParallel,
    pipeline: PipelineParallel,
    init: partition.Initializer,
    output_init: partition.Initializer,
) -> Tree:
    """Returns the declarations of all layers; what only some have is stacked over these."""
    places = np.asarray(pipeline.places) if pipeline.places else np.arange(s.num_layers)[None]
    per_chunk = places.shape[1] // pipeline.num_stages
    specs: Tree = {}
    kinds = dict.fromkeys((s.layer, *s.place_settings))
    # Where all layers have the same parameters the places of a chunk do not matter.
    partial = partial_stacks(s.settings_at(per_chunk)) if partial_stacks(tuple(kinds)) else {}
    for settings in kinds:
        of_layer = layer_specs(settings, parallel, kernel_init=init, output_init=output_init)
        for key, tree in of_layer.items():
            if key not in specs:
                present = np.array(partial.get(key, (True,) * per_chunk))
                own = places.reshape(len(places), -1, per_chunk)[:, :, present].reshape(len(places), -1)
                specs[key] = partition.stack(tree, own, pipeline.axis)
    return specs


def _position_spec(
    s: GPTSettings, parallel: LayerParallel, pipeline: PipelineParallel, init: partition.Initializer
) -> ParameterSpec:
    shape = (s.max_positions, s.hidden_size)
    if pipeline.axis is None:
        return ParameterSpec(shape, P(None, None), init, parallel.norm_partial_axes)
    axes = vocab_axes(parallel, pipeline)
    if s.max_positions % (parallel.num_ranks * pipeline.num_stages) == 0:
        return ParameterSpec(shape, P(axes, None), init)
    # The first rank alone adds its rows, so that the others' gradients are zero.
    return ParameterSpec(shape, P(None, None), init, (axes,) if isinstance(axes, str) else tuple(axes or ()))


# ---- the parts ----------------------------------------------------------------------------------------------------
def gpt_context(
    batch: Tokens, settings: GPTSettings, parallel: LayerParallel, dropout_key: Key[Array, ""] | None = None
) -> TokenContext:
    """Returns what every layer needs to know of a micro-batch. Communication: none."""
    rotary = None
    if settings.position_embedding == "rope":
        rotary = rotary_angles(
            _positions(batch, parallel),
            settings.rotary_dim,
            base=settings.rotary_base,
            interpolation_factor=settings.rotary_interpolation,
            scaling=settings.rotary_scaling,
        )
    return TokenContext(
        batch.sample_ids,
        _token_index(batch, parallel),
        rotary,
        dropout_key,
        batch.segment_ids,
        batch.auxiliary_weight,
        batch.padding,
    )


def _token_index(batch: Tokens, parallel: LayerParallel) -> Array:
    """Returns the place in the whole sequence of each of this rank's tokens, [seq_cp]."""
    return token_index(batch.tokens.shape[-1], parallel.context.axis, parallel.context.order)


def _positions(batch: Tokens, parallel: LayerParallel) -> Array:
    return _token_index(batch, parallel)[None] if batch.position_ids is None else batch.position_ids


def gpt_embed(
    parameters: Tree,
    batch: Tokens,
    settings: GPTSettings,
    parallel: LayerParallel,
    pipeline: PipelineParallel = ONE_STAGE,
    *,
    dropout_key: Key[Array, ""] | None = None,
) -> Float[Array, "batch seq_local hidden"]:
    """Returns the input of the first layer: this cp rank's tokens, or the tp rank's shard of them; on every stage.

    Communication, B = bytes of the whole result: over tp one all-reduce of B (sequence parallel: reduce-scatter); over
    pp one all-reduce of the result (B / tp under sequence parallelism).

    Args:
      parameters: {"embedding": ...} of this rank.
      batch: one micro-batch, the same on every stage.
      settings: numbers of the model.
      parallel: how layers are divided.
      pipeline: how the model is cut into stages.
      dropout_key: None: no dropout.
    """
    tables, positions, shard = parameters["embedding"], _positions(batch, parallel), parallel.sequence_parallel
    axes = vocab_axes(parallel, pipeline)
    x = vocab_parallel_lookup(tables["word"]["embedding"], batch.tokens, axes)
    if pipeline.axis is not None:
        if "position" in tables:
            x = x + _own_positions(tables["position"]["embedding"], positions, settings, axes)
        # First over tp: with sequence parallelism a 1 / tp part is left to sum over the stages.
        x = sum_over(leave_region(x, parallel.axis, sequence_parallel=shard), pipeline.axis)
    else:
        x = leave_region(x, parallel.axis, sequence_parallel=shard)
        if "position" in tables:
            # After the reduce-scatter: each rank adds the positions of its own tokens only.
            local = own_slice(positions, parallel.sequence_axis, 1)
            x = x + jnp.take(tables["position"]["embedding"], local, axis=0)
    if dropout_key is not None:
        key = random.site_key(dropout_key, 0, random.Site.EMBEDDING)
        index = own_slice(_token_index(batch, parallel), parallel.sequence_axis, 0)
        x = random.dropout(x, settings.layer.hidden_dropout, key, batch.sample_ids, index)
    return x


def _own_positions(table: Array, positions: Array, settings: GPTSettings, axes: Axes) -> Array:
    """Returns the part of the position embeddings that this rank adds before the sum over all ranks."""
    if table.shape[0] != settings.max_positions:
        return vocab_parallel_lookup(table, positions, axes)
    return jnp.where(axis_rank(axes) == 0, jnp.take(table, positions, axis=0), 0)


def gpt_layer(
    parameters: Tree,
    x: Float[Array, "batch seq_local hidden"],
    context: TokenContext,
    layer: Integer[Array, ""],
    settings: LayerSettings,
    parallel: LayerParallel,
    pipeline: PipelineParallel = ONE_STAGE,
) -> Float[Array, "batch seq_local hidden"]:
    """Returns x after one layer. Communication: that of `stacked_layer`, over tp.

    Args:
      parameters: this rank's part of one layer.
      x: see `gpt_embed`.
      context: of the micro-batch.
      layer: global layer number, -1: no layer.
      settings: numbers of the layer.
      parallel: how layers are divided.
      pipeline: how the model is cut into stages.
    """
    absent = pipeline.may_be_absent
    return stacked_layer(parameters, x, context, settings, parallel, layer, may_be_absent=absent)


def gpt_output_loss(
    parameters: Tree,
    x: Float[Array, "batch seq_local hidden"],
    batch: Tokens,
    settings: GPTSettings,
    parallel: LayerParallel,
    pipeline: PipelineParallel = ONE_STAGE,
) -> tuple[Float[Array, ""], Float[Array, "batch seq"]]:
    """Returns (sum of weight x loss, fp32 loss of each token) from the last layer's output.

    Communication: that of `linear_cross_entropy` over (pp, tp); backward an all-reduce of x over pp.

    Args:
      parameters: {"final_norm", "output"} of this rank, or {"final_norm", "embedding": {"word"}} when tied.
      x: the last layer's output, the same on every stage.
      batch: one micro-batch.
      settings: numbers of the model.
      parallel: how layers are divided.
      pipeline: how the model is cut into stages.
    """
    kernel, transposed = _output_kernel(parameters, settings)
    h = _final_norm(parameters, x, settings)
    if pipeline.axis is not None:
        # Before the gather over tp: backward then sums over the stages what the reduce-scatter over tp has left.
        h = copy_to(h, pipeline.axis)
    return linear_cross_entropy(
        enter_region(h, parallel.axis, sequence_parallel=parallel.sequence_parallel),
        kernel,
        batch.labels,
        batch.weights,
        axis=vocab_axes(parallel, pipeline),
        vocab_size=settings.loss_vocab_size,
        label_smoothing=settings.label_smoothing,
        transposed=transposed,
    )


def gpt_output_logits(
    parameters: Tree,
    x: Float[Array, "batch seq_local hidden"],
    settings: GPTSettings,
    parallel: LayerParallel,
    pipeline: PipelineParallel = ONE_STAGE,
) -> Float[Array, "batch seq vocab_local"]:
    """Returns this rank's columns of the logits over the padded vocabulary, from the last layer's output.

    Communication: an all-gather of x over tp under sequence parallelism; backward as `gpt_output_loss`. Arguments as
    there.
    """
    kernel, transposed = _output_kernel(parameters, settings)
    h = _final_norm(parameters, x, settings)
    if pipeline.axis is not None:
        h = copy_to(h, pipeline.axis)
    h = enter_region(h, parallel.axis, sequence_parallel=parallel.sequence_parallel)
    return matmul(h, kernel.T if transposed else kernel)


def _final_norm(parameters: Tree, x: Array, settings: GPTSettings) -> Array:
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


def embed_parameters(parameters: Tree) -> Tree:
    """Returns the sub-tree that `gpt_embed` takes."""
    return {"embedding": parameters["embedding"]}


def output_parameters(parameters: Tree, settings: GPTSettings) -> Tree:
    """Returns the sub-tree that `gpt_output_loss` takes."""
    if settings.tied:
        kernel = {"embedding": {"word": parameters["embedding"]["word"]}}
    else:
        kernel = {"output": parameters["output"]}
    return {"final_norm": parameters["final_norm"], **kernel}


# ---- the whole model on one stage ---------------------------------------------------------------------------------
def _last_layer(
    parameters: Tree,
    batch: Tokens,
    settings: GPTSettings,
    parallel: LayerParallel,
    dropout_key: Key[Array, ""] | None,
) -> Array:
    x = gpt_embed(parameters, batch, settings, parallel, dropout_key=dropout_key)
    layers = jnp.arange(settings.num_layers, dtype=jnp.int32)
    context = gpt_context(batch, settings, parallel, dropout_key)
    stacked = parameters["layers"]
    return transformer_stack(stacked, x, context, settings.settings_at(settings.num_layers), parallel, layers)


def gpt_hidden(
    parameters: Tree,
    tokens: Integer[Array, "batch seq"],
    sample_ids: Integer[Array, "batch"],
    settings: GPTSettings,
    parallel: LayerParallel,
    *,
    positions: Integer[Array, "#batch seq"] | None = None,
    segments: Integer[Array, "batch seq_whole"] | None = None,
    dropout_key: Key[Array, ""] | None = None,
) -> Float[Array, "batch seq_local hidden"]:
    """Returns the normed states of the last layer, this rank's sequence shard under sequence parallelism.

    Communication over tp, B = bytes of the whole states: forward (2 num_layers + 1) all-reduces, backward 2
    num_layers + 1, counting the output layer's (sequence parallel: the same bytes as gathers and scatters).

    Args:
      parameters: this rank's part of `gpt_specs`, in the compute dtype.
      tokens: this cp rank's tokens of each sequence.
      sample_ids: place of each sequence in the run's stream of samples.
      settings: numbers of the model.
      parallel: how layers are divided.
      positions: position of each token; None: its place in the sequence.
      segments: [batch, whole seq]: tokens see only those of their own segment (packed documents); None: one segment.
      dropout_key: None: no dropout.
    """
    batch = Tokens(tokens, None, None, sample_ids, positions, segments)
    return _final_norm(parameters, _last_layer(parameters, batch, settings, parallel, dropout_key), settings)


def gpt_loss(
    parameters: Tree,
    batch: Tokens,
    settings: GPTSettings,
    parallel: LayerParallel,
    *,
    dropout_key: Key[Array, ""] | None = None,
) -> tuple[Float[Array, ""], Float[Array, "batch seq"]]:
    """Returns (sum of weight x loss, fp32 loss of each token); only the sum is differentiable.

    Communication: that of `gpt_hidden` and `linear_cross_entropy`, over tp.
    """
    x = _last_layer(parameters, batch, settings, parallel, dropout_key)
    return gpt_output_loss(parameters, x, batch, settings, parallel)


def gpt_logits(
    parameters: Tree,
    tokens: Integer[Array, "batch seq"],
    settings: GPTSettings,
    parallel: LayerParallel,
) -> Float[Array, "batch seq vocab_local"]:
    """Returns this rank's columns of the logits over the padded vocabulary; no dropout.

    Communication: that of `gpt_hidden`, over tp.
    """
    batch = Tokens(tokens, None, None, jnp.zeros(tokens.shape[0], jnp.uint32))
    return gpt_output_logits(parameters, _last_layer(parameters, batch, settings, parallel, None), settings, parallel)
