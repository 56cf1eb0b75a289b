"""Hugging Face folders for tests: whole ones, whose tensors are holes in their files, and ways to break them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype, shape)."""
BYTES = {"F16": 2, "BF16": 2, "F32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I32": 4, "I64": 8}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}


def tensors(config: dict[str, Any], dtype: str = "BF16") -> Tensors:
    """Those of a model without biases and norms of its own kind; tied when the configuration says so."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim", hidden // config["num_attention_heads"])
    query, kv = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    found = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (query, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, query),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (wide, hidden),
            prefix + "mlp.up_proj.weight": (wide, hidden),
            prefix + "mlp.down_proj.weight": (hidden, wide),
        }
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return {name: (dtype, shape) for name, shape in found.items()}


def described(tensors: Tensors) -> dict[str, Any]:
    """The header of a file of these tensors."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        nbytes = BYTES[dtype]
        for length in shape:
            nbytes *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    return header


def write_safetensors(path: Path, header: dict[str, Any] | bytes, data_bytes: int | None = None) -> None:
    """A file with this header and a hole for its data."""
    if data_bytes is None:
        assert isinstance(header, dict)
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        data_bytes = max(ends, default=0)
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + data_bytes)


def write(folder: Path, config: dict[str, Any] = LLAMA, *, shards: int = 1, **changes: Any) -> Path:
    """A whole checkpoint."""
    config = {**config, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    all_tensors = tensors(config)
    if shards == 1:
        write_safetensors(folder / SINGLE, described(all_tensors))
        return folder
    where = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: one for place, (name, one) in enumerate(all_tensors.items()) if place % shards == number}
        write_safetensors(folder / file, described(part))
        where |= {name: file for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def change_config(folder: Path, **changes: Any) -> None:
    """Keys set, or removed by None."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def change_header(folder: Path, change: Any, data_bytes: int | None = None) -> None:
    """`change(header)` on the header of a checkpoint of one file, which gets a hole of the right size again."""
    path = folder / SINGLE
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    write_safetensors(path, header, data_bytes)
