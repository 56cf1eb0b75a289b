"""Which modules a model needs, and that SGLang has them as they are asked for."""

from __future__ import annotations

import ast

import pytest

from gpu_scheduler.engines.sglang.policy import jit
from tests.gpu_scheduler.engines.sglang.base.test_kernels import functions, sglang_folder

LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16"}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
WIDE = {"global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True}
OF_LLAMA = {jit.rope(True, 128, "bfloat16"), jit.kvcache(1024)}
"""Modules that LLAMA needs on two devices."""
ALWAYS = {jit.clamp_position("int64")}


def of_dtype(dtype: str) -> set[jit.JitModule]:
    return ALWAYS | {jit.activation(dtype)}


@pytest.mark.parametrize(
    ("config", "ranks", "more"),
    [
        (LLAMA, 1, {jit.rope(True, 128, "bfloat16"), jit.kvcache(2048)}),
        (LLAMA, 4, {jit.rope(True, 128, "bfloat16"), jit.kvcache(512)}),
        (LLAMA, 16, {jit.rope(True, 128, "bfloat16"), jit.kvcache(256)}),
        (LLAMA | {"head_dim": 64}, 1, {jit.rope(True, 64, "bfloat16"), jit.kvcache(1024)}),
        (LLAMA | {"partial_rotary_factor": 0.5}, 1, {jit.rope(True, 64, "bfloat16"), jit.kvcache(2048)}),
        (LLAMA | {"num_key_value_heads": None}, 1, {jit.rope(True, 128, "bfloat16"), jit.kvcache(8192)}),
        (LLAMA | WIDE, 2, {*OF_LLAMA, jit.rope(True, 512, "bfloat16"), jit.kvcache(2048)}),
        (
            LLAMA | WIDE | {"attention_k_eq_v": False},
            2,
            {*OF_LLAMA, jit.rope(True, 512, "bfloat16"), jit.kvcache(4096)},
        ),
        (LLAMA | LATENT, 1, {jit.rope(False, 64, "bfloat16"), jit.latent_rows(1024, 128)}),
        (LLAMA | LATENT, 4, {jit.rope(False, 64, "bfloat16"), jit.latent_rows(1024, 128)}),
        (LLAMA | LATENT | {"qk_rope_head_dim": None}, 1, set()),
        (LLAMA | {"num_attention_heads": 0}, 1, set()),
        (LLAMA | {"hidden_size": "wide"}, 1, set()),
    ],
)
def test_jit_modules_of_a_config_are_those_of_its_shape(config, ranks, more):
    assert jit.needed(config, ranks) == of_dtype("bfloat16") | more


@pytest.mark.parametrize(
    ("quantised", "repack"),
    [
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "gptq"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, None),
        ({"quant_method": "fp8"}, None),
        ("odd", None),
    ],
)
def test_quantised_weights_need_the_modules_that_take_minutes(quantised, repack):
    more = jit.needed(LLAMA | {"quantization_config": quantised}, 1) - jit.needed(LLAMA, 1)
    assert {module.path.rpartition(".")[2] for module in more} == (
        {"gptq_marlin", f"{repack}_marlin_repack"} if repack else set()
    )


def test_quantised_weights_of_a_mixture_need_the_module_for_experts_too():
    quantised = {"quantization_config": {"quant_method": "awq"}}
    more = jit.needed(LLAMA | quantised | {"num_local_experts": 8}, 1) - jit.needed(LLAMA | quantised, 1)
    assert {module.path.rpartition(".")[2] for module in more} == {"moe_wna16_marlin"} and len(more) == 2


@pytest.mark.parametrize("outside", [("torch_dtype",), ("torch_dtype", "quantization_config")])
def test_a_model_that_takes_images_too_needs_the_modules_of_its_language_model(outside):
    quantised = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}
    text = LLAMA | LATENT | quantised | {"n_routed_experts": 384}
    wrapper = {"vision_config": {}, "text_config": {key: text[key] for key in text if key not in outside}}
    assert jit.needed(wrapper | {key: text[key] for key in outside}, 4) == jit.needed(text, 4)
    assert jit.needed({"text_config": "odd"}, 1) == ALWAYS


def test_jit_modules_that_the_config_does_not_determine_are_left_to_engines():
    assert jit.needed({}, 1) == jit.needed(LLAMA | {"torch_dtype": "float32"}, 1) == ALWAYS
    assert jit.needed(LLAMA | {"dtype": "float16", "torch_dtype": "float32"}, 1) > of_dtype("float16")
    assert jit.needed({"dtype": "bfloat16"}, 1) == of_dtype("bfloat16")


SHAPES = [
    LLAMA | LATENT,
    *(LLAMA | {"quantization_config": {"quant_method": method}, "num_experts": 8} for method in ("awq", "gptq")),
]


@pytest.mark.parametrize("module", sorted(set().union(*(jit.needed(each, 1) for each in SHAPES))), ids=str)
def test_jit_module_exists_in_sglang_with_these_parameters(module):
    path = sglang_folder().joinpath(*module.path.split(".")[1:]).with_suffix(".py")
    parameters = functions(path.read_text())[module.function].args.args
    kinds = [ast.unparse(each.annotation) for each in parameters]
    said = [{bool: "bool", int: "int", str: "torch.dtype"}[type(each)] for each in module.arguments]
    assert kinds == said
