"""A Llama in GGUF (llama.cpp's format, weights quantised) as a folder of Hugging Face, for tests on a real model.

The package gguf dequantises; config.json follows from the file's metadata; transformers reads the tokenizer.

    blk.N.attn_q.weight    rows of a head in pairs (i, i + d/2), side by side: llama.cpp rotates neighbours
    q_proj.weight          rows of a head in two halves: all first ones of the pairs, then all second ones
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads x d, hidden] with neighbouring rows paired -> the rows of each head in two halves."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def write_huggingface(gguf_file: Path, folder: Path) -> None:
    """Writes config.json, model.safetensors (fp32) and the tokenizer's files."""
    import gguf
    import transformers

    reader = gguf.GGUFReader(str(gguf_file))
    value: Any = lambda key: reader.fields[key].contents()  # noqa: E731
    assert value("general.architecture") == "llama"
    of_llama: Any = lambda key: value(f"llama.{key}")  # noqa: E731
    heads = {"attn_q": of_llama("attention.head_count"), "attn_k": of_llama("attention.head_count_kv")}
    tensors = {}
    for tensor in reader.tensors:
        weights = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name in _TOP:
            tensors[_TOP[tensor.name]] = weights
            continue
        _, layer, kind, leaf = tensor.name.split(".")
        weights = halves(weights, heads[kind]) if kind in heads else weights
        tensors[f"model.layers.{layer}.{_LAYER[kind]}.{leaf}"] = weights
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": of_llama("embedding_length"),
        "intermediate_size": of_llama("feed_forward_length"),
        "max_position_embeddings": of_llama("context_length"),
        "num_attention_heads": heads["attn_q"],
        "num_hidden_layers": of_llama("block_count"),
        "num_key_value_heads": heads["attn_k"],
        "head_dim": of_llama("rope.dimension_count"),
        "rms_norm_eps": of_llama("attention.layer_norm_rms_epsilon"),
        "rope_theta": of_llama("rope.freq_base"),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "torch_dtype": "float32",
        "vocab_size": of_llama("vocab_size"),
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name)
    tokenizer.save_pretrained(str(folder))
