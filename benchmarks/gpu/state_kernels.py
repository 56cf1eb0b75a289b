"""Checks that SGLang's kernels of states touch the slots that they are given, and no other memory.

    python -m benchmarks.gpu.state_kernels --out DIR --commit HASH

States lie over addresses of which only those of a few slots are mapped, as in an engine: a kernel that touches another
slot ends the process, and the last line printed names it. Everything is computed over an ordinary pool too, and the
results have to be the same, bit for bit. The shapes are those of Qwen 3.6 27B (gated delta nets, two layers of a state)
and of Nemotron 3 Nano (Mamba layers); slots are as far apart as whole states. Ten seconds, and a minute where Triton
has to compile. Exit status 1 if something differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpu_scheduler.engines.sglang.kv.pools.kv_views import heads_of_states, state_views

SLOTS, STRIDE = 240, 152 << 20
LIVE = (0, 1, 5, 29, 57, 120, 231)
"""Slots with memory. The highest is beyond what 32 bits count in elements."""
LAYERS = 2
PADDED = (231, 5, -1, 120)
"""Slots of a decode step; -1: an empty place of a CUDA graph."""
PROMPTS = ((231, 1, True), (57, 11, False), (5, 70, True))
"""Slot, tokens, and whether it goes on from its state, of each prompt of a step."""


class Pool:
    """States over addresses that are partly mapped (`views`), and equal ones in an ordinary pool (`plain`)."""

    def __init__(
        self, raw: torch.Tensor, conv: tuple[int, int], temporal: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        """`raw`: bytes of all slots, of which those in `LIVE` are mapped."""
        first, second = state_views(raw, LAYERS, STRIDE, [(conv, dtype), (temporal, torch.float32)])
        self.views = first, second
        self.plain = tuple(torch.zeros(each.shape, dtype=each.dtype, device=each.device) for each in self.views)
        for view, plain in zip(self.views, self.plain, strict=True):
            for slot in LIVE:
                plain[:, slot] = torch.randn(plain[:, slot].shape, device=plain.device).to(plain.dtype)
                view[:, slot] = plain[:, slot]

    def states(self, of: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        return [each[:, slot] for each in of for slot in LIVE]


Step = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
"""A computation over the two tensors of a pool, which changes states there; returns its other results."""


def managed(kind: Any, conv: torch.Tensor, temporal: torch.Tensor) -> Any:
    """A pool of SGLang's, or of ours, over these tensors."""
    pool = object.__new__(kind)
    pool.mamba_cache = kind.State(conv=[conv], temporal=temporal)
    pool.replayssm_write_pos, pool.debug_memory_pool = None, False
    return pool


def slots_change(device: str) -> dict[str, Step]:
    """The steps in which the pool itself changes slots."""
    from gpu_scheduler.engines.sglang.kv.pools.states import ElasticStatePool

    def clear(conv: torch.Tensor, temporal: torch.Tensor) -> list[torch.Tensor]:
        managed(ElasticStatePool, conv, temporal).clear_slots(torch.tensor([57], device=device))
        return []

    def copy(conv: torch.Tensor, temporal: torch.Tensor) -> list[torch.Tensor]:
        source, target = torch.tensor([231, 5], device=device), torch.tensor([29, 1], device=device)
        managed(ElasticStatePool, conv, temporal).copy_from(source, target)
        return []

    return {"slots are cleared": clear, "states are copied": copy}


