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
_GEMMA_4 = {
    "model_type": "gemma4_text",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}
_MAMBA = {
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 1024,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "use_conv_bias": True,
    "use_bias": False,
    "mlp_bias": False,
    "attention_bias": False,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "mamba_ssm_cache_dtype": "float32",
}
"""Mamba layers, attention and experts, one part a layer, with heads as NVIDIA publishes them."""
_LATENT = {
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "attention_bias": False,
}
"""Latent attention, whose kernels know these sizes of a row only."""
_SOFTMAX = {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0}
_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
_DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}
_DELTA_NET = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
"""Linear attention in three of four layers, with heads as Qwen publishes them."""
_SHARED_EXPERT = {"shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": []}
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


def _delta_net(count: int) -> dict[str, Any]:
    """Layers of linear attention, and full attention in every fourth one."""
    types = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(count)]
    return {**_DELTA_NET, "num_hidden_layers": count, "layer_types": types}


def _qwen_3_5(mixture: str = "", **text: Any) -> dict[str, Any]:
    """Qwen 3.5 with its part for images. `mixture`: ending of the names of models with experts ("_moe")."""
    inner = {**_SMALL, **_delta_net(4), **text, "model_type": f"qwen3_5{mixture}_text"}
    positions = {**inner["rope_parameters"], "mrope_section": [11, 11, 10], "mrope_interleaved": True}
    return {
        "architectures": [f"Qwen3_5{mixture.removeprefix('_').capitalize()}ForConditionalGeneration"],
        "model_type": f"qwen3_5{mixture}",
        "text_config": {**inner, "rope_parameters": {"rope_theta": 1e7, **positions}},
        "vision_config": {
            "depth": 1,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_heads": 4,
            "out_hidden_size": inner["hidden_size"],
            "patch_size": 14,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _gemma_4(**text: Any) -> dict[str, Any]:
    """Gemma 4 with its part for images."""
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {**_SMALL, **_GEMMA_4, **text},
        "vision_config": {**_VISION, "num_key_value_heads": 4, "head_dim": 64},
        "audio_config": None,
        "torch_dtype": "bfloat16",
    }


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
    "deepseek-v2": {**_SMALL, **_LATENT, **_SOFTMAX, "architectures": ["DeepseekV2ForCausalLM"]}
    | {"model_type": "deepseek_v2", "q_lora_rank": None, "n_shared_experts": 2, "rope_scaling": _DEEPSEEK_YARN},
    "deepseek-v3": {**_SMALL, **_LATENT, **_SIGMOID, "architectures": ["DeepseekV3ForCausalLM"]}
    | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    | {"num_nextn_predict_layers": 0, "rope_scaling": {**_DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "glm4-moe-lite": {**_SMALL, **_LATENT, **_SIGMOID, "architectures": ["Glm4MoeLiteForCausalLM"]}
    | {"model_type": "glm4_moe_lite", "qk_nope_head_dim": 192, "v_head_dim": 256, "n_shared_experts": 1}
    | {"partial_rotary_factor": 1.0},
    "qwen3.5": {**_SMALL, **_delta_net(4), "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
    "qwen3.5-moe": {**_SMALL, **_EXPERTS, **_SHARED_EXPERT, **_delta_net(4), "architectures": ["Qwen3_5MoeForCausalLM"]}
    | {"model_type": "qwen3_5_moe_text"},
    "qwen3.5-images": _qwen_3_5(),
    "qwen3.5-moe-images": _qwen_3_5("_moe", **_EXPERTS, **_SHARED_EXPERT),
    "qwen3-next": {**_SMALL, **_EXPERTS, **_SHARED_EXPERT, **_delta_net(4), "architectures": ["Qwen3NextForCausalLM"]}
    | {"model_type": "qwen3_next"},
    "nemotron-h": {**_SMALL, **_MAMBA, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"}
    | {"hybrid_override_pattern": "MEM*-E", "num_hidden_layers": 6},
    "gemma4": _gemma_4(layer_types=_layers(4, 2)),
    "gemma4-moe": _gemma_4(
        layer_types=_layers(4, 2), enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=512
    ),
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
    "qwen3.6-27b": {
        **_SMALL, **_delta_net(64), "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24,
        "num_key_value_heads": 4, "linear_num_value_heads": 48, "max_position_embeddings": 262144,
    },
    "qwen3.6-35b-a3b": {
        **_SMALL, **_SHARED_EXPERT, **_delta_net(40), "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_attention_heads": 16,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "norm_topk_prob": True,
        "max_position_embeddings": 262144,
    },
    "gemma-4-31b": _gemma_4(
        vocab_size=262144, hidden_size=5376, intermediate_size=21504, num_hidden_layers=60, num_attention_heads=32,
        num_key_value_heads=16, num_global_key_value_heads=4, sliding_window=1024, max_position_embeddings=262144,
        layer_types=_layers(60, 6),
    ),
    "gemma-4-26b-a4b": _gemma_4(
        vocab_size=262144, hidden_size=2816, intermediate_size=2112, num_hidden_layers=30, num_attention_heads=16,
        num_key_value_heads=8, sliding_window=1024, max_position_embeddings=262144, layer_types=_layers(30, 6),
        enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704,
    ),
    "nemotron-3-nano-30b-a3b": {
        **_SMALL, **_MAMBA, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52,
        "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32,
        "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_routed_experts": 128,
        "num_experts_per_tok": 6, "max_position_embeddings": 262144,
    },
    "deepseek-v2-lite": {
        **_LATENT, **_SOFTMAX, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
        "num_attention_heads": 16, "q_lora_rank": None, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "rope_scaling": _DEEPSEEK_YARN, "hidden_act": "silu", "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
    },
    "glm-4.7-flash": {
        **_LATENT, **_SIGMOID, "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
        "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47,
        "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1,
        "num_experts_per_tok": 4, "routed_scaling_factor": 1.8, "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "partial_rotary_factor": 1.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
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


def config_of(name: str) -> dict[str, Any]:
    """The configuration of a model, or with `NAME@LAYERS` that of its first layers, for a device or a disk that has no
    room for all. Raises KeyError for a name that is not known."""
    known, _, layers = name.partition("@")
    found = CONFIGS[known]
    if not layers:
        return found
    text = found.get("text_config", found)
    fewer = {**text, "num_hidden_layers": int(layers)}
    for key in ("layer_types", "hybrid_override_pattern"):
        if key in text:
            fewer[key] = text[key][: int(layers)]
    return {**found, "text_config": fewer} if text is not found else fewer
