"""Hooks on kernels for which SGLang has no other form on a CPU without AMX; on machines with a GPU there are none.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
fused_norm_gate.rms_norm_gated        The gated norm of linear attention is      SGLang launches a Triton kernel, which
(Qwen 3 Next)                         computed by torch                          no CPU has
layernorm_gated.layernorm_fn          The gated norm of linear attention is      SGLang launches a Triton kernel
(Qwen 3.5)                            computed by torch
elementwise                           The shared expert's gate is computed by    SGLang launches a Triton kernel
.fused_gate_sigmoid_mul_add           torch
mamba.MambaMixer2.__init__            Convolutions of Mamba layers are computed  SGLang has no name for them on a CPU
                                      by torch
ssd_combined                          States of Mamba layers are computed by     SGLang launches a Triton kernel
.mamba_chunk_scan_combined,           torch
ssu_dispatch.selective_state_update
NemotronHMoE._forward_core            The router's product has float32 results   torch has no such product on a CPU
fused_moe_native.moe_forward_native   Experts without a gate are computed        SGLang refuses their activation
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from gpu_scheduler.engines.sglang.base.environment import has_gpu
from gpu_scheduler.engines.sglang.hooks.hook import Hook


def gated_norm(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "swish",
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    **_arguments: Any,
) -> torch.Tensor:
    """Computes the norm of `x`, scaled by the activated gate `g`. Models that are served have neither bias nor
    residual."""
    assert bias is None and residual is None, "a gated norm with a bias or a residual"
    normed: torch.Tensor = torch.ops.sgl_kernel.fused_rmsnorm_gated_cpu(x, weight, g, eps, activation)
    return normed


def gated_layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    z: torch.Tensor,
    eps: float,
    group_size: int | None,
    norm_before_gate: bool,
    is_rms_norm: bool,
    activation: str,
) -> torch.Tensor:
    """Computes the root mean square norm of `x`, scaled by the activated gate `z`. Arguments are those of SGLang's
    `layernorm_gated.layernorm_fn`; values that no model has that is served fail."""
    assert is_rms_norm and norm_before_gate and group_size is None, "another norm than those of models that are served"
    return gated_norm(x, z, weight, bias, activation, eps=eps)


def add_gated(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Adds the shared expert's output, scaled by the gate of each token, to that of the others, in place."""
    final_hidden_states += (hidden_states @ gate_weight).sigmoid()[:, None] * shared_output


def mamba_layer(original: Callable[..., None], mixer: Any, *args: Any, **kwargs: Any) -> None:
    """Makes a Mamba layer, with convolutions for CPUs under the names that SGLang imports on GPUs only."""
    from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu
    from sglang.srt.layers.attention.mamba import mamba

    vars(mamba).update(
        causal_conv1d_fn_triton=causal_conv1d_fn_cpu, causal_conv1d_update_triton=causal_conv1d_update_cpu
    )
    original(mixer, *args, **kwargs)


def state_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    initial_states: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    state_dtype: torch.dtype,
    **_arguments: Any,
) -> tuple[None, torch.Tensor, None]:
    """Runs the prompts of a step through a Mamba layer. Only the states at the ends of the prompts are made, of all
    that the kernel returns."""
    states = initial_states
    if states is None:
        states = torch.zeros(len(cu_seqlens) - 1, *x.shape[2:], B.shape[-1], dtype=state_dtype)
    ends: torch.Tensor = torch.ops.sgl_kernel.state_space_scan_cpu(
        x[0], dt[0], A, B[0], C[0], D, dt_bias, states.to(state_dtype), cu_seqlens, out[0]
    )
    return None, ends, None


def state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_arguments: Any,
) -> None:
    """Runs the next token of each request through a Mamba layer, and replaces the state in the request's slot. SGLang
    repeats the one number that a head has in `dt`, `A`, `D` and `dt_bias` over the elements of the head."""
    slots = state_batch_indices.long()
    bounds = torch.arange(len(x) + 1)
    state[slots] = torch.ops.sgl_kernel.state_space_scan_cpu(
        x, dt[..., 0], A[:, 0, 0], B, C, D[:, 0], dt_bias[:, 0], state[slots], bounds, out
    )


def routed(
    layer: Any, hidden_states: torch.Tensor, forward_batch: Any = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes the mixture of a Nemotron layer: (output of the routed experts, output of the shared ones; None if there
    are none)."""
    logits = hidden_states.float() @ layer.gate.weight.t().float()
    chosen = layer.topk(hidden_states, logits)
    shared = None if layer.shared_experts is None else layer.shared_experts(hidden_states)
    inputs = layer._apply_fc1_latent_proj(hidden_states) if layer.use_latent_moe else hidden_states
    return layer.experts(inputs, chosen), shared


def experts(original: Callable[..., Any], layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> Any:
    """Computes the weighted outputs of a layer's experts, (tokens, size). Experts without a gate are activated by the
    square of what is above zero."""
    if config.is_gated:
        return original(layer, x, topk_output, config)
    assert config.activation == "relu2", f"experts without a gate are activated by {config.activation}"
    out = torch.zeros_like(x)
    for expert in topk_output.topk_ids.unique().tolist():
        tokens, places = torch.nonzero(topk_output.topk_ids == expert, as_tuple=True)
        inner = functional.relu(functional.linear(x[tokens], layer.w13_weight[expert])).square()
        weights = topk_output.topk_weights[tokens, places, None]
        out.index_add_(0, tokens, (functional.linear(inner, layer.w2_weight[expert]) * weights).to(x.dtype))
    # SGLang's router may have put the factor into the weights, which the layer's flag says.
    scaled = layer.should_fuse_routed_scaling_factor_in_topk or config.routed_scaling_factor is None
    return out if scaled else out * config.routed_scaling_factor


_NORMS = "sglang.kernels.ops.attention.fla"
_MAMBA = "sglang.kernels.ops.mamba.triton_ops"
_ON_A_CPU = [
    Hook(f"{_NORMS}.fused_norm_gate.rms_norm_gated", gated_norm, "REPLACE"),
    Hook(f"{_NORMS}.layernorm_gated.layernorm_fn", gated_layer_norm, "REPLACE"),
    Hook("sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add", add_gated, "REPLACE"),
    Hook("sglang.srt.layers.attention.mamba.mamba.MambaMixer2.__init__", mamba_layer, "AROUND"),
    Hook(f"{_MAMBA}.ssd_combined.mamba_chunk_scan_combined", state_scan, "REPLACE"),
    Hook(f"{_MAMBA}.ssu_dispatch.selective_state_update", state_update, "REPLACE"),
    Hook("sglang.srt.models.nemotron_h.NemotronHMoE._forward_core", routed, "REPLACE"),
    Hook("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", experts, "AROUND"),
]
HOOKS = [] if has_gpu() else _ON_A_CPU
