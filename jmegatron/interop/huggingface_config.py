"""config.json of Hugging Face's models <-> options of ours. No communication, no jax.

Every field of a config.json is mapped, or checked to say what is done here anyway, or known not to change what a
language model computes, or refused by its name: a field that nobody knows may change the computation.

`options_of` gives every option of the section `model` but those that a model does not fix (`FREE_OPTIONS`), in one
spelling, so that two models compute the same if and only if their options are equal.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jmegatron.config import Config, ModelConfig, attention_window, moe_layers
from jmegatron.config.options import problem
from jmegatron.interop.safetensors_folder import DType, read_json

Options = dict[str, Any]

FREE_OPTIONS = (
    "seq_length",
    "make_vocab_size_divisible_by",
    "padded_vocab_size",
    "moe_router_dtype",
    "moe_receive_bound_factor",
)
"""Options of the section `model` that a model does not fix."""
_TRAINING_OPTIONS = (
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_bias_update_rate",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "moe_pad_expert_input_to_capacity",
)
"""Options that a trained model does not depend on; not every family's config.json has room for them."""

_DTYPES: dict[str, DType] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_MOST_LAYERS = 10_000
"""Far beyond any model: a file that says more would only fill the memory with names."""

_PLAIN = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu_erf",
    "relu2": "squared_relu",
    "quick_gelu": "quick_gelu",
}
_GATED = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu_erf",
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
    "gelu_fast": "geglu",
}
"""Their name of the activation -> ours; where ours has several names, the first one is written."""

_NEUTRAL: dict[str, Any] = {
    "add_cross_attention": False,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cross_attention_hidden_size": None,
    "final_logit_softcapping": None,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "pretraining_tp": 1,
    "pruned_heads": {},
    "reorder_and_upcast_attn": False,
    "rope_interleaved": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "router_jitter_noise": 0.0,
    "tie_encoder_decoder": False,
}
"""Fields that change the computation, and their one value that is done here (where a family does not map them)."""

_HARMLESS_NAMES = """
model_type architectures transformers_version transformers.js_config tokenizer_class torch_dtype dtype name_or_path
is_llama_config unsloth_version unsloth_fixed use_cache use_bfloat16 torchscript tf_legacy_loss return_dict
output_attentions output_hidden_states output_router_logits output_past chunk_size_feed_forward
tie_last_hidden_states is_decoder
bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id prefix decoder_start_token_id
forced_bos_token_id forced_eos_token_id id2label label2id num_labels problem_type finetuning_task
task_specific_params n_special predict_special_tokens summary_activation summary_first_dropout
summary_proj_to_labels summary_type summary_use_proj max_length min_length max_new_tokens do_sample early_stopping
num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences return_dict_in_generate
output_scores remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
"""
_HARMLESS = frozenset(_HARMLESS_NAMES.split())
"""Fields about files, token ids, generation or other heads. So are those that begin with _."""

_REASONS = {
    "quantization_config": "quantised weights are not read",
    "auto_map": "the model has code of its own",
    "per_layer_config": "layers that differ are not there",
}


# ---- reading ------------------------------------------------------------------------------------------------------
_NEEDED = object()


