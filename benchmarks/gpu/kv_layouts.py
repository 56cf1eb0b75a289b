"""Times of the kernels of a step for each layout of their memory: KV in SGLang's ordinary layout or in ours, token by
token, in torch's memory or in extents, and weights in either.

    python -m benchmarks.gpu.kv_layouts --out DIR --commit HASH [--shapes 8B,1B] [--weights]

One CUDA graph for each arrangement, over all layers of a shape:

    kv        store K and V of the new tokens, then FlashAttention 3 over all of them; pages scattered over the pool:
              decode steps of many short, of some long requests and of one, and prefills of whole and of half prompts
    weights   the matrix products of a layer, without attention

Graphs are replayed in turns; a figure is the median of the replays, in microseconds for the whole step.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import report, vmm
from gpu_scheduler.engines.sglang.kv.pools.kv_views import KvShape, kv_views

PAGE = 16
HIDDEN, INTERMEDIATE = 4096, 14336
ROUNDS = 40
REPLAYS = 5
LOADS = {
    "decode of 48 at 320 tokens": (48, 320, 1),
    "decode of 32 at 4,096 tokens": (32, 4096, 1),
    "decode of one at 1,024 tokens": (1, 1024, 1),
    "prefill of 4 prompts of 2,048 tokens": (4, 2048, 2048),
    "prefill of the second half of 4 prompts of 4,096 tokens": (4, 4096, 2048),
}
"""Requests, tokens of each, and how many of them the step computes."""
Step = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """The attention of one model: what decides the size of a token's KV and the kernel that is chosen."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def page_bytes(self) -> int:
        return self.layers * 2 * PAGE * self.kv_heads * self.head_dim * 2


SHAPES = (Shape("1B", 16, 32, 8, 64), Shape("3B", 28, 24, 8, 128), Shape("8B", 32, 32, 8, 128))


