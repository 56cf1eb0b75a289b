"""The operators of linear attention (gated delta rule) that SGLang takes from sgl_kernel on a CPU, in plain torch: one
step for each token, in float32. The operators follow the published formulas (Gated Delta Networks, arXiv 2412.06464),
and are for models small enough for tests.

The state of a slot is (value heads, value size, key size). The state of its convolution is the last inputs, (channels,
one less than the width). Both may be strided views of any memory; a call writes the slots that it is given and no
others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

_LEAST_NORM = 1e-6
"""Addend to the sum of squares of a query or key, so that one of zeros can be divided by its length."""


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Convolves the sequences of a prefill step, (channels, tokens), each behind the inputs in its slot, where it has
    some."""
    before = weight.shape[1] - 1
    out = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for slot, goes_on, start, end in zip(
        cache_indices.tolist(), has_initial_state.tolist(), bounds, bounds[1:], strict=False
    ):
        kept = conv_states[slot] if goes_on else conv_states.new_zeros(conv_states.shape[1:])
        inputs = torch.cat((kept.to(x.dtype), x[:, start:end]), dim=1)
        done = functional.conv1d(inputs[None], weight[:, None], bias, groups=len(weight))[0]
        out[:, start:end] = _activated(done, activation)
        conv_states[slot] = inputs[:, -before:].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolves the next token of each sequence, (batch, channels)."""
    slots = conv_state_indices.long()
    inputs = torch.cat((conv_states[slots].to(x.dtype), x[:, :, None]), dim=2)
    done = (inputs * weight).sum(dim=2)
    conv_states[slots] = inputs[:, :, 1:].to(conv_states.dtype)
    return _activated(done if bias is None else done + bias, activation)


def fused_gdn_gating_cpu(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logarithm of the decay, strength of the update) of each token and value head, (1, tokens, heads) each."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """Runs the sequences of a prefill step through the gated delta rule, each from the state in its slot, which is
    replaced by the one at its end. Returns the outputs, (1, tokens, value heads, value size)."""
    if use_qk_l2norm_in_kernel:
        q, k = _of_length_one(q), _of_length_one(k)
    out = _delta_rule(q[0], k[0], v[0], g[0], beta[0], initial_state, initial_state_indices, cu_seqlens)
    return out[None], None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    **_: Any,
) -> torch.Tensor:
    """Runs the tokens of a decode step through the gated delta rule, one of each sequence, from the state in its slot,
    which is replaced by the next one. `a`, `b`: inputs of the gates. Returns the outputs, (1, tokens, value heads,
    value size)."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )[0]


def _delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    indices: torch.Tensor,
    bounds: torch.Tensor,
) -> torch.Tensor:
    """The outputs of all tokens, (tokens, value heads, value size). All sequences take their first tokens together,
    then their second ones, and so on. A sequence that has no more tokens keeps its state, which neither decays nor
    changes."""
    group = v.shape[1] // k.shape[1]
    slots, starts = indices.long(), bounds[:-1].long()
    lengths = bounds[1:].long() - starts
    count, heads, longest = len(slots), v.shape[1], int(lengths.max())
    steps = torch.arange(longest)
    there = steps < lengths[:, None]
    # Steps that a sequence lacks repeat its own first token: with no strength all the same, NaN would reach its state.
    at = torch.where(there, starts[:, None] + steps, starts[:, None].clamp(max=len(v) - 1))

    def laid_out(of_tokens: torch.Tensor) -> torch.Tensor:
        """Values of tokens as a row for each step, of all sequences and heads: (longest, count * heads, ...)."""
        return of_tokens.float()[at].transpose(0, 1).reshape(longest, count * heads, *of_tokens.shape[2:])

    absent = ~there.T[:, :, None].expand(longest, count, heads).reshape(longest, count * heads)
    queries = laid_out((q * q.shape[-1] ** -0.5).repeat_interleave(group, dim=1))[..., None]
    keys = laid_out(k.repeat_interleave(group, dim=1))[:, :, None]
    values = laid_out(v)[..., None]
    decays = laid_out(g).exp().masked_fill(absent, 1.0)[..., None, None]
    strengths = laid_out(beta).masked_fill(absent, 0.0)[..., None, None]
    state = states[slots].float().flatten(0, 1)
    said = torch.empty_like(values)
    for query, key, value, decay, strength, out in zip(queries, keys, values, decays, strengths, said, strict=True):
        state *= decay
        change = torch.baddbmm(value, state, key.transpose(1, 2), alpha=-1).mul_(strength)
        state.baddbmm_(change, key)
        torch.bmm(state, query, out=out)
    states[slots] = state.view(count, heads, *states.shape[2:]).to(states.dtype)
    return said.view(longest, count, heads, -1).transpose(0, 1)[there].to(v.dtype)


def fused_rmsnorm_gated_cpu(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, activation: str = "silu"
) -> torch.Tensor:
    """The root mean square norm of each row, scaled by `weight` and by the activated gate."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + eps)
    opened = gate.float().sigmoid() if activation == "sigmoid" else functional.silu(gate.float())
    return (normed * weight.float() * opened).to(x.dtype)


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiplies `x` by the sigmoid of the gate, in place."""
    x.mul_(gate.sigmoid())


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys with each head normed, (tokens * heads, head size) each. A weight is how much the scale is above
    1, as in Gemma."""
    return _gemma_norm(q.reshape(-1, head_dim), q_weight, eps), _gemma_norm(k.reshape(-1, head_dim), k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys with each head normed, and the output gates, (tokens * heads, head size) each. In `q_gate` the
    gate of each head lies behind its query. A weight is how much the scale is above 1, as in Gemma."""
    q, gate = q_gate.view(-1, num_heads, 2, head_dim).unbind(dim=2)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous().view(-1, head_dim)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(queries, keys and values; output gates; b; a) of a projection that has all queries, all keys, all values and all
    gates in this order, and of another one that has all b and all a."""
    values = num_heads_v * head_v
    qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + values, values], dim=-1)
    b, a = mixed_ba.split(num_heads_v, dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


def _activated(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    if activation is None:
        return x
    assert activation in ("silu", "swish"), f"a convolution is activated by {activation}"
    return functional.silu(x)


def _of_length_one(x: torch.Tensor) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().square().sum(dim=-1, keepdim=True) + _LEAST_NORM)


def _gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed = x.float() * torch.rsqrt(x.float().square().mean(dim=-1, keepdim=True) + eps)
    return (normed * (1 + weight.float())).to(x.dtype)


OPERATORS = (
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_mul_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
)
"""Operators that SGLang looks up in torch.ops.sgl_kernel. The other functions of this module it imports by name."""