class _Fields:
    """The fields of a config.json; remembers which were asked for, and what is wrong."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values
        self._known: set[str] = set()
        self.problems: list[str] = []

    def refuse(self, field: str, why: str) -> None:
        """Adds a problem."""
        self.problems.append(f"{field}: {why}")

    def raw(self, field: str) -> Any:
        """Returns a value whatever it is; None where there is none."""
        self._known.add(field)
        return self._values.get(field)

    def is_null(self, field: str) -> bool:
        """Returns whether a field is there and null."""
        return field in self._values and self._values[field] is None

    def count(self, field: str, default: Any = _NEEDED, null: Any = _NEEDED) -> Any:
        """Returns a positive integer. `default` is for a missing field, `null` for one that is null."""
        good = lambda value: type(value) is int and 0 < value < 2**31  # noqa: E731
        return self._checked(field, default, null, good, "a positive integer") or 1

    def number(self, field: str, default: Any = _NEEDED, *, least: float = 0.0) -> float:
        """Returns a finite number of at least `least`."""
        return float(self._checked(field, default, _NEEDED, lambda v: _is_number(v, least), "a number"))

    def flag(self, field: str, default: bool) -> bool:
        """Returns a bool."""
        return self._checked(field, default, default, lambda value: isinstance(value, bool), "true or false")

    def choice(self, field: str, default: str, names: Mapping[str, str]) -> str:
        """Returns our name for one of theirs."""
        value = self._checked(
            field, default, _NEEDED, lambda v: isinstance(v, str) and v in names, "one of " + ", ".join(names)
        )
        return names.get(value, "")

    def _checked(self, field: str, default: Any, null: Any, good: Callable[[Any], bool], expected: str) -> Any:
        self._known.add(field)
        value = self._values.get(field, default)
        if field in self._values and value is None and null is not _NEEDED:
            return null
        if value is _NEEDED:
            self.refuse(field, f"missing, expected {expected}")
            return 0
        if field in self._values and not good(value):
            self.refuse(field, f"{_short(value)}, expected {expected}")
            return 0 if default is _NEEDED else default
        return value

    def check_the_rest(self) -> None:
        """Refuses what has not been asked for and is not known to be harmless."""
        for field, value in self._values.items():
            if field in self._known or field in _HARMLESS or field.startswith("_"):
                continue
            if field in _NEUTRAL:
                if value is not None and value != _NEUTRAL[field]:
                    self.refuse(field, f"{_short(value)}, only {_short(_NEUTRAL[field])} is done here")
            elif value is not None:
                self.refuse(field, _REASONS.get(field, f"{_short(value)}, and nothing is known of this field"))


def _is_number(value: Any, least: float = -math.inf) -> bool:
    return type(value) in (int, float) and abs(value) < 1e30 and value >= least


def _short(value: Any) -> str:
    text = {None: "null", True: "true", False: "false"}.get(value) if isinstance(value, bool | None) else None
    text = text or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def load_config_json(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the fields of a folder's config.json.

    Raises:
      ConfigError: it cannot be read.
    """
    return read_json(Path(folder) / "config.json")


def read_config(folder: str | os.PathLike[str]) -> Options:
    """Returns the options of the model in a folder.

    Raises:
      ConfigError: as `options_of`, or there is no config.json.
    """
    return options_of(load_config_json(folder), str(Path(folder) / "config.json"))


def options_of(original: Mapping[str, Any], where: str = "config.json") -> Options:
    """Returns the options of the model that a config.json describes: the section `model` without `FREE_OPTIONS`.

    Raises:
      ConfigError: the architecture is unknown, or fields say what is not done here; all of them are named.
    """
    family = _family_of(original, where)
    options, problems = _parsed(original, family)
    if problems:
        raise problem(
            "The config.json describes a model that cannot be built here.",
            where=where,
            got="; ".join(problems),
            expected=f"a model of {family.name} without these",
            fix="take another model; if a field that is named does not change the computation, remove it from the file",
        )
    return options


def _parsed(original: Mapping[str, Any], family: "_Family") -> tuple[Options, list[str]]:
    """Returns the options, and what is wrong with the fields."""
    fields = _Fields(original)
    options = {**_DEFAULTS, **family.read(fields)}
    heads, groups = options["num_attention_heads"], options["num_query_groups"]
    if heads % groups:
        fields.refuse("num_key_value_heads", f"{groups}, expected a divisor of the {heads} heads")
    if options["position_embedding_type"] == "rope" and options["kv_channels"] % 2:
        fields.refuse("head_dim", f"{options['kv_channels']}, expected an even number")
    if options["num_layers"] > _MOST_LAYERS:
        fields.refuse("num_hidden_layers", f"{options['num_layers']}, expected at most {_MOST_LAYERS}")
    options["group_query_attention"] = heads != groups
    fields.check_the_rest()
    return options, fields.problems


