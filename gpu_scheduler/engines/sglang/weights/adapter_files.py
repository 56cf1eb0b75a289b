"""Reads the folder of an adapter in PEFT's format, completed for SGLang. The loader has checked the folder
(`loader/checkpoints/adapter_folder.py`), but files may have changed since, and SGLang asserts shapes in the middle of a
step: so all of it is checked here again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpu_scheduler.engines.sglang.base.errors import BrokenModel, HostFault
from gpu_scheduler.engines.sglang.base.options import one_line

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang joins into one."""
_TENSOR = re.compile(r".*\.layers\.(?P<layer>\d+)\.\w+\.(?P<module>\w+)\.lora_(?P<part>[AB])\.weight")


@dataclass(frozen=True)
class LinearShape:
    """Sizes of a linear layer in checkpoints, and as SGLang has widened it."""

    rows: int
    columns: int
    padded_rows: int
    padded_columns: int


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter as it was read."""

    rank: int
    modules: tuple[str, ...]
    """Last parts of the names of the linear layers that it changes."""
    tensors: dict[str, torch.Tensor]
    scaling: float
    """Factor of its product of matrices."""


def shapes(config: Any) -> dict[str, LinearShape]:
    """The linear layers of each decoder layer that may have adapters, by the last part of their names. `config` is
    SGLang's, whose intermediate size may be larger than the checkpoint's."""
    heads, key_values, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    size = getattr(config, "head_dim", None) or hidden // heads
    wide, own = config.intermediate_size, getattr(config, "original_intermediate_size", config.intermediate_size)
    found = {
        "q_proj": (heads * size, hidden),
        "k_proj": (key_values * size, hidden),
        "v_proj": (key_values * size, hidden),
        "o_proj": (hidden, heads * size),
    }
    made = {name: LinearShape(*each, *each) for name, each in found.items()}
    made |= dict.fromkeys(("gate_proj", "up_proj"), LinearShape(own, hidden, wide, hidden))
    return made | {"down_proj": LinearShape(hidden, own, hidden, wide)}


def read(folder: str, dtype: torch.dtype, layers: int, wanted: Mapping[str, LinearShape]) -> AdapterFiles:
    """Reads an adapter of a model with so many decoder layers, with values of `dtype`, as wide as SGLang's layers. Of
    layers that SGLang joins it has to have all, so those that it does not change get zeros. `wanted`: see `shapes`.
    Raises HostFault if the files cannot be read, BrokenModel if they are no adapter of this model."""
    path = Path(folder)
    try:
        config = json.loads((path / CONFIG).read_text())
        with safe_open(path / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name).to(dtype) for name in file.keys()}
    except (OSError, ValueError, SafetensorError) as error:
        why = one_line(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            why = f"{Path(error.filename).name}: {error.strerror}"
        raise HostFault(f"its files cannot be read: {why}") from None
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise BrokenModel(f"{CONFIG} is no adapter's: {one_line(error)}") from None
    modules: set[str] = set()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        told = _TENSOR.fullmatch(name)
        shape = wanted.get(told["module"]) if told is not None else None
        if told is None or shape is None or int(told["layer"]) >= layers:
            raise BrokenModel(f"it is for another model: it has {name}")
        modules.add(told["module"])
        found[name] = _fitted(name, tensor, rank, shape, told["part"])
    _complete(found, rank, wanted)
    return AdapterFiles(rank, tuple(sorted(modules)), found, scaling)


def _fitted(name: str, tensor: torch.Tensor, rank: int, shape: LinearShape, part: str) -> torch.Tensor:
    """One factor, with zeros where the layer was widened."""
    own = (rank, shape.columns) if part == "A" else (shape.rows, rank)
    if tuple(tensor.shape) != own:
        raise BrokenModel(f"it is for another model: {name} is {list(tensor.shape)}, not {list(own)}")
    if not bool(torch.isfinite(tensor).all()):
        raise BrokenModel(f"{name} has values that are no numbers")
    more = (0, shape.padded_columns - shape.columns) if part == "A" else (0, 0, 0, shape.padded_rows - shape.rows)
    return torch.nn.functional.pad(tensor, more) if any(more) else tensor


def _complete(tensors: dict[str, torch.Tensor], rank: int, wanted: Mapping[str, LinearShape]) -> None:
    """Adds zeros for layers that SGLang joins with one that is there."""
    for joined in _JOINED:
        for name in list(tensors):
            module = name.split(".")[-3]
            for other in joined if module in joined else ():
                twin = name.replace(f".{module}.", f".{other}.")
                if twin not in tensors:
                    is_a, shape = ".lora_A." in name, wanted[other]
                    size = (rank, shape.padded_columns) if is_a else (shape.padded_rows, rank)
                    tensors[twin] = torch.zeros(size, dtype=tensors[name].dtype)
