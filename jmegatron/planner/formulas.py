"""Textbook figures of a GPT: parameters by part, matmul FLOPs, MFU.

No communication, no jax; plain numbers in, plain numbers out. Conventions:

- A multiply and an add are two FLOPs. Only matmuls count: weight products and the two products of attention.
- Backward is twice forward (gradient of the input and of the weight).
- Model FLOPs take what the mathematics asks for; executed FLOPs add what is recomputed.
- Attention is counted over the whole score rectangle, s x s, unless `causal_skip`: then half of it, for kernels that
  skip the blocks above the diagonal (and as Megatron-LM counts, training.py `num_floating_point_operations`). With a
  window of w tokens, the token itself among them, `causal_skip` counts the band, w s - w^2 / 2 (there: still half).
- The embedding look-up is no matmul; the output layer is one, also when it shares the embedding's weights.

Sources: arXiv:2104.04473 section 3 and appendix, arXiv:2205.05198 section 4, arXiv:2204.02311 appendix B (MFU).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertShape:
    """The numbers of a mixture of experts.

    Attributes:
        num_experts: experts of a layer.
        top_k: experts of a token.
        ffn_hidden_size: inner width of an expert.
        num_layers: layers that have experts; the others are dense.
        shared_ffn_hidden_size: inner width of the feed-forward layer that every token passes as well; 0 for none.
        router_bias: the router has a bias for each expert.
        pattern: whether each layer has experts; (): all have.
        capacity_factor: as `--moe-expert-capacity-factor`.
        pad_to_capacity: as `--moe-pad-expert-input-to-capacity`.
        bound_factor: as `--moe-receive-bound-factor`.
        router_fp32: the router multiplies in fp32.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    num_layers: int
    shared_ffn_hidden_size: int = 0
    router_bias: bool = False
    pattern: tuple[bool, ...] = ()
    capacity_factor: float | None = None
    pad_to_capacity: bool = False
    bound_factor: float | None = None
    router_fp32: bool = False


@dataclass(frozen=True)
class GPTShape:
    """The numbers of a GPT that its size and cost depend on.

    Attributes:
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        ffn_hidden_size: inner width of the MLP (of each half of it, when gated).
        num_attention_heads: query heads.
        num_query_groups: key/value heads.
        kv_channels: width of a head.
        vocab_rows: rows of the embedding, padding included.
        seq_len: tokens of a sequence.
        gated: the MLP has a gate (SwiGLU, GeGLU).
        biases: linear layers have biases (the output layer never).
        qkv_bias: the query/key/value projection has one even without `biases`.
        norm: "layernorm" has a scale and a bias, "rmsnorm" a scale.
        tied: the output layer uses the embedding's weights.
        num_positions: rows of the learned position embedding; 0 for none (rotary).
        qk_norm: queries and keys are normalised, with one norm of width `kv_channels` each.
        window: tokens before itself that a token sees; None: all.
        experts: of the layers that have such; None: a dense model.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_rows: int
    seq_len: int
    gated: bool = False
    biases: bool = True
    qkv_bias: bool = False
    norm: str = "layernorm"
    tied: bool = True
    num_positions: int = 0
    qk_norm: bool = False
    window: int | None = None
    experts: ExpertShape | None = None

    def __post_init__(self) -> None:
        if self.norm not in ("layernorm", "rmsnorm"):
            raise ValueError(f"norm {self.norm!r}: expected 'layernorm' or 'rmsnorm'")

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, which is that of the value heads."""
        return self.num_query_groups * self.kv_channels


# ---- parameters -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameters:
    """Number of parameters by part; all layers together.

    Attributes:
        word_embedding: token embedding.
        position_embedding: learned positions.
        attention: the query/key/value and output projections.
        mlp: both linear layers, of dense layers and shared experts.
        norms: all norms, the last one among them.
        output_layer: output weights of its own (0 when tied).
        experts: both linear layers of all experts.
        router: of all layers with experts.
    """

    word_embedding: int
    position_embedding: int
    attention: int
    mlp: int
    norms: int
    output_layer: int
    experts: int = 0
    router: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(vars(self).values())


