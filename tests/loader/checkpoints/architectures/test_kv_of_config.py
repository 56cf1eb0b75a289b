"""Kinds of KV by config.json, beside figures that were computed by hand from published configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_kinds.layout import BEYOND_WINDOW_TOKENS, KvLayout, attention, latent, of_tokens, state, window
from loader.checkpoints.architectures.kv_of_config import kv_layout, kv_of_folder
from loader.checkpoints.errors import BrokenCheckpoint

BF16 = 2
KIB, MIB = 1 << 10, 1 << 20
QWEN_3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
}
DELTA_NET = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
QWEN_3_CODER_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
    **DELTA_NET,
}
QWEN_3_6_35B_A3B = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 40,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_num_value_heads": 32,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        **DELTA_NET,
    },
}
QWEN_3_6_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_num_value_heads": 48,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        **DELTA_NET,
    },
}
NEMOTRON_NANO_9B_V2 = {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "num_hidden_layers": 56,
    "hidden_size": 4480,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
NEMOTRON_3_NANO_30B_A3B = {
    **NEMOTRON_NANO_9B_V2,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "hidden_size": 2688,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "mamba_ssm_cache_dtype": "float32",
}
GEMMA_4_31B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 60,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    },
}
GEMMA_4_26B_A4B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "text_config": {
        **GEMMA_4_31B["text_config"],  # type: ignore[dict-item]
        "num_hidden_layers": 30,
        "hidden_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    },
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
GPT_OSS_120B = {
    **GPT_OSS_20B,
    "num_hidden_layers": 36,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
LATENT = {"hidden_size": 2048, "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
DEEPSEEK_V2_LITE = {"architectures": ["DeepseekV2ForCausalLM"], "num_hidden_layers": 27, **LATENT}
DEEPSEEK_V2 = {"architectures": ["DeepseekV2ForCausalLM"], "num_hidden_layers": 60, **LATENT}
DEEPSEEK_V3 = {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61, **LATENT}
GLM_4_7_FLASH = {"architectures": ["Glm4MoeLiteForCausalLM"], "num_hidden_layers": 47, **LATENT}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (QWEN_3_8B, of_tokens(144 * KIB)),  # 36 layers of keys and values of 8 heads of 128 numbers
        (LLAMA_2_7B, of_tokens(512 * KIB)),  # a head for each of attention's, of 4096 / 32 numbers
        # 12 of 48 layers with 2 heads of 256; 36 with 32 states of 128 x 128, and 3 columns of (2 x 16 + 32) x 128.
        (QWEN_3_CODER_NEXT, KvLayout((attention(24 * KIB), state(36 * (2 * MIB + 48 * KIB))))),
        (QWEN_3_6_35B_A3B, KvLayout((attention(20 * KIB), state(30 * (2 * MIB + 48 * KIB))))),
        (QWEN_3_6_27B, KvLayout((attention(64 * KIB), state(48 * (3 * MIB + 60 * KIB))))),
        # 4 of 56 layers with 8 heads of 128; 27 with 128 x 80 x 128 numbers, and 3 columns of 128 x 80 + 2 x 8 x 128.
        (NEMOTRON_NANO_9B_V2, KvLayout((attention(16 * KIB), state(27 * (5 * MIB + 72 * KIB))))),
        # 6 of 52 layers with 2 heads of 128; 23 with 64 x 64 x 128 numbers, and 3 columns of 64 x 64 + 2 x 8 x 128.
        (NEMOTRON_3_NANO_30B_A3B, KvLayout((attention(6 * KIB), state(23 * (2 * MIB + 36 * KIB))))),
        # 10 layers with 4 heads of 512, and 50 with 16 heads of 256, which keep keys and values though they are equal.
        (GEMMA_4_31B, KvLayout((attention(80 * KIB), window(800 * KIB, 1024, BEYOND_WINDOW_TOKENS)))),
        (GEMMA_4_26B_A4B, KvLayout((attention(20 * KIB), window(200 * KIB, 1024, BEYOND_WINDOW_TOKENS)))),
        (GPT_OSS_20B, KvLayout((attention(24 * KIB), window(24 * KIB, 128, BEYOND_WINDOW_TOKENS)))),
        (GPT_OSS_120B, KvLayout((attention(36 * KIB), window(36 * KIB, 128, BEYOND_WINDOW_TOKENS)))),
        (DEEPSEEK_V2_LITE, KvLayout((latent(27 * 576 * BF16),))),
        (DEEPSEEK_V2, KvLayout((latent(60 * 576 * BF16),))),
        (DEEPSEEK_V3, KvLayout((latent(61 * 576 * BF16),))),
        (GLM_4_7_FLASH, KvLayout((latent(47 * 576 * BF16),))),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_kv_of_a_published_configuration_has_the_kinds_computed_by_hand(
    config: dict[str, Any], expected: KvLayout
) -> None:
    assert kv_layout(config, BF16, one_pool=False) == expected


@pytest.mark.parametrize(
    ("config", "mib"),
    [
        pytest.param(QWEN_3_6_35B_A3B, 61, id="Qwen 35B"),
        pytest.param(QWEN_3_CODER_NEXT, 74, id="Qwen 80B"),
        pytest.param(QWEN_3_6_27B, 147, id="Qwen 27B"),
        pytest.param(NEMOTRON_NANO_9B_V2, 137, id="Nemotron 9B"),
        pytest.param(NEMOTRON_3_NANO_30B_A3B, 47, id="Nemotron 30B"),
    ],
)
def test_state_of_a_published_model_has_the_size_that_the_guide_says(config: dict[str, Any], mib: int) -> None:
    [found] = [kind for kind in kv_layout(config, BF16, one_pool=False).kinds if kind.states]
    assert round(found.bytes_per_state / MIB) == mib and found.states == 1


def test_state_in_smaller_floats_is_smaller_but_for_its_convolution() -> None:
    text = {**QWEN_3_6_27B["text_config"], "mamba_ssm_dtype": "bfloat16"}  # type: ignore[dict-item]
    found = kv_layout({**QWEN_3_6_27B, "text_config": text}, BF16, one_pool=False)
    assert found.kinds[1].bytes_per_state == 48 * (3 * MIB // 2 + 60 * KIB)


def test_windows_in_one_pool_are_attention_over_all_tokens() -> None:
    assert kv_layout(GPT_OSS_20B, BF16, one_pool=True) == of_tokens(48 * KIB)


def test_windows_in_a_pool_of_their_own_keep_the_latest_tokens_and_the_other_layers_all() -> None:
    every, in_window = kv_layout(GPT_OSS_20B, BF16, one_pool=False).kinds
    assert (every.name, every.bytes_per_token) == ("attention", 24 * KIB)
    assert (in_window.name, in_window.bytes_per_token, in_window.window_tokens) == ("window", 24 * KIB, 128)


def test_windows_with_other_heads_have_no_pool_together_and_cost_a_token_as_much_as_all_layers() -> None:
    with pytest.raises(BrokenCheckpoint, match="heads of another size, which need their own pool"):
        kv_layout(GEMMA_4_31B, BF16, one_pool=True)
    assert kv_layout(GEMMA_4_31B, BF16, one_pool=False).marginal(0) == 880 * KIB


@pytest.mark.parametrize(
    "config",
    [QWEN_3_8B, QWEN_3_6_27B, GEMMA_4_31B, GPT_OSS_20B, NEMOTRON_NANO_9B_V2],
    ids=["8B", "27B", "31B", "20B", "9B"],
)
def test_kinds_of_heads_divide_among_devices(config: dict[str, Any]) -> None:
    one, two = (kv_layout(config, BF16, devices, one_pool=False) for devices in (1, 2))
    assert one.share(2) == two and all(kind.divided for kind in one.kinds)


def test_more_devices_than_heads_have_the_same_heads() -> None:
    four, eight = (kv_layout(QWEN_3_6_35B_A3B, BF16, devices, one_pool=False) for devices in (2, 4))
    assert four.kinds[0] == eight.kinds[0] == attention(10 * KIB)
    assert eight.kinds[1].bytes_per_state == 30 * (MIB // 2 + 12 * KIB), "states have more heads"


def test_latent_rows_are_the_same_on_each_device() -> None:
    one, four = (kv_layout(DEEPSEEK_V3, BF16, devices, one_pool=False) for devices in (1, 4))
    assert one == four and not one.kinds[0].divided


def test_layers_that_use_the_kv_of_others_have_none_of_their_own() -> None:
    text = {**GEMMA_4_31B["text_config"], "num_kv_shared_layers": 12}  # type: ignore[dict-item]
    found = kv_layout({**GEMMA_4_31B, "text_config": text}, BF16, one_pool=False)
    assert found.kinds == (attention(64 * KIB), window(640 * KIB, 1024, BEYOND_WINDOW_TOKENS))


def test_layers_without_a_window_have_heads_of_their_own_number_only_where_keys_are_values_too() -> None:
    text = {**GEMMA_4_31B["text_config"], "attention_k_eq_v": False}  # type: ignore[dict-item]
    found = kv_layout({**GEMMA_4_31B, "text_config": text}, BF16, one_pool=False)
    assert found.kinds == (attention(320 * KIB), window(800 * KIB, 1024, BEYOND_WINDOW_TOKENS))


@pytest.mark.parametrize(
    ("config", "change", "why"),
    [
        (QWEN_3_8B, {"num_hidden_layers": None}, "config.json has no num_hidden_layers"),
        (QWEN_3_8B, {"num_hidden_layers": 1 << 20}, "more than 4096"),
        (QWEN_3_8B, {"num_key_value_heads": 0}, "num_key_value_heads = 0 is not"),
        (QWEN_3_8B, {"layer_types": ["full_attention"] * 3}, "layer_types has 3 of 36 layers"),
        (QWEN_3_8B, {"layer_types": ["mamba"] * 36}, "what layers of the type mamba keep is not known"),
        (QWEN_3_CODER_NEXT, {"linear_num_value_heads": None}, "config.json has no linear_num_value_heads"),
        (QWEN_3_CODER_NEXT, {"mamba_ssm_dtype": "int4"}, "mamba_ssm_dtype"),
        (QWEN_3_8B, {"head_dim": 1 << 30}, "bytes for each token, more than any model has"),
        (DEEPSEEK_V3, {"kv_lora_rank": 1 << 30}, "bytes for each token, more than any model has"),
        (QWEN_3_CODER_NEXT, {"linear_key_head_dim": 1 << 30}, "bytes for each state, more than any model has"),
        (GPT_OSS_20B, {"sliding_window": None}, "config.json has no sliding_window"),
        (GPT_OSS_20B, {"sliding_window": 10**30}, "sliding_window is larger than 2147483647"),
        (DEEPSEEK_V3, {"index_head_dim": 128}, "what a model with index_head_dim keeps is not known"),
        (QWEN_3_8B, {"num_kv_shared_layers": 36}, "leaves no layer that has KV of its own"),
        (NEMOTRON_NANO_9B_V2, {"hybrid_override_pattern": None}, "neither hybrid_override_pattern nor layers_block_t"),
        (NEMOTRON_NANO_9B_V2, {"mamba_head_dim": None}, "config.json has no mamba_head_dim"),
        (NEMOTRON_NANO_9B_V2, {"mamba_ssm_dtype": "int4"}, "mamba_ssm_dtype"),
        (QWEN_3_8B, {"mamba_num_heads": 8}, "what a model with mamba_num_heads keeps is not known"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": "64"}, "qk_rope_head_dim = '64' is not"),
    ],
)
def test_configuration_without_what_a_kind_needs_is_refused_by_name(
    config: dict[str, Any], change: dict[str, Any], why: str
) -> None:
    with pytest.raises(BrokenCheckpoint) as broken:
        kv_layout({**config, **change}, BF16, one_pool=False)
    assert why in str(broken.value)


VALUES = st.one_of(
    st.none(), st.integers(-1, 9), st.just("x"), st.just([]), st.just({"a": 1}), st.floats(), st.just([1])
)


@given(
    st.sampled_from(
        [
            *(QWEN_3_8B, LLAMA_2_7B, QWEN_3_CODER_NEXT, GPT_OSS_20B, DEEPSEEK_V3, GEMMA_4_31B["text_config"]),
            NEMOTRON_NANO_9B_V2,
        ]
    ),
    st.data(),
    st.booleans(),
)
def test_any_values_of_a_configuration_give_kinds_or_are_refused(
    config: dict[str, Any], data: st.DataObject, one_pool: bool
) -> None:
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(config.keys() - {"architectures"})), VALUES, min_size=1))
    try:
        found = kv_layout({"architectures": ["X"], **config, **changed}, BF16, one_pool=one_pool)
    except BrokenCheckpoint:
        return
    assert found.kinds and found.bytes_of(10) > 0


def test_folder_tells_its_kinds_if_its_configuration_does(tmp_path: Path) -> None:
    def write(text: str) -> KvLayout | None:
        (tmp_path / "config.json").write_text(text)
        return kv_of_folder(tmp_path, BF16, 1)

    assert kv_of_folder(tmp_path, BF16, 1) is None, "there is no file"
    assert write(json.dumps(DEEPSEEK_V3)) == kv_layout(DEEPSEEK_V3, BF16, one_pool=False)
    assert write(json.dumps(GPT_OSS_20B)) == kv_layout(GPT_OSS_20B, BF16, one_pool=False)
    with_one_pool = {**GPT_OSS_20B, "architectures": ["Gemma2ForCausalLM"]}
    assert write(json.dumps(with_one_pool)) == of_tokens(48 * KIB), "served, with one pool"
    for text in ("[]", "{", "{}", '{"architectures": [1]}', json.dumps({**QWEN_3_8B, "num_hidden_layers": None})):
        assert write(text) is None