def stored_dtype(original: Mapping[str, Any]) -> DType:
    """Returns the dtype of the weights beside a config.json, F32 where it does not say."""
    return _DTYPES.get(str(original.get("dtype") or original.get("torch_dtype")), "F32")


_DEFAULTS: Options = {
    "position_embedding_type": "rope",
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "window_size": None,
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "hidden_dropout": 0.0,
    "mask_padded_vocab": True,
    **{
        field.name: field.default
        for field in dataclasses.fields(ModelConfig)
        if field.name.startswith(("moe_", "num_experts")) and field.name not in FREE_OPTIONS
    },
}


@dataclasses.dataclass(frozen=True)
class _Family:
    """One architecture of transformers."""

    name: str
    architectures: tuple[str, ...]
    """With its output layer, and without."""
    read: Callable[[_Fields], Options]
    write: Callable[[Options], dict[str, Any]]
    """Without architectures and model_type."""


def _family_of(original: Mapping[str, Any], where: str) -> _Family:
    name, classes = original.get("model_type"), original.get("architectures")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None or (classes is not None and classes not in [[one] for one in family.architectures]):
        experts = [field for field in original if "expert" in field]
        raise problem(
            "The architecture is not known here.",
            where=where,
            got=f"model_type {_short(name)}, architectures {_short(classes)}"
            + (f", with {', '.join(experts)}: this mixture of experts is not there yet" if experts else ""),
            expected="one of " + ", ".join(f"{key} ({one.architectures[0]})" for key, one in _FAMILIES.items()),
            fix="take a model of one of these architectures",
        )
    return family