def mapped(nbytes: int, extent_bytes: int) -> torch.Tensor:
    """A byte tensor over extents of that size, which stay until the process ends."""
    extents = vmm.Extents()
    nbytes = -(-nbytes // extent_bytes) * extent_bytes
    base = vmm.reserve(nbytes)
    for at in range(0, nbytes, extent_bytes):
        handle = extents.create(extent_bytes)
        extents.map(base + at, extent_bytes, handle)
        extents.release(handle)
    extents.allow(base, nbytes)
    return vmm.bytes_at(base, nbytes)


def graph(step: Step) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        step()
    return made


def in_turns(steps: dict[str, Step]) -> dict[str, list[float]]:
    """Microseconds of the median replay of each round, by name."""
    graphs = {name: graph(step) for name, step in steps.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(ROUNDS):
        for name in list(graphs)[:: 1 if number % 2 else -1]:
            times = []
            for _ in range(REPLAYS):
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                graphs[name].replay()
                last.record()
                last.synchronize()
                times.append(1e3 * first.elapsed_time(last))
            found[name].append(statistics.median(times))
    return found


class Kv:
    """One pool of so many bytes and a batch whose pages are scattered over it."""

    def __init__(self, shape: Shape, batch: int, tokens: int, pool_bytes: int, new: int = 1) -> None:
        """`new`: the last tokens of each request, which the step computes; 1 in a decode step."""
        self._shape, self._new = shape, new
        self.pages = pool_bytes // shape.page_bytes()
        need = -(-tokens // PAGE)
        chosen = random.Random(1).sample(range(1, self.pages), batch * need)
        table = torch.tensor(chosen, dtype=torch.int32, device="cuda").view(batch, need)
        last = torch.arange(tokens - new, tokens, device="cuda")
        self._slots = (table[:, last // PAGE].long() * PAGE + last % PAGE).reshape(-1)
        self._lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
        self._starts = torch.arange(0, batch * new + 1, new, dtype=torch.int32, device="cuda")
        self._ends = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device="cuda")
        self._table = table
        made = (
            torch.randn(batch * new, shape.kv_heads * shape.head_dim, dtype=torch.bfloat16, device="cuda") for _ in "kv"
        )
        self._k, self._v = made
        self._q = torch.randn(batch * new, shape.query_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")

    def _attend(self, k: torch.Tensor, v: torch.Tensor) -> None:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        flash_attn_with_kvcache(
            q=self._q,
            k_cache=k,
            v_cache=v,
            page_table=self._table,
            cache_seqlens=self._lengths,
            cu_seqlens_q=self._starts,
            max_seqlen_q=self._new,
            **({"cu_seqlens_k_new": self._ends} if self._new > 1 else {}),
            softmax_scale=self._shape.head_dim**-0.5,
            causal=True,
            num_splits=0,
        )

    def ordinary(self) -> Step:
        from sglang.kernels.ops.kvcache.kvcache import store_cache

        row = self._shape.kv_heads * self._shape.head_dim
        made = [
            torch.zeros(self.pages * PAGE, row, dtype=torch.bfloat16, device="cuda")
            for _ in range(2 * self._shape.layers)
        ]
        paged = [each.view(self.pages, PAGE, self._shape.kv_heads, self._shape.head_dim) for each in made]

        def step() -> None:
            for layer in range(self._shape.layers):
                k, v = made[2 * layer : 2 * layer + 2]
                store_cache(self._k, self._v, k, v, self._slots, row_bytes=2 * row, size_limit=len(k))
                self._attend(*paged[2 * layer : 2 * layer + 2])

        return step

    def token_by_token(self, raw: torch.Tensor) -> Step:
        from sglang.kernels.ops.kvcache.kvcache import store_cache

        shape, row = self._shape, self._shape.kv_heads * self._shape.head_dim
        raw = raw[: self.pages * shape.page_bytes()]
        lies = KvShape(
            shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim, PAGE, self.pages, dtype=torch.bfloat16
        )
        views = list(zip(*kv_views(raw, lies), strict=True))
        flat = [tuple(each.view(-1, row) for each in pair) for pair in views]
        paged = [tuple(each.view(self.pages, PAGE, shape.kv_heads, shape.head_dim) for each in pair) for pair in views]

        def step() -> None:
            for layer in range(shape.layers):
                k, v = flat[layer]
                store_cache(self._k, self._v, k, v, self._slots, row_bytes=2 * row, size_limit=len(k))
                self._attend(*paged[layer])

        return step


def weights(layers: int, batch: int, raw: torch.Tensor | None) -> Step:
    """The products of so many layers, their weights back to back in `raw`, or in tensors of their own."""
    shapes = [(HIDDEN, 6144), (HIDDEN, HIDDEN), (HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)]
    matrices, at = [], 0
    for _ in range(layers):
        for rows, columns in shapes:
            nbytes = 2 * rows * columns
            own = torch.empty(nbytes, dtype=torch.uint8, device="cuda") if raw is None else raw[at : at + nbytes]
            at += nbytes
            matrices.append(own.view(torch.bfloat16).view(columns, rows).normal_(std=0.02))
    inputs = {rows: torch.randn(batch, rows, dtype=torch.bfloat16, device="cuda") for rows, _ in shapes}

    def step() -> None:
        for matrix in matrices:
            torch.nn.functional.linear(inputs[matrix.shape[1]], matrix)

    return step


def show(title: str, found: dict[str, list[float]]) -> None:
    base = statistics.median(next(iter(found.values())))
    cells = []
    for name, times in found.items():
        middle = statistics.median(times)
        cells.append((name, f"{middle:.1f}", f"{middle - base:+.1f}", f"{middle / base:.4f}"))
    report.table(title, ("arrangement", "us a step", "more", "ratio"), cells)


def kv_cases(shape: Shape, pool_bytes: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds by load and arrangement. All arrangements of a load have the same requests on the same pages."""
    large = mapped(pool_bytes, 64 * vmm.MIB)
    ours = mapped(pool_bytes, 8 * vmm.MIB)
    own = torch.zeros(pool_bytes, dtype=torch.uint8, device="cuda")
    found = {}
    for name, (batch, tokens, new) in LOADS.items():
        for raw in (large, ours, own):
            raw.zero_()
        kv = Kv(shape, batch, tokens, pool_bytes, new)
        steps = {
            "ordinary, torch's": kv.ordinary(),
            "token by token, torch's": kv.token_by_token(own),
            "token by token, extents of 64 MiB": kv.token_by_token(large),
            "token by token, extents of 8 MiB": kv.token_by_token(ours),
        }
        found[name] = in_turns(steps)
        show(f"{shape.name}, {name}", found[name])
        del steps, kv
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--shapes", default="8B,1B", help="of the KV")
    parser.add_argument("--pool-gib", type=float, default=20.0, help="of each of three pools")
    parser.add_argument("--batch", type=int, default=48, help="rows of the products")
    parser.add_argument("--weights", action="store_true", help="also the products, of an 8B shape")
    given = parser.parse_args()
    vmm.make_current(0)
    found: dict[str, Any] = {}
    for name in given.shapes.split(","):
        shape = next(each for each in SHAPES if each.name == name)
        pages = int(given.pool_gib * 2**30) // shape.page_bytes()
        found[name] = kv_cases(shape, pages * shape.page_bytes())
        torch.cuda.empty_cache()
    if given.weights:
        shape = next(each for each in SHAPES if each.name == "8B")
        weight_bytes = 2 * shape.layers * (HIDDEN * 6144 + HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)
        weight_steps = {
            "torch's, a tensor each": weights(shape.layers, given.batch, None),
            "torch's, one tensor": weights(
                shape.layers, given.batch, torch.empty(weight_bytes, dtype=torch.uint8, device="cuda")
            ),
            "extents of 512 MiB": weights(shape.layers, given.batch, mapped(weight_bytes, 512 * vmm.MIB)),
            "extents of 64 MiB": weights(shape.layers, given.batch, mapped(weight_bytes, 64 * vmm.MIB)),
        }
        found["weights"] = in_turns(weight_steps)
        show("weights", found["weights"])
    report.write(given.out, "gpu_kv_layouts", given.commit, {"arguments": vars(given) | {"out": ""}, **found})


if __name__ == "__main__":
    main()
