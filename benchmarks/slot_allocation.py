"""What the elastic pool adds to SGLang's own slot allocation.

    python benchmarks/slot_allocation.py            # a minute

One allocation is what SGLang does before a step: make sure of n free slots, then take them. Slots of 3,072 bytes (a
small model's token) in extents of 64 KiB, so that some straddle two extents. Half of the pool is live, in random
places: about ten slots are free in each extent.

    sglang    SGLang 0.5.16's own allocator and eviction check
    warm      the elastic pool, memory mapped and free
    reserve   the elastic pool, when the slots need extents from the driver's reserve
    cold      the elastic pool, when balloond has to be asked for them
    frees     giving the same slots back

The aim is under 20 microseconds added by a warm allocation, at p99. Samples are kept on the clock and on the core; the
difference is other work on the machine.
"""

from __future__ import annotations

import contextlib
import gc
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_scheduler.engines.sglang import environment

environment.prepare()

import asyncio  # noqa: E402

import torch  # noqa: E402
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.common import evict_from_tree_cache  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache  # noqa: E402

from balloond.backends.cpu import CpuMapper  # noqa: E402
from balloond.client import BalloondClient  # noqa: E402
from balloond.driver.lease import Lease  # noqa: E402
from balloond.driver.range import ElasticRange  # noqa: E402
from benchmarks import _report  # noqa: E402
from gpu_scheduler.engines.sglang.admission import Admission  # noqa: E402
from gpu_scheduler.engines.sglang.allocator import ElasticAllocator  # noqa: E402
from gpu_scheduler.engines.sglang.kv import ElasticKv  # noqa: E402
from services.errors import PrismError  # noqa: E402

SLOT_BYTES, EXTENT_BYTES = 3072, 64 << 10
SLOTS = 100_000
COUNTS = (1, 16, 64, 256)
SAMPLES = 2000
RARE_SAMPLES = 150
WAIT_S = 1.0
AIM_US = 20.0
SEED = 20260731


