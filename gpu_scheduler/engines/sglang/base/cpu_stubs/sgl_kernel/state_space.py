"""Operators of state-space layers (Mamba2) in plain torch: one step for each token, in float32. SGLang has Triton
kernels for them and nothing for a CPU, so hooks put these in their place (`hooks/cpu_kernels.py`). The operators follow
the published recurrence (Mamba2, arXiv 2405.21060), and are for models small enough for tests.

A state is (heads, head size, state size) for each sequence. Inputs of the state and outputs of it, `b` and `c`, are
shared by the heads of a group. `decay` is the rate of each head, below zero.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def state_space_scan_cpu(
    x: torch.Tensor,
    dt: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    bounds: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Runs the sequences of a prefill step, each from its row of `states`, and returns the states at their ends. `x`
    and `out` are (tokens, heads, head size), `dt` (tokens, heads), `b` and `c` (tokens, groups, state size)."""
    group = x.shape[1] // b.shape[1]
    b, c = (each.float().repeat_interleave(group, dim=1) for each in (b, c))
    dt = functional.softplus(dt.float() + dt_bias.float())
    kept, change = (dt * decay.float()).exp(), dt[:, :, None] * x.float()
    state = states.float().clone()
    starts = bounds[:-1].long()
    lengths = bounds[1:].long() - starts
    for step in range(int(lengths.max())):
        going = torch.nonzero(lengths > step).flatten()
        at = starts[going] + step
        now = state[going] * kept[at][:, :, None, None] + change[at][:, :, :, None] * b[at][:, :, None, :]
        told = torch.einsum("bhpn,bhn->bhp", now, c[at]) + d.float()[:, None] * x[at].float()
        out[at] = told.to(out.dtype)
        state[going] = now
    return state.to(states.dtype)


OPERATORS = (state_space_scan_cpu,)
"""Operators that hooks look up in torch.ops.sgl_kernel."""
