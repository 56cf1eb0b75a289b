"""The table of model classes: what is read of a folder of each kind, and what is refused of them."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loader.checkpoints.architectures import classes, families
from loader.checkpoints.architectures.kv_of_config import kv_layout
from loader.checkpoints.checkpoint import read, read_config
from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.weight_files import tensors_of
from testing import small_checkpoints as small

GUIDE = Path(__file__).resolve().parents[4] / "docs" / "guide" / "models.md"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of classes, each written once."""
    made: dict[str, Path] = {}

    def folder(architecture: str, form: str = "") -> Path:
        if (name := f"{architecture} {form}") not in made:
            made[name] = small.write(architecture, tmp_path_factory.mktemp("model") / "m", form)
        return made[name]

    return folder


def changed(folder: Path, into: Path, change: Any) -> Path:
    """A folder with the same weights, whose config.json `change` has changed."""
    into.mkdir()
    for path in folder.iterdir():
        (into / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (into / "config.json").unlink()
    (into / "config.json").write_text(json.dumps(config))
    return into


def test_classes_verified_on_cpu_have_a_small_checkpoint_to_compare_engines_by() -> None:
    assert small.CLASSES.keys() == {name for name, known in classes.CLASSES.items() if "CPU" in known.verified}
    assert all(known.gpu_only for known in classes.CLASSES.values() if "CPU" not in known.verified)


@pytest.mark.parametrize(
    ("types", "why"),
    [
        (None, "config.json has no layer_types"),
        (["sliding_attention"] * 4, "every layer has a window, and engines have no pool for windows alone"),
    ],
)
def test_gpt_oss_whose_layers_with_windows_are_not_known_or_all_is_refused(
    tmp_path: Path, folders: Any, types: list[str] | None, why: str
) -> None:
    folder = folders("GptOssForCausalLM")
    assert [kind.name for kind in read(folder, 2).kv.kinds] == ["attention", "window"]
    with pytest.raises(BrokenCheckpoint, match=why):
        read(changed(folder, tmp_path / "m", lambda c: c.update(layer_types=types)), 2)


def test_table_of_model_classes_is_in_the_guide() -> None:
    assert classes.markdown() in GUIDE.read_text()


@pytest.mark.parametrize("architecture", small.CLASSES)
def test_config_alone_tells_of_a_class_what_its_whole_folder_tells(
    tmp_path: Path, folders: Any, architecture: str
) -> None:
    whole = folders(architecture)
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    devices = (1, 2) if not classes.CLASSES[architecture].states == classes.MAMBA else (1,)
    for count in devices:
        found, expected = read_config(tmp_path, 2, count), read(whole, 2, count)
        for field in ("kv", "layers", "context_tokens", "expert_share", "quantisation"):
            assert getattr(found, field) == getattr(expected, field), field
        beside = sum(
            -(-tensor.elements * 2 // 256) * 256
            for name, tensor in families.text_tensors(tensors_of(whole), families.read_shape(config_of(whole))).items()
            if families.beside_text(name, families.read_shape(config_of(whole)))
        )
        assert found.weights_bytes == pytest.approx(expected.weights_bytes - beside, abs=4096)
        assert found.active_bytes == pytest.approx(expected.active_bytes - beside, abs=4096)


def config_of(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())


def test_a_class_on_two_devices_has_half_of_the_experts_and_of_the_heads(folders: Any) -> None:
    one, two = (read(folders("Qwen3MoeForCausalLM"), 4, devices) for devices in (1, 2))
    assert two.kv_bytes_per_token == one.kv_bytes_per_token // 2
    assert one.weights_bytes / 2 < two.weights_bytes < 0.6 * one.weights_bytes


@pytest.mark.parametrize("architecture", [name for name, known in classes.CLASSES.items() if known.states])
def test_a_class_with_states_has_the_kind_and_each_of_two_devices_half_of_it(folders: Any, architecture: str) -> None:
    found = read(folders(architecture), 4)
    (state,) = (kind for kind in found.kv.kinds if kind.states)
    # Three layers: the last three inputs of 64 + 64 + 192 rows, and 4 heads of 48 x 32; or of 192 + 2 x 8 x 32 rows,
    # and 16 heads of 12 x 32.
    mamba = classes.CLASSES[architecture].states == classes.MAMBA
    each = 3 * 704 + 16 * 12 * 32 if mamba else 3 * 320 + 4 * 48 * 32
    assert (state.states, state.bytes_per_state) == (1, 3 * 4 * each)
    assert found.kv_bytes_per_token == 4 * 2 * 2 * 32, "of one layer"
    if mamba:
        return  # served by one device
    half = read(folders(architecture), 4, 2)
    (half_state,) = (kind for kind in half.kv.kinds if kind.states)
    assert (half_state.states, half_state.bytes_per_state) == (1, state.bytes_per_state // 2)
    assert half.kv_bytes_per_token == found.kv_bytes_per_token // 2
    assert found.weights_bytes / 2 < half.weights_bytes < found.weights_bytes


@pytest.mark.parametrize(
    ("architecture", "form"),
    [("NemotronHForCausalLM", ""), ("Gemma4ForConditionalGeneration", "Gemma 4 E2B")],
)
def test_a_model_with_which_no_engine_was_seen_on_several_devices_is_served_by_one(
    folders: Any, architecture: str, form: str
) -> None:
    with pytest.raises(BrokenCheckpoint, match=f"this {architecture} is served by one device, not by 2"):
        read(folders(architecture, form) if form else folders(architecture), 4, 2)


@pytest.mark.parametrize(
    ("change", "heads"),
    [
        ({"linear_num_key_heads": 1}, "4 value heads with 1 key heads"),
        ({"linear_num_key_heads": 1, "linear_num_value_heads": 3}, "3 value heads with 1 key heads"),
    ],
)
def test_heads_of_linear_attention_that_do_not_divide_are_refused_by_name(
    tmp_path: Path, folders: Any, change: dict[str, int], heads: str
) -> None:
    folder = changed(folders("Qwen3_5ForCausalLM"), tmp_path / "m", lambda config: config.update(change))
    with pytest.raises(BrokenCheckpoint, match=f"{heads} of linear attention do not divide among 2 devices"):
        read(folder, 4, 2)


@pytest.mark.parametrize("devices", [1, 2])
def test_projections_to_values_that_are_keys_are_divided_as_those_of_other_values(
    tmp_path: Path, folders: Any, devices: int
) -> None:
    """Engines hold both projections, though a checkpoint has one for keys and values together."""
    whole = config_of(folders("Gemma4ForConditionalGeneration"))
    found = []
    for together in (True, False):
        folder = tmp_path / str(together)
        folder.mkdir()
        text = {**whole["text_config"], "num_key_value_heads": 2, "num_global_key_value_heads": 2}
        config = {**whole, "text_config": {**text, "attention_k_eq_v": together}}
        (folder / "config.json").write_text(json.dumps(config))
        found.append(read_config(folder, 4, devices).weights_bytes)
    assert found[0] == found[1]


def test_gate_of_a_shared_expert_is_on_each_device_as_a_whole(folders: Any) -> None:
    """The gate of a shared expert has one row, which does not divide among devices."""
    one, two = (read(folders("Qwen3NextForCausalLM"), 4, devices) for devices in (1, 2))
    assert one.weights_bytes / 2 < two.weights_bytes < 0.6 * one.weights_bytes


@pytest.mark.parametrize(
    "names",
    [
        {"layers_block_type": ["mamba", "moe", "attention", "mamba", "mlp", "mamba"], "hybrid_override_pattern": None},
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp", "mamba"],
            "hybrid_override_pattern": None,
        },
        {"mamba_n_groups": 8, "mamba_d_conv": 4, "mamba_conv_bias": True, "num_hidden_layers": 6},
        {"time_step_limit": [0.0, float("inf")], "mamba_hidden_act": None, "mlp_hidden_act": None},
    ],
    ids=["layers", "newer layers", "sizes", "limits"],
)
def test_layers_and_sizes_of_nemotron_by_other_names_are_the_same_model(
    tmp_path: Path, folders: Any, names: dict[str, Any]
) -> None:
    folder = folders("NemotronHForCausalLM")
    other, found = read(changed(folder, tmp_path / "m", lambda c: c.update(names)), 4), read(folder, 4)
    assert (other.kv, other.weights_bytes, other.layers) == (found.kv, found.weights_bytes, 6)


def test_nemotron_without_experts_needs_no_keys_of_experts(tmp_path: Path, folders: Any) -> None:
    """Published Nano 9B v2 has none; layer 1 of the small checkpoint becomes a dense one."""
    folder = folders("NemotronHForCausalLM")
    keys = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size")

    def dense(config: dict[str, Any]) -> None:
        for key in keys:
            del config[key]
        config["hybrid_override_pattern"] = "M-*M-M"

    other = changed(folder, tmp_path / "m", dense)
    (other / "model.safetensors").unlink()
    weights = {
        name: each for name, each in load_file(folder / "model.safetensors").items() if ".layers.1.m" not in name
    }
    for part in ("up_proj", "down_proj"):
        weights[f"backbone.layers.1.mixer.{part}.weight"] = weights[f"backbone.layers.4.mixer.{part}.weight"].clone()
    save_file(weights, other / "model.safetensors")
    found = read(other, 4)
    assert found.active_bytes == found.weights_bytes
    assert found.kv == read(folder, 4).kv


def test_joined_experts_and_single_ones_are_of_the_same_size(tmp_path: Path, folders: Any) -> None:
    folder = folders("Qwen3_5MoeForCausalLM")
    other = changed(folder, tmp_path / "m", lambda config: None)
    (other / "model.safetensors").unlink()
    weights = small.joined(load_file(folder / "model.safetensors"))
    save_file(weights, other / "model.safetensors")
    single, joined = read(folder, 4), read(other, 4)
    assert (joined.weights_bytes, joined.active_bytes) == (single.weights_bytes, single.active_bytes)
    weights["model.layers.1.mlp.experts.down_proj"] = weights["model.layers.1.mlp.experts.down_proj"][:7].clone()
    save_file(weights, other / "model.safetensors")
    with pytest.raises(BrokenCheckpoint, match=r"mlp.experts.down_proj is \[7, 128, 64\] where"):
        read(other, 4)


GEMMA_4 = "Gemma4ForConditionalGeneration"
GEMMA_4_26B_A4B = {
    "architectures": [GEMMA_4],
    "model_type": "gemma4",
    "text_config": {
        "vocab_size": 262_144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    },
}


def test_experts_beside_a_dense_mlp_are_counted_with_it_and_a_token_goes_through_some(folders: Any) -> None:
    dense, mixture = read(folders(GEMMA_4), 4), read(folders(GEMMA_4, "Gemma 4 26B-A4B"), 4)
    assert dense.active_bytes == dense.weights_bytes
    experts = 4 * 8 * 3 * 64 * 128 * 4  # layers, experts, matrices, their sizes, bytes of a float
    # Beside the experts: a router of 8 rows, three norms, factors of the router's input, and one for each expert.
    beside = 4 * ((8 + 3 + 1) * 128 * 4 + 256)
    folded = 4 * 128 * 4  # the factors of the router's input again, as engines keep them
    assert mixture.weights_bytes == dense.weights_bytes + experts + beside + folded
    assert mixture.active_bytes == dense.active_bytes + experts // 4 + beside, "two experts of eight"


@pytest.mark.parametrize("joined", [False, True])
def test_a_published_mixture_beside_dense_layers_has_as_many_parameters_as_its_name_says(joined: bool) -> None:
    shape = families.read_shape(GEMMA_4_26B_A4B)
    sizes = {
        name: prod(size) for name, size in families.expected_tensors(shape, GEMMA_4_26B_A4B, joined=joined).items()
    }
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    mixture = families.mixture_of(GEMMA_4_26B_A4B)
    assert mixture is not None
    count, used = families.experts_of(GEMMA_4_26B_A4B, mixture)
    assert round(sum(sizes.values()) / 1e9, 1) == 25.2
    assert round((sum(sizes.values()) - experts * (count - used) / count) / 1e9, 1) == 3.8


def small_gemma_4(**text: Any) -> dict[str, Any]:
    """A configuration of a Gemma 4 with embeddings in every layer."""
    given = {
        "vocab_size": 262_144,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "num_attention_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
    }
    return {"architectures": [GEMMA_4], "model_type": "gemma4", "text_config": {**given, **text}}


GEMMA_4_E2B = small_gemma_4(
    hidden_size=1536,
    intermediate_size=6144,
    use_double_wide_mlp=True,
    num_hidden_layers=35,
    num_key_value_heads=1,
    num_kv_shared_layers=20,
    layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
)
GEMMA_4_E4B = small_gemma_4(
    hidden_size=2560,
    intermediate_size=10_240,
    num_hidden_layers=42,
    num_key_value_heads=2,
    num_kv_shared_layers=18,
    layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 7,
)


@pytest.mark.parametrize(
    ("config", "effective", "full_kib", "window_kib"),
    # 12 of 15 layers with KV have windows, with a head of 256; the others have one of 512.
    [(GEMMA_4_E2B, 2.3, 6, 12), (GEMMA_4_E4B, 4.6, 16, 40)],
    ids=["E2B", "E4B"],
)
def test_a_published_model_with_embeddings_in_every_layer_has_parameters_and_kv_as_computed_by_hand(
    config: dict[str, Any], effective: float, full_kib: int, window_kib: int
) -> None:
    sizes = {name: prod(size) for name, size in families.expected_tensors(families.read_shape(config), config).items()}
    assert round((sum(sizes.values()) - sizes[families.EMBEDDINGS_OF_LAYERS]) / 1e9, 1) == effective
    every, window = kv_layout(config, 2, one_pool=False).kinds
    assert (every.bytes_per_token, window.bytes_per_token) == (full_kib << 10, window_kib << 10)


def test_layers_that_use_the_kv_of_others_take_the_same_memory_whether_a_checkpoint_has_their_own_or_not(
    folders: Any,
) -> None:
    wide, tuned = (folders(GEMMA_4, form) for form in ("Gemma 4 E2B", "Gemma 4 E4B, tuned"))
    without = {name for name in tensors_of(wide) if re.search(r"\.[345]\.self_attn\.(k_|v_proj)", name)}
    assert len(without) == 9 and not without & tensors_of(tuned).keys()
    found, other = read(wide, 4), read(tuned, 4)
    assert found.kv == other.kv
    assert found.weights_bytes - other.weights_bytes == 3 * 3 * 192 * 128 * 4, "three layers are twice as wide"
    embeddings = 1024 * 6 * 24 * 4
    assert found.weights_bytes - found.active_bytes == embeddings, "a token reads a row of these"


KIMI_K25: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "vision_config": {},
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": 163_840,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "tie_word_embeddings": False,
        "max_position_embeddings": 262_144,
        "rope_theta": 50_000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": None,
                    "output_activations": None,
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "strategy": "group",
                        "group_size": 32,
                        "symmetric": True,
                        "dynamic": False,
                        "actorder": None,
                        "block_structure": None,
                    },
                }
            },
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
        },
    },
}
"""Kimi K2.5 as published: experts in INT4, the rest in bfloat16."""