def parameters(shape: GPTShape) -> Parameters:
    """Number of parameters of a GPT, by part."""
    attention = _attention_weights(shape) + shape.biases * shape.hidden_size
    attention += (shape.biases or shape.qkv_bias) * (shape.query_width + 2 * shape.kv_width)
    vectors = 2 if shape.norm == "layernorm" else 1
    layer_norms = vectors * (2 * shape.hidden_size + 2 * shape.kv_channels * shape.qk_norm)
    return Parameters(
        word_embedding=shape.vocab_rows * shape.hidden_size,
        position_embedding=shape.num_positions * shape.hidden_size,
        attention=shape.num_layers * attention,
        mlp=_dense_layers(shape) * _mlp_parameters(shape, shape.ffn_hidden_size) + _shared_parameters(shape),
        norms=shape.num_layers * layer_norms + vectors * shape.hidden_size,
        output_layer=0 if shape.tied else shape.vocab_rows * shape.hidden_size,
        experts=_expert_parameters(shape),
        router=_router_parameters(shape),
    )


def parameters_of_token(shape: GPTShape) -> int:
    """Number of parameters that compute a token: all, but of each layer's experts those that the token goes to."""
    experts = shape.experts
    idle = 0 if experts is None else experts.num_experts - experts.top_k
    return parameters(shape).total - (_expert_parameters(shape) // experts.num_experts * idle if experts else 0)


def matmul_parameters(shape: GPTShape) -> int:
    """Weights that a token is multiplied with: layers and output layer, without embeddings, biases and norms.

    Of the experts those that it goes to.
    """
    return _layer_weights(shape) + shape.vocab_rows * shape.hidden_size


def _attention_weights(shape: GPTShape) -> int:
    return shape.hidden_size * (shape.query_width + 2 * shape.kv_width) + shape.query_width * shape.hidden_size


def _layer_weights(shape: GPTShape) -> int:
    """Weights of all layers that a token is multiplied with."""
    weights = shape.num_layers * _attention_weights(shape)
    weights += _dense_layers(shape) * _mlp_weights(shape, shape.ffn_hidden_size)
    experts = shape.experts
    if experts is not None:
        of_token = experts.top_k * _mlp_weights(shape, experts.ffn_hidden_size)
        of_token += _mlp_weights(shape, experts.shared_ffn_hidden_size) + shape.hidden_size * experts.num_experts
        weights += experts.num_layers * of_token
    return weights


def _dense_layers(shape: GPTShape) -> int:
    return shape.num_layers - (0 if shape.experts is None else shape.experts.num_layers)


def _mlp_weights(shape: GPTShape, width: int) -> int:
    return shape.hidden_size * width * (3 if shape.gated else 2)


def _mlp_parameters(shape: GPTShape, width: int) -> int:
    biases = width * (2 if shape.gated else 1) + shape.hidden_size
    return _mlp_weights(shape, width) + (biases if shape.biases and width else 0)


def _shared_parameters(shape: GPTShape) -> int:
    experts = shape.experts
    return 0 if experts is None else experts.num_layers * _mlp_parameters(shape, experts.shared_ffn_hidden_size)


def _expert_parameters(shape: GPTShape) -> int:
    experts = shape.experts
    if experts is None:
        return 0
    return experts.num_layers * experts.num_experts * _mlp_parameters(shape, experts.ffn_hidden_size)


def _router_parameters(shape: GPTShape) -> int:
    experts = shape.experts
    if experts is None:
        return 0
    return experts.num_layers * experts.num_experts * (shape.hidden_size + experts.router_bias)


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


def attention_flops_per_token(shape: GPTShape, causal_skip: bool = False) -> float:
    """Forward FLOPs of the attention products (scores, and scores times values) for one token, all layers.

    4 s h a layer, with h the width of the query heads together; with `causal_skip` half of it, or
    4 (w - w^2 / 2s) h with a window of w tokens, the token itself among them.
    """
    keys = float(shape.seq_len)
    if causal_skip:
        seen = keys if shape.window is None else min(shape.window + 1.0, keys)
        keys = seen - seen**2 / (2 * keys)
    return 4 * keys * shape.query_width * shape.num_layers


def forward_flops_per_token(shape: GPTShape, causal_skip: bool = False) -> float:
    """Forward matmul FLOPs for one token: 2 per matmul weight, and attention."""
    return 2 * matmul_parameters(shape) + attention_flops_per_token(shape, causal_skip)


def backward_flops_per_token(shape: GPTShape, causal_skip: bool = False) -> float:
    """Backward matmul FLOPs for one token: twice the forward's."""
    return 2 * forward_flops_per_token(shape, causal_skip)


def model_flops_per_step(shape: GPTShape, tokens_per_step: int, causal_skip: bool = False) -> float:
    """Forward and backward matmul FLOPs of one optimizer step on all devices together.

    With `causal_skip` this is the number that Megatron-LM reports TFLOP/s with.
    """
    return 3 * forward_flops_per_token(shape, causal_skip) * tokens_per_step


def flops_6nd(num_parameters: int | float, tokens: int) -> float:
    """6 N D: the rule of thumb for FLOPs of forward and backward, all parameters counted and attention left out."""
    return 6.0 * num_parameters * tokens


def first_product_flops_per_token(shape: GPTShape) -> float:
    """Forward FLOPs of the first product (with the gate's) of feed-forward layers and experts for one token."""
    experts, width = shape.experts, _dense_layers(shape) * shape.ffn_hidden_size
    if experts is not None:
        width += experts.num_layers * (experts.top_k * experts.ffn_hidden_size + experts.shared_ffn_hidden_size)
    return 2.0 * shape.hidden_size * width * (2 if shape.gated else 1)


def executed_flops_per_step(
    shape: GPTShape,
    tokens_per_step: int,
    causal_skip: bool = False,
    recompute: str = "none",
    scores_again: bool = False,
    recompute_mlp: bool = False,
) -> float:
    """Matmul FLOPs that a step really executes on all devices together.

    `scores_again`: attention's backward multiplies queries and keys again, instead of keeping s x s probabilities. So
    does every attention here, but what cuDNN multiplies inside of itself is not counted.

    `recompute` is "none", "selective" (norms and activations run again, no product; with `recompute_mlp` the first
    product of feed-forward layers and experts) or "full" (the forward of every layer runs again; the output layer is
    kept).

    Raises:
        ValueError: `recompute` is none of the three.
    """
    layers = 2 * _layer_weights(shape)
    attention = attention_flops_per_token(shape, causal_skip)
    first = first_product_flops_per_token(shape) if recompute_mlp else 0.0
    again = {"none": 0.0, "selective": first, "full": layers + attention}
    if recompute not in again:
        raise ValueError(f"recompute {recompute!r}: expected one of {', '.join(again)}")
    scores = attention / 2 if scores_again else 0.0
    return model_flops_per_step(shape, tokens_per_step, causal_skip) + (again[recompute] + scores) * tokens_per_step


def mfu(model_flops: float, step_seconds: float, num_devices: int, peak_flops: float) -> float:
    """Model FLOPs utilisation: the share of the devices' peak that the model's own FLOPs take, 0 to 1.

    Args:
        model_flops: FLOPs of one step on all devices (`model_flops_per_step`), without recompute.
        step_seconds: seconds of one step.
        num_devices: devices that ran it.
        peak_flops: peak FLOP/s of one device, in the dtype of the matmuls, without sparsity.

    Raises:
        ValueError: a divisor is not positive.
    """
    if min(step_seconds, num_devices, peak_flops) <= 0:
        raise ValueError(
            f"mfu: expected positive numbers, got step_seconds {step_seconds}, num_devices {num_devices}, "
            f"peak_flops {peak_flops}"
        )
    return model_flops / (step_seconds * num_devices * peak_flops)
