"""Recorded Megatron-Core arrays (torch layout, one name a layer) <-> our stacked tree, for weights and gradients alike.

Both sides are flat dicts: Megatron's names on one, paths like "layers/mlp/up/kernel" on the other.
"""

import functools
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from jmegatron.interop import megatron
from jmegatron.interop.pieces import all_ours, all_theirs
from jmegatron.layers import AttentionSettings, MLPSettings
from jmegatron.models.gpt import GPTSettings
from jmegatron.models.transformer import LayerSettings

DATA = Path(__file__).parent / "data"
Arrays = dict[str, np.ndarray]


# ---- whole models -------------------------------------------------------------------------------------------------
def from_megatron(arrays: Arrays, settings: GPTSettings) -> Arrays:
    """Returns our flat dict of global, stacked arrays."""
    ours = all_ours(megatron.pieces(settings), arrays)
    assert {path: a.shape for path, a in ours.items()} == megatron.shapes(settings)
    return ours


def to_megatron(ours: Arrays, settings: GPTSettings) -> Arrays:
    """Returns Megatron's names and layouts: the inverse of `from_megatron`."""
    return all_theirs(megatron.pieces(settings), ours)


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


def unpack_checkpoints(model: str, folder: Path) -> None:
    """Unpacks the recorded checkpoints of a model, files as Megatron-Core wrote them.

    Their weights are packed as a reference to weights.safetensors, which holds the same numbers.
    """
    zstandard = pytest.importorskip("zstandard")
    weights = DATA / model / "weights.safetensors"
    known = weights.read_bytes() if weights.exists() else b""
    dictionary = zstandard.ZstdCompressionDict(known, dict_type=zstandard.DICT_TYPE_RAWCONTENT) if known else None
    packed = (DATA / "checkpoints" / f"{model}.tar.zst").read_bytes()
    archive = zstandard.ZstdDecompressor(dict_data=dictionary).decompress(packed)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def reference_parameters(model: str, settings: GPTSettings | None = None, **extra: np.ndarray) -> Any:
    """Returns the recorded weights (with `extra` ones by Megatron's name) as our tree."""
    arrays = recorded(model, "weights") | extra
    return nested(from_megatron(arrays, settings or reference_settings(model)))
