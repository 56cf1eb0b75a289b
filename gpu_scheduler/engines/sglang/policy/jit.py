"""The modules that SGLang has nvcc compile at their first use, and which of them a model needs. Pure; imports no
SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = {"bfloat16": 2, "float16": 2}
"""Bytes of a number of weights and KV, by the dtype's name in torch and config.json."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of config.json of which a mixture of experts has one."""


@dataclass(frozen=True, order=True)
class JitModule:
    """A module that `function` of `path` loads, and compiles first where no cache has it. An argument that is text is
    the name of a torch dtype."""

    path: str
    function: str
    arguments: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.path.rpartition('.')[2]}({', '.join(map(str, self.arguments))})"


def clamp_position(dtype: str) -> JitModule:
    """The module that clamps positions of this dtype."""
    return JitModule("sglang.jit_kernel.clamp_position", "_jit_clamp_position_module", (dtype,))


def activation(dtype: str) -> JitModule:
    """The module with the activation functions of this dtype."""
    return JitModule("sglang.jit_kernel.activation", "_jit_activation_module", (dtype,))


def rope(is_neox: bool, dimensions: int, dtype: str) -> JitModule:
    """The module that applies a rotary embedding to `dimensions` dimensions of each head."""
    return JitModule("sglang.jit_kernel.rope", "_jit_fused_rope_module", (is_neox, dimensions, dtype))


def kvcache(row_bytes: int) -> JitModule:
    """The module that stores rows of `row_bytes`, one token's K or V on one rank, into the KV cache."""
    return JitModule("sglang.jit_kernel.kvcache", "_jit_kvcache_module", (row_bytes,))


def quantised(config: Mapping[str, Any], dtype: str) -> set[JitModule]:
    """The modules that multiply with quantised weights, of those that take minutes to compile."""
    given = config.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    packed = method == "compressed-tensors" and given is not None and given.get("format") == "pack-quantized"
    if method not in ("awq", "gptq") and not packed:
        return set()
    found = {JitModule("sglang.jit_kernel.gptq_marlin", "_jit_gptq_marlin_module", (dtype,))}
    if any(config.get(key) for key in _EXPERTS):
        found.add(JitModule("sglang.jit_kernel.moe_wna16_marlin", "_jit_moe_wna16_marlin_module", (dtype,)))
    repack = "awq_marlin_repack" if method == "awq" else "gptq_marlin_repack"
    found.add(JitModule(f"sglang.jit_kernel.{repack}", f"_jit_{repack}_module", ()))
    return found


def needed(config: Mapping[str, Any], ranks: int) -> set[JitModule]:
    """Modules that a model with this config.json needs on `ranks` devices, as far as the configuration says. An engine
    compiles a missing one when it needs it; a superfluous one only costs compile time."""
    found = {clamp_position("int64")}
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype not in DTYPES:
        return found
    found |= {activation(dtype), *quantised(config, dtype)}
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
