"""Quantised checkpoints: what is read of each format, its size, and what is refused of it in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.checkpoints.architectures import quantisation
from loader.checkpoints.checkpoint import Checkpoint, read, read_config
from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.weight_files import tensors_of
from testing import format_checkpoints, small_checkpoints
from testing.format_checkpoints import FORMATS
from tests.loader import checkpoint_files
from tests.loader.checkpoint_files import SINGLE, Tensors

BF16 = 2
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**SMALL, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mixture": {
        **SMALL,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 256,
    },
    "gpt-oss": {
        **SMALL,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "layer_types": ["full_attention"],
        "sliding_window": 128,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
    "minimax": {
        **SMALL,
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "use_qk_norm": True,
    },
}
"""config.json by the name of a model. Layers divide into groups of 128 on two devices."""
NAMES = {
    "bf16": "",
    "fp8": "FP8",
    "fp8-blocks": "FP8 in blocks",
    "fp8-channels": "FP8",
    "int8": "INT8",
    "int4": "INT4 weights",
    "awq": "AWQ with 4 bits",
    "gptq": "GPTQ with 4 bits",
    "gptq-ordered": "GPTQ with 4 bits",
    "mxfp4": "MXFP4",
}
PUBLISHED = [
    *(
        (model, each)
        for model in ("dense", "mixture")
        for each in FORMATS
        if each != "mxfp4" and (model, each) != ("mixture", "int8")
    ),
    ("gpt-oss", "bf16"),
    ("gpt-oss", "mxfp4"),
    ("minimax", "fp8-blocks"),
    ("minimax", "awq"),
]
Q_PROJ, O_PROJ, DOWN = (f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"))
EXPERTS = "model.layers.0.mlp.experts"

Folders = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Checkpoints by model and format, each written once."""
    made: dict[tuple[str, str], Path] = {}

    def folder(model: str, format_: str) -> Path:
        if (model, format_) not in made:
            written = format_checkpoints.write(tmp_path_factory.mktemp("model") / "m", MODELS[model], format_)
            (written / "tokenizer.json").write_text("{}")
            made[model, format_] = written
        return made[model, format_]

    return folder


@pytest.mark.parametrize(("model", "format_"), PUBLISHED)
def test_a_checkpoint_of_a_format_is_as_large_as_its_tensors_and_two_devices_have_half_each(
    folders: Folders, model: str, format_: str
) -> None:
    folder = folders(model, format_)
    one, two = (read(folder, BF16, devices) for devices in (1, 2))
    tensors = tensors_of(folder)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    if format_ == "mxfp4":  # an eighth more, by which kernels pad experts
        nbytes += sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name) // 8
    assert one.quantisation == two.quantisation == NAMES[format_]
    assert one.weights_bytes == pytest.approx(nbytes, rel=0.01)
    assert two.weights_bytes == pytest.approx(nbytes / 2, rel=0.01)
    assert two.kv_bytes_per_token == one.kv_bytes_per_token // 2 == 2 * 128 * BF16


@pytest.mark.parametrize(("model", "format_"), PUBLISHED)
def test_config_alone_tells_how_large_a_checkpoint_of_a_format_is(
    tmp_path: Path, folders: Folders, model: str, format_: str
) -> None:
    whole = folders(model, format_)
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    for devices in (1, 2):
        found, expected = read_config(tmp_path, BF16, devices), read(whole, BF16, devices)
        assert found.quantisation == expected.quantisation
        assert found.weights_bytes == pytest.approx(expected.weights_bytes, rel=0.02)
        assert found.active_bytes == pytest.approx(expected.active_bytes, rel=0.02)


