"""A quantisation method for tests of the engine on the CPU, where none of SGLang's own runs: whole numbers of 8 bits
with a scale for each row, which SGLang lays out anew after it has read them.

`repacking.py` is an engine that knows it as METHOD; `write` makes a checkpoint of it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.gpu_scheduler.engines.sglang import checkpoints

METHOD = "int8_repacked_for_tests"
KV_SCALES = {"k_scale": 0.75, "v_scale": 1.25}


def write(folder: Path, plain: Path) -> None:
    """A small checkpoint of the method in `folder`, and one of the same weights as floats in `plain`."""
    import torch
    from safetensors.torch import load_file, save_file

    checkpoints.llama(plain)
    shutil.copytree(plain, folder)
    quantised: dict[str, torch.Tensor] = {}
    floats = load_file(plain / "model.safetensors")
    for name, weight in floats.items():
        if not name.endswith("_proj.weight"):
            quantised[name] = weight
            continue
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        quantised[name] = (weight / scale).round().to(torch.int8)
        quantised[f"{name}_scale"] = scale
        floats[name] = quantised[name] * scale
        if name.endswith("q_proj.weight"):
            attention = name.removesuffix("q_proj.weight")
            quantised |= {attention + each: torch.tensor(value) for each, value in KV_SCALES.items()}
    save_file(quantised, folder / "model.safetensors")
    save_file(floats, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": METHOD}}))


def register(quantization: ModuleType) -> None:
    """Adds the method to SGLang's. Called in engine processes, where SGLang may be imported."""
    import torch
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.parameter import ChannelQuantScaleParameter, ModelWeightParameter
    from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
    from sglang.srt.layers.radix_attention import RadixAttention

    class Packed:
        """What a kernel keeps of a layer."""

        def __init__(self, scales: torch.Tensor) -> None:
            self.scales = scales

    class Method(LinearMethodBase):  # type: ignore[misc]
        def create_weights(
            self,
            layer: Any,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            weight_loader: Any,
            **others: Any,
        ) -> None:
            rows, columns = sum(output_partition_sizes), input_size_per_partition
            read = {"output_dim": 0, "weight_loader": weight_loader}
            weight = torch.empty(rows, columns, dtype=torch.int8)
            layer.register_parameter("weight", ModelWeightParameter(data=weight, input_dim=1, **read))
            scale = torch.empty(rows, 1)
            layer.register_parameter("weight_scale", ChannelQuantScaleParameter(data=scale, **read))

        def process_weights_after_loading(self, layer: Any) -> None:
            rows, columns = layer.weight.shape
            # A step between that needs four times the weight's place in the range for a while.
            layer.wide = torch.nn.Parameter(layer.weight.data.float(), requires_grad=False)
            del layer.weight
            # Two columns lie beside each other, so that neither shape nor order is what it was.
            turned = layer.wide.data.t().reshape(columns // 2, 2, rows).transpose(1, 2).to(torch.int8).contiguous()
            layer.turned = torch.nn.Parameter(turned, requires_grad=False)
            del layer.wide
            layer.rows = float(rows)
            layer.halves = layer.weight_scale.data.flatten() / 2
            self.packed = Packed(layer.weight_scale.data.t().clone())
            layer.workspace = torch.zeros(64)

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            rows = int(layer.rows)
            weight = layer.turned.transpose(1, 2).reshape(-1, rows) * (self.packed.scales / 2 + layer.halves)
            return torch.nn.functional.linear(x, weight.t(), bias)

    class Config(QuantizationConfig):  # type: ignore[misc]
        def get_name(self) -> str:
            return METHOD

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float32]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Config:
            return cls()

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            if isinstance(layer, RadixAttention):
                return BaseKVCacheMethod(self)
            return Method() if isinstance(layer, LinearBase) else None

        def get_scaled_act_names(self) -> list[str]:
            return []

    quantization.QUANTIZATION_METHODS[METHOD] = Config
