"""Hugging Face's folders (config.json, safetensors) of GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3 <-> our arrays.

No communication, no jax, neither torch nor transformers. Import and export are loops over `pieces`, one tensor or two
at a time (of a mixture of experts those of all experts of a layer):

    options = read_config(folder)                                         # the model, as options of ours
    source = SafetensorsFolder(folder)
    matched = match_tensors(source, options)                              # stops where a tensor is missing or foreign
    for piece in matched.pieces:                                          # import
        values = piece.to_ours(tuple(source.read(name) for name in piece.theirs))

    fields = write_config(config, original)                               # export
    with SafetensorsWriter(folder, tensor_shapes(config), stored_dtype(fields)) as target:
        for piece in pieces(config):
            for name, value in zip(piece.theirs, piece.to_theirs(ours(piece)), strict=True):
                target.write(name, value)
        target.add_file("config.json", config_text(fields))
        target.commit()

Values are exact: bfloat16 and fp16 are read into fp32, and round to themselves when they are written back.
"""

import dataclasses
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jmegatron.config import Config
from jmegatron.config.options import problem
from jmegatron.interop.huggingface_config import (
    FREE_OPTIONS,
    load_config_json,
    model_options,
    options_of,
    read_config,
    stored_dtype,
    write_config,
)
from jmegatron.interop.pieces import Arrays, Piece, Slot, flat, linear, same
from jmegatron.interop.safetensors_folder import DTYPES, SafetensorsFolder, SafetensorsWriter

__all__ = [
    "COMPANIONS",
    "FREE_OPTIONS",
    "Matched",
    "SafetensorsFolder",
    "SafetensorsWriter",
    "UsedOnce",
    "config_text",
    "load_config_json",
    "match_tensors",
    "model_options",
    "options_of",
    "pieces",
    "read_companions",
    "read_config",
    "stored_dtype",
    "tensor_shapes",
    "write_config",
]


# ---- names and layouts --------------------------------------------------------------------------------------------
def pieces(model: Config | Mapping[str, Any], *, bare: bool = False) -> list[Piece]:
    """Returns how the tensors of a model correspond to our arrays, in the order in which they are best written.

    Learned positions: the names and layouts of GPT-2; rotary ones: those of Llama, which Mistral and Qwen share.

    Args:
      model: a resolved config, or options as `read_config` returns them.
      bare: whether names are those of a model without output layer, as in the folder of the first GPT-2: without
        "transformer." or "model.".
    """
    options = model_options(model) if isinstance(model, Config) else model
    learned = options["position_embedding_type"] == "learned_absolute"
    hidden, vocab = options["hidden_size"], options["vocab_size"]
    prefix = "" if bare else _prefix(options)
    word, norm = ("wte", "ln_f") if learned else ("embed_tokens", "norm")
    found = [same(Slot("embedding/word/embedding"), f"{prefix}{word}.weight", (vocab, hidden))]
    if learned:
        positions = (options["max_position_embeddings"], hidden)
        found.append(same(Slot("embedding/position/embedding"), f"{prefix}wpe.weight", positions))
    layer_pieces = _gpt2_layer if learned else _llama_layer
    for layer in range(options["num_layers"]):
        found += layer_pieces(options, layer, f"{prefix}{'h' if learned else 'layers'}.{layer}.")
    found += _norm("final_norm", None, prefix + norm, hidden, options["normalization"])
    if options["untie_embeddings_and_output_weights"]:
        found.append(linear(Slot("output/kernel"), "lm_head.weight", (hidden, vocab), 1))
    return found


def _prefix(options: Mapping[str, Any]) -> str:
    return "transformer." if options["position_embedding_type"] == "learned_absolute" else "model."