# ---- GPT-2 ----------------------------------------------------------------------------------------------------------
def _read_gpt2(fields: _Fields) -> Options:
    hidden, heads = fields.count("n_embd"), fields.count("n_head")
    positions = fields.count("n_positions")
    if fields.raw("n_ctx") not in (None, positions):
        fields.refuse("n_ctx", f"{_short(fields.raw('n_ctx'))}, expected n_positions {positions}")
    if hidden % heads:
        fields.refuse("n_embd", f"{hidden}, expected a multiple of n_head {heads}")
    dropout = fields.number("resid_pdrop", 0.1)
    if fields.number("embd_pdrop", 0.1) != dropout:
        fields.refuse("embd_pdrop", f"{fields.raw('embd_pdrop')}, expected that of resid_pdrop, {dropout}")
    return {
        "num_layers": fields.count("n_layer"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": fields.count("n_inner", 4 * hidden, 4 * hidden),
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "max_position_embeddings": positions,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": fields.number("layer_norm_epsilon", 1e-5),
        "activation": fields.choice("activation_function", "gelu_new", _PLAIN),
        "disable_bias_linear": False,
        "untie_embeddings_and_output_weights": not fields.flag("tie_word_embeddings", True),
        "hidden_dropout": dropout,
        "attention_dropout": fields.number("attn_pdrop", 0.1),
        "init_method_std": fields.number("initializer_range", 0.02),
        "vocab_size": fields.count("vocab_size"),
    }


def _write_gpt2(options: Options) -> dict[str, Any]:
    return {
        "activation_function": _their_name(options["activation"], _PLAIN),
        "attn_pdrop": options["attention_dropout"],
        "embd_pdrop": options["hidden_dropout"],
        "initializer_range": options["init_method_std"],
        "layer_norm_epsilon": options["norm_epsilon"],
        "n_embd": options["hidden_size"],
        "n_head": options["num_attention_heads"],
        "n_inner": options["ffn_hidden_size"],
        "n_layer": options["num_layers"],
        "n_positions": options["max_position_embeddings"],
        "resid_pdrop": options["hidden_dropout"],
        "tie_word_embeddings": not options["untie_embeddings_and_output_weights"],
        "vocab_size": options["vocab_size"],
    }


def _their_name(activation: str, names: Mapping[str, str]) -> str:
    """Returns their name for ours, or ours, which they do not know."""
    return next((theirs for theirs, ours in names.items() if ours == activation), activation)


# ---- Llama and its descendants --------------------------------------------------------------------------------------
def _read_llama(fields: _Fields) -> Options:
    options = _read_common(fields)
    attention, mlp = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    if attention != mlp:
        # Ours has biases in all linear layers, in none, or in those of queries, keys and values.
        fields.refuse("attention_bias, mlp_bias", f"{_short(attention)} and {_short(mlp)}, expected equal values")
    return options | {"disable_bias_linear": not (attention or mlp)}


def _read_mistral(fields: _Fields) -> Options:
    window = None if fields.is_null("sliding_window") else fields.count("sliding_window", 4096)
    return _read_common(fields, "needed") | {"window_size": _checked_layer_types(fields, window)}


def _read_mixtral(fields: _Fields) -> Options:
    missing = fields.raw("sliding_window") is None
    window = None if missing else fields.count("sliding_window")
    options = _read_common(fields, "needed") | {"window_size": _checked_layer_types(fields, window)}
    # A softmax over all experts whose chosen ones are divided by their sum is the softmax over the chosen.
    experts, chosen = fields.count("num_local_experts", 8), fields.count("num_experts_per_tok", 2)
    if chosen > experts or chosen < 2:
        fields.refuse("num_experts_per_tok", f"{chosen}, expected 2 to num_local_experts {experts}")
    # Theirs is k times ours, and over all layers together; only training would need it.
    fields.number("router_aux_loss_coef", 0.001)
    width = options["ffn_hidden_size"]
    return options | {"num_experts": experts, "moe_router_topk": chosen, "moe_ffn_hidden_size": width}


def _read_qwen2(fields: _Fields) -> Options:
    return _read_common(fields, "needed") | _qwen_window(fields) | {"add_qkv_bias": True}


def _read_qwen3(fields: _Fields) -> Options:
    return _read_common(fields, "needed", head_dim=128) | _qwen_window(fields) | {"qk_layernorm": True}


def _read_common(fields: _Fields, groups: str = "heads", head_dim: int | None = None) -> Options:
    """Returns the options that these families share; `groups`: what a missing num_key_value_heads means."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    if head_dim is None and fields.raw("head_dim") is None and hidden % heads:
        fields.refuse("hidden_size", f"{hidden}, expected a multiple of num_attention_heads {heads}, or a head_dim")
    derived = max(1, hidden // heads)
    return {
        "num_layers": fields.count("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": fields.count("intermediate_size"),
        "num_query_groups": fields.count("num_key_value_heads", heads if groups == "heads" else _NEEDED, heads),
        "kv_channels": fields.count("head_dim", head_dim or derived, derived),
        "max_position_embeddings": fields.count("max_position_embeddings"),
        **_read_rope(fields),
        "norm_epsilon": fields.number("rms_norm_eps", 1e-6),
        "activation": fields.choice("hidden_act", "silu", _GATED),
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not fields.flag("tie_word_embeddings", False),
        "attention_dropout": fields.number("attention_dropout", 0.0),
        "init_method_std": fields.number("initializer_range", 0.02),
        "vocab_size": fields.count("vocab_size"),
    }


def _qwen_window(fields: _Fields) -> Options:
    layers, used = fields.raw("num_hidden_layers"), fields.flag("use_sliding_window", False)
    first = fields.raw("max_window_layers")
    if not used or fields.is_null("sliding_window"):
        fields.raw("sliding_window")
        return {"window_size": _checked_layer_types(fields, None)}
    window = fields.count("sliding_window", 4096)
    if fields.raw("layer_types") is not None:
        return {"window_size": _checked_layer_types(fields, window)}
    # Layers from max_window_layers on have the window: the name says the opposite.
    first = 28 if first is None else first
    if not isinstance(first, int) or not isinstance(layers, int) or 0 < first < layers:
        fields.refuse("max_window_layers", f"{_short(first)}, expected a window in all of the layers or in none")
    return {"window_size": f"{window - 1},0" if first == 0 else None}


def _checked_layer_types(fields: _Fields, window: int | None) -> str | None:
    """Returns `window_size`. Theirs counts the token itself, ours the tokens before it."""
    types = fields.raw("layer_types")
    if types is None:
        return None if window is None else f"{window - 1},0"
    kinds = set(types) if isinstance(types, list) and all(isinstance(kind, str) for kind in types) else {""}
    sliding = {"sliding_attention"}
    if kinds != sliding and kinds != {"full_attention"}:
        fields.refuse("layer_types", f"{_short(types)}, expected one kind, full_attention or sliding_attention")
    elif kinds == sliding and window is None:
        fields.refuse("layer_types", "sliding_attention, expected a sliding_window with it")
    return f"{window - 1},0" if kinds == sliding and window is not None else None


def _read_rope(fields: _Fields) -> Options:
    """Returns how positions turn; transformers 5 has all of it in rope_parameters, older ones in two fields."""
    old, new, outer_base = fields.raw("rope_scaling"), fields.raw("rope_parameters"), fields.raw("rope_theta")
    if old is not None and new is not None and old != new:
        fields.refuse("rope_scaling, rope_parameters", "both are there and differ")
    field = "rope_parameters" if new is not None else "rope_scaling"
    given = new if new is not None else old
    if not isinstance(given, dict | None):
        fields.refuse(field, f"{_short(given)}, expected an object")
        given = None
    rope = {key: value for key, value in (given or {}).items() if value is not None}

    def number(key: str, default: Any = None, least: float = 1e-30) -> Any:
        value = rope.pop(key, default)
        if not _is_number(value, least):
            fields.refuse(f"{field}.{key}", f"{_short(value)}, expected a number of at least {least:g}")
            return 1.0
        return float(value)

    def only(key: str, expected: int | float, default: Any = None) -> None:
        value = rope.pop(key, default)
        if type(value) not in (int, float) or value != expected:
            fields.refuse(f"{field}.{key}", f"{_short(value)}, only {expected} is done here")

    base = number("rope_theta", 10000.0 if outer_base is None else outer_base)
    if outer_base is not None and outer_base != base:
        fields.refuse("rope_theta", f"{_short(outer_base)}, but {base} in {field}")
    only("partial_rotary_factor", 1.0, 1.0)
    kinds = {rope.pop(key) for key in ("rope_type", "type") if isinstance(rope.get(key), str)} or {"default"}
    kind = kinds.pop() if len(kinds) == 1 else " and ".join(sorted(kinds))
    options: Options = {"rotary_base": base}
    if kind == "linear":
        factor = number("factor", least=1.0)
        options["rotary_seq_len_interpolation_factor"] = None if factor == 1.0 else factor
    elif kind == "llama3":
        options |= {"use_rope_scaling": True, "rope_scaling_factor": number("factor", least=1.0)}
        only("low_freq_factor", 1.0)
        only("high_freq_factor", 4.0)
        only("original_max_position_embeddings", 8192, fields.raw("max_position_embeddings"))
    if kind not in ("default", "linear", "llama3"):
        fields.refuse(f"{field}.rope_type", f"{_short(kind)}, expected default, linear or llama3")
    else:
        for key, value in rope.items():
            fields.refuse(f"{field}.{key}", f"{_short(value)}, and nothing is known of this field")
    return options


def _write_common(options: Options) -> dict[str, Any]:
    o = options
    scaling: dict[str, Any] | None = None
    if o["use_rope_scaling"]:
        scaling = {
            "rope_type": "llama3",
            "factor": o["rope_scaling_factor"],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    elif o["rotary_seq_len_interpolation_factor"] is not None:
        scaling = {"rope_type": "linear", "factor": o["rotary_seq_len_interpolation_factor"]}
    return {
        "attention_dropout": o["attention_dropout"],
        "head_dim": o["kv_channels"],
        "hidden_act": _their_name(o["activation"], _GATED),
        "hidden_size": o["hidden_size"],
        "initializer_range": o["init_method_std"],
        "intermediate_size": o["ffn_hidden_size"],
        "max_position_embeddings": o["max_position_embeddings"],
        "num_attention_heads": o["num_attention_heads"],
        "num_hidden_layers": o["num_layers"],
        "num_key_value_heads": o["num_query_groups"],
        "rms_norm_eps": o["norm_epsilon"],
        # In the two fields that old and new versions of transformers read.
        "rope_scaling": scaling,
        "rope_theta": o["rotary_base"],
        "tie_word_embeddings": not o["untie_embeddings_and_output_weights"],
        "vocab_size": o["vocab_size"],
    }


def _their_window(options: Options) -> int | None:
    return None if options["window_size"] is None else int(options["window_size"].split(",")[0]) + 1


def _write_llama(options: Options) -> dict[str, Any]:
    biases = not options["disable_bias_linear"]
    return _write_common(options) | {"attention_bias": biases, "mlp_bias": biases}


def _write_mistral(options: Options) -> dict[str, Any]:
    return _write_common(options) | {"sliding_window": _their_window(options)}


def _write_mixtral(options: Options) -> dict[str, Any]:
    return _write_mistral(options) | {
        "num_local_experts": options["num_experts"],
        "num_experts_per_tok": options["moe_router_topk"],
    }


def _write_qwen2(options: Options) -> dict[str, Any]:
    window = _their_window(options)
    return _write_common(options) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": options["num_layers"] if window is None else 0,
    }


def _write_qwen3(options: Options) -> dict[str, Any]:
    return _write_qwen2(options) | {"attention_bias": False}


_FAMILIES = {
    "gpt2": _Family("GPT-2", ("GPT2LMHeadModel", "GPT2Model"), _read_gpt2, _write_gpt2),
    "llama": _Family("Llama", ("LlamaForCausalLM", "LlamaModel"), _read_llama, _write_llama),
    "mistral": _Family("Mistral", ("MistralForCausalLM", "MistralModel"), _read_mistral, _write_mistral),
    "qwen2": _Family("Qwen2", ("Qwen2ForCausalLM", "Qwen2Model"), _read_qwen2, _write_qwen2),
    "qwen3": _Family("Qwen3", ("Qwen3ForCausalLM", "Qwen3Model"), _read_qwen3, _write_qwen3),
    "mixtral": _Family("Mixtral", ("MixtralForCausalLM", "MixtralModel"), _read_mixtral, _write_mixtral),
}


# ---- writing ------------------------------------------------------------------------------------------------------
def model_options(config: Config) -> Options:
    """Returns the options of a resolved config's model, in the spelling of `options_of`."""
    model = config.model
    rope = model.position_embedding_type == "rope"
    # Whatever the length of the run's sequences: a window that covers them is a window of the model still.
    window = attention_window(dataclasses.replace(model, seq_length=2**62))
    interpolation = model.rotary_seq_len_interpolation_factor
    spelled = {
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "window_size": None if window is None else f"{window},0",
        "rotary_seq_len_interpolation_factor": interpolation if rope and interpolation != 1.0 else None,
        "rope_scaling_factor": model.rope_scaling_factor if model.use_rope_scaling else 8.0,
        "add_qkv_bias": model.add_qkv_bias and model.disable_bias_linear,
        "mask_padded_vocab": model.mask_padded_vocab or model.padded_vocab_size == model.vocab_size,
    }
    if model.num_experts is not None:
        # Of layers that all have experts the width of a dense one says nothing.
        spelled |= {"moe_layer_freq": None} if all(moe_layers(model)) else {}
        spelled |= {"ffn_hidden_size": model.moe_ffn_hidden_size} if all(moe_layers(model)) else {}
    if not rope:
        spelled |= {name: _DEFAULTS[name] for name in ("rotary_base", "rotary_percent", "rotary_interleaved")}
    names = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in FREE_OPTIONS]
    return {name: getattr(model, name) for name in names} | spelled