@contextlib.contextmanager
def lease() -> Iterator[Lease]:
    """A keeper, a balloond and a lease on it."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        config = folder / "balloond.toml"
        config.write_text(
            f'name = "balloond"\nlisten = "unix:{folder}/b.sock"\nnode = "n"\nhandoff = "{folder}/h.sock"\n'
            f'keeper = "{folder}/k.sock"\nlog_level = "error"\n'
            f'[[devices]]\nname = "cpu:0"\ncapacity_bytes = {4 << 30}\n'
        )
        for arguments in (["balloond.keeper", "--socket", f"{folder}/k.sock"], ["balloond", "--config", str(config)]):
            process = subprocess.Popen([sys.executable, "-m", *arguments])
            stack.callback(process.wait)
            stack.callback(process.terminate)
        asyncio.run(book(f"unix:{folder}/b.sock"))
        yield Lease.attach(f"{folder}/h.sock", "cpu:0", "model", timeout_s=10.0)


async def book(address: str) -> None:
    client = BalloondClient(address)
    while True:
        try:
            await client.set_booking("cpu:0", "model", quota_bytes=0, weights_bytes=0, floor_bytes=0)
            break
        except PrismError:
            await asyncio.sleep(0.1)
    await client.close()


def fragment(allocator: Any, chance: random.Random) -> None:
    """Takes what there is, and frees a random half."""
    taken = allocator.alloc(allocator.available_size()).tolist()
    chance.shuffle(taken)
    allocator.free(torch.tensor(taken[: len(taken) // 2]))


def since(begin: float, end: float) -> float:
    """Microseconds, to a tenth."""
    return round(1e6 * (end - begin), 1)


def alternate(take: Callable[[], torch.Tensor], give: Callable[[torch.Tensor], None], samples: int) -> dict[str, Any]:
    """Microseconds of `samples` allocations, and of giving each back a few allocations later."""
    allocating, allocating_core, freeing, held = [], [], [], []
    gc.collect()
    gc.disable()
    for _ in range(samples):
        begin, begin_core = time.perf_counter(), time.thread_time()
        slots = take()
        allocating_core.append(since(begin_core, time.thread_time()))
        allocating.append(since(begin, time.perf_counter()))
        held.append(slots)
        if len(held) > 8:
            slots = held.pop(0)
            begin_core = time.thread_time()
            give(slots)
            freeing.append(since(begin_core, time.thread_time()))
    gc.enable()
    for slots in held:
        give(slots)
    return {"alloc_us": allocating, "alloc_core_us": allocating_core, "free_core_us": freeing}


class Elastic:
    """The engine's pool without the engine."""

    def __init__(self, lease: Lease, low: int, high: int) -> None:
        self.memory = ElasticRange(
            lease,
            CpuMapper(),
            span_bytes=-(-(SLOTS + 1) * SLOT_BYTES // EXTENT_BYTES) * EXTENT_BYTES,
            extent_bytes=EXTENT_BYTES,
            low=low,
            high=high,
        )
        self.kv = ElasticKv(self.memory, SLOT_BYTES, SLOTS + 1)
        self.kv.hold_dummy(10.0)
        self.allocator = ElasticAllocator(SLOTS, dtype=torch.float32, device="cpu", kvcache=None, kv=self.kv)
        self.tree = RadixCache.create_simulated(mock_allocator=self.allocator)
        self.admission = Admission(self.kv, WAIT_S, WAIT_S, lambda tree, tokens: None)

    def take(self, count: int) -> torch.Tensor:
        self.admission.before_allocation(self.tree, count)
        slots = self.allocator.alloc(count)
        assert slots is not None
        return slots

    def close(self) -> None:
        self.memory.close()


def stock(count: int) -> dict[str, Any]:
    allocator = TokenToKVPoolAllocator(SLOTS, torch.float32, "cpu", None, need_sort=False)
    tree = RadixCache.create_simulated(mock_allocator=allocator)
    fragment(allocator, random.Random(SEED))

    def take() -> torch.Tensor:
        evict_from_tree_cache(tree, count)
        return allocator.alloc(count)

    return alternate(take, allocator.free, SAMPLES)


def warm(lease: Lease, count: int) -> dict[str, Any]:
    elastic = Elastic(lease, 0, 0)
    elastic.kv.grow(SLOTS // 2, 60.0)
    fragment(elastic.allocator, random.Random(SEED))
    measured = alternate(lambda: elastic.take(count), elastic.allocator.free, SAMPLES)
    elastic.close()
    return measured


def growing(lease: Lease, count: int, reserve: bool) -> dict[str, Any]:
    """Every allocation needs new extents: from the reserve, or from balloond."""
    extents = -(-count * SLOT_BYTES // EXTENT_BYTES) + 1
    elastic = Elastic(lease, 2 * extents, 2 * extents) if reserve else Elastic(lease, 0, 0)
    elastic.take(elastic.kv.available)
    samples = []
    for _ in range(min(RARE_SAMPLES, (SLOTS - 1000) // (count + 50))):
        wanted = elastic.memory.mapped_bytes
        while (
            reserve and elastic.memory.mapped_bytes - elastic.kv.envelopes.held * EXTENT_BYTES < extents * EXTENT_BYTES
        ):
            time.sleep(0.001)
        begin = time.perf_counter()
        elastic.take(count)
        samples.append(since(begin, time.perf_counter()))
        assert reserve or elastic.memory.mapped_bytes > wanted
        elastic.take(elastic.kv.available)
    elastic.close()
    return {"alloc_us": samples}


def main() -> None:
    given = _report.arguments("slot_allocation", __doc__ or "").parse_args()
    raw: dict[str, dict[str, Any]] = {}
    rows = []
    with lease() as held:
        for count in COUNTS:
            cases = {
                "sglang": stock(count),
                "warm": warm(held, count),
                "reserve": growing(held, count, reserve=True),
                "cold": growing(held, count, reserve=False),
            }
            spreads = {name: _report.spread(case["alloc_us"]) for name, case in cases.items()}
            core = {name: _report.spread(cases[name]["alloc_core_us"]) for name in ("sglang", "warm")}
            free = {name: _report.spread(cases[name]["free_core_us"]) for name in ("sglang", "warm")}
            added = {q: core["warm"][q] - core["sglang"][q] for q in ("p50", "p99")}
            summary = {"alloc_us": spreads, "alloc_core_us": core, "free_core_us": free, "added_core_us": added}
            raw[str(count)] = {**cases, "summary": summary}
            rows.append(
                [count]
                + [f"{core[name]['p50']:.1f} / {core[name]['p99']:.1f}" for name in core]
                + [f"{added['p50']:.1f} / {added['p99']:.1f}"]
                + [f"{spreads[name]['p50']:.0f} / {spreads[name]['p99']:.0f}" for name in ("reserve", "cold")]
                + [f"{free[name]['p50']:.1f} / {free[name]['p99']:.1f}" for name in free]
            )
        held.detach()
    header = ["slots", "sglang", "warm", "warm adds", "reserve", "cold", "sglang frees", "elastic frees"]
    print("microseconds, p50 / p99; reserve and cold on the clock, the others on the core")
    _report.table(header, rows)
    _report.write(
        given.out,
        "slot_allocation",
        {
            "slot_bytes": SLOT_BYTES,
            "extent_bytes": EXTENT_BYTES,
            "slots": SLOTS,
            "aim_added_p99_us": AIM_US,
            "by_slots": raw,
        },
    )


if __name__ == "__main__":
    main()
