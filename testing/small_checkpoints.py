"""A small random checkpoint of every model class that engines on CPUs serve (`loader/checkpoints/classes.py`): an
entry each."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

VOCABULARY, CONTEXT = 1024, 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.08,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
WINDOWS = {
    "sliding_window": 16,
    "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class SmallCheckpoint:
    """How Transformers makes a checkpoint."""

    config: str
    """Name of the configuration's class."""
    changes: dict[str, Any]
    """Values of the configuration."""
    published: tuple[tuple[str, str], ...] = ()
    """Beginnings of names of weights as this version of Transformers saves them, and as they are published."""


def text(config: str, **changes: Any) -> SmallCheckpoint:
    return SmallCheckpoint(config, {**SHAPE, **changes})


CLASSES = {
    "LlamaForCausalLM": text("LlamaConfig"),
    "MistralForCausalLM": text("MistralConfig", sliding_window=None),
    "Qwen2ForCausalLM": text("Qwen2Config"),
    "Qwen3ForCausalLM": text("Qwen3Config"),
    "Phi3ForCausalLM": text("Phi3Config"),
    "Gemma2ForCausalLM": text("Gemma2Config", **WINDOWS),
    "Gemma3ForCausalLM": text("Gemma3TextConfig", **WINDOWS),
    "MixtralForCausalLM": text("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "Qwen3MoeForCausalLM": text("Qwen3MoeConfig", **EXPERTS, num_experts=8, norm_topk_prob=True),
    "Glm4MoeForCausalLM": text(
        "Glm4MoeConfig", **EXPERTS, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, use_qk_norm=True
    ),
    "HYV3ForCausalLM": text(
        "HYV3Config",
        **EXPERTS,
        num_experts=8,
        num_shared_experts=1,
        first_k_dense_replace=1,
        qk_norm=True,
        route_norm=True,
    ),
    "Gemma3ForConditionalGeneration": SmallCheckpoint(
        "Gemma3Config",
        {
            "text_config": {**SHAPE, **WINDOWS},
            "vision_config": {**VISION, "vision_use_head": False},
            "mm_tokens_per_image": 4,
        },
        published=(("vision_tower.", "vision_tower.vision_model."),),
    ),
    "Qwen3VLForConditionalGeneration": SmallCheckpoint(
        "Qwen3VLConfig",
        {
            "text_config": {
                **SHAPE,
                "tie_word_embeddings": False,
                "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 128,
                "patch_size": 14,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            "tie_word_embeddings": False,
        },
    ),
    "Mistral3ForConditionalGeneration": SmallCheckpoint(
        "Mistral3Config",
        {
            "text_config": {"model_type": "mistral", **SHAPE, "sliding_window": None, "tie_word_embeddings": False},
            "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
}


def write(architecture: str, folder: Path) -> Path:
    """The checkpoint of a class, as its publisher writes it; of a tokenizer there is only the file."""
    known = CLASSES[architecture]
    torch.manual_seed(3)
    model = getattr(transformers, architecture)(getattr(transformers, known.config)(**known.changes)).eval()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if "hidden_activation" in config:  # published ones say it twice, and SGLang reads the other one for Gemma 2
        config["hidden_act"] = config["hidden_activation"]
    path.write_text(json.dumps(config))
    if known.published:
        weights = load_file(folder / "model.safetensors")
        save_file(
            {_published(name, known.published): each for name, each in weights.items()}, folder / "model.safetensors"
        )
    return folder


def beside_text(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of a multimodal model's other parts, by published names, with random values: of its text, only the sizes
    matter here."""
    architecture = config["architectures"][0]
    known = CLASSES[architecture]
    text = {**config["text_config"], "num_hidden_layers": 1, "vocab_size": 64}
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:1]
    given = {key: value for key, value in config.items() if key in known.changes} | {"text_config": text}
    torch.manual_seed(3)
    model = getattr(transformers, architecture)(getattr(transformers, known.config)(**given)).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        weights = load_file(Path(folder) / "model.safetensors")
    named = {_published(name, known.published): each for name, each in weights.items()}
    return {name: each for name, each in named.items() if not name.startswith("language_model.")}


def _published(name: str, names: tuple[tuple[str, str], ...]) -> str:
    saved = next((pair for pair in names if name.startswith(pair[0])), ("", ""))
    return saved[1] + name.removeprefix(saved[0])
