"""Checkpoints with random weights in the layouts in which models are published: any class of the loader's table, with
weights of floats or quantised.

Names and shapes are those that the loader expects, so a checkpoint of the real size differs from a published one in its
values alone. Weights keep the scale of activations, so that greedy tokens depend on all of them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from loader.checkpoints.architectures import families, quantisation
from loader.checkpoints.architectures.quantisation import Quantisation, QuantisedTensor
from testing import checkpoint_headers, small_checkpoints


def _compressed(format_: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    """A quantization_config of compressed-tensors, all linear layers in one way."""
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": activations,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


def _by_rows(format_: str, kind: str) -> dict[str, Any]:
    """Weights of 8 bits with a scale a row, and activations that are quantised token by token."""
    weights = {"num_bits": 8, "type": kind, "strategy": "channel"}
    activations = {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}
    return _compressed(format_, weights, activations)


FORMATS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "fp8-channels": _by_rows("float-quantized", "float"),
    "int8": _by_rows("int-quantized", "int"),
    "int4": _compressed(
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None
    ),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "gptq-ordered": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
    "mxfp4": {"quant_method": "mxfp4"},
}  # fmt: skip
"""quantization_config by the name of a format; None: weights are floats."""
_UNIFORM_4, _UNIFORM_8 = 4.6, 73.6
"""Standard deviations of whole numbers of 4 and 8 bits that are all as likely."""
_MXFP4 = 3.2
"""The same of its 4 bits."""
_MIDDLE_4 = 0x88888888 - (1 << 32)
_WRITERS = 6
"""Files that are written at the same time."""


def write(folder: Path, config: Mapping[str, Any], format_: str, device: str = "cpu") -> Path:
    """A checkpoint of the model that `config` describes, with a file for each layer; returns the folder. Values are
    drawn on the device, from the tensor's name."""
    folder.mkdir(parents=True, exist_ok=True)
    quantised = FORMATS[format_]
    config = {**config, "quantization_config": quantised} if quantised else dict(config)
    text = families.text_config(config)
    experts = [name for name in families.expected_tensors(families.read_shape(config), config) if _is_router(name)]
    floats = ["lm_head", *(name[: -len(".weight")] for name in experts)]
    if quantised and quantised["quant_method"] in ("fp8", "awq", "mxfp4"):
        others = ["vision_tower", "multi_modal_projector"] if "text_config" in config else []
        quantised = {**quantised, "modules_to_not_convert": [*floats, *others]}
    elif quantised and "ignore" in quantised:
        quantised = {**quantised, "ignore": floats}
    if quantised:
        config["quantization_config"] = quantised
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    index = _write_images(folder, config)
    kind = quantisation.read(config, text)

    def save(number: int, layer: Mapping[str, tuple[int, ...]]) -> None:
        file = f"model-{number:05d}.safetensors"
        made: dict[str, torch.Tensor] = {}
        for name, shape in layer.items():
            made |= _tensors(name, shape, kind, device, zlib.crc32(name.encode()))
        save_file({name: tensor.cpu().contiguous() for name, tensor in made.items()}, folder / file)
        index.update(dict.fromkeys(made, file))

    with ThreadPoolExecutor(_WRITERS) as pool:
        for saved in [pool.submit(save, number, layer) for number, layer in enumerate(_files(config))]:
            saved.result()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def write_headers(folder: Path, config: Mapping[str, Any]) -> Path:
    """A checkpoint of floats without values, for engines that draw their own (`random_weights`) and for whoever reads
    names and shapes: its file is a hole on the disk. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shapes = {name: shape for layer in _files(config) for name, shape in layer.items()}
    checkpoint_headers.write(folder / "model-text.safetensors", shapes)
    index = dict.fromkeys(shapes, "model-text.safetensors") | _write_images(folder, config)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def _write_images(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A file with the tensors that a multimodal model has beside its text; the file's name by those of the tensors.
    Nothing for other models."""
    if "text_config" not in config:
        return {}
    beside = small_checkpoints.beside_text(config)
    save_file(beside, folder / "model-images.safetensors")
    return dict.fromkeys(beside, "model-images.safetensors")