def tensor_shapes(model: Config | Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns shape by name of every tensor of a model, in the order of `pieces`."""
    return {
        name: shape for piece in pieces(model) for name, shape in zip(piece.theirs, piece.their_shapes, strict=True)
    }


def _norm(path: str, layer: int | None, name: str, features: int, kind: str) -> list[Piece]:
    leaves = {"scale": "weight", "bias": "bias"} if kind == "LayerNorm" else {"scale": "weight"}
    return [flat(Slot(f"{path}/{ours}", layer), f"{name}.{theirs}", (features,)) for ours, theirs in leaves.items()]


def _gpt2_layer(o: Mapping[str, Any], layer: int, prefix: str) -> list[Piece]:
    """[in, out] (GPT-2's Conv1D) is ours, flattened; c_attn holds queries, keys and values side by side."""
    hidden, ffn, heads = o["hidden_size"], o["ffn_hidden_size"], (o["num_attention_heads"], o["kv_channels"])
    at = lambda path: Slot(f"layers/{path}", layer)  # noqa: E731

    def dense(path: str, name: str, shape: tuple[int, ...], inputs: int) -> list[Piece]:
        return [
            linear(at(f"{path}/kernel"), f"{prefix}{name}.weight", shape, inputs, transposed=False),
            flat(at(f"{path}/bias"), f"{prefix}{name}.bias", shape[inputs:]),
        ]

    return [
        *_norm("layers/input_norm", layer, f"{prefix}ln_1", hidden, "LayerNorm"),
        _joined_qkv(at, "kernel", f"{prefix}attn.c_attn.weight", (hidden,), heads),
        _joined_qkv(at, "bias", f"{prefix}attn.c_attn.bias", (), heads),
        *dense("attention/output", "attn.c_proj", (*heads, hidden), 2),
        *_norm("layers/mlp_norm", layer, f"{prefix}ln_2", hidden, "LayerNorm"),
        *dense("mlp/up", "mlp.c_fc", (hidden, ffn), 1),
        *dense("mlp/down", "mlp.c_proj", (ffn, hidden), 1),
    ]


def _joined_qkv(at: Any, leaf: str, name: str, inputs: tuple[int, ...], heads: tuple[int, int]) -> Piece:
    """Theirs [*in, 3 x heads x d]; ours query [*in, heads, d] and key_value [*in, heads, 2, d]."""

    def to_ours(theirs: Arrays) -> Arrays:
        query, key, value = np.moveaxis(theirs[0].reshape(*inputs, 3, *heads), len(inputs), 0)
        return query, np.stack([key, value], axis=-2)

    def to_theirs(ours: Arrays) -> Arrays:
        query, key_value = ours
        parts = (query, key_value[..., 0, :], key_value[..., 1, :])
        return (np.concatenate([part.reshape(*inputs, -1) for part in parts], axis=-1),)

    slots = at(f"attention/query/{leaf}"), at(f"attention/key_value/{leaf}")
    return Piece(slots, (name,), ((*inputs, 3 * heads[0] * heads[1]),), to_ours, to_theirs)


def _llama_layer(o: Mapping[str, Any], layer: int, prefix: str) -> list[Piece]:
    """[out, in] as torch has it; keys and values, and gate and up, are one array of ours each."""
    hidden, ffn, d = o["hidden_size"], o["ffn_hidden_size"], o["kv_channels"]
    heads, groups = (o["num_attention_heads"], d), (o["num_query_groups"], d)
    at = lambda path: Slot(f"layers/{path}", layer)  # noqa: E731
    use_bias = not o["disable_bias_linear"]

    def dense(path: str, theirs: tuple[str, ...], shape: tuple[int, ...], inputs: int, biased: bool) -> list[Piece]:
        weights, biases = (tuple(f"{prefix}{name}.{leaf}" for name in theirs) for leaf in ("weight", "bias"))
        if len(theirs) == 2:
            found = [_paired(at(f"{path}/kernel"), weights, shape, inputs)]
            return found + [_paired(at(f"{path}/bias"), biases, shape[inputs:], 0)] * biased
        found = [linear(at(f"{path}/kernel"), weights[0], shape, inputs)]
        return found + [flat(at(f"{path}/bias"), biases[0], shape[inputs:])] * biased

    def head_norms() -> list[Piece]:
        if not o["qk_layernorm"]:
            return []
        both = (("query_norm", "q_norm"), ("key_norm", "k_norm"))
        return [
            p
            for ours, theirs in both
            for p in _norm(f"layers/attention/{ours}", layer, f"{prefix}self_attn.{theirs}", d, "RMSNorm")
        ]

    def feed_forward() -> list[Piece]:
        if o["num_experts"] is not None:
            return _mixtral_experts(o, layer, f"{prefix}block_sparse_moe.")
        return [
            *dense("mlp/up", ("mlp.gate_proj", "mlp.up_proj"), (hidden, ffn), 1, use_bias),
            *dense("mlp/down", ("mlp.down_proj",), (ffn, hidden), 1, use_bias),
        ]

    qkv_bias = use_bias or o["add_qkv_bias"]
    return [
        *_norm("layers/input_norm", layer, f"{prefix}input_layernorm", hidden, "RMSNorm"),
        *dense("attention/query", ("self_attn.q_proj",), (hidden, *heads), 1, qkv_bias),
        *dense("attention/key_value", ("self_attn.k_proj", "self_attn.v_proj"), (hidden, *groups), 1, qkv_bias),
        *head_norms(),
        *dense("attention/output", ("self_attn.o_proj",), (*heads, hidden), 2, use_bias),
        *_norm("layers/mlp_norm", layer, f"{prefix}post_attention_layernorm", hidden, "RMSNorm"),
        *feed_forward(),
    ]


def _mixtral_experts(o: Mapping[str, Any], layer: int, prefix: str) -> list[Piece]:
    """Router, gate (w1) and up (w3), down (w2); ours have all experts of a layer in one array each."""
    hidden, ffn, number = o["hidden_size"], o["moe_ffn_hidden_size"], o["num_experts"]
    at = lambda path: Slot(f"layers/moe/{path}/kernel", layer)  # noqa: E731

    def all_experts(slot: Slot, theirs: tuple[str, ...], one: Piece) -> Piece:
        """`one` is the piece of a single expert."""
        names = tuple(f"{prefix}experts.{expert}.{name}.weight" for expert in range(number) for name in theirs)
        count = len(theirs)

        def to_ours(arrays: Arrays) -> Arrays:
            parts = [arrays[i : i + count] for i in range(0, len(arrays), count)]
            return (np.stack([one.to_ours(part)[0] for part in parts]),)

        def to_theirs(ours: Arrays) -> Arrays:
            return tuple(array for expert in ours[0] for array in one.to_theirs((expert,)))

        return Piece((slot,), names, one.their_shapes * number, to_ours, to_theirs)

    up, down = at("experts/up"), at("experts/down")
    return [
        linear(at("router"), f"{prefix}gate.weight", (hidden, number), 1),
        all_experts(up, ("w1", "w3"), _paired(up, ("", ""), (hidden, ffn), 1)),
        all_experts(down, ("w2",), linear(down, "", (ffn, hidden), 1)),
    ]


def _paired(slot: Slot, theirs: tuple[str, ...], shape: tuple[int, ...], inputs: int) -> Piece:
    """Ours, [*in, *out[:-1], 2, out[-1]], holds two tensors of theirs; `shape` is [*in, *out] of one (bias: [*out])."""
    outputs = int(np.prod(shape[inputs:]))
    matrix = (int(np.prod(shape[:inputs])), outputs) if inputs else (outputs,)
    return Piece(
        (slot,),
        theirs,
        (matrix[::-1],) * 2,
        lambda arrays: (np.stack([array.T.reshape(shape) for array in arrays], axis=-2),),
        lambda ours: tuple(ours[0][..., i, :].reshape(matrix).T for i in range(2)),
    )


# ---- checks -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Matched:
    """A folder's tensors and how they correspond to our arrays."""

    pieces: list[Piece]
    left_out: tuple[str, ...]
    """Tensors that are no weights: masks and frequencies of old versions, and a copy of a tied output layer."""


_BUFFERS = re.compile(r".*\.(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)")


def match_tensors(folder: SafetensorsFolder, model: Config | Mapping[str, Any]) -> Matched:
    """Returns the pieces of a folder's model, each of its tensors being in one of them or left out for a reason.

    Raises:
      ConfigError: tensors are missing, too many, or have another shape or dtype; all of them are named.
    """
    options = model_options(model) if isinstance(model, Config) else model
    bare = not any(name.startswith(_prefix(options)) for name in folder.tensors)
    found = pieces(options, bare=bare)
    expected = {n: shape for piece in found for n, shape in zip(piece.theirs, piece.their_shapes, strict=True)}
    others = folder.tensors.keys() - expected.keys()
    left_out = {name for name in others if _BUFFERS.fullmatch(name)}
    if "lm_head.weight" in others and _is_copy(folder, "lm_head.weight", found[0].theirs[0]):
        left_out.add("lm_head.weight")
    problems = [f"missing: {name}" for name in expected if name not in folder.tensors]
    for name in sorted(others - left_out):
        why = ", though config.json says tie_word_embeddings and it is not the word embedding"
        problems.append(
            f"not known: {name} {list(folder.tensors[name].shape)}{why if name == 'lm_head.weight' else ''}"
        )
    for name, shape in expected.items():
        record = folder.tensors.get(name)
        if record is not None and record.shape != shape:
            problems.append(f"{name} has shape {list(record.shape)}, expected {list(shape)}")
        elif record is not None and record.dtype not in DTYPES:
            problems.append(f"{name} has dtype {record.dtype}, expected one of {', '.join(DTYPES)}")
    if problems:
        more = f" and {len(problems) - 12} more" if len(problems) > 12 else ""
        raise problem(
            "The tensors of the folder are not those of the model in its config.json.",
            where=str(folder.path),
            got="; ".join(problems[:12]) + more,
            expected="each tensor of the model once, and no other",
            fix="get config.json and the safetensors files from the same place",
        )
    return Matched(found, tuple(sorted(left_out)))


def _is_copy(folder: SafetensorsFolder, name: str, other: str) -> bool:
    """Returns whether two tensors hold the same bytes."""
    first, second = folder.tensors[name], folder.tensors.get(other)
    if second is None or (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return np.array_equal(folder.read_bytes(name), folder.read_bytes(other))


class UsedOnce:
    """Counts what a conversion has used, to say at its end that it was all, and each once."""

    def __init__(self, expected: Iterable[str]):
        self._expected = Counter(expected)
        self._used: Counter[str] = Counter()

    def use(self, *used: str) -> None:
        """Counts names."""
        self._used.update(used)

    def check(self) -> str:
        """Returns what the log says.

        Raises:
          ValueError: a name was left out, used twice, or is none of those expected.
        """
        wrong = sorted((self._expected - self._used) | (self._used - self._expected))
        if wrong:
            raise ValueError("not used exactly once: " + ", ".join(wrong[:12]))
        return f"{self._expected.total()} tensors, each used once"


# ---- what is not weights ------------------------------------------------------------------------------------------
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files beside the weights that a model is used with. Nothing else is carried along, and no code."""
_LARGEST_COMPANION = 2**28


def read_companions(source: str | os.PathLike[str]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Returns (content by name, reason by name of those not taken) of the tokenizer's and generation's files there.

    Links are not followed: what they point to would be given away with the exported model.
    """
    taken: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    for name in COMPANIONS:
        path = Path(source) / name
        try:
            # Not waiting, since it might be a pipe.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        except OSError as error:
            refused[name] = "is a link" if path.is_symlink() else (error.strerror or str(error))
            continue
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                refused[name] = "is no plain file"
            elif found.st_size > _LARGEST_COMPANION:
                refused[name] = f"has {found.st_size} bytes, expected at most {_LARGEST_COMPANION}"
            else:
                with open(descriptor, "rb", closefd=False) as file:
                    taken[name] = file.read()
        finally:
            os.close(descriptor)
    return taken, refused


def config_text(fields: Mapping[str, Any]) -> bytes:
    """Returns the text of a config.json."""
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()
