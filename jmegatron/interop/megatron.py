"""Megatron-Core's names and layouts, and its checkpoints into ours and back, one piece at a time. No communication.

Source: Megatron-LM models/gpt/gpt_layer_specs.py, transformer/{attention,mlp,transformer_block}.py,
optimizer/distrib_optimizer.py. Names are those of a model whose layers are counted ("decoder.layers.3.mlp....", as
`state_dict` has them); a checkpoint stacks the layers and renames the norms, see `stored`.

    linear                 [out, in], ours [*in, *out]
    linear_qkv             rows in blocks, one a query group: its query heads, its key, its value
    linear_fc1 (gated)     gate rows, then up rows; ours [hidden, 2, ffn]
    vocabulary             padded rows; ours has the true ones
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmegatron import partition
from jmegatron.checkpoint.streaming import StreamingReader, StreamingWriter
from jmegatron.config.megatron_flags import SINGLE_VALUES
from jmegatron.errors import UsageError
from jmegatron.interop import torch_dist
from jmegatron.interop.pieces import Arrays, Piece, Slot, check_finite, flat, linear, same, slots
from jmegatron.interop.torch_dist import StoredTensor, TorchDistReader
from jmegatron.layers.attention import AttentionSettings
from jmegatron.models.gpt import GPTSettings, gpt_specs
from jmegatron.models.transformer import LayerParallel, partial_stacks
from jmegatron.optimizer.optimizers import OptimizerSettings, build_optimizer
from jmegatron.optimizer.schedules import LearningRateSchedule, WeightDecaySchedule

_WORD = "embedding.word_embeddings.weight"
_POSITION = "embedding.position_embeddings.weight"
_OUTPUT = "output_layer.weight"
_MODEL = {"final_norm/scale": "decoder.final_layernorm.weight", "final_norm/bias": "decoder.final_layernorm.bias"}
# Our path in a layer -> (name in a layer, leading dims of ours that are inputs; 0: flat).
_LAYER = {
    "input_norm/scale": ("input_layernorm.weight", 0),
    "input_norm/bias": ("input_layernorm.bias", 0),
    "mlp_norm/scale": ("pre_mlp_layernorm.weight", 0),
    "mlp_norm/bias": ("pre_mlp_layernorm.bias", 0),
    "attention/query_norm/scale": ("self_attention.q_layernorm.weight", 0),
    "attention/query_norm/bias": ("self_attention.q_layernorm.bias", 0),
    "attention/key_norm/scale": ("self_attention.k_layernorm.weight", 0),
    "attention/key_norm/bias": ("self_attention.k_layernorm.bias", 0),
    "attention/output/kernel": ("self_attention.linear_proj.weight", 2),
    "attention/output/bias": ("self_attention.linear_proj.bias", 0),
    "mlp/up/kernel": ("mlp.linear_fc1.weight", 1),
    "mlp/up/bias": ("mlp.linear_fc1.bias", 0),
    "mlp/down/kernel": ("mlp.linear_fc2.weight", 1),
    "mlp/down/bias": ("mlp.linear_fc2.bias", 0),
    "moe/router/kernel": ("mlp.router.weight", 1),
    "moe/router/expert_bias": ("mlp.router.expert_bias", 0),
    "moe/shared/up/kernel": ("mlp.shared_experts.linear_fc1.weight", 1),
    "moe/shared/up/bias": ("mlp.shared_experts.linear_fc1.bias", 0),
    "moe/shared/down/kernel": ("mlp.shared_experts.linear_fc2.weight", 1),
    "moe/shared/down/bias": ("mlp.shared_experts.linear_fc2.bias", 0),
}
# The same for parameters with a leading dim of experts, which a checkpoint holds stacked behind the layers.
_EXPERTS = {
    "moe/experts/up/kernel": ("mlp.experts.experts.linear_fc1.weight", 1),
    "moe/experts/up/bias": ("mlp.experts.experts.linear_fc1.bias", 0),
    "moe/experts/down/kernel": ("mlp.experts.experts.linear_fc2.weight", 1),
    "moe/experts/down/bias": ("mlp.experts.experts.linear_fc2.bias", 0),
}
# Not trained: a checkpoint has them in fp32 whatever the model's type, and the optimizer keeps no state of them.
_BUFFERS = ("mlp.router.expert_bias",)
# A checkpoint calls the norms by what follows them, since Transformer Engine fuses the two.
_STORED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_EXTRA_STATES = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
_MASTERS = ("param", "fp32_param", "master")
"""What the fp32 weights are called in the optimizer's state: by the distributed optimizer, by older versions of it and
the plain one, by some others."""
_MOMENTS = {"exp_avg": "optimizer/0/mu", "exp_avg_sq": "optimizer/0/nu"}
_FLAT = re.compile(r"optimizer\.(distributed\.)?.*(bucket_idx_|gbuf_idx_|dp_group_idx_)")
_MOST_NAMED = 8


# ---- names and layouts --------------------------------------------------------------------------------------------
def shapes(settings: GPTSettings) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each of our parameters as a checkpoint holds them."""
    specs = partition.named_specs(gpt_specs(settings, LayerParallel()))
    return {path: partition.canonical(spec, {}).shape for path, spec in specs}


