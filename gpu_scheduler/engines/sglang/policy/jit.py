"""Modules that SGLang has nvcc compile at their first use, and which of them a model needs. Pure; imports no SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = {"bfloat16": 2, "float16": 2}
"""Of weights and KV, by the name that torch and config.json have for them: bytes of a number."""


@dataclass(frozen=True, order=True)
class JitModule:
    """`function` of `path` loads it, and compiles it first where no cache has it. An argument that is text is the name
    of a dtype of torch's."""

    path: str
    function: str
    arguments: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.path.rpartition('.')[2]}({', '.join(map(str, self.arguments))})"


def clamp_position(dtype: str) -> JitModule:
    return JitModule("sglang.jit_kernel.clamp_position", "_jit_clamp_position_module", (dtype,))


def activation(dtype: str) -> JitModule:
    return JitModule("sglang.jit_kernel.activation", "_jit_activation_module", (dtype,))


def rope(is_neox: bool, dimensions: int, dtype: str) -> JitModule:
    return JitModule("sglang.jit_kernel.rope", "_jit_fused_rope_module", (is_neox, dimensions, dtype))


def kvcache(row_bytes: int) -> JitModule:
    return JitModule("sglang.jit_kernel.kvcache", "_jit_kvcache_module", (row_bytes,))


def needed(config: Mapping[str, Any], ranks: int) -> set[JitModule]:
    """Of a model with this config.json, on so many devices; as far as that says it. What is missing here an engine
    compiles when it needs it, and what is too much costs a compiler's time."""
    found = {clamp_position("int64")}
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype not in DTYPES:
        return found
    found.add(activation(dtype))
    try:
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        width = int(config.get("head_dim") or config["hidden_size"] // heads)
        turned = int(width * float(config.get("partial_rotary_factor") or 1.0))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return found
    if width > 0 < kv_heads:
        found |= {rope(True, turned, dtype), kvcache(max(1, kv_heads // ranks) * width * DTYPES[dtype])}
    return found