def test_experts_beside_a_dense_mlp_may_be_quantised_one_by_one(tmp_path: Path) -> None:
    """Floats are published joined, FP8 is not: Gemma 4 26B-A4B."""
    floats = small_checkpoints.write("Gemma4ForConditionalGeneration", tmp_path / "floats", "Gemma 4 26B-A4B")
    config = json.loads((floats / "config.json").read_text())
    folder = format_checkpoints.write(tmp_path / "m", config, "fp8-channels")
    (folder / "tokenizer.json").write_text("{}")
    tensors = tensors_of(folder)
    assert tensors["model.language_model.layers.3.experts.7.down_proj.weight"].dtype == "F8_E4M3"
    assert tensors["model.language_model.layers.3.router.proj.weight"].dtype == "BF16"
    found, whole = read(folder, BF16), read(floats, BF16)
    assert found.quantisation == "FP8"
    assert whole.weights_bytes / 2 < found.weights_bytes < 0.8 * whole.weights_bytes
    assert found.active_bytes < found.weights_bytes


@pytest.mark.parametrize(
    ("format_", "changes", "expected"),
    [
        ("fp8", {}, {"weight": ("F8_E4M3", (3584, 18944)), "weight_scale": ("F32", ())}),
        (
            "fp8",
            {"activation_scheme": "static"},
            {"weight": ("F8_E4M3", (3584, 18944)), "weight_scale": ("F32", (1,)), "input_scale": ("F32", (1,))},
        ),
        ("fp8-blocks", {}, {"weight": ("F8_E4M3", (3584, 18944)), "weight_scale_inv": ("BF16", (28, 148))}),
        ("fp8-channels", {}, {"weight": ("F8_E4M3", (3584, 18944)), "weight_scale": ("BF16", (3584, 1))}),
        ("int8", {}, {"weight": ("I8", (3584, 18944)), "weight_scale": ("BF16", (3584, 1))}),
        (
            "int4",
            {},
            {
                "weight_packed": ("I32", (3584, 2368)),
                "weight_scale": ("BF16", (3584, 148)),
                "weight_shape": ("I64", (2,)),
            },
        ),
        (
            "awq",
            {},
            {"qweight": ("I32", (18944, 448)), "qzeros": ("I32", (148, 448)), "scales": ("F16", (148, 3584))},
        ),
        (
            "gptq",
            {},
            {
                "qweight": ("I32", (2368, 3584)),
                "qzeros": ("I32", (148, 448)),
                "scales": ("F16", (148, 3584)),
                "g_idx": ("I32", (18944,)),
            },
        ),
        (
            "gptq",
            {"bits": 8, "group_size": -1},
            {
                "qweight": ("I32", (4736, 3584)),
                "qzeros": ("I32", (1, 896)),
                "scales": ("F16", (1, 3584)),
                "g_idx": ("I32", (18944,)),
            },
        ),
        ("mxfp4", {}, {"weight": ("BF16", (3584, 18944))}),
    ],
)
def test_quantised_layer_tensors_are_those_that_publishers_write(
    format_: str, changes: dict[str, Any], expected: Tensors
) -> None:
    """The shapes of `down_proj` of Qwen 2.5 7B: 18944 inputs, 3584 outputs."""
    kind = quantisation.read({"quantization_config": {**(FORMATS[format_] or {}), **changes}}, {})
    assert kind is not None
    needed = kind.tensors(3584, 18944)
    assert needed.keys() == expected.keys()
    for part, (dtype, shape) in expected.items():
        assert dtype in needed[part].dtypes and shape in needed[part].shapes, part


def test_joined_experts_have_the_tensors_that_gpt_oss_20b_has() -> None:
    kind = quantisation.read({"quantization_config": FORMATS["mxfp4"]}, {})
    assert kind is not None
    shapes = {end: each.shapes for end, each in kind.experts(32, 2880, 5760).items()}
    assert shapes == {"_blocks": ((32, 5760, 90, 16),), "_scales": ((32, 5760, 90),)}