def pieces(settings: GPTSettings, vocabulary_rows: int | None = None) -> list[Piece]:
    """Returns how a model's parameters correspond to Megatron-Core's; each piece has one tensor of theirs.

    Args:
      settings: the model.
      vocabulary_rows: of theirs, padding included; None: `settings.padded_vocab_size`.

    Raises:
      UsageError: fewer rows than tokens; padding that takes part in the softmax has another size; a part of the model
        has no counterpart.
    """
    rows = settings.padded_vocab_size if vocabulary_rows is None else vocabulary_rows
    our_shapes = shapes(settings)
    found = []
    for path, shape in our_shapes.items():
        if path == "embedding/word/embedding":
            found.append(_vocabulary(Slot(path), _WORD, shape, rows, settings))
        elif path == "output/kernel":
            found.append(_vocabulary(Slot(path), _OUTPUT, shape, rows, settings))
        elif path == "embedding/position/embedding":
            found.append(same(Slot(path), _POSITION, shape))
        elif path in _MODEL:
            found.append(flat(Slot(path), _MODEL[path], shape))
        elif not path.startswith("layers/"):
            raise _no_counterpart(path)
    stacks = partial_stacks(settings.settings_at(settings.num_layers))
    for layer in range(settings.num_layers):
        for path, shape in our_shapes.items():
            if not path.startswith("layers/"):
                continue
            present = stacks.get(path.split("/")[1], (True,) * settings.num_layers)
            if present[layer]:
                found += _layer_pieces(path, layer, sum(present[:layer]), shape[1:], our_shapes, settings)
    return found


def stored(name: str) -> Slot:
    """Returns where a checkpoint holds a tensor: its key, and the index of the leading dim if layers are stacked."""
    match = re.fullmatch(r"decoder\.layers\.([0-9]+)\.(.+)", name)
    if match is None:
        return Slot(name)
    rest = match[2]
    for own, theirs in _STORED.items():
        rest = theirs + rest.removeprefix(own) if rest.startswith(own) else rest
    return Slot(f"decoder.layers.{rest}", int(match[1]))


def _is_buffer(piece: Piece) -> bool:
    return piece.theirs[0].endswith(_BUFFERS)


def _no_counterpart(path: str) -> UsageError:
    return UsageError(
        f"{path}: got a parameter whose name at Megatron-Core is not known here, expected those of a GPT without"
        " experts; fix: convert a model without it"
    )


def _layer_pieces(
    path: str, layer: int, index: int, shape: tuple[int, ...], our_shapes: Mapping[str, Any], settings: GPTSettings
) -> list[Piece]:
    """Returns the piece of a parameter of a layer, which is number `index` of those that have it."""
    own = path.removeprefix("layers/")
    if own.startswith("attention/key_value/"):
        return []  # with the queries
    if own.startswith("attention/query/"):
        leaf = own.removeprefix("attention/query/")
        name = f"decoder.layers.{layer}.self_attention.linear_qkv.{'weight' if leaf == 'kernel' else 'bias'}"
        other = f"layers/attention/key_value/{leaf}"
        slots = (Slot(path, index), Slot(other, index))
        return [_qkv(slots, name, (shape, our_shapes[other][1:]), settings.layer.attention)]
    if own in _EXPERTS:
        name, num_inputs = _EXPERTS[own]
        return [_experts(Slot(path, index), f"decoder.layers.{layer}.{name}", shape, num_inputs)]
    if own not in _LAYER:
        raise _no_counterpart(path)
    name, num_inputs = _LAYER[own]
    slot, name = Slot(path, index), f"decoder.layers.{layer}.{name}"
    return [linear(slot, name, shape, num_inputs) if num_inputs else flat(slot, name, shape)]


