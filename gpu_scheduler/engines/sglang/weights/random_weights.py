"""Weights from a seed, for benchmarks. Imports only torch, safetensors and Transformers, so that a comparison of this
engine with another program, or of one device with several, draws the same weights."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

_FLOATS = ("BF16", "F16", "F32")
"""Types of files whose weights are drawn, by safetensors' names."""


def checkpoint(folder: str, dtype: torch.dtype, device: torch.device | str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors that a checkpoint of this configuration would have, whole, one after the other: the same in
    every process on the same kind of device. Names and shapes are those of the folder's safetensors files, whose values
    are not read; without such files they are those of Transformers' class. Activations keep their scale and attention
    is peaked, so that greedy tokens depend on weights and on KV. Raises ValueError for files with quantised weights."""
    for name, shape in _shapes(Path(folder)):
        yield name, _draw(name, shape, dtype, device)


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Published names of a model's weights, with their shapes. Raises ValueError for weights that are no floats."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                tensor = file.get_slice(name)
                if tensor.get_dtype() not in _FLOATS:
                    raise ValueError(f"{name} is {tensor.get_dtype()}: random weights are floats")
                yield name, tuple(tensor.get_shape())
    if not files:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        for name, parameter in model.named_parameters():
            yield name, tuple(parameter.shape)


def _draw(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """One tensor: ones for a vector, else normally distributed, with the name as seed."""
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    attends = any(part in name for part in ("q_proj", "k_proj", "v_proj"))
    scale = 1.0 if "embed" in name else shape[-1] ** -0.5 * (1.7 if attends else 1.0)
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, scale, generator=generator)