def test_quantisation_config_may_be_in_the_text_config_or_have_its_older_key() -> None:
    """Wrappers have it in `text_config`, older compressed-tensors in `compression_config`."""
    assert quantisation.read({}, {"quantization_config": FORMATS["fp8"]}) == quantisation.read(
        {"quantization_config": FORMATS["fp8"]}, {}
    )
    assert quantisation.read({"compression_config": FORMATS["int8"]}, {}) == quantisation.read(
        {"quantization_config": FORMATS["int8"]}, {}
    )
    assert quantisation.read({}, {}) is None and quantisation.read({"quantization_config": None}, {}) is None


@pytest.mark.parametrize("format_", ["awq", "int8", "fp8-blocks"])
@pytest.mark.parametrize(
    "excepted", [O_PROJ, "model.layers.0", "o_proj", "language_model." + O_PROJ, "re:.*o_proj$", "re:("]
)
def test_excepted_layer_left_as_floats_is_accepted(
    tmp_path: Path, folders: Folders, format_: str, excepted: str
) -> None:
    def as_floats(tensors: Tensors, config: dict[str, Any]) -> None:
        o_proj_as_floats(tensors, config)
        key = "ignore" if format_ == "int8" else "modules_to_not_convert"
        config["quantization_config"][key] = ["lm_head", excepted]

    before = read(folders("dense", format_), BF16)
    found = changed(folders("dense", format_), tmp_path / "m", as_floats)
    assert found.quantisation == before.quantisation and found.weights_bytes > before.weights_bytes + 512 * 512 // 2


def o_proj_as_floats(tensors: Tensors, config: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith(f"{O_PROJ}.")]:
        del tensors[name]
    tensors[f"{O_PROJ}.weight"] = ("BF16", (512, 512))


@pytest.mark.parametrize("targets", [["re:.*mlp.*"], ["Linear"]])
def test_layers_that_are_no_target_may_be_floats(tmp_path: Path, folders: Folders, targets: list[str]) -> None:
    def as_floats(tensors: Tensors, config: dict[str, Any]) -> None:
        o_proj_as_floats(tensors, config)
        config["quantization_config"]["config_groups"]["group_0"]["targets"] = targets

    if targets == ["Linear"]:
        with pytest.raises(BrokenCheckpoint, match=f"the weights lack {O_PROJ}.weight_scale"):
            changed(folders("dense", "int8"), tmp_path / "m", as_floats)
    else:
        assert changed(folders("dense", "int8"), tmp_path / "m", as_floats).quantisation == "INT8"


def changed(folder: Path, into: Path, change: Callable[[Tensors, dict[str, Any]], Any], devices: int = 1) -> Checkpoint:
    """What is read of a folder in which `change` has changed (tensors by name, config.json)."""
    tensors: Tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors_of(folder).items()}
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config)
    into.mkdir()
    (into / "tokenizer.json").write_text("{}")
    (into / "config.json").write_text(json.dumps(config))
    checkpoint_files.write_safetensors(into / SINGLE, checkpoint_files.described(tensors))
    return read(into, BF16, devices)


def lacks(name: str) -> Callable[[Tensors, dict[str, Any]], Any]:
    return lambda tensors, config: tensors.pop(name)


def has(name: str, dtype: str, *shape: int) -> Callable[[Tensors, dict[str, Any]], Any]:
    return lambda tensors, config: tensors.update({name: (dtype, shape)})


def says(**changes: Any) -> Callable[[Tensors, dict[str, Any]], Any]:
    """Changes of `quantization_config`; None takes a key away."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        given = {**config["quantization_config"], **changes}
        config["quantization_config"] = {key: value for key, value in given.items() if value is not None}

    return change


def groups(**weights: Any) -> Callable[[Tensors, dict[str, Any]], Any]:
    """Changes of how compressed-tensors describes weights."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        (group,) = config["quantization_config"]["config_groups"].values()
        group["weights"] |= weights

    return change


def inputs(**activations: Any) -> Callable[[Tensors, dict[str, Any]], Any]:
    """Changes of how compressed-tensors describes activations."""

    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        (group,) = config["quantization_config"]["config_groups"].values()
        group["input_activations"] |= activations

    return change


