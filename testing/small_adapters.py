"""Small random adapters in PEFT's format for a checkpoint, and the checkpoint with an adapter merged into its weights
by plain arithmetic: what PEFT's merging does, which is not installed here."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write(
    base: Path,
    folder: Path,
    *,
    rank: int = 4,
    modules: Sequence[str] = ALL,
    layers: Sequence[int] | None = None,
    seed: int = 7,
    **config: Any,
) -> Path:
    """An adapter of the checkpoint at `base`, of all its layers or of some, that changes its answers much."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        layer = name.removesuffix(".weight")
        if layers is not None and not any(f".layers.{number}." in name for number in layers):
            continue
        if layer.rpartition(".")[2] in modules and name.endswith(".weight"):
            rows, columns = weight.shape
            named = f"base_model.model.{layer}"
            tensors[f"{named}.lora_A.weight"] = 0.2 * torch.randn(rank, columns, generator=drawn)
            tensors[f"{named}.lora_B.weight"] = 0.2 * torch.randn(rows, rank, generator=drawn)
    save_file(tensors, folder / WEIGHTS)
    told = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(modules),
        "layers_to_transform": layers,
        "bias": "none",
        "modules_to_save": None,
        **config,
    }
    (folder / CONFIG).write_text(json.dumps(told))
    return folder


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The checkpoint with W + scaling * B A in the place of W."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / CONFIG).read_text())
    scaling = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    weights, changes = load_file(base / "model.safetensors"), load_file(adapter / WEIGHTS)
    for name in [name for name in changes if ".lora_A." in name]:
        to = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
        weights[to] = weights[to] + scaling * (changes[name.replace(".lora_A.", ".lora_B.")] @ changes[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