def _files(config: Mapping[str, Any]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Shapes of weights by the published names: those beside the layers, and those of each layer."""
    shape = families.read_shape(config)
    expected = families.expected_tensors(shape, config)
    for layer in range(-1, shape.layers):
        begin = f"model.layers.{layer}."
        yield {
            _published(name, shape.architecture, wrapped="text_config" in config): size
            for name, size in expected.items()
            if (name.startswith(begin) if layer >= 0 else not name.startswith("model.layers."))
        }


def _published(name: str, architecture: str, *, wrapped: bool) -> str:
    """The name of a tensor in published checkpoints, by the one that the loader has. `wrapped`: the class takes images
    too."""
    if architecture == "NemotronHForCausalLM":
        ours = next((begin for begin in families.MAMBA_NAMES if name.startswith(begin)), "")
        return families.MAMBA_NAMES.get(ours, "") + name.removeprefix(ours)
    if wrapped and architecture.startswith(("Gemma4For", "Qwen3_5")):
        return name.replace("model.", "model.language_model.", 1)
    return f"language_model.{name}" if wrapped else name


def _is_router(name: str) -> bool:
    return name.endswith((".gate.weight", ".router.weight", ".router.proj.weight"))


def _tensors(
    name: str, shape: tuple[int, ...], kind: Quantisation | None, device: str, seed: int
) -> dict[str, torch.Tensor]:
    layer, _, last = name.rpartition(".")
    drawn = torch.Generator(device).manual_seed(seed)
    plain = len(shape) < 2 or "embed" in name or "lm_head" in name or _is_router(name)
    if kind is not None and len(shape) == 3:
        return {
            name + end: _quantised(end, each, shape[1], kind, device, drawn)
            for end, each in kind.experts(*shape).items()
        }
    if kind is None or plain or kind.layout == "mxfp4" or last != "weight":
        return {name: _floats(name, shape, device, drawn)}
    return {
        f"{layer}.{part}": _quantised(part, each, shape[1], kind, device, drawn, shape[0])
        for part, each in kind.tensors(*shape).items()
    }


def _floats(name: str, shape: tuple[int, ...], device: str, drawn: torch.Generator) -> torch.Tensor:
    if name.endswith(("bias", "sinks")) or "_bias" in name:
        values = torch.randn(shape, device=device, generator=drawn) * 0.02
    elif len(shape) < 2:
        values = torch.ones(shape, device=device)
    else:
        columns = shape[1] if len(shape) == 3 else shape[-1]
        scale = 1.0 if "embed" in name else columns**-0.5 * (1.7 if "q_proj" in name else 1.0)
        values = torch.randn(shape, device=device, generator=drawn, dtype=torch.bfloat16) * scale
    return values.to(torch.bfloat16)


def _quantised(
    part: str, needed: QuantisedTensor, columns: int, kind: Quantisation, device: str, drawn: torch.Generator,
    rows: int = 0,
) -> torch.Tensor:  # fmt: skip
    shape = needed.shapes[0]
    spread = {"F8_E4M3": 1.0, "I8": _UNIFORM_8, "U8": _MXFP4}.get(next(iter(needed.dtypes)), _UNIFORM_4)
    if part in ("weight_scale", "weight_scale_inv", "scales"):
        of = 1.0 if kind.dtypes == frozenset({"F8_E4M3"}) and kind.layout == "plain" else _UNIFORM_8
        of = of if kind.layout == "plain" else _UNIFORM_4
        dtype = {"awq": torch.float16, "gptq": torch.float16}.get(kind.layout, torch.float32)
        values = torch.rand(shape, device=device, generator=drawn) * 0.2 + 0.9
        return (values * columns**-0.5 / of).to(dtype if kind.layout != "compressed" else torch.bfloat16)
    if part == "_scales":
        power = round(127 + torch.tensor(columns**-0.5 / spread).log2().item())
        return torch.full(shape, power, dtype=torch.uint8, device=device)
    if part == "input_scale":
        return torch.full(shape, 1 / 32, device=device)
    if part == "weight_shape":
        return torch.tensor([rows, columns], dtype=torch.int64)
    if part in ("qzeros", "weight_zero_point"):
        middle = 0x77777777 if kind.layout == "gptq" else _MIDDLE_4
        return torch.full(shape, middle, dtype=torch.int32, device=device)
    if part.endswith("g_idx"):
        return (torch.arange(columns, device=device) // (kind.group or columns)).to(torch.int32)
    if "F8_E4M3" in needed.dtypes:
        return torch.randn(shape, device=device, generator=drawn).to(torch.float8_e4m3fn)
    if "I8" in needed.dtypes:
        return torch.randint(-127, 128, shape, device=device, generator=drawn, dtype=torch.int8)
    if "U8" in needed.dtypes:
        return torch.randint(0, 256, shape, device=device, generator=drawn, dtype=torch.uint8)
    # Numbers of 4 bits from 1 to 15, whose mean is the zero point: of 0 to 15 it is not, and all answers become alike.
    words = torch.zeros(shape, dtype=torch.int64, device=device)
    for place in range(0, 32, 4):
        words |= torch.randint(1, 16, shape, device=device, generator=drawn) << place
    return words.to(torch.int32)