_TOGETHER = (
    {"rope_theta", "rope_scaling", "rope_parameters"},
    {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "num_hidden_layers"},
    {"n_positions", "n_ctx"},
    {"torch_dtype", "dtype"},
)
"""Fields that say one thing together: where one changes, the others are written anew or go."""


def write_config(
    config: Config, original: Mapping[str, Any] | None = None, dtype: DType | None = None
) -> dict[str, Any]:
    """Returns the fields of config.json for a model.

    Args:
      config: resolved.
      original: the config.json that the model was imported with; its fields come back, but for those that say another
        thing than the options do now. None: the first of the known architectures that fits is taken.
      dtype: of the exported weights; None: the original's.

    Raises:
      ConfigError: none of the architectures, or not the original's, can say what the options do; they are named.
    """
    options = model_options(config)
    families = list(_FAMILIES) if original is None else [_family_key(original)]
    refused = {}
    for key in families:
        fields = _written(key, options, original, dtype)
        refused[key] = _differences(options, fields)
        if not refused[key]:
            return fields
    # Of a family without experts little else would be said.
    nearest = [key for key in refused if "num_experts" not in refused[key]] or list(refused)
    key = min(nearest, key=lambda key: len(refused[key]))
    raise problem(
        "The model cannot be described in a config.json of Hugging Face.",
        where=refused[key],
        got=", ".join(f"{name} {options[name]}" for name in refused[key]),
        expected=f"what {_FAMILIES[key].architectures[0]} can say"
        + ("" if original else ", which is nearest to it")
        + "; the vocabulary's padding masked",
        fix="these options cannot be exported; keep the model in its own format",
    )


