"""A small random checkpoint of every model class that engines on CPUs serve
(`loader/checkpoints/architectures/classes.py`): an entry each."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from loader.checkpoints.architectures import families

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
LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.8,
}
"""Settings of latent attention with experts in groups; no two sizes of a row are the same."""
_DRAWN = {
    "e_score_correction_bias": (0.5, 1.5),
    "_a_layernorm.weight": (0.5, 1.5),
    ".router.scale": (0.5, 1.5),
    ".per_expert_scale": (0.5, 1.5),
    "_layernorm_1.weight": (0.5, 1.5),
    "_layernorm_2.weight": (0.5, 1.5),
    ".layer_scalar": (0.5, 1.5),
    "per_layer_projection_norm.weight": (0.5, 1.5),
    "per_layer_input_norm.weight": (0.5, 1.5),
    "mixer.norm.weight": (0.5, 1.5),
    "mixer.D": (0.5, 1.5),
    **{f"mixer.{layer}.bias": (-0.5, 0.5) for layer in ("conv1d", "in_proj", "out_proj", "up_proj", "down_proj")},
    "mixer.dt_bias": (-4.0, -1.0),
}
"""Ends of the names of tensors, and between which numbers their values are drawn: Transformers makes them all zeros or
ones, or so small that states hardly change, which would hide that one is not used."""
WINDOWS = {
    "sliding_window": 16,
    "query_pre_attn_scalar": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True,
}
STATES = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "rope_theta": 20_000.0,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 20_000.0, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": False,
}
"""Layers with states of a fixed size beside one with keys and values. Keys and values of a state differ in size, so
that none is taken for the other, and a state takes more than one extent of tests."""
MAMBA = {
    "layers_block_type": ["mamba", "moe", "attention", "mamba", "mlp", "mamba"],
    "num_hidden_layers": 6,
    "mamba_num_heads": 16,
    "mamba_head_dim": 12,
    "ssm_state_size": 32,
    "n_groups": 8,
    "chunk_size": 32,
    "time_step_min": 1e-9,
    "n_routed_experts": 8,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False,
    "rescale_prenorm_residual": False,
}
"""Layers that are one part alone. In prompts, and only there, Transformers lengthens time steps that are shorter than
`time_step_min`, which engines do not."""
SHARED_EXPERT = {"num_experts": 8, "shared_expert_intermediate_size": 48}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

_OF_FULL_LAYERS = ("global_head_dim", "num_global_key_value_heads")


@dataclass(frozen=True)
class SmallCheckpoint:
    """How Transformers makes a checkpoint."""

    config: str
    """Name of the configuration's class."""
    changes: dict[str, Any]
    """Values of the configuration."""
    published: tuple[tuple[str, str], ...] = ()
    """Beginnings of names of weights as this version of Transformers saves them, and as they are published."""
    joins_experts: bool = False
    """Whether published weights have all experts of a layer in one tensor, where Transformers saves them one by one."""
    model: str = ""
    """Name of the model's class, if it is not the one of the architecture."""
    beside: Mapping[str, Any] = field(default_factory=dict)
    """Values that published configurations have in `vision_config` beside those that Transformers saves."""
    unused: bool = False
    """Whether published weights have tensors that no step reads, and that Transformers does not save."""


def text(config: str, **changes: Any) -> SmallCheckpoint:
    return SmallCheckpoint(config, {**SHAPE, **changes})


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": CONTEXT // 8, "rope_theta": 10000.0}


def latent(config: str, **changes: Any) -> SmallCheckpoint:
    given = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    return SmallCheckpoint(config, {**given, **LATENT, **EXPERTS, **changes})


def deepseek_v3(**changes: Any) -> SmallCheckpoint:
    return latent(
        "DeepseekV3Config",
        moe_layer_freq=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        **changes,
    )


