"""Recorded Megatron-Core arrays (torch layout, one name a layer) <-> our stacked tree, for weights and gradients alike.

Both sides are flat dicts: Megatron's names on one, paths like "layers/mlp/up/kernel" on the other. The map only
reorders elements, so it maps gradients as well as weights. `linear_qkv` rows stand in blocks of one query group each:
its query heads, then its key, then its value.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jmegatron import partition
from jmegatron.layers import AttentionSettings, MLPSettings
from jmegatron.models.gpt import GPTSettings, gpt_specs
from jmegatron.models.transformer import LayerParallel, LayerSettings

DATA = Path(__file__).parent / "data"
Arrays = dict[str, np.ndarray]

# Megatron's name -> (our path, number of leading dims of our array that are inputs; 0: no matrix).
_MODEL = {
    "embedding.position_embeddings.weight": ("embedding/position/embedding", None),
    "embedding.word_embeddings.weight": ("embedding/word/embedding", None),
    "decoder.final_layernorm.weight": ("final_norm/scale", 0),
    "decoder.final_layernorm.bias": ("final_norm/bias", 0),
    "output_layer.weight": ("output/kernel", 1),
}
_LAYER = {
    "input_layernorm.weight": ("layers/input_norm/scale", 0),
    "input_layernorm.bias": ("layers/input_norm/bias", 0),
    "pre_mlp_layernorm.weight": ("layers/mlp_norm/scale", 0),
    "pre_mlp_layernorm.bias": ("layers/mlp_norm/bias", 0),
    "self_attention.linear_proj.weight": ("layers/attention/output/kernel", 2),
    "self_attention.linear_proj.bias": ("layers/attention/output/bias", 0),
    "mlp.linear_fc1.weight": ("layers/mlp/up/kernel", 1),
    "mlp.linear_fc1.bias": ("layers/mlp/up/bias", 0),
    "mlp.linear_fc2.weight": ("layers/mlp/down/kernel", 1),
    "mlp.linear_fc2.bias": ("layers/mlp/down/bias", 0),
}


def _to_ours(array: np.ndarray, inputs: int | None, shape: tuple[int, ...]) -> np.ndarray:
    return (array.T if inputs else array).reshape(shape)


def _to_megatron(array: np.ndarray, inputs: int | None) -> np.ndarray:
    if inputs is None:
        return array
    if inputs == 0:
        return array.reshape(-1)
    return array.reshape(int(np.prod(array.shape[:inputs])), -1).T


# ---- the grouped projection of queries, keys and values -----------------------------------------------------------
def _split_qkv(array: np.ndarray, s: AttentionSettings) -> tuple[np.ndarray, np.ndarray]:
    """[groups x (queries + 2) x d, *in] -> query [*in, heads, d], key_value [*in, kv_heads, 2, d]."""
    blocks = array.reshape(s.num_kv_heads, -1, s.head_dim, *array.shape[1:])
    query, key_value = blocks[:, :-2], blocks[:, -2:]
    query = query.reshape(s.num_heads, s.head_dim, *array.shape[1:])
    is_matrix = array.ndim == 2
    return (np.moveaxis(query, -1, 0), np.moveaxis(key_value, -1, 0)) if is_matrix else (query, key_value)


def _join_qkv(query: np.ndarray, key_value: np.ndarray, s: AttentionSettings) -> np.ndarray:
    if query.ndim == 3:
        query, key_value = np.moveaxis(query, 0, -1), np.moveaxis(key_value, 0, -1)
    rest = query.shape[2:]
    blocks = np.concatenate([query.reshape(s.num_kv_heads, -1, s.head_dim, *rest), key_value], axis=1)
    return blocks.reshape(-1, *rest)


# ---- whole models -------------------------------------------------------------------------------------------------
def from_megatron(arrays: Arrays, settings: GPTSettings) -> Arrays:
    """Returns our flat dict of global, stacked arrays."""
    shapes = {path: spec.shape for path, spec in partition.named_specs(gpt_specs(settings, LayerParallel()))}
    ours = {path: _to_ours(arrays[name], n, shapes[path]) for name, (path, n) in _MODEL.items() if path in shapes}
    layer = lambda name: [arrays[f"decoder.layers.{i}.{name}"] for i in range(settings.num_layers)]  # noqa: E731
    for name, (path, n) in _LAYER.items():
        if path in shapes:
            ours[path] = np.stack([_to_ours(a, n, shapes[path][1:]) for a in layer(name)])
    for kind, leaf in (("weight", "kernel"), ("bias", "bias")):
        if f"layers/attention/query/{leaf}" in shapes:
            parts = [_split_qkv(a, settings.layer.attention) for a in layer(f"self_attention.linear_qkv.{kind}")]
            for name, stacked in zip(("query", "key_value"), zip(*parts, strict=True), strict=True):
                ours[f"layers/attention/{name}/{leaf}"] = np.stack(stacked)
    assert {path: a.shape for path, a in ours.items()} == shapes
    return ours


def to_megatron(ours: Arrays, settings: GPTSettings) -> Arrays:
    """Returns Megatron's names and layouts: the inverse of `from_megatron`."""
    arrays = {name: _to_megatron(ours[path], n) for name, (path, n) in _MODEL.items() if path in ours}
    for i in range(settings.num_layers):
        prefix = f"decoder.layers.{i}"
        for name, (path, n) in _LAYER.items():
            if path in ours:
                arrays[f"{prefix}.{name}"] = _to_megatron(ours[path][i], n)
        for kind, leaf in (("weight", "kernel"), ("bias", "bias")):
            if f"layers/attention/query/{leaf}" in ours:
                query, key_value = (ours[f"layers/attention/{name}/{leaf}"][i] for name in ("query", "key_value"))
                joined = _join_qkv(query, key_value, settings.layer.attention)
                arrays[f"{prefix}.self_attention.linear_qkv.{kind}"] = joined
    return arrays


