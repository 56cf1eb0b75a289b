"""Configurations of models by name: small ones of each class, and those of published models, for checkpoints with
random weights (`testing/format_checkpoints.py`)."""

from __future__ import annotations

from typing import Any

_SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "norm_topk_prob": True}
_GPT_OSS = {
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "rope_theta": 150000,
    "rms_norm_eps": 1e-5,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GEMMA_3 = {
    "model_type": "gemma3_text",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "query_pre_attn_scalar": 64,
    "rope_local_base_freq": 10000.0,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
}
_VISION = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
"""A small tower of images, which is not loaded: the published ones are a few percent of their models."""


def _layers(count: int, period: int) -> list[str]:
    """Windows, and full attention in the last of each `period` layers."""
    return ["full_attention" if number % period == period - 1 else "sliding_attention" for number in range(count)]


def _gemma_3(**text: Any) -> dict[str, Any]:
    """Gemma 3 with its part for images."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {**_SMALL, **_GEMMA_3, **text},
        "vision_config": {"model_type": "siglip_vision_model", **_VISION, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "torch_dtype": "bfloat16",
    }


def _mistral_3(**text: Any) -> dict[str, Any]:
    """Mistral 3 with its part for images."""
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": {**_SMALL, "model_type": "mistral", "sliding_window": None, **text},
        "vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 64},
        "torch_dtype": "bfloat16",
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {**_SMALL, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3-moe": {**_SMALL, **_EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {**_SMALL, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    | {"num_experts_per_tok": 2, "intermediate_size": 512, "sliding_window": None},
    "glm4-moe": {**_SMALL, **_EXPERTS, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
    | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "n_group": 1}
    | {"topk_group": 1, "routed_scaling_factor": 1.0, "partial_rotary_factor": 0.5, "attention_bias": True},
    "minimax-m2": {**_SMALL, "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "rotary_dim": 32}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512, "use_qk_norm": True}
    | {"scoring_func": "sigmoid", "use_routing_bias": True, "qk_norm_type": "per_layer", "num_mtp_modules": 0},
    "gpt-oss": {**_SMALL, **_GPT_OSS, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    | {"num_local_experts": 8, "intermediate_size": 512, "layer_types": _layers(4, 2), "rope_scaling": _YARN}
    | {"max_position_embeddings": 131072},
    "gemma3": {**_SMALL, **_GEMMA_3, "architectures": ["Gemma3ForCausalLM"], "layer_types": _layers(4, 2)},
    "gemma3-images": _gemma_3(layer_types=_layers(4, 2)),
    "mistral3-images": _mistral_3(),
    "gemma-3-12b": _gemma_3(
        vocab_size=262208, hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16,
        num_key_value_heads=8, head_dim=256, sliding_window=1024, query_pre_attn_scalar=256,
        max_position_embeddings=131072, rope_scaling={"rope_type": "linear", "factor": 8.0},
        layer_types=_layers(48, 6),
    ),
    "mistral-small-24b": _mistral_3(
        vocab_size=131072, hidden_size=5120, intermediate_size=32768, num_hidden_layers=40, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=1e9,
    ),
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
    },
    "gpt-oss-20b": {
        **_GPT_OSS, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088,
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "layer_types": _layers(24, 2),
        "max_position_embeddings": 131072, "rope_scaling": _YARN, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
    },
    "qwen3-32b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120,
        "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    },
}  # fmt: skip
"""config.json by the name of a model."""