def _family_key(original: Mapping[str, Any]) -> str:
    _family_of(original, "config.json of the original")
    return original["model_type"]


def _written(key: str, options: Options, original: Mapping[str, Any] | None, dtype: DType | None) -> dict[str, Any]:
    family = _FAMILIES[key]
    fresh = family.write(options)
    if original is None:
        # Their defaults are ids of the tokenizers that the first models of each family had.
        ids = {"bos_token_id": None, "eos_token_id": None}
        names = {"architectures": [family.architectures[0]], "model_type": key}
        return names | ids | fresh | {"torch_dtype": _dtype_name(dtype or "F32")}
    before = family.write(options_of(original))
    changed = {field for field in fresh if fresh[field] != before[field]}
    if dtype is not None and dtype != stored_dtype(original):
        name = "dtype" if "dtype" in original else "torch_dtype"
        fresh[name] = _dtype_name(dtype)
        changed.add(name)
    for group in _TOGETHER:
        if changed & group:
            changed |= group & fresh.keys()
    gone = {field for group in _TOGETHER if changed & group for field in group - fresh.keys()}
    kept = {field: value for field, value in original.items() if field not in gone}
    return kept | {field: fresh[field] for field in fresh if field in changed}


def _dtype_name(dtype: DType) -> str:
    return next(name for name, one in _DTYPES.items() if one == dtype)


def _differences(options: Options, fields: Mapping[str, Any]) -> list[str]:
    """Returns the options that the fields do not say as they are."""
    said, problems = _parsed(fields, _FAMILIES[fields["model_type"]])
    differing = [name for name in options if name not in _TRAINING_OPTIONS and said.get(name) != options[name]]
    assert differing or not problems, problems
    return differing