def _experts(slot: Slot, name: str, shape: tuple[int, ...], num_inputs: int) -> Piece:
    """Returns the piece of all experts' weights or biases of a layer, [experts, out, in] there."""
    one = (linear if num_inputs else flat)(slot, name, shape[1:], *([num_inputs] if num_inputs else []))

    def each(how: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
        return lambda arrays: (np.stack([how((array,))[0] for array in arrays[0]]),)

    their_shape = (shape[0], *one.their_shapes[0])
    return Piece((slot,), (name,), (their_shape,), each(one.to_ours), each(one.to_theirs))


def _vocabulary(slot: Slot, name: str, shape: tuple[int, ...], rows: int, settings: GPTSettings) -> Piece:
    """Returns the piece of a table with a row a token, the output layer's transposed."""
    transposed = name == _OUTPUT
    count, hidden = shape[::-1] if transposed else shape
    if rows < count or (rows != count and not settings.mask_padded_vocab):
        raise UsageError(
            f"{name}: got {rows} rows, expected {'at least ' if settings.mask_padded_vocab else ''}{count}, the size of"
            " the vocabulary; fix: set --vocab-size and --padded-vocab-size to those of the checkpoint's model"
        )

    def to_ours(theirs: Arrays) -> Arrays:
        cut = theirs[0][:count]
        return (cut.T if transposed else cut,)

    def to_theirs(ours: Arrays) -> Arrays:
        table = ours[0].T if transposed else ours[0]
        return (np.concatenate([table, np.zeros((rows - count, hidden), table.dtype)]),)

    return Piece((slot,), (name,), ((rows, hidden),), to_ours, to_theirs)


def _qkv(slots: tuple[Slot, Slot], name: str, shapes: tuple[Any, Any], s: AttentionSettings) -> Piece:
    """Returns the piece of the joint projection: rows stand in blocks of one group, its queries, its key, its value."""
    query_shape, key_value_shape = map(tuple, shapes)
    is_matrix = len(query_shape) == 3
    rest = (s.hidden_size,) if is_matrix else ()
    rows = (s.num_heads + 2 * s.num_kv_heads) * s.head_dim
    inputs_first = (lambda a: np.moveaxis(a, -1, 0)) if is_matrix else (lambda a: a)
    inputs_last = (lambda a: np.moveaxis(a, 0, -1)) if is_matrix else (lambda a: a)

    def to_ours(theirs: Arrays) -> Arrays:
        blocks = theirs[0].reshape(s.num_kv_heads, -1, s.head_dim, *rest)
        query = blocks[:, :-2].reshape(s.num_heads, s.head_dim, *rest)
        return inputs_first(query).reshape(query_shape), inputs_first(blocks[:, -2:]).reshape(key_value_shape)

    def to_theirs(ours: Arrays) -> Arrays:
        query, key_value = map(inputs_last, ours)
        query = query.reshape(s.num_kv_heads, -1, s.head_dim, *rest)
        return (np.concatenate([query, key_value], axis=1).reshape(rows, *rest),)

    return Piece(slots, (name,), ((rows, *rest),), to_ours, to_theirs)


def _stored_shapes(found: Iterable[Piece]) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor of a checkpoint."""
    layers: dict[str, set[int | None]] = collections.defaultdict(set)
    own: dict[str, tuple[int, ...]] = {}
    for piece in found:
        slot = stored(piece.theirs[0])
        layers[slot.path].add(slot.layer)
        own[slot.path] = piece.their_shapes[0]
    return {key: shape if None in layers[key] else (len(layers[key]), *shape) for key, shape in own.items()}


# ---- options ------------------------------------------------------------------------------------------------------
_SAME_OPTIONS = (
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "ffn_hidden_size", "kv_channels"),
    *("max_position_embeddings", "rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling"),
    *("rotary_seq_len_interpolation_factor", "rope_scaling_factor", "normalization", "norm_epsilon"),
    *("apply_layernorm_1p", "add_qkv_bias", "untie_embeddings_and_output_weights", "qk_layernorm"),
    *("hidden_dropout", "attention_dropout", "init_method_std", "vocab_size", "padded_vocab_size"),
)
# Only with experts: the arguments have their defaults in dense models as well.
_EXPERT_OPTIONS = (
    *("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_topk"),
    *("moe_router_pre_softmax", "moe_router_score_function", "moe_router_enable_expert_bias"),
    *("moe_router_bias_update_rate", "moe_router_num_groups", "moe_router_group_topk"),
    *("moe_router_topk_scaling_factor", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
    *("moe_router_dtype", "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity"),
)
# What changes the model and is not there here: argument -> values that mean that it is not used.
_ABSENT: Mapping[str, tuple[Any, ...]] = {
    "moe_layer_freq": (None, 1),
    "moe_apply_probs_on_input": (None, False),
    "moe_input_jitter_eps": (0, 0.0, None),
    "multi_latent_attention": (None, False),
    "mtp_num_layers": (None, 0),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "is_hybrid_model": (None, False),
    "hybrid_override_pattern": (None,),
    "experimental_attention_variant": (None,),
    "no_rope_freq": (None, 0),
    "qk_l2_norm": (None, False),
    "attention_output_gate": (None, False),
    "softmax_type": (None, "vanilla"),
    "window_attn_skip_freq": (None,),
    "quick_geglu": (None, False),
    "glu_linear_offset": (None, 0, 0.0),
    "activation_func_clamp_value": (None,),
}


def options(arguments: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], Any]]) -> dict[str, Any]:
    """Returns our model options as far as a checkpoint says them, by its arguments and by its tensors.

    Args:
      arguments: `TorchDistReader.common["args"]`.
      tensors: `TorchDistReader.tensors`.

    Raises:
      UsageError: the model has what is not implemented here, or arguments and tensors contradict one another.
    """
    for name, unused in _ABSENT.items():
        value = arguments.get(name)
        if not any(type(value) is type(other) and value == other for other in unused):
            raise UsageError(
                f"args.{name}: got {value!r:.100} in the checkpoint, expected {unused[-1]!r}: the model has what is not"
                " implemented here; fix: convert a model without it"
            )
    said, seen = _options_of_arguments(arguments), _options_of_tensors(arguments, tensors)
    for name, value in seen.items():
        if said.get(name, value) != value:
            raise UsageError(
                f"{name}: the checkpoint's arguments say {said[name]!r}, its tensors {value!r}; fix: give a checkpoint"
                " whose common.pt belongs to its tensors"
            )
    return said | seen


def _options_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in arguments.items() if isinstance(value, str | int | float)}
    found = {name: plain[name] for name in _SAME_OPTIONS if name in plain}
    if plain.get("num_experts"):
        found |= _expert_options(arguments)
    heads = plain.get("num_attention_heads")
    if "group_query_attention" in plain and heads is not None:
        # Without it the number of groups, which is there all the same, does not count.
        grouped = bool(plain["group_query_attention"])
        found["num_query_groups"] = plain.get("num_query_groups", 1) if grouped else heads
        found["group_query_attention"] = found["num_query_groups"] != heads
    if "add_bias_linear" in plain:
        found["disable_bias_linear"] = not plain["add_bias_linear"]
    if "position_embedding_type" in plain:
        kind = plain["position_embedding_type"]
        if kind not in ("learned_absolute", "rope", "none"):
            raise UsageError(
                f"args.position_embedding_type: got {kind!r:.50} in the checkpoint, expected learned_absolute, rope or"
                " none; fix: convert a model with one of these"
            )
        found["position_embedding_type"] = kind
    window = arguments.get("window_size")
    if isinstance(window, tuple | list) and len(window) == 2:
        found["window_size"] = ",".join(map(str, window))
    for name, activation in (("swiglu", "swiglu"), ("squared_relu", "squared_relu"), ("openai_gelu", "gelu_tanh")):
        if plain.get(name):
            found["activation"] = activation
    if "activation" not in found and "bias_gelu_fusion" in plain and "swiglu" in plain:
        # With its fusion the reference computes the tanh form.
        fused = plain["bias_gelu_fusion"] and plain.get("add_bias_linear", True)
        found["activation"] = "gelu_tanh" if fused else "gelu_erf"
    return found


def _expert_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of mixtures of experts, without those that another one leaves without effect."""
    found = {}
    for name in _EXPERT_OPTIONS:
        value = arguments.get(name)
        if name in SINGLE_VALUES and isinstance(value, list | tuple):
            if len(value) != 1:
                raise UsageError(
                    f"args.{name}: got {value!r:.100} in the checkpoint, expected one value: {SINGLE_VALUES[name]};"
                    " fix: convert a model with one balancing type"
                )
            value = value[0]
        if isinstance(value, str | int | float):
            found[name] = value
    if not found.get("moe_router_enable_expert_bias"):
        found.pop("moe_router_bias_update_rate", None)
    if found.get("moe_router_score_function") == "sigmoid":
        found.pop("moe_router_pre_softmax", None)
    if found.get("moe_router_load_balancing_type") == "none":
        found.pop("moe_aux_loss_coeff", None)
    return found


def _options_of_tensors(
    arguments: Mapping[str, Any], tensors: Mapping[str, tuple[tuple[int, ...], Any]]
) -> dict[str, Any]:
    shape = {name.removeprefix("decoder.layers."): shape for name, (shape, _) in tensors.items()}
    attention, mlp = "self_attention.linear_", "mlp.linear_"
    for name, dims in ((_WORD, 2), (f"{attention}qkv.weight", 3), (f"{attention}proj.weight", 3)):
        if len(shape.get(name, ())) != dims:
            raise UsageError(
                f"{name}: got {list(shape[name]) if name in shape else 'no such tensor'} in the checkpoint, expected"
                f" {dims} dims; fix: give the checkpoint of a GPT whose layers are alike"
            )
    found: dict[str, Any] = {
        "num_layers": shape[f"{attention}qkv.weight"][0],
        "hidden_size": shape[_WORD][1],
        "padded_vocab_size": shape[_WORD][0],
        "untie_embeddings_and_output_weights": _OUTPUT in shape,
        "disable_bias_linear": f"{attention}proj.bias" not in shape,
        "normalization": "LayerNorm" if f"{attention}qkv.layer_norm_bias" in shape else "RMSNorm",
        "qk_layernorm": "self_attention.q_layernorm.weight" in shape,
    }
    if found["disable_bias_linear"]:
        found["add_qkv_bias"] = f"{attention}qkv.bias" in shape
    if len(shape.get(f"{mlp}fc2.weight", ())) == 3:
        found["ffn_hidden_size"] = shape[f"{mlp}fc2.weight"][2]
    experts = shape.get("mlp.experts.experts.linear_fc2.weight", ())
    if len(experts) == 4:
        found["num_experts"], found["moe_ffn_hidden_size"] = experts[1], experts[3]
        shared = shape.get("mlp.shared_experts.linear_fc2.weight", ())
        if len(shared) == 3:
            found["moe_shared_expert_intermediate_size"] = shared[2]
    if _POSITION in shape:
        found["position_embedding_type"] = "learned_absolute"
        found["max_position_embeddings"] = shape[_POSITION][0]
    heads = arguments.get("num_attention_heads")
    if type(heads) is int and heads > 0:
        head_dim, left = divmod(shape[f"{attention}proj.weight"][2], heads)
        groups = (shape[f"{attention}qkv.weight"][1] // max(1, head_dim) - heads) // 2
        if left or (heads + 2 * groups) * head_dim != shape[f"{attention}qkv.weight"][1]:
            raise UsageError(
                f"args.num_attention_heads: got {heads} in the checkpoint, which does not fit its tensors"
                f" {attention}qkv.weight {list(shape[f'{attention}qkv.weight'])} and {attention}proj.weight"
                f" {list(shape[f'{attention}proj.weight'])}; fix: give a checkpoint whose common.pt belongs to them"
            )
        found["kv_channels"], found["num_query_groups"] = head_dim, groups
        found["group_query_attention"] = groups != heads
    return found


def arguments(settings: GPTSettings) -> dict[str, Any]:
    """Returns the arguments of Megatron-Core that describe a model; the inverse of `options`.

    Raises:
      UsageError: the activation cannot be said in them.
    """
    s, a, m = settings, settings.layer.attention, settings.layer.mlp
    known = ("gelu_tanh", "gelu_erf", "swiglu", "squared_relu")
    if m.activation not in known:
        raise UsageError(
            f"--activation {m.activation}: Megatron-LM has no option for it, expected one of {', '.join(known)}; fix:"
            " export a model with one of these"
        )
    scaling = s.rotary_scaling
    return {
        "num_layers": s.num_layers,
        "hidden_size": s.hidden_size,
        "ffn_hidden_size": m.ffn_hidden_size,
        "num_attention_heads": a.num_heads,
        "group_query_attention": a.num_kv_heads != a.num_heads,
        "num_query_groups": a.num_kv_heads,
        "kv_channels": a.head_dim,
        "max_position_embeddings": s.max_positions,
        "position_embedding_type": s.position_embedding,
        "add_position_embedding": s.position_embedding == "learned_absolute",
        "rotary_base": s.rotary_base,
        "rotary_percent": s.rotary_dim / a.head_dim if s.rotary_dim else 1.0,
        "rotary_interleaved": a.rotary_interleaved,
        "rotary_seq_len_interpolation_factor": None if s.rotary_interpolation == 1.0 else s.rotary_interpolation,
        "use_rope_scaling": scaling is not None,
        "rope_scaling_factor": 8.0 if scaling is None else scaling.factor,
        "window_size": None if a.window is None else (a.window, 0),
        "normalization": s.layer.normalization,
        "norm_epsilon": s.layer.norm_eps,
        "apply_layernorm_1p": s.layer.zero_centered_norm,
        "swiglu": m.activation == "swiglu",
        "squared_relu": m.activation == "squared_relu",
        "openai_gelu": m.activation == "gelu_tanh" and not m.use_bias,
        "bias_gelu_fusion": m.activation == "gelu_tanh" and m.use_bias,
        "add_bias_linear": m.use_bias,
        "add_qkv_bias": a.use_qkv_bias and not m.use_bias,
        "untie_embeddings_and_output_weights": not s.tied,
        "qk_layernorm": a.qk_norm is not None,
        "hidden_dropout": s.layer.hidden_dropout,
        "attention_dropout": a.dropout,
        "init_method_std": s.init_std,
        "vocab_size": s.vocab_size,
        "padded_vocab_size": s.padded_vocab_size,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        **_expert_arguments(settings),
    }


def _expert_arguments(settings: GPTSettings) -> dict[str, Any]:
    moe = settings.layer.moe
    if moe is None:
        return {"num_experts": None}
    router = moe.router
    return {
        "num_experts": router.num_experts,
        "moe_ffn_hidden_size": moe.experts.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size,
        "moe_router_topk": router.top_k,
        "moe_router_pre_softmax": router.pre_softmax,
        "moe_router_score_function": router.score_function,
        "moe_router_enable_expert_bias": router.expert_bias,
        "moe_router_bias_update_rate": router.bias_update_rate,
        "moe_router_num_groups": router.num_groups,
        "moe_router_group_topk": router.group_top_k,
        "moe_router_topk_scaling_factor": router.scaling_factor,
        "moe_router_dtype": "fp32" if router.fp32 else None,
        "moe_router_load_balancing_type": router.balancing,
        "moe_aux_loss_coeff": router.coefficient,
        "moe_z_loss_coeff": router.z_coefficient or None,
        "moe_expert_capacity_factor": moe.capacity_factor,
        "moe_token_drop_policy": moe.drop_policy,
        "moe_pad_expert_input_to_capacity": moe.pad_to_capacity,
        "moe_layer_freq": 1,
    }


# ---- import -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class _Move:
    """A piece of one kind of our arrays: parameters, or a moment of the optimizer."""

    piece: Piece
    ours: str
    """Prefix of our names, such as "parameters"."""
    theirs: str
    """Prefix of their keys, such as "" or "optimizer.state.exp_avg."."""

    @property
    def source(self) -> Slot:
        """Where a checkpoint of theirs holds it."""
        slot = stored(self.piece.theirs[0])
        return Slot(self.theirs + slot.path, slot.layer)

    @property
    def targets(self) -> list[Slot]:
        """Which parts of our arrays it fills."""
        return [Slot(f"{self.ours}/{slot.path}", slot.layer) for slot in self.piece.ours]


@dataclasses.dataclass(frozen=True)
class ImportPlan:
    """What `import_checkpoint` will do; all names and shapes have been checked."""

    layout: dict[str, tuple[tuple[int, ...], np.dtype]]
    """Our arrays, for `StreamingWriter`."""
    lines: list[str]
    """"theirs -> ours" for each tensor, and what is left out knowingly."""
    iteration: int
    updates: int
    """Of the optimizer; the iteration where its state is not imported."""
    samples: int
    """That the schedules have counted."""
    zeros: tuple[str, ...]
    """Our arrays that are zero, since a checkpoint has no counterpart."""
    moves: tuple[_Move, ...] = dataclasses.field(repr=False)


def plan_import(reader: TorchDistReader, settings: GPTSettings, *, optimizer: bool = False) -> ImportPlan:
    """Returns how a checkpoint becomes one of ours: parameters in fp32, and with `optimizer` adam's state.

    With the optimizer's state the parameters are its fp32 weights, of which the model's own are copies. Buffers, of
    which it keeps nothing, are the model's, and their moments zero.

    Raises:
      UsageError: a tensor is missing, too many, or of another shape than the model asks for; the optimizer's state is
        not there by name.
    """
    where, names = str(reader.folder), set(reader.tensors)
    _check_experts(where, names, settings)
    rows = reader.tensors[_WORD][0][0] if _WORD in names and reader.tensors[_WORD][0] else None
    found = pieces(settings, rows)
    weights = {name for name in names if not name.startswith("optimizer.")}
    _check_names(where, reader, "", weights, found)
    lines: list[str] = []
    zeros: tuple[str, ...] = ()
    moves = [_Move(piece, "parameters", "") for piece in found]
    layout: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        f"parameters/{path}": (shape, np.dtype(np.float32)) for path, shape in shapes(settings).items()
    }
    iteration = _count(reader.common.get("iteration"), f"{where}: common: iteration")
    updates = iteration
    if optimizer:
        kinds = _optimizer_kinds(where, reader, names - weights)
        trained = [piece for piece in found if not _is_buffer(piece)]
        buffers = [piece for piece in found if _is_buffer(piece)]
        for prefix in kinds.values():
            own = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
            _check_names(where, reader, prefix, own, trained)
        moves = [_Move(piece, ours, prefix) for ours, prefix in kinds.items() for piece in trained]
        moves += [_Move(piece, "parameters", "") for piece in buffers]
        paths = dict.fromkeys(slot.path for slot in slots(buffers))
        zeros = tuple(f"{moment}/{path}" for moment in _MOMENTS.values() for path in paths)
        lines += [f"(no state of a buffer) -> {name}, zero" for name in zeros]
        for moment in _MOMENTS.values():
            layout |= {f"{moment}/{path}": (shape, np.dtype(np.float32)) for path, shape in shapes(settings).items()}
        layout |= {name: ((), np.dtype(np.int32)) for name in _counters(settings)}
        updates = _num_updates(where, reader.common)
        copies = sorted(weights - _stored_shapes(buffers).keys())
        lines += [f"{name} -> (a copy of {kinds['parameters']}{name})" for name in copies]
    else:
        lines += [f"{name} -> (left out: no optimizer)" for name in sorted(names - weights)]
    layout["step"] = ((), np.dtype(np.int32))
    lines = [f"{move.source} -> {', '.join(map(str, move.targets))}" for move in moves] + lines
    lines += [f"{name} -> (left out: {_why_left_out(name)})" for name in sorted(reader.objects)]
    _assert_each_once(moves, {name: entry for name, entry in layout.items() if name not in zeros})
    scheduler = reader.common.get("opt_param_scheduler")
    samples = scheduler.get("num_steps") if isinstance(scheduler, dict) else None
    if samples is None:
        samples = reader.common.get("args", {}).get("consumed_train_samples", 0)
    samples = _count(samples, f"{where}: common: samples")
    return ImportPlan(layout, lines, iteration, updates, samples, zeros, tuple(moves))


def import_checkpoint(reader: TorchDistReader, plan: ImportPlan, writer: StreamingWriter) -> None:
    """Writes what `plan_import` has planned, and has not been written yet; no more than one piece is in memory.

    The caller commits.

    Raises:
      UsageError: a tensor cannot be read, is not finite, or a piece cannot be written.
    """
    for move in plan.moves:
        targets = move.targets
        if all(writer.is_written(slot.path, slot.layer) for slot in targets):
            continue
        theirs = reader.read(move.source.path, move.source.layer).astype(np.float32)
        check_finite(str(move.source), theirs, reader.folder)
        for slot, value in zip(targets, move.piece.to_ours((theirs,)), strict=True):
            if not writer.is_written(slot.path, slot.layer):
                writer.write(slot.path, np.ascontiguousarray(value), slot.layer)
    for name in plan.zeros:
        if not writer.is_written(name):
            writer.write(name, np.zeros(*plan.layout[name]))
    for name, (shape, dtype) in plan.layout.items():
        if dtype == np.int32 and not shape and not writer.is_written(name):
            writer.write(name, np.array(plan.iteration if name == "step" else plan.updates, np.int32))


def _check_experts(where: str, names: set[str], settings: GPTSettings) -> None:
    """Checks that experts are on both sides or on none, and in all layers."""
    experts = sorted(name for name in names if ".mlp.experts." in name or ".mlp.router." in name)
    if experts and settings.layer.moe is None:
        raise UsageError(
            f"{where}: got {len(experts)} tensors of experts, such as {experts[0]}, expected none: the model is dense;"
            " fix: give --num-experts and the other options of the checkpoint's model"
        )
    if settings.place_settings and partial_stacks(settings.place_settings):
        raise UsageError(
            f"{where}: layers with and without experts (--moe-layer-freq) are not stacked in Megatron-Core's"
            " checkpoints, which is not implemented here; fix: convert a model whose layers are alike"
        )


def _check_names(where: str, reader: TorchDistReader, prefix: str, names: set[str], found: list[Piece]) -> None:
    """Checks that the tensors below a prefix are those of the model."""
    expected = _stored_shapes(found)
    problems = []
    for name in sorted(names | expected.keys()):
        if name not in names:
            problems.append(f"{prefix}{name} is missing, expected {list(expected[name])}")
            continue
        shape, dtype = reader.tensors[prefix + name]
        if name not in expected:
            problems.append(f"{prefix}{name} {list(shape)} has no place in the model")
        elif shape != expected[name]:
            problems.append(f"{prefix}{name} is {list(shape)}, expected {list(expected[name])}")
        elif not jnp.issubdtype(dtype, jnp.floating):
            problems.append(f"{prefix}{name} has dtype {dtype}, expected a floating point number")
    _raise_problems(where, problems, "set the options of the model to those that the checkpoint was trained with")


def _raise_problems(where: str, problems: Sequence[str], fix: str) -> None:
    if problems:
        more = f"; and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise UsageError(f"{where}: does not fit the model: {'; '.join(problems[:_MOST_NAMED])}{more}; fix: {fix}")


def _optimizer_kinds(where: str, reader: TorchDistReader, names: set[str]) -> dict[str, str]:
    """Returns the prefix of their keys by that of ours: fp32 weights and both moments.

    Raises:
      UsageError: they are not there by the parameters' names.
    """
    flat_names = sorted(name for name in names if _FLAT.match(name))
    if flat_names:
        raise UsageError(
            f"{where}: the optimizer's state lies in flat buffers ({flat_names[0]}), whose layout depends on the run"
            " (dp_reshardable), expected it by name; fix: save it with --dist-ckpt-optim-fully-reshardable, or import"
            " the weights without the optimizer"
        )
    there = {name.split(".")[2] for name in names if name.startswith("optimizer.state.") and name.count(".") > 2}
    masters = sorted(there & set(_MASTERS))
    if len(masters) != 1 or there != {*masters, *_MOMENTS} or any(not n.startswith("optimizer.state.") for n in names):
        raise UsageError(
            f"{where}: the optimizer's state is {sorted(there) or 'not there'}, expected {list(_MOMENTS)} of adam and"
            f" fp32 weights (one of {', '.join(_MASTERS)}); fix: import the weights without the optimizer"
        )
    return {"parameters": f"optimizer.state.{masters[0]}."} | {
        ours: f"optimizer.state.{theirs}." for theirs, ours in _MOMENTS.items()
    }


def _count(value: Any, where: str) -> int:
    if type(value) not in (int, float) or not 0 <= value < 2**31 or value != int(value):
        raise UsageError(
            f"{where}: got {value!r:.50}, expected a count; fix: give a checkpoint that Megatron-Core wrote"
        )
    return int(value)


def _num_updates(where: str, common: Mapping[str, Any]) -> int:
    groups: list[Any] = []
    state = common.get("optimizer")
    for _ in range(4):  # one or two dicts deep, as versions differ
        if isinstance(state, dict):
            groups = state.get("param_groups", groups)
            state = state.get("optimizer")
    steps = {group.get("step") for group in groups if isinstance(group, dict)} if isinstance(groups, list) else set()
    if len(steps) != 1:
        raise UsageError(
            f"{where}: common: the optimizer's param_groups say step {sorted(map(str, steps)) or 'nowhere'}, expected"
            " one number of updates; fix: import the weights without the optimizer"
        )
    return _count(steps.pop(), f"{where}: common: step of the optimizer's param_groups")


def _counters(settings: GPTSettings) -> list[str]:
    """Returns the names of all counters of adam's state: each counts updates."""
    specs = partition.map_specs(lambda s: partition.canonical(s, {}), gpt_specs(settings, LayerParallel()))
    schedule = LearningRateSchedule("constant", peak=0.0, minimum=0.0, warmup=0.0, decay=1.0)
    arrays = partition.map_specs(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), specs)
    state = jax.eval_shape(build_optimizer(OptimizerSettings(), schedule, specs).init, arrays)
    names = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        if not leaf.shape:
            keys = (getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))) for key in path)
            names.append("/".join(map(str, ("optimizer", *keys))))
    return names