def sized(**changes: int) -> Callable[[Tensors, dict[str, Any]], Any]:
    """Changes of the model's own shape."""
    return lambda tensors, config: config.update(changes)


@pytest.mark.parametrize(
    ("model", "format_", "change", "reason"),
    [
        ("dense", "fp8", lacks(f"{Q_PROJ}.weight_scale"), f"the weights lack {Q_PROJ}.weight_scale"),
        ("dense", "fp8-blocks", lacks(f"{DOWN}.weight_scale_inv"), f"the weights lack {DOWN}.weight_scale_inv"),
        ("dense", "int8", lacks(f"{DOWN}.weight"), f"the weights lack {DOWN}.weight"),
        ("dense", "int4", lacks(f"{Q_PROJ}.weight_packed"), f"the weights lack {Q_PROJ}.weight_packed"),
        ("dense", "int4", groups(symmetric=False), f"the weights lack {Q_PROJ}.weight_zero_point and 6 other tensors"),
        ("dense", "int4", groups(actorder="group"), f"the weights lack {Q_PROJ}.weight_g_idx and 6 other tensors"),
        ("dense", "awq", lacks(f"{Q_PROJ}.qzeros"), f"the weights lack {Q_PROJ}.qzeros"),
        ("dense", "gptq", lacks(f"{Q_PROJ}.g_idx"), f"the weights lack {Q_PROJ}.g_idx"),
        ("mixture", "fp8", lacks(f"{EXPERTS}.1.up_proj.weight_scale"), f"lack {EXPERTS}.1.up_proj.weight_scale"),
        ("gpt-oss", "mxfp4", lacks(f"{EXPERTS}.down_proj_scales"), f"the weights lack {EXPERTS}.down_proj_scales"),
        (
            "dense", "fp8-blocks", has(f"{Q_PROJ}.weight_scale_inv", "F32", 4, 5),
            f"{SINGLE}: {Q_PROJ}.weight_scale_inv is [4, 5] where config.json makes it [4, 4]",
        ),
        (
            "dense", "fp8-channels", has(f"{DOWN}.weight_scale", "F32", 1, 512),
            f"{SINGLE}: {DOWN}.weight_scale is [1, 512] where config.json makes it [512, 1]",
        ),
        (
            "gpt-oss", "mxfp4", has(f"{EXPERTS}.gate_up_proj_blocks", "U8", 2, 1024, 32, 8),
            f"{EXPERTS}.gate_up_proj_blocks is [2, 1024, 32, 8] where config.json makes it [2, 1024, 16, 16]",
        ),
        ("dense", "fp8", has(f"{Q_PROJ}.weight", "I8", 512, 512), f"{Q_PROJ}.weight is I8: FP8 has F8_E4M3"),
        ("dense", "fp8", has(f"{Q_PROJ}.weight", "F8_E5M2", 512, 512), f"{Q_PROJ}.weight is F8_E5M2: FP8 has F8_E4M3"),
        ("dense", "int8", has(f"{Q_PROJ}.weight", "F8_E4M3", 512, 512), f"{Q_PROJ}.weight is F8_E4M3: INT8 has I8"),
        ("dense", "awq", has(f"{Q_PROJ}.qweight", "I64", 512, 64), f"{Q_PROJ}.qweight is I64: AWQ with 4 bits has I32"),
        (
            "dense", "int8", has("lm_head.weight", "I8", 128, 512),
            "lm_head.weight is I8: INT8 has BF16 or F16 or F32 or F64",
        ),
        ("gpt-oss", "mxfp4", has(f"{EXPERTS}.down_proj_scales", "I8", 2, 512, 16), "down_proj_scales is I8: MXFP4 has"),
        (
            "dense", "fp8", lambda tensors, config: config.pop("quantization_config"),
            f"{Q_PROJ}.weight is F8_E4M3: config.json does not say how the weights are quantised",
        ),
        ("dense", "awq", lambda tensors, config: config.pop("quantization_config"),
         ".qweight is of a quantised layer: config.json does not say how the weights are quantised"),
        ("gpt-oss", "mxfp4", lambda tensors, config: config.pop("quantization_config"),
         "_blocks is of a quantised layer: config.json does not say how the weights are quantised"),
        ("dense", "bf16", lambda tensors, config: config.update(quantization_config=FORMATS["fp8"]),
         "config.json says that the weights are quantised (FP8): none of them is"),
        ("dense", "fp8", lambda tensors, config: config.update(quantization_config=[8]),
         "config.json: quantization_config is not an object"),
        (
            "dense", "fp8", says(quant_method="quip"),
            "it is quantised by 'quip', which is not supported; these methods are: fp8, awq, gptq, compressed-tensors",
        ),
        ("dense", "fp8", says(quant_method=None), "config.json: quantization_config has no quant_method"),
        ("dense", "fp8", says(activation_scheme="maybe"),
         "quantization_config.activation_scheme = 'maybe' is not dynamic or static, which alone is supported"),
        ("dense", "fp8", o_proj_as_floats, f"the weights lack {O_PROJ}.weight_scale"),
        ("dense", "fp8", says(modules_to_not_convert="lm_head"), "modules_to_not_convert = 'lm_head' is not a list of"),
        ("dense", "fp8-blocks", says(activation_scheme="static"), "activation_scheme = 'static' is not dynamic"),
        ("dense", "fp8-blocks", says(weight_block_size=[128]), "weight_block_size is [128], not two numbers above 0"),
        ("dense", "fp8-blocks", says(weight_block_size=[128, 0]), "weight_block_size is [128, 0], not two numbers"),
        ("dense", "awq", says(bits=3), "quantization_config.bits = 3 is not 4, which alone is supported"),
        ("dense", "awq", says(version="gemv"), "version = 'gemv' is not gemm or GEMM, which alone is supported"),
        ("dense", "awq", says(zero_point=False), "zero_point = False is not true, which alone is supported"),
        ("dense", "awq", says(group_size=None), "config.json: quantization_config has no group_size"),
        ("dense", "gptq", says(group_size="128"), "group_size = '128' is not -1 or 32 or 64 or 128"),
        ("dense", "gptq", says(bits=2), "quantization_config.bits = 2 is not 4 or 8, which alone is supported"),
        ("dense", "gptq", says(sym=False), "quantization_config.sym = False is not true, which alone is supported"),
        ("dense", "gptq", says(dynamic={"+:.*": {"bits": 8}}), "quantised by GPTQ with other bits for some layers"),
        ("dense", "int4", groups(type="float"), "it is quantised to NVFP4, which is not supported: it needs kernels"),
        ("dense", "int4", groups(group_size=None), "config.json: quantization_config has no group_size"),
        ("dense", "int4", groups(num_bits=3), "to 'int' weights of 3 bits by 'group' in the format 'pack-"),
        ("dense", "int8", groups(strategy="group"), "to 'int' weights and activations of 8 bits by 'group'"),
        ("dense", "int8", says(config_groups={}), "config.json: quantization_config has no config_groups"),
        ("dense", "int8", says(config_groups={"a": {"weights": {}}, "b": {}}), "it is quantised in 2 ways at once"),
        ("dense", "int8", says(config_groups={"a": {}}), "config_groups does not say how weights are quantised"),
        (
            "dense", "awq", sized(intermediate_size=448),
            f"{DOWN}: a quantised layer's 448 columns do not divide into groups of 128",
        ),
        ("dense", "awq", sized(intermediate_size=516), "gate_proj: a quantised layer's 516 rows do not divide into"),
        ("dense", "gptq", says(group_size=96), "group_size = 96 is not -1 or 32 or 64 or 128"),
        ("dense", "gptq", says(bits=None), "quantization_config has no bits"),
        ("dense", "gptq", says(sym=None), "quantization_config has no sym"),
        ("dense", "awq", says(zero_point=None), "quantization_config has no zero_point"),
        ("dense", "fp8", says(activation_scheme=None), "quantization_config has no activation_scheme"),
        ("dense", "int4", says(format="dense"), "in the format 'dense', which is not supported"),
        ("dense", "int8", groups(symmetric=False), "symmetric = False is not true"),
        ("dense", "fp8-channels", groups(strategy="block", block_structure=[128]), "block_structure is [128], not two"),
        ("dense", "fp8-channels", groups(strategy="block", block_structure=5), "block_structure is 5, not two numbers"),
        (
            "mixture", "fp8-channels", inputs(strategy="tensor"),
            "its experts are quantised to FP8: kernels are for none of this kind",
        ),
        ("mixture", "int8", says(), "its experts are quantised to INT8: kernels are for none of this kind"),
        (
            "mixture", "gptq", sized(torch_dtype="bfloat16"),
            "experts are quantised to GPTQ with 4 bits: kernels are for float16, and not for bfloat16",
        ),
        ("gpt-oss", "mxfp4", sized(intermediate_size=528), "528 columns do not divide into blocks of 32"),
        (
            "gpt-oss", "mxfp4", lambda tensors, config: config.update(quantization_config=FORMATS["fp8"]),
            "its experts are quantised to FP8, which is not supported for this class",
        ),
    ],
)  # fmt: skip
def test_invalid_quantised_checkpoint_is_refused_in_one_line_that_names_its_fault(
    tmp_path: Path,
    folders: Folders,
    model: str,
    format_: str,
    change: Callable[[Tensors, dict[str, Any]], Any],
    reason: str,
) -> None:
    with pytest.raises(BrokenCheckpoint) as broken:
        changed(folders(model, format_), tmp_path / "m", change)
    assert reason in str(broken.value) and "\n" not in str(broken.value)
    assert not broken.value.may_pass, "the same files will not do later either"


