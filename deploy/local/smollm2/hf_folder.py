"""The files of a Hugging Face folder, made of a GGUF file: a Llama model with a byte-level BPE tokenizer.

GGUF names tensors in its own way, has the rows of query and key projections in the order that llama.cpp rotates them
in, and has configuration and tokenizer as fields. Quantised values become the nearest bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
_OF_THE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_A_LAYER = {
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
_SHOWN = 4
"""Times that progress is told."""

Fields = Mapping[str, Any]
"""Key -> value of a GGUF file."""


def write(source: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Writes the model of a GGUF file into an empty folder. Raises OSError."""
    reader = gguf.GGUFReader(source)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    weights = _weights(reader, fields, say)
    say("writing model.safetensors and the tokenizer")
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # the disk is full
        raise OSError(f"{folder / 'model.safetensors'}: {error}") from None
    documents = {
        "config.json": config(fields, tied="lm_head.weight" not in weights),
        "generation_config.json": token_ids(fields),
        "tokenizer.json": tokenizer(fields),
        "tokenizer_config.json": tokenizer_config(fields),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())
    # The library lets nobody else read it.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def _weights(reader: gguf.GGUFReader, fields: Fields, say: Callable[[str], None]) -> dict[str, torch.Tensor]:
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights = {}
    count = len(reader.tensors)
    for number, tensor in enumerate(reader.tensors, 1):
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if part in heads:
            values = rotary_in_halves(values, heads[part])
        weights[tensor_name(tensor.name)] = torch.tensor(values).to(torch.bfloat16)
        if number * _SHOWN // count > (number - 1) * _SHOWN // count:
            say(f"{number} of {count} tensors")
    return weights


def tensor_name(name: str) -> str:
    """Transformers' name of a tensor that GGUF calls `name`."""
    stem = name.removesuffix(".weight")
    if stem in _OF_THE_MODEL:
        return f"{_OF_THE_MODEL[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_OF_A_LAYER[part]}.weight"


def rotary_in_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """A query or key projection with each head's rows as Transformers rotates them, the first half with the second;
    llama.cpp has those that are rotated together beside each other."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def token_ids(fields: Fields) -> dict[str, int]:
    """Ids of the special tokens; an answer ends at `eos_token_id`."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: int(fields[f"tokenizer.ggml.{known}_token_id"]) for name, known in names.items()}


def config(fields: Fields, tied: bool) -> dict[str, Any]:
    """config.json; `tied`: the embeddings are the output layer too."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF has it in float32: 9.999999747378752e-06 for 1e-05.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **token_ids(fields),
    }


def _special(fields: Fields) -> dict[int, str]:
    """Id -> text of the tokens that are no text of an answer."""
    control = gguf.TokenType.CONTROL
    types = fields["tokenizer.ggml.token_type"]
    return {id: text for id, text in enumerate(fields["tokenizer.ggml.tokens"]) if types[id] == control}


def tokenizer(fields: Fields) -> dict[str, Any]:
    """tokenizer.json: each digit is a token of its own, as GGUF's "smollm" means."""
    whole = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytes_of_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": id, "content": text, **whole} for id, text in _special(fields).items()],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_of_text],
        },
        "post_processor": None,
        "decoder": bytes_of_text,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: id for id, text in enumerate(fields["tokenizer.ggml.tokens"])},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(fields: Fields) -> dict[str, Any]:
    """tokenizer_config.json."""
    texts = fields["tokenizer.ggml.tokens"]
    ids = {**token_ids(fields), "unk_token_id": fields["tokenizer.ggml.unknown_token_id"]}
    return {
        # The published folder has GPT2Tokenizer. Transformers 5 then makes a tokenizer that does not part digits, in
        # spite of tokenizer.json, and "a  12" becomes other tokens than those that the model was trained with.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name.removesuffix("_id"): texts[id] for name, id in ids.items()},
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