def qwen_3_5(text_config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a Qwen 3.5 that takes images too."""
    positions = {**text_config["rope_parameters"], "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    return {
        "text_config": {**text_config, "rope_parameters": positions},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 14,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [],
        },
        "tie_word_embeddings": False,
    }


def gemma_4(*, clipped: bool = False, audio: dict[str, Any] | None = None, **changes: Any) -> SmallCheckpoint:
    """`clipped`: whether linear layers of the parts for images and sound have bounds."""
    return SmallCheckpoint(
        "Gemma4Config",
        {
            "text_config": {
                **SHAPE,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "tie_word_embeddings": True,
                "head_dim": 32,
                "global_head_dim": 64,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                **changes,
            },
            "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 16, "use_clipped_linears": clipped},
            "audio_config": audio,
        },
    )


def small_gemma_4(*, unused: bool, **changes: Any) -> SmallCheckpoint:
    """A Gemma 4 whose last layers use the KV of others. `unused`: whether these layers have projections to keys and
    values all the same, as in Google's checkpoints, and not in those of people who tune the model."""
    made = gemma_4(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_global_key_value_heads=None,
        attention_k_eq_v=False,
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=24,
        vocab_size_per_layer_input=VOCABULARY,
        clipped=True,
        audio={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [128, 4],  # SGLang takes the first for granted
            "output_proj_dims": 48,
        },
        **changes,
    )
    return replace(made, unused=unused)


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
    "DeepseekV2ForCausalLM": latent(
        "DeepseekV2Config",
        q_lora_rank=None,
        moe_layer_freq=1,
        topk_method="group_limited_greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        rope_scaling={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "DeepseekV3ForCausalLM": deepseek_v3(num_mtp_layers=0),
    "KimiK25ForConditionalGeneration": SmallCheckpoint(
        "Kimi_K25Config",
        {
            "text_config": {
                "architectures": ["DeepseekV3ForCausalLM"],
                "model_type": "deepseek_v3",
                **deepseek_v3(tie_word_embeddings=False).changes,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
            },
            "projection_hidden_size": 32,
            "tie_word_embeddings": False,
        },
        published=(
            ("language_model.model.blocks.", "language_model.model.layers."),
            ("model.mm_projector.", "mm_projector."),
            ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
        ),
        model="Kimi_K25ForConditionalGeneration",
        beside={"vt_hidden_size": 32, "init_pos_emb_height": 4, "init_pos_emb_width": 4, "text_hidden_size": 128},
    ),
    "Glm4MoeLiteForCausalLM": latent("Glm4MoeLiteConfig", norm_topk_prob=True),
    "HYV3ForCausalLM": text(
        "HYV3Config",
        **EXPERTS,
        num_experts=8,
        num_shared_experts=1,
        first_k_dense_replace=1,
        qk_norm=True,
        route_norm=True,
    ),
    "Qwen3NextForCausalLM": text("Qwen3NextConfig", **EXPERTS, **SHARED_EXPERT, **STATES, norm_topk_prob=True),
    "Qwen3_5ForCausalLM": text("Qwen3_5TextConfig", **STATES),
    "Qwen3_5MoeForCausalLM": text("Qwen3_5MoeTextConfig", **EXPERTS, **SHARED_EXPERT, **STATES),
    "Qwen3_5ForConditionalGeneration": SmallCheckpoint("Qwen3_5Config", qwen_3_5(SHAPE | STATES)),
    "Qwen3_5MoeForConditionalGeneration": SmallCheckpoint(
        "Qwen3_5MoeConfig", qwen_3_5(SHAPE | EXPERTS | SHARED_EXPERT | STATES), joins_experts=True
    ),
    "NemotronHForCausalLM": text("NemotronHConfig", **EXPERTS, **MAMBA),
    "Gemma3ForConditionalGeneration": SmallCheckpoint(
        "Gemma3Config",
        {
            "text_config": {**SHAPE, **WINDOWS},
            "vision_config": {**VISION, "vision_use_head": False},
            "mm_tokens_per_image": 4,
        },
        published=(("vision_tower.", "vision_tower.vision_model."),),
    ),
    "Gemma4ForConditionalGeneration": gemma_4(),
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

FORMS = {
    "Gemma4ForConditionalGeneration": {
        "Gemma 4 26B-A4B": gemma_4(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=64),
        "Gemma 4 E2B": small_gemma_4(unused=True, use_double_wide_mlp=True),
        "Gemma 4 E4B, tuned": small_gemma_4(unused=False),
    },
}
"""Other forms of a class, whose layers have other parts than those of the form in `CLASSES`, by the name of a model
that has it."""

NOT_SERVED = {
    "GptOssForCausalLM": text(
        "GptOssConfig",
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    ),
}
"""Classes that engines on CPUs can run for tests. The loader refuses them there."""


def write(architecture: str, folder: Path, form: str = "") -> Path:
    """The checkpoint of a class, as its publisher writes it; of a tokenizer there is only the file. `form`: one of the
    `FORMS` of the class; empty: the one in `CLASSES`."""
    known = FORMS[architecture][form] if form else {**CLASSES, **NOT_SERVED}[architecture]
    torch.manual_seed(3)
    model = getattr(transformers, known.model or architecture)(getattr(transformers, known.config)(**known.changes))
    for name, tensor in model.state_dict().items():
        for end, (least, most) in _DRAWN.items():
            if name.endswith(end):
                tensor.uniform_(least, most)
    model.eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = [architecture]
    config.get("vision_config", {}).update(known.beside)
    if "hidden_activation" in config:  # published ones say it twice, and SGLang reads the other one for Gemma 2
        config["hidden_act"] = config["hidden_activation"]
    if "per_layer_config" in (text := config.get("text_config", {})):  # published ones name the sizes of each type
        del text["per_layer_config"]
        text.update({key: known.changes["text_config"][key] for key in _OF_FULL_LAYERS})
    if config["model_type"] == "kimi_k25":  # published ones describe their positions as DeepSeek's do
        text["model_type"] = "kimi_k2"
        stretched = text.pop("rope_parameters")
        text["rope_theta"], stretched["type"] = stretched.pop("rope_theta"), stretched.pop("rope_type")
        text["rope_scaling"] = stretched
    if architecture == "Qwen3NextForCausalLM":  # where published ones say it, and SGLang reads it
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    if architecture == "NemotronHForCausalLM":  # published ones have a letter for each layer, or older names
        del config["layers_block_type"], config["mtp_layers_block_type"]
        config["hybrid_override_pattern"] = model.config.hybrid_override_pattern
    path.write_text(json.dumps(config))
    if known.published:
        weights = load_file(folder / "model.safetensors")
        save_file(
            {_published(name, known.published): each for name, each in weights.items()}, folder / "model.safetensors"
        )
    if known.unused:
        weights = load_file(folder / "model.safetensors")
        others = families.held_beside(families.read_shape(config), config)
        named = {name.replace("model.", "model.language_model.", 1): size for name, size in others.items()}
        save_file(weights | {name: torch.randn(size) for name, size in named.items()}, folder / "model.safetensors")
    if known.joins_experts:
        save_file(joined(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return folder


def joined(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights with all experts of a layer in one tensor for gate and up projection, and one for down."""
    made = {name: each for name, each in weights.items() if ".experts." not in name}
    for module in {name.partition(".experts.")[0] for name in weights if ".experts." in name}:
        one_by_one = range(sum(name.startswith(f"{module}.experts.") for name in weights) // 3)

        def stacked(part: str, module: str = module, experts: range = one_by_one) -> torch.Tensor:
            return torch.stack([weights[f"{module}.experts.{number}.{part}.weight"] for number in experts])

        made[f"{module}.experts.gate_up_proj"] = torch.cat((stacked("gate_proj"), stacked("up_proj")), dim=1)
        made[f"{module}.experts.down_proj"] = stacked("down_proj")
    return made


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
    of_text = ("language_model.", "model.language_model.", "lm_head.")
    return {name: each for name, each in named.items() if not name.startswith(of_text)}


def _published(name: str, names: tuple[tuple[str, str], ...]) -> str:
    saved = next((pair for pair in names if name.startswith(pair[0])), ("", ""))
    return saved[1] + name.removeprefix(saved[0])