@pytest.mark.parametrize(
    ("model", "format_", "changes", "devices", "reason"),
    [
        ("dense", "fp8-blocks", {"intermediate_size": 640}, 2,
         "mlp.gate_proj: its 640 rows do not divide among 2 devices in blocks of 128"),
        ("dense", "int4", {"intermediate_size": 640}, 2,
         "mlp.down_proj: its 640 columns do not divide among 2 devices in blocks of 128"),
        ("dense", "awq", {"num_attention_heads": 2, "head_dim": 64, "hidden_size": 256}, 2,
         "self_attn.o_proj: its 128 columns do not divide among 2 devices in blocks of 128"),
        ("mixture", "fp8", {"moe_intermediate_size": 130, "num_experts": 4}, 4,
         "mlp.experts.0.gate_proj: its 130 rows do not divide among 4 devices"),
        ("mixture", "fp8-blocks", {"moe_intermediate_size": 384}, 2,
         "mlp.experts.0.gate_proj: its 384 rows do not divide among 2 devices in blocks of 128"),
        ("dense", "fp8-blocks", {"head_dim": 64, "hidden_size": 256}, 2,
         "self_attn.k_proj: its 128 rows do not divide among 2 devices in blocks of 128"),
        ("gpt-oss", "bf16", {"intermediate_size": 30, "num_local_experts": 4}, 4,
         "mlp.experts: its intermediate size 30 does not divide among 4 devices"),
        ("gpt-oss", "bf16", {"intermediate_size": 31}, 2,
         "mlp.experts: its intermediate size 31 does not divide among 2 devices"),
    ],
)  # fmt: skip
def test_quantised_layer_that_does_not_divide_among_devices_is_refused_by_name(
    tmp_path: Path, model: str, format_: str, changes: dict[str, int], devices: int, reason: str
) -> None:
    folder = format_checkpoints.write(tmp_path / "m", {**MODELS[model], "vocab_size": 8, **changes}, format_)
    (folder / "tokenizer.json").write_text("{}")
    assert read(folder, BF16).layers == 1
    with pytest.raises(BrokenCheckpoint) as broken:
        read(folder, BF16, devices)
    assert str(broken.value) == f"model.layers.0.{reason}"