def nested(flat: dict[str, Any]) -> Any:
    """Returns {"a": {"b": x}} for {"a/b": x}."""
    tree: Any = {}
    for path, value in flat.items():
        *parents, leaf = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def flat(tree: Any) -> Arrays:
    """Returns {"a/b": x} for {"a": {"b": x}}."""
    found: Arrays = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found.update({f"{name}/{path}": leaf for path, leaf in flat(value).items()})
        else:
            found[name] = np.asarray(value)
    return found


# ---- the recorded models ------------------------------------------------------------------------------------------
def reference_settings(model: str, **changes: Any) -> GPTSettings:
    """Returns the settings of "gpt_gelu" or "llama_like".

    `changes` may name fields of any of the three settings: {"activation": ..., "rotary_interleaved": ...}.
    """
    gpt = model == "gpt_gelu"
    attention = dict(
        num_kv_heads=4 if gpt else 2, use_bias=gpt, use_qkv_bias=gpt, rotary_interleaved=False, window=None
    )
    mlp = dict(ffn_hidden_size=256 if gpt else 160, activation="gelu_tanh" if gpt else "swiglu", use_bias=gpt)
    whole = dict(
        position_embedding="learned_absolute" if gpt else "rope",
        tied=gpt,
        rotary_dim=16,
        rotary_interpolation=1.0,
        rotary_scaling=None,
    )
    for name, value in changes.items():
        next(group for group in (attention, mlp, whole) if name in group)[name] = value
    layer = LayerSettings(
        AttentionSettings(64, 4, head_dim=16, **attention), MLPSettings(64, **mlp), "LayerNorm" if gpt else "RMSNorm"
    )
    return GPTSettings(4, layer, vocab_size=128, padded_vocab_size=128, max_positions=32, **whole)


@functools.cache
def recorded(model: str, name: str) -> Arrays:
    """Returns the arrays of data/MODEL/NAME.safetensors or .npz."""
    folder = DATA / model
    tensors = folder / f"{name}.safetensors"
    return load_file(tensors) if tensors.exists() else dict(np.load(folder / f"{name}.npz"))


def reference_parameters(model: str, settings: GPTSettings | None = None, **extra: np.ndarray) -> Any:
    """Returns the recorded weights (with `extra` ones by Megatron's name) as our tree."""
    arrays = recorded(model, "weights") | extra
    return nested(from_megatron(arrays, settings or reference_settings(model)))