def delta_net(device: str, dtype: torch.dtype, heads: int, value_heads: int, dim: int) -> dict[str, Step]:
    """The steps of a layer with linear attention, as SGLang's backend launches them."""
    from sglang.kernels.ops.attention.fla.chunk import chunk_gated_delta_rule
    from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode
    from sglang.kernels.ops.attention.triton_gdn_fused_proj import fused_qkvzba_causal_conv1d_update_contiguous
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn

    def some(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device).to(of)

    mixed, values = (2 * heads + value_heads) * dim, value_heads * dim
    weights, gates, biases = some(mixed, 4), some(value_heads, of=torch.float32), some(value_heads)
    padded = torch.tensor(PADDED, dtype=torch.int32, device=device)
    kept = padded >= 0
    projected, both = some(len(PADDED), mixed + values), some(len(PADDED), 2 * value_heads)
    lengths = [tokens for _, tokens, _ in PROMPTS]
    starts = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    slots = torch.tensor([slot for slot, _, _ in PROMPTS], dtype=torch.int32, device=device)
    goes_on = torch.tensor([on for _, _, on in PROMPTS], device=device)
    prompts = some(sum(lengths), mixed)
    forget = -torch.rand(1, sum(lengths), value_heads, device=device)
    learn = torch.rand(1, sum(lengths), value_heads, device=device).to(dtype)

    def decode(conv: torch.Tensor, temporal: torch.Tensor) -> list[torch.Tensor]:
        packed, z, b, a = fused_qkvzba_causal_conv1d_update_contiguous(
            projected, both, conv[1], weights, None, padded,
            qkv_dim=mixed, v_dim=values, num_v_heads=value_heads, head_v_dim=dim, activation="silu",
        )  # fmt: skip
        packed = packed.where(kept[:, None], 0)
        out = packed.new_empty(len(PADDED), 1, value_heads, dim)
        fused_recurrent_gated_delta_rule_packed_decode(
            packed, a, b, gates, biases, dim**-0.5, temporal[1], out, padded, use_qk_l2norm_in_kernel=True
        )
        return [packed, z[kept], out]

    def prefill(conv: torch.Tensor, temporal: torch.Tensor) -> list[torch.Tensor]:
        convolved = causal_conv1d_fn(
            prompts.transpose(0, 1), weights, None, conv_states=conv[1], query_start_loc=starts, seq_lens_cpu=lengths,
            cache_indices=slots, has_initial_state=goes_on, activation="silu",
        ).transpose(0, 1)  # fmt: skip
        states, step = heads_of_states(temporal[1])
        parts = convolved.split([heads * dim, heads * dim, values], dim=-1)
        q, k, v = (each.reshape(1, sum(lengths), -1, dim) for each in parts)
        out, _, _ = chunk_gated_delta_rule(
            q=q, k=k, v=v, g=forget, beta=learn, initial_state=states, initial_state_indices=slots * step,
            cu_seqlens=starts, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return [convolved, out]

    return {"linear attention, a decode step": decode, "linear attention, prompts": prefill}


def mamba(device: str, dtype: torch.dtype, heads: int, dim: int, state: int, groups: int) -> dict[str, Step]:
    """The steps of a Mamba layer that read or write states in their slots."""
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn, causal_conv1d_update
    from sglang.kernels.ops.mamba.triton_ops.mamba_ssm import selective_state_update

    def some(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device).to(of)

    mixed, many = heads * dim + 2 * groups * state, len(PADDED)
    weights, bias, tokens = some(mixed, 4), some(mixed), some(many, mixed)
    padded = torch.tensor(PADDED, dtype=torch.int32, device=device)
    kept = padded >= 0
    x, b, c, times = some(many, heads, dim), some(many, groups, state), some(many, groups, state), some(many, heads)
    decay = -torch.rand(heads, device=device)
    d, times_bias = some(heads), some(heads)
    lengths = [length for _, length, _ in PROMPTS]
    starts = torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    slots = torch.tensor([slot for slot, _, _ in PROMPTS], dtype=torch.int32, device=device)
    goes_on = torch.tensor([on for _, _, on in PROMPTS], device=device)
    prompts = some(sum(lengths), mixed)

    def decode(conv: torch.Tensor, temporal: torch.Tensor) -> list[torch.Tensor]:
        convolved = causal_conv1d_update(tokens.clone(), conv[1], weights, bias, "silu", conv_state_indices=padded)
        out = torch.zeros_like(x)
        selective_state_update(
            temporal[1], x, times[:, :, None].expand(-1, -1, dim), decay[:, None, None].expand(-1, dim, state), b, c,
            d[:, None].expand(-1, dim), z=None, dt_bias=times_bias[:, None].expand(-1, dim), dt_softplus=True,
            state_batch_indices=padded, out=out,
        )  # fmt: skip
        return [convolved[kept], out[kept]]

    def prefill(conv: torch.Tensor, temporal: torch.Tensor) -> list[torch.Tensor]:
        convolved = causal_conv1d_fn(
            prompts.transpose(0, 1), weights, bias, conv_states=conv[1], query_start_loc=starts, seq_lens_cpu=lengths,
            cache_indices=slots, has_initial_state=goes_on, activation="silu",
        )  # fmt: skip
        states = torch.where(goes_on[:, None, None, None], temporal[1][slots], 0)
        temporal[1][slots] = 0.5 * states
        return [convolved]

    return {"a Mamba layer, a decode step": decode, "a Mamba layer, prompts": prefill}


def compare(pool: Pool, steps: dict[str, Step], finish: Callable[[], None]) -> list[str]:
    """The names of the steps that differ."""
    differ = []
    for name, step in steps.items():
        print(f"{name} ...", flush=True)
        results = []
        for of in (pool.plain, pool.views):
            results.append([*step(*of), *pool.states(of)])
            finish()
        pairs = zip(*results, strict=True)
        if not all(torch.equal(mine, plain) for plain, mine in pairs):
            differ.append(name)
    return differ


def addresses() -> torch.Tensor:
    """Bytes of all slots on the first GPU; those in `LIVE` are mapped, until the process ends."""
    from benchmarks.gpu import vmm

    extents, base = vmm.Extents(), vmm.reserve(SLOTS * STRIDE)
    for slot in LIVE:
        handle = extents.create(STRIDE)
        extents.map(base + slot * STRIDE, STRIDE, handle)
        extents.release(handle)
        extents.allow(base + slot * STRIDE, STRIDE)
    found: torch.Tensor = vmm.bytes_at(base, SLOTS * STRIDE)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--commit", default="unknown")
    given = parser.parse_args()
    from benchmarks.gpu import report
    from gpu_scheduler.engines.sglang.base import kernels

    kernels.take_all_numbers()
    torch.cuda.manual_seed(0)
    torch.zeros(1, device="cuda")  # makes the context in which memory is mapped
    device, dtype = "cuda", torch.bfloat16
    raw = addresses()
    heads, value_heads, dim = 16, 48, 128
    pool = Pool(raw, ((2 * heads + value_heads) * dim, 3), (value_heads, dim, dim), dtype)
    steps = slots_change(device) | delta_net(device, dtype, heads, value_heads, dim)
    differ = compare(pool, steps, torch.cuda.synchronize)
    pool = Pool(raw, (64 * 64 + 2 * 8 * 128, 3), (64, 64, 128), dtype)
    steps = slots_change(device) | mamba(device, dtype, 64, 64, 128, 8)
    differ += compare(pool, steps, torch.cuda.synchronize)
    report.write(given.out, "gpu_state_kernels", given.commit, {"differ": differ})
    if differ:
        sys.exit(f"over addresses that are not all mapped these compute something else: {', '.join(differ)}")


if __name__ == "__main__":
    main()