@pytest.mark.parametrize(
    ("model", "changes", "layer"),
    [
        ("dense", {"head_dim": 96, "hidden_size": 384}, "self_attn.k_proj"),
        ("dense", {"intermediate_size": 192}, "mlp.gate_proj"),
        ("mixture", {"moe_intermediate_size": 192}, "mlp.experts.0.gate_proj"),
    ],
)
def test_layers_that_engines_join_are_whole_blocks_on_one_device_too(
    tmp_path: Path, model: str, changes: dict[str, int], layer: str
) -> None:
    folder = format_checkpoints.write(tmp_path / "m", {**MODELS[model], "vocab_size": 8, **changes}, "fp8-blocks")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(BrokenCheckpoint, match=f"model.layers.0.{layer}: its 192 rows do not divide in blocks of 128"):
        read(folder, BF16)


def test_a_quantised_checkpoint_is_for_gpus(folders: Folders) -> None:
    """Where floats have four bytes: on CPUs."""
    with pytest.raises(
        BrokenCheckpoint, match=r"its weights are quantised \(INT8\), and engines on CPUs have no kernels"
    ):
        read(folders("dense", "int8"), 4)


@pytest.mark.parametrize(
    ("exception", "layer", "may"),
    [
        ("re:.*o_proj$", "self_attn.o_proj", True),
        ("re:.*o_proj$", "self_attn.q_proj", False),
        ("re:model.layers.0.*", "self_attn.q_proj", True),
        ("re:.*mlp[.]gate$", "self_attn.q_proj", True),  # more than ends and dots: any layer may be one
        ("model.language_model.layers.0.self_attn.q_proj", "self_attn.q_proj", True),
        ("language_model.model.layers.0.self_attn.k_proj", "self_attn.q_proj", False),
    ],
)
def test_exceptions_of_quantisation_are_names_and_plain_patterns(exception: str, layer: str, may: bool) -> None:
    config = {"quantization_config": {**(FORMATS["fp8-channels"] or {}), "ignore": ["lm_head", exception]}}
    kind = quantisation.read(config, config)
    assert kind is not None and kind.may_be_float(f"model.layers.0.{layer}.weight") == may


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.just(10**30), st.floats(), st.text(max_size=3),
    st.lists(st.one_of(st.none(), st.integers(0, 1), st.text(max_size=1)), max_size=2),
    st.dictionaries(st.text(max_size=2), st.none(), max_size=1),
)  # fmt: skip


def places(value: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where a value of a JSON object may be replaced."""
    if not isinstance(value, dict):
        return []
    return [place for key, each in value.items() for place in ((*at, key), *places(each, (*at, key)))]


@given(st.data(), st.sampled_from([each for each in FORMATS if FORMATS[each]]))
@settings(max_examples=150)
def test_quantisation_config_with_an_odd_value_is_served_or_refused_in_one_line(
    data: st.DataObject, format_: str
) -> None:
    config = {"quantization_config": json.loads(json.dumps(FORMATS[format_])), "architectures": ["LlamaForCausalLM"]}
    place = data.draw(st.sampled_from(places(config["quantization_config"])))
    inner: Any = config["quantization_config"]
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = data.draw(ODD)
    try:
        kind = quantisation.read(config, config)
        if kind is not None:
            kind.tensors(256, 512)
            assert all(isinstance(kind.may_be_float(each), bool) for each in ("lm_head.weight", "a.q_proj.weight"))
    except BrokenCheckpoint as error:
        assert "\n" not in str(error) or "\n" in str(inner[place[-1]])