def test_a_published_wrapper_with_latent_attention_has_parameters_and_kv_as_computed_by_hand() -> None:
    assert families.refusal(KIMI_K25) is None
    shape = families.read_shape(KIMI_K25)
    assert shape.context_tokens == 262_144
    sizes = {name: prod(size) for name, size in families.expected_tensors(shape, KIMI_K25).items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert round(sum(sizes.values()) / 1e12, 2) == 1.03
    assert round((sum(sizes.values()) - experts * 376 / 384) / 1e9) == 33, "32 and the input embeddings"
    assert kv_layout(KIMI_K25, 2, one_pool=True).marginal(0) == 61 * 576 * 2


def int4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """A weight's tensors as compressed-tensors packs eight numbers of 4 bits into a word, in groups of 32."""
    rows, columns = weight.shape
    return {
        "weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32),
        "weight_scale": torch.ones(rows, columns // 32, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns], dtype=torch.int32),
    }


def test_experts_in_int4_beside_other_layers_in_floats_are_read_as_published(tmp_path: Path, folders: Any) -> None:
    floats = folders("KimiK25ForConditionalGeneration")
    quantised = {"quantization_config": KIMI_K25["text_config"]["quantization_config"]}
    # Twice as wide as in the folder, because kernels take 128 columns at a time.
    wider = {"moe_intermediate_size": 128, "n_shared_experts": 1}
    folder = changed(floats, tmp_path / "m", lambda c: c["text_config"].update(wider | quantised))
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(floats / "model.safetensors").items():
        if ".mlp.experts." in name:
            layer = name.removesuffix("weight")
            weights |= {f"{layer}{part}": each for part, each in int4(torch.empty(128, 128)).items()}
        else:
            weights[name] = weight.to(torch.bfloat16)
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model.safetensors")
    found, whole = read(folder, 2), read(floats, 2)
    assert found.quantisation == "INT4 weights" and found.kv == whole.kv
    projections = 3 * 8 * 3  # of three layers with eight experts
    packed = projections * (128 * 128 // 2 + 128 * 128 // 32 * 2 + 256)
    assert whole.weights_bytes - found.weights_bytes == projections * 64 * 128 * 2 - packed
    with pytest.raises(BrokenCheckpoint, match="engines on CPUs have no kernels for it"):
        read(folder, 4)
    expert = "language_model.model.layers.1.mlp.experts.7.up_proj"
    for part, reason in (
        ("weight_scale", "up_proj.weight_scale is [128, 1] where config.json makes it [128, 4]"),
        ("weight_packed", "up_proj.weight_packed is [128, 1] where config.json makes it [128, 16]"),
    ):
        broken = {**weights, f"{expert}.{part}": weights[f"{expert}.{part}"][:, :1].contiguous()}
        save_file(broken, folder / "model.safetensors")
        with pytest.raises(BrokenCheckpoint) as refused:
            read(folder, 2)
        assert reason in str(refused.value)


@pytest.mark.parametrize("name", ["scale", "per_expert_scale", "proj.weight"])
def test_a_router_without_one_of_its_tensors_is_refused_by_name(tmp_path: Path, folders: Any, name: str) -> None:
    """Engines would take ones in place of factors that a checkpoint lacks."""
    folder = folders(GEMMA_4, "Gemma 4 26B-A4B")
    other = changed(folder, tmp_path / "m", lambda config: None)
    weights = load_file(folder / "model.safetensors")
    del weights[f"model.language_model.layers.2.router.{name}"]
    (other / "model.safetensors").unlink()
    save_file(weights, other / "model.safetensors")
    with pytest.raises(BrokenCheckpoint, match=f"the weights lack model.layers.2.router.{name}"):
        read(other, 4)


def test_layers_that_predict_several_tokens_are_no_part_for_images(tmp_path: Path, folders: Any) -> None:
    folder = folders("Qwen3_5ForConditionalGeneration")
    other = changed(folder, tmp_path / "m", lambda config: None)
    (other / "model.safetensors").unlink()
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"mtp.fc.weight": weights["lm_head.weight"].clone()}, other / "model.safetensors")
    assert read(other, 4).weights_bytes == read(folder, 4).weights_bytes


@pytest.mark.parametrize("architecture", [name for name, known in classes.CLASSES.items() if known.tied_beside_text])
@pytest.mark.parametrize("tied", [True, False, None])
def test_a_wrapper_whose_engine_reads_beside_its_text_whether_embeddings_are_one_has_them_so(
    tmp_path: Path, folders: Any, architecture: str, tied: bool | None
) -> None:
    def change(config: dict[str, Any]) -> None:
        config["text_config"]["tie_word_embeddings"] = not tied
        config.pop("tie_word_embeddings")
        if tied is not None:
            config["tie_word_embeddings"] = tied

    whole = read(folders(architecture), 4)
    embedding = 4 * small.VOCABULARY * small.SHAPE["hidden_size"]
    found = read(changed(folders(architecture), tmp_path / "changed", change), 4)
    assert found.weights_bytes == whole.weights_bytes - (embedding if tied else 0)


def test_a_wrapper_is_read_by_its_text_config_and_is_as_large_as_all_its_parts(folders: Any) -> None:
    text, whole = (read(folders(name), 4) for name in ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"))
    assert (whole.context_tokens, whole.layers, whole.kv_bytes_per_token) == (
        text.context_tokens,
        text.layers,
        text.kv_bytes_per_token,
    )
    assert text.weights_bytes < whole.weights_bytes < 1.2 * text.weights_bytes


@pytest.mark.parametrize(
    ("architecture", "change", "reason"),
    [
        ("Gemma3ForConditionalGeneration", lambda c: c.pop("text_config"), "no text_config, which describes the"),
        ("Gemma2ForCausalLM", lambda c: c.pop("hidden_act"), "config.json has no hidden_act"),
        ("Gemma2ForCausalLM", lambda c: c.update(hidden_act="silu"), "hidden_act = 'silu' is not gelu_pytorch_tanh"),
        *(
            ("Gemma4ForConditionalGeneration", lambda c, change=change: c["text_config"].update(change), reason)
            for change, reason in (
                ({"global_head_dim": None}, "config.json has no global_head_dim"),
                (
                    {"global_head_dim": 32},
                    "self_attn.q_proj.weight is [256, 128] where config.json makes it [128, 128]",
                ),
                ({"num_global_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads"),
                ({"attention_k_eq_v": "yes"}, "attention_k_eq_v = 'yes' is not"),
                ({"attention_k_eq_v": False}, "the weights lack model.layers.1.self_attn.v_proj.weight"),
                ({"hidden_size_per_layer_input": 64}, "the weights lack model.layers.0.per_layer_input_gate.weight"),
                (
                    {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 0},
                    "config.json has no vocab_size_per_layer_input",
                ),
                ({"use_double_wide_mlp": "no"}, "use_double_wide_mlp = 'no' is not"),
                ({"enable_moe_block": True}, "config.json has no num_experts"),
                ({"enable_moe_block": "yes"}, "enable_moe_block = 'yes' is not"),
                ({"num_kv_shared_layers": 3}, "num_kv_shared_layers = 3 leaves layers without any whose KV they use"),
                ({"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4 leaves layers without any whose KV they use"),
                ({"num_kv_shared_layers": -1}, "num_kv_shared_layers = -1 is not"),
                ({"use_bidirectional_attention": "all"}, "attention to what follows"),
                ({"layer_types": None}, "config.json has no layer_types"),
            )
        ),
        *(
            (
                "Gemma4ForConditionalGeneration",
                lambda c, change=change: change(c["text_config"]["rope_parameters"]),
                reason,
            )
            for change, reason in (
                (lambda c: c.pop("full_attention"), "rope_parameters.full_attention is not an object"),
                (lambda c: c.update(sliding_attention=1e4), "rope_parameters.sliding_attention is not an object"),
                (
                    lambda c: c["full_attention"].update(rope_type="nope"),
                    "rope_parameters.full_attention.rope_type = 'nope' is not default, ",
                ),
                (
                    lambda c: c["full_attention"].update(partial_rotary_factor=-3),
                    "rope_parameters.full_attention.partial_rotary_factor = -3 is not a number above 0, at most 1",
                ),
            )
        ),
        *(
            (name, lambda c, change=change: c.update(change), reason)
            for name in (
                "DeepseekV2ForCausalLM",
                "DeepseekV3ForCausalLM",
                "Glm4MoeLiteForCausalLM",
                "NemotronHForCausalLM",
            )
            for change, reason in (
                ({"n_group": 0}, "n_group = 0 is not a positive whole number"),
                ({"n_group": 3}, "8 experts cannot be divided into n_group = 3 groups"),
                ({"topk_group": 0}, "topk_group = 0 is not a positive whole number"),
                ({"topk_group": 5}, "topk_group is 5 of n_group = 4 groups"),
                (
                    {"topk_group": 1, "num_experts_per_tok": 3},
                    "num_experts_per_tok is 3, and topk_group = 1 groups have 2",
                ),
                ({"routed_scaling_factor": -1.0}, "routed_scaling_factor = -1.0 is not a number above 0"),
            )
        ),
        ("DeepseekV3ForCausalLM", lambda c: c.update(n_group=8), "n_group = 8 groups of 1 have no 2 best experts each"),
        ("Glm4MoeLiteForCausalLM", lambda c: c.update(first_k_dense_replace=2**70), "mlp_layer_types is not 11805916"),
        ("MixtralForCausalLM", lambda c: c.pop("num_local_experts"), "config.json has no num_local_experts"),
        ("MixtralForCausalLM", lambda c: c.update(num_local_experts=-1), "num_local_experts = -1 is not a whole"),
        ("MixtralForCausalLM", lambda c: c.update(num_local_experts=5), "the weights lack model.layers.0.block_sparse"),
        ("MixtralForCausalLM", lambda c: c.update(sliding_window=16), "sliding-window attention"),
        ("Phi3ForCausalLM", lambda c: c.update(sliding_window=16), "sliding-window attention"),
        ("Glm4MoeForCausalLM", lambda c: c.update(first_k_dense_replace=2), "the weights lack model.layers.1.mlp."),
        ("Glm4MoeForCausalLM", lambda c: c.update(kv_lora_rank=512), "latent attention"),
        ("DeepseekV2ForCausalLM", lambda c: c.update(norm_topk_prob=True), "norm_topk_prob = True is not False"),
        (
            "DeepseekV2ForCausalLM",
            lambda c: c.update(topk_method="noaux_tc"),
            "topk_method = 'noaux_tc' is not 'greedy'",
        ),
        ("DeepseekV2ForCausalLM", lambda c: c.update(topk_method="greedy"), "n_group = 4 is not 1, which greedy"),
        ("DeepseekV3ForCausalLM", lambda c: c.update(moe_layer_freq=2), "moe_layer_freq = 2 is not 1"),
        ("DeepseekV3ForCausalLM", lambda c: c.pop("scoring_func"), "scoring_func = None is not 'sigmoid'"),
        ("DeepseekV3ForCausalLM", lambda c: c.pop("n_group"), "config.json has no n_group"),
        ("DeepseekV3ForCausalLM", lambda c: c.pop("q_lora_rank"), "config.json has no q_lora_rank"),
        ("DeepseekV3ForCausalLM", lambda c: c.pop("kv_lora_rank"), "config.json has no kv_lora_rank"),
        ("DeepseekV3ForCausalLM", lambda c: c.update(qk_rope_head_dim=0), "qk_rope_head_dim = 0 is not a positive"),
        (
            "DeepseekV3ForCausalLM",
            lambda c: c.update(qk_rope_head_dim=15),
            "qk_rope_head_dim = 15 is not a whole number",
        ),
        ("DeepseekV3ForCausalLM", lambda c: c.update(v_head_dim=48), "kv_b_proj.weight is [256, 32] where config.json"),
        ("DeepseekV3ForCausalLM", lambda c: c.update(attention_bias=True), "attention_bias = True is not false"),
        ("DeepseekV3ForCausalLM", lambda c: c.update(rope_interleave=False), "rope_interleave = False is not true"),
        (
            "DeepseekV3ForCausalLM",
            lambda c: c.update(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            "rope_parameters is of type 'linear', where only default and yarn are supported",
        ),
        (
            "DeepseekV3ForCausalLM",
            lambda c: c["rope_parameters"].update(truncate=False),
            "rope_parameters.truncate = False is not true",
        ),
        (
            "KimiK25ForConditionalGeneration",
            lambda c: c["text_config"].pop("architectures"),
            "architectures = None is not ['DeepseekV3ForCausalLM']",
        ),
        ("KimiK25ForConditionalGeneration", lambda c: c["text_config"].update(v_head_dim=48), "kv_b_proj.weight is"),
        ("KimiK25ForConditionalGeneration", lambda c: c["text_config"].update(index_topk=64), "sparse attention (DSA)"),
        ("Glm4MoeLiteForCausalLM", lambda c: c.update(q_lora_rank=None), "config.json has no q_lora_rank"),
        ("Glm4MoeLiteForCausalLM", lambda c: c.update(first_k_dense_replace=2), "mlp_layer_types is not 2 times dense"),
        (
            "Glm4MoeLiteForCausalLM",
            lambda c: c.update(partial_rotary_factor=0.5),
            "partial_rotary_factor = 0.5 is not 1",
        ),
        ("Qwen3_5ForCausalLM", lambda c: c.pop("full_attention_interval"), "has no full_attention_interval"),
        ("Qwen3_5ForCausalLM", lambda c: c["layer_types"].reverse(), "not one layer with full attention in 4"),
        ("Qwen3_5ForCausalLM", lambda c: c.update(linear_num_value_heads=3), "3 value heads of linear layers cannot"),
        ("Qwen3_5ForCausalLM", lambda c: c.update(linear_key_head_dim=16), "linear_attn.in_proj_qkv.weight is [320, "),
        ("Qwen3_5ForCausalLM", lambda c: c.update(attn_output_gate=False), "attn_output_gate = false is not supported"),
        ("Qwen3_5ForCausalLM", lambda c: c.update(mamba_d_state=16), "hybrid of attention and state-space"),
        ("Qwen3_5ForCausalLM", lambda c: c.update(partial_rotary_factor=0.25), "is 0.25, and 0.5 in rope_parameters"),
        *(
            ("NemotronHForCausalLM", lambda c, change=change: c.update(change), reason)
            for change, reason in (
                ({"hybrid_override_pattern": None}, "neither hybrid_override_pattern nor layers_block_type"),
                ({"hybrid_override_pattern": "ME*M-X"}, "hybrid_override_pattern has 'X', a layer that is not known"),
                ({"hybrid_override_pattern": "ME*M-MM"}, "the weights lack model.layers.6.mixer.in_proj.weight"),
                ({"hybrid_override_pattern": "ME-M-M"}, "no layer is attention"),
                ({"hybrid_override_pattern": "*E*-*-"}, "no layer is a Mamba layer"),
                ({"num_hidden_layers": 7}, "config.json names 6 of 7 layers"),
                (
                    {"layers_block_type": ["mamba"] * 6},
                    "layers_block_type and hybrid_override_pattern are of different",
                ),
                (
                    {"layers_block_type": ["sliding_attention"] * 6},
                    "layers_block_type has 'sliding_attention'; engines know mamba, attention, mlp, moe",
                ),
                ({"layer_types": ["mamba"] * 6}, "engines read layers_block_type, not layer_types"),
                ({"mamba_n_groups": 4}, "n_groups is 8, and mamba_n_groups is 4"),
                ({"n_groups": 4}, "n_groups is 4 without mamba_n_groups: engines take 8 for it"),
                ({"mamba_num_heads": 12}, "12 heads of Mamba layers cannot share 8 groups"),
                ({"mamba_head_dim": 24}, "mixer.in_proj.weight is [912, 128] where config.json makes it [1296, 128]"),
                ({"ssm_state_size": "32"}, "ssm_state_size = '32' is not a positive whole number"),
                ({"use_conv_bias": None, "mamba_conv_bias": False}, "use_conv_bias is None, and mamba_conv_bias is Fa"),
                ({"use_bias": True}, "the weights lack model.layers.0.mixer.in_proj.bias"),
                ({"attention_bias": True}, "attention_bias = True is not false: engines have no biases there"),
                ({"mlp_bias": True}, "mlp_bias is true, and engines have no biases in shared experts"),
                ({"mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu' is not relu2"),
                ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu' is not silu or swish"),
                ({"time_step_limit": [0.0, 0.1]}, "is not 0 and infinity: engines limit no time steps"),
                ({"chunk_size": 0}, "chunk_size = 0 is not a positive whole number"),
                ({"n_shared_experts": 0}, "n_shared_experts = 0 is not a positive whole number"),
                ({"n_routed_experts": None}, "config.json has no n_routed_experts"),
                ({"moe_latent_size": 64}, "the weights lack model.layers.1.mixer.fc1_latent_proj.weight"),
                ({"sliding_window": 16}, "sliding-window attention"),
                ({"linear_key_head_dim": 16}, "hybrid of attention and state-space or linear layers"),
            )
        ),
        ("Qwen3NextForCausalLM", lambda c: c.pop("rope_theta"), "config.json has no rope_theta"),
        ("Qwen3NextForCausalLM", lambda c: c.update(rope_theta=1e4), "rope_theta is 10000.0, and 20000.0 in rope_par"),
        ("Qwen3NextForCausalLM", lambda c: c.update(mlp_only_layers=[0]), "layers without experts among others"),
    ],
)
def test_setting_that_a_class_cannot_have_is_refused_by_name(
    tmp_path: Path, folders: Any, architecture: str, change: Any, reason: str
) -> None:
    with pytest.raises(BrokenCheckpoint) as broken:
        read(changed(folders(architecture), tmp_path / "m", change), 4)
    assert reason in str(broken.value)


@pytest.mark.parametrize("architecture", [name for name, known in classes.CLASSES.items() if known.latent])
def test_a_latent_row_is_as_large_on_two_devices_as_on_one(folders: Any, architecture: str) -> None:
    """32 elements of the latent vector and 16 that are rotated, in four layers."""
    one, two, half = (read(folders(architecture), *given) for given in ((4, 1), (4, 2), (2, 2)))
    assert (one.kv_bytes_per_token, two.kv_bytes_per_token) == (4 * 48 * 4, 4 * 48 * 4)
    assert half.kv_bytes_per_token == 4 * 48 * 2
    assert one.weights_bytes / 2 < two.weights_bytes < 0.6 * one.weights_bytes


def test_kv_of_one_byte_is_refused_with_latent_attention(folders: Any) -> None:
    with pytest.raises(BrokenCheckpoint, match="not supported with latent attention"):
        read(folders("DeepseekV3ForCausalLM"), 2, kv_dtype="fp8")


def test_layers_beyond_those_of_the_model_are_not_counted(tmp_path: Path, folders: Any) -> None:
    """Published GLM 4.5 has one that predicts several tokens at once; engines do not load it."""
    folder = folders("Glm4MoeForCausalLM")
    fewer = read(changed(folder, tmp_path / "m", lambda c: c.update(num_hidden_layers=3)), 4)
    assert fewer.layers == 3 and fewer.weights_bytes < read(folder, 4).weights_bytes


@pytest.mark.parametrize("devices", [1, 2])
def test_a_class_with_two_shapes_keeps_a_window_of_its_own_and_divides_each_by_its_heads(
    folders: Any, devices: int
) -> None:
    found = read(folders("Gemma4ForConditionalGeneration"), 4, devices)
    every, window = found.kv.kinds
    assert (every.name, every.bytes_per_token) == ("attention", 2 * 2 * 1 * 64 * 4), "both devices have the one head"
    assert (window.name, window.window_tokens) == ("window", 16)
    assert window.bytes_per_token == 2 * 2 * 2 * 32 * 4 // devices


@pytest.mark.parametrize(
    ("architecture", "key"),
    [("Gemma4ForConditionalGeneration", "num_attention_heads"), ("Qwen3_5ForConditionalGeneration", "num_heads")],
)
def test_heads_for_images_that_do_not_divide_are_refused_by_name(
    tmp_path: Path, folders: Any, architecture: str, key: str
) -> None:
    folder = changed(folders(architecture), tmp_path / "m", lambda config: config["vision_config"].update({key: 3}))
    read(folder, 4)
    with pytest.raises(BrokenCheckpoint, match="the 3 heads of its part for images do not divide among 2 devices"):
        read(folder, 4, 2)


def test_keys_and_values_of_either_shape_do_not_divide_further_than_their_heads(tmp_path: Path, folders: Any) -> None:
    """There are two heads in layers with a window and one in the others, so four devices divide no more than two."""
    folder = changed(
        folders("Gemma4ForConditionalGeneration"),
        tmp_path / "m",
        lambda config: config["vision_config"].update(num_attention_heads=4),
    )
    two, four = (read(folder, 4, devices) for devices in (2, 4))
    queries_and_outputs = 2 * 2 * (4 * 32 + 4 * 64) * 128
    divided = queries_and_outputs + 4 * 3 * 192 * 128 + 1024 * 128
    assert two.weights_bytes - four.weights_bytes == 4 * (divided // 2 - divided // 4)
    assert two.kv == four.kv


def test_heads_of_either_shape_that_do_not_divide_are_refused_by_name(tmp_path: Path, folders: Any) -> None:
    def more(config: dict[str, Any]) -> None:
        config["text_config"].update(num_attention_heads=12, num_key_value_heads=4, num_global_key_value_heads=3)

    folder = changed(folders("Gemma4ForConditionalGeneration"), tmp_path / "m", more)
    with pytest.raises(BrokenCheckpoint, match="12 attention heads with 3 key-value heads do not divide among 4 dev"):
        read(folder, 4, 4)


@pytest.mark.parametrize("name", [name for name in small.CLASSES if not classes.CLASSES[name].embeds])
def test_a_class_with_which_engines_make_no_embeddings_is_refused_for_them_alone(name: str, folders: Any) -> None:
    with pytest.raises(BrokenCheckpoint, match=f"engines make no embeddings with {name}"):
        read(folders(name), 4, task="embed")
    assert read(folders(name), 4, task="generate").embedding is None


@pytest.mark.parametrize(("window", "why"), [(1, "= 1 is not 2 or more"), (10**30, "is larger than 2147483647")])
def test_a_class_with_two_shapes_whose_window_no_engine_can_have_is_refused(
    window: int, why: str, tmp_path: Path, folders: Any
) -> None:
    folder = folders("Gemma4ForConditionalGeneration")
    with pytest.raises(BrokenCheckpoint, match=f"sliding_window {why}"):
        read(changed(folder, tmp_path / "m", lambda c: c["text_config"].update(sliding_window=window)), 4)