def _why_left_out(name: str) -> str:
    if "._extra_state" in name:
        return "state of 8-bit arithmetic"
    return "state of torch's random numbers" if name.startswith("rng_state") else "no tensor"


def _assert_each_once(moves: Sequence[_Move], layout: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
    filled = collections.Counter(slot for move in moves for slot in move.targets)
    assert set(filled.values()) == {1}
    assert len({move.source for move in moves}) == len(moves)
    for name, (shape, dtype) in layout.items():
        if dtype == np.float32:
            assert Slot(name) in filled or all(Slot(name, n) in filled for n in range(shape[0])), name


# ---- export -------------------------------------------------------------------------------------------------------
def export_checkpoint(
    reader: StreamingReader,
    settings: GPTSettings,
    folder: str | Path,
    iteration: int,
    *,
    common: Mapping[str, Any] | None = None,
    optimizer: bool = False,
    dtype: Any = np.float32,
) -> list[str]:
    """Writes one of our checkpoints as Megatron-Core's, no more than one piece in memory; returns "ours -> theirs".

    Args:
      reader: ours.
      settings: the model, with the padding that the vocabulary gets.
      folder: of all iterations.
      iteration: this one.
      common: what goes into common.pt besides arguments of the model and the iteration, see `optimizer_common`; "args"
        in it add to the arguments.
      optimizer: write adam's state as well ("fully reshardable").
      dtype: of the model's weights; buffers and the optimizer's state are fp32.

    Raises:
      UsageError: torch is missing; an array is missing, too many, or of another shape than the model asks for; the
        folder holds a checkpoint; it cannot be written.
    """
    found = pieces(settings)
    prefixes = {"": "parameters"}
    if optimizer:
        prefixes |= {"optimizer.state.param.": "parameters"}
        prefixes |= {f"optimizer.state.{theirs}.": ours for theirs, ours in _MOMENTS.items()}
    _check_ours(reader, settings, list(dict.fromkeys(prefixes.values())))
    expected = _stored_shapes(found)
    lines, tensors = [], []
    for prefix, ours in prefixes.items():
        moves: dict[str, dict[int | None, _Move]] = collections.defaultdict(dict)
        for move in (_Move(piece, ours, prefix) for piece in found if not (prefix and _is_buffer(piece))):
            moves[move.source.path][move.source.layer] = move
            lines.append(f"{', '.join(map(str, move.targets))} -> {move.source}")
        for key, own in moves.items():
            in_fp32 = prefix or any(_is_buffer(move.piece) for move in own.values())
            kind = np.dtype(np.float32) if in_fp32 else np.dtype(dtype)
            read = functools.partial(_read_theirs, reader, own, kind)
            tensors.append(StoredTensor(key, expected[key.removeprefix(prefix)], kind, read, None not in own))
    given = dict(common or {})
    content = {
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "content_metadata": {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            **({"distrib_optim_sharding_type": "fully_reshardable"} if optimizer else {}),
        },
        **given,
        "args": {**arguments(settings), "iteration": iteration, **given.get("args", {})},
    }
    layers = settings.num_layers
    objects = {
        f"decoder.layers.{module}._extra_state/shard_{n}_{layers}": [None]
        for module in _EXTRA_STATES
        for n in range(layers)
    }
    torch_dist.write(folder, iteration, tensors, content, objects)
    return lines


def _read_theirs(reader: StreamingReader, moves: Mapping[int | None, _Move], dtype: Any, index: int | None) -> Any:
    move = moves[index]
    ours = tuple(reader.read(slot.path, slot.layer) for slot in move.targets)
    for slot, values in zip(move.targets, ours, strict=True):
        check_finite(str(slot), values, "the checkpoint")
    return move.piece.to_theirs(ours)[0].astype(dtype)


def _check_ours(reader: StreamingReader, settings: GPTSettings, prefixes: list[str]) -> None:
    problems = []
    for prefix in prefixes:
        expected = {f"{prefix}/{path}": shape for path, shape in shapes(settings).items()}
        there = {name for name in reader.arrays if name.startswith(f"{prefix}/")}
        for name in sorted(expected.keys() | there):
            if name not in there:
                problems.append(f"{name} is missing, expected {list(expected[name])}")
            elif name not in expected:
                problems.append(f"{name} {list(reader.arrays[name].shape)} has no place in the model")
            elif tuple(reader.arrays[name].shape) != expected[name]:
                problems.append(f"{name} is {list(reader.arrays[name].shape)}, expected {list(expected[name])}")
    _raise_problems("the checkpoint", problems, "convert it with the options that it was trained with")


def optimizer_common(settings: OptimizerSettings, schedule: LearningRateSchedule, updates: int) -> dict[str, Any]:
    """Returns the part of common.pt that says how adam and its schedules stand after so many updates.

    Raises:
      UsageError: another optimizer than adam.
    """
    if settings.name != "adam":
        raise UsageError(
            f"--optimizer {settings.name}: its state has no place in a checkpoint of Megatron-Core, expected adam; fix:"
            " export the weights without the optimizer"
        )
    decay = settings.weight_decay
    if not isinstance(decay, WeightDecaySchedule):
        decay = WeightDecaySchedule(style="constant", start=decay, end=decay, steps=schedule.decay)
    count = np.asarray(updates)
    group = {
        "is_expert_parallel": False,
        "default_config": True,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": schedule.peak,
        "min_lr": schedule.minimum,
        "lr": float(schedule.in_float64(count)),
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
        **dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False),
        **dict.fromkeys(("foreach", "fused")),
        "decoupled_weight_decay": True,
        "step": float(updates),
    }
    groups = [{**group, "wd_mult": mult, "weight_decay": mult * float(decay.in_float64(count))} for mult in (1.0, 0.0)]
    return {
        "optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"},
        "opt_param_scheduler": {
            "max_lr": schedule.peak,
            "lr_warmup_steps": _whole(schedule.warmup),
            "num_steps": schedule.position.after(updates, schedule.samples_per_update).samples,
            "lr_decay_style": schedule.style,
            "lr_decay_steps": _whole(schedule.decay),
            "min_lr": schedule.minimum,
            "start_wd": decay.start,
            "end_wd": decay.end,
            "wd_incr_style": decay.style,
            "wd_incr_steps": _whole(decay.steps),
        },
    }


def _whole(samples: float) -> float | int:
    return int(samples) if samples == int(samples) else samples
