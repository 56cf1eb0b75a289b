"""Milliseconds of the linear attention of a decode step, by how far the states of two requests lie apart.

    python -m benchmarks.gpu.state_strides --out DIR --commit HASH

SGLang keeps the states of all requests layer by layer in one allocation, which is measured too. Ours lie request by
request, each in extents of 2 MiB that are mapped one by one, so a layer reads addresses that are a whole state apart.
Tables of pages on the device may serve some distances worse than others, powers of two above all. The shapes are those
of Qwen 3.6 35B-A3B (32 MiB a state) with layers left out so that all distances fit a GPU. Before each layer other
memory is read, as the weights of a model are. Each number is a CUDA graph of all layers, as in an engine; layouts take
turns. Two minutes with compiling.
"""

from __future__ import annotations

import random
import statistics
from typing import Any

import torch

from benchmarks.gpu import report, vmm
from gpu_scheduler.engines.sglang.base import kernels
from gpu_scheduler.engines.sglang.kv.pools.kv_views import state_views

EXTENT = 2 * vmm.MIB
LAYERS, HEADS, VALUE_HEADS, DIM = 15, 16, 32, 128
SLOTS = 64
EXTENTS_APART = (16, 17, 18, 19, 24, 31)
"""Extents from one state to the next; a state has 16."""
REQUESTS = (1, 8, 16, 32, 48)
OTHER_BYTES = 96 * vmm.MIB
"""Bytes of other memory that are read before each layer: more than the device's cache holds."""
ROUNDS, REPLAYS = 15, 10


def mapped(extents_apart: int) -> torch.Tensor:
    """States of all layers, (layers, slots, heads, rows, columns), each slot in extents of its own, with
    `extents_apart` extents from one slot to the next."""
    extents, base = vmm.Extents(), vmm.reserve(SLOTS * extents_apart * EXTENT)
    own = -(-LAYERS * VALUE_HEADS * DIM * DIM * 4 // EXTENT)
    for slot in range(SLOTS):
        for extent in range(own):
            address = base + (slot * extents_apart + extent) * EXTENT
            handle = extents.create(EXTENT)
            extents.map(address, EXTENT, handle)
            extents.release(handle)
        extents.allow(base + slot * extents_apart * EXTENT, own * EXTENT)
    raw = vmm.bytes_at(base, SLOTS * extents_apart * EXTENT)
    (found,) = state_views(raw, LAYERS, extents_apart * EXTENT, [((VALUE_HEADS, DIM, DIM), torch.float32)])
    return found


class Step:
    """A CUDA graph of the linear attention of all layers of a decode step."""

    def __init__(self, states: torch.Tensor, slots: list[int], other: torch.Tensor | None) -> None:
        """`other`, (layers, numbers): memory that is read before each layer."""
        from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode

        def some(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(shape, device="cuda").to(of)

        many = len(slots)
        packed = some(many, (2 * HEADS + VALUE_HEADS) * DIM)
        a, b = some(many, VALUE_HEADS), some(many, VALUE_HEADS)
        gates, biases = some(VALUE_HEADS, of=torch.float32), some(VALUE_HEADS)
        out = packed.new_empty(many, 1, VALUE_HEADS, DIM)
        places = torch.tensor(slots, dtype=torch.int32, device="cuda")
        sums = torch.empty(LAYERS, device="cuda")

        def layers() -> None:
            for layer in range(LAYERS):
                if other is not None:
                    torch.sum(other[layer], dim=0, out=sums[layer])
                fused_recurrent_gated_delta_rule_packed_decode(
                    packed, a, b, gates, biases, DIM**-0.5, states[layer], out, places, use_qk_l2norm_in_kernel=True
                )

        self._kept = packed, a, b, gates, biases, out, places, sums
        layers()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            layers()

    def ms(self) -> float:
        """Milliseconds of one replay, the mean of `REPLAYS`."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            self._graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / REPLAYS


def compare(layouts: dict[str, torch.Tensor], many: int, other: torch.Tensor | None) -> dict[str, Any]:
    """Milliseconds of a step of `many` requests in each layout, by the layout's name: medians of rounds in which all
    layouts take turns. `other` as in `Step`."""
    slots = random.Random(many).sample(range(SLOTS), many)
    steps = {name: Step(states, slots, other) for name, states in layouts.items()}
    rounds = [{name: step.ms() for name, step in steps.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(each[name] for each in rounds) for name in layouts}


def main() -> None:
    given = report.arguments(__doc__ or "").parse_args()
    kernels.take_all_numbers()
    torch.cuda.set_device(given.device)
    torch.zeros(1, device="cuda")  # makes the context in which memory is mapped
    shape = (LAYERS, SLOTS, VALUE_HEADS, DIM, DIM)
    layouts = {"layer by layer": torch.zeros(shape, device="cuda")}
    for apart in EXTENTS_APART:
        layouts[f"{apart * EXTENT >> 20} MiB apart"] = mapped(apart)
    for each in layouts.values():
        each.zero_()
    other = torch.zeros(LAYERS, OTHER_BYTES // 4, device="cuda")
    rows = [
        {"requests": many, "other_reads": reads is not None} | compare(layouts, many, reads)
        for reads in (None, other)
        for many in REQUESTS
    ]
    report.table(
        "ms of a decode step's linear attention",
        ["requests", "other reads", *layouts],
        [[f"{each:.3f}" if isinstance(each, float) else each for each in row.values()] for row in rows],
    )
    report.write(given.out, "gpu_state_strides", given.commit, {"rows": rows})


if __name__ == "__main__":
    main()
