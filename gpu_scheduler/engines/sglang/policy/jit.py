"""The modules that SGLang has nvcc compile at their first use, and which of them a model needs. Pure; imports no
SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPES = {"bfloat16": 2, "float16": 2}
"""Bytes of a number of weights and KV, by the dtype's name in torch and config.json."""
_OPS = "sglang.kernels.ops"
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
    return JitModule(f"{_OPS}.attention.clamp_position", "_jit_clamp_position_module", (dtype,))


def activation(dtype: str) -> JitModule:
    """The module with the activation functions of this dtype."""
    return JitModule(f"{_OPS}.activation.activation", "activation_module", (dtype,))


def rope(is_neox: bool, dimensions: int, dtype: str) -> JitModule:
    """The module that applies a rotary embedding to `dimensions` dimensions of each head."""
    return JitModule(f"{_OPS}.attention.rope", "_jit_fused_rope_module", (is_neox, dimensions, dtype, dtype))


def kvcache(row_bytes: int) -> JitModule:
    """The module that stores rows of `row_bytes`, one token's K or V on one rank, into the KV cache."""
    return JitModule(f"{_OPS}.kvcache.kvcache", "_jit_kvcache_module", (row_bytes, row_bytes, 0))


def latent_rows(rank_bytes: int, rotated_bytes: int) -> JitModule:
    """The module that stores latent rows into the KV cache, of a latent vector and the rotated part of a key. Hopper
    has what it needs; other GPUs use Triton's."""
    return JitModule(f"{_OPS}.kvcache.set_mla_kv_buffer", "set_mla_kv_buffer_module", (rank_bytes, rotated_bytes, True))


def quantised(config: Mapping[str, Any], dtype: str) -> set[JitModule]:
    """The modules that multiply with quantised weights, of those that take minutes to compile."""
    given = config.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    packed = method == "compressed-tensors" and given is not None and given.get("format") == "pack-quantized"
    if method not in ("awq", "gptq") and not packed:
        return set()
    found = {JitModule(f"{_OPS}.gemm.gptq_marlin", "_jit_gptq_marlin_module", (dtype,))}
    if any(config.get(key) for key in _EXPERTS):
        # One for the experts' first weights and one for their second, which adds to zeros.
        for adds in (False, True):
            arguments = (dtype, False, False, True, adds, True)
            found.add(JitModule(f"{_OPS}.moe.moe_wna16_marlin", "_jit_moe_wna16_marlin_module", arguments))
    repack = "awq_marlin_repack" if method == "awq" else "gptq_marlin_repack"
    found.add(JitModule(f"{_OPS}.quantization.{repack}", f"_jit_{repack}_module", ()))
    return found


def needed(config: Mapping[str, Any], ranks: int) -> set[JitModule]:
    """Modules that a model with this config.json needs on `ranks` devices, as far as the configuration says. An engine
    compiles a missing one when it needs it; a superfluous one only costs compile time."""
    found = {clamp_position("int64")}
    text = config.get("text_config")
    if isinstance(text, Mapping):  # what takes images too describes its language model there
        config = {**config, **text}
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype not in DTYPES:
        return found
    found |= {activation(dtype), *quantised(config, dtype)}
    if config.get("kv_lora_rank"):
        rank, rotated = config["kv_lora_rank"], config.get("qk_rope_head_dim")
        if type(rank) is type(rotated) is int:
            found |= {rope(False, rotated, dtype), latent_rows(rank * DTYPES[dtype], rotated * DTYPES[dtype])}
        return found
    try:
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        width = int(config.get("head_dim") or config["hidden_size"] // heads)
        turned = int(width * float(config.get("partial_rotary_factor") or 1.0))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return found
    if width > 0 < kv_heads:
        found |= {rope(True, turned, dtype), kvcache(max(1, kv_heads // ranks) * width * DTYPES[dtype])}
    # Layers without a window that have heads of their own (Gemma 4).
    wide, few = config.get("global_head_dim"), config.get("num_global_key_value_heads")
    if type(wide) is int and wide > 0 < kv_heads:
        others = few if config.get("attention_k_eq_v") and type(few) is int else kv_heads
        found |= {rope(True, wide, dtype), kvcache(max(1, others // ranks) * wide * DTYPES[dtype])}
    return found
