"""Reads the folder of an adapter in PEFT's format, completed for SGLang. The loader has checked the folder
(`loader/checkpoints/adapters.py`); what can have changed since is an error here.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpu_scheduler.engines.sglang.base.errors import BrokenModel, HostFault
from gpu_scheduler.engines.sglang.base.options import one_line

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SGLang joins into one, in its order."""


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter as it was read."""

    config: dict[str, Any]
    """What SGLang reads of adapter_config.json."""
    tensors: dict[str, torch.Tensor]


def read(folder: str, dtype: torch.dtype, widths: dict[str, int]) -> AdapterFiles:
    """Reads an adapter with values of `dtype`. Of layers that SGLang joins it has to have all, so those that it does
    not change get zeros. `widths`: rows of each layer, by the last part of its name. Raises HostFault if the files
    cannot be read, BrokenModel if they are not an adapter."""
    path = Path(folder)
    try:
        config = json.loads((path / CONFIG).read_text())
        with safe_open(path / WEIGHTS, framework="pt") as file:
            tensors = {name: file.get_tensor(name).to(dtype) for name in file.keys()}
    except (OSError, ValueError, SafetensorError) as error:
        raise HostFault(f"an adapter cannot be read: {one_line(error)}") from None
    try:
        rank = int(config["r"])
        alpha = float(config["lora_alpha"])
        if rank < 1:
            raise ValueError(f"r is {rank}")
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenModel(f"{CONFIG} is no adapter's: {one_line(error)}") from None
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BrokenModel(f"{name} of the adapter has values that are no numbers")
    scaled = alpha * math.sqrt(rank) if config.get("use_rslora") else alpha  # SGLang divides by the rank
    modules = sorted(_modules(tensors))
    _complete(tensors, widths)
    return AdapterFiles(
        {"peft_type": "LORA", "r": rank, "lora_alpha": scaled, "target_modules": modules},
        tensors,
    )


def _modules(names: Iterable[str]) -> set[str]:
    """Last parts of the names of the layers that the tensors are for."""
    return {name.split(".lora_")[0].rpartition(".")[2] for name in names}


def _complete(tensors: dict[str, torch.Tensor], widths: dict[str, int]) -> None:
    """Adds zeros for layers that are joined with one that is there, and puts joined layers into SGLang's order."""
    for joined in _JOINED:
        for name in [name for name in tensors if _modules([name]) & {*joined}]:
            module = next(iter(_modules([name])))
            there = tensors[name]
            for other in joined:
                twin = name.replace(f".{module}.", f".{other}.")
                if twin not in tensors:
                    rows = widths[other] if ".lora_B." in name else there.shape[0]
                    tensors[twin] = torch.zeros(rows, *there.shape[1:], dtype=there.dtype)
