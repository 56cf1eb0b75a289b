"""Pages through balloond: from its ledger to an engine's addresses and back, and from an idle neighbour to who needs
them.

    python benchmarks/page_path.py                       # a minute
    python benchmarks/page_path.py --device cuda:0 --out benchmarks/results/gpu_page_path.json

    there     an engine's `acquire` of many extents: asked, booked, created, recorded by the keeper, sent, mapped; in
              extents of one size, and in large ones as far as they go
    back      their `release` until balloond has them back: unmapped, returned, destroyed, free in the ledger
    neighbour 1 GiB, in large extents, full of the cached prefixes of a neighbour that does nothing else, until mapped
              at the taker: reclaim, eviction, unmap, return, new extents. Once with memory that the neighbour wrote,
              once not
    reserve   the same from the neighbour's reserve: its main thread is not needed
    one       a single extent, there and back

Without a GPU pages are 64 KiB of host memory, and with one 2 MiB of its own. Everything is a process of its own:
keeper, balloond, the neighbour; the engine is this one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import multiprocessing.connection
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from balloond import backends
from balloond.backends.base import Mapper
from balloond.client import BalloondClient
from balloond.driver.connection.lease import Lease
from balloond.driver.kv.range import ElasticRange
from balloond.policy.extents import LARGE
from benchmarks import _report
from services.ipc import seqpacket
from services.rpc import rpc

MIB, GIB = 1 << 20, 1 << 30
ROUNDS, NEIGHBOUR_ROUNDS, SINGLES = 25, 12, 400
TIMEOUT_S = 30.0
Q = (0.5, 0.99)


@dataclass(frozen=True)
class Setting:
    """What is measured on which device."""

    device: str
    pages_per_extent: tuple[int, ...]
    there_and_back_bytes: int
    spare_bytes: int
    """Extents that balloond makes ahead."""

    @property
    def page_bytes(self) -> int:
        return backends.page_bytes(self.device)

    @property
    def set_aside_bytes(self) -> int:
        return self.spare_bytes + self.page_bytes if self.spare_bytes else 0


def setting(device: str) -> Setting:
    if device.startswith("cuda:"):
        return Setting(device, (1, 2, 4), 4 * GIB, 128 * MIB)
    return Setting(device, (1, 4, 32), 256 * MIB, 0)


class Node:
    """A keeper and a balloond with one device, in a folder."""

    def __init__(self, folder: Path, on: Setting, capacity: int, extent_bytes: int) -> None:
        self._device = on.device
        self.handoff = str(folder / "handoff.sock")
        self.address = f"unix:{folder / 'balloond.sock'}"
        keeper = str(folder / "keeper.sock")
        config = folder / "balloond.toml"
        config.write_text(
            f'name = "balloond"\nlisten = "{self.address}"\nnode = "benchmark"\nhandoff = "{self.handoff}"\n'
            f'keeper = "{keeper}"\nlog_level = "warning"\n[[devices]]\nname = "{on.device}"\n'
            f"capacity_bytes = {capacity + on.set_aside_bytes}\nspare_bytes = {on.spare_bytes}\n"
            f"kv_extent_bytes = {extent_bytes}\n"
        )
        self._processes = [self._start("balloond.keeper", "--socket", keeper)]
        while True:
            try:
                seqpacket.connect(keeper).close()
                break
            except OSError:
                time.sleep(0.01)
        self._processes.append(self._start("balloond", "--config", str(config)))
        if not asyncio.run(rpc.healthy(self.address, TIMEOUT_S)):
            raise SystemExit("balloond did not start")
        asyncio.run(self._book("engine", "neighbour"))

    @staticmethod
    def _start(*command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", *command], cwd=_report.ROOT)

    async def _book(self, *models: str) -> None:
        client = BalloondClient(self.address)
        for model in models:
            await client.set_booking(self._device, model, quota_bytes=0, weights_bytes=0, floor_bytes=0)
        await client.close()

    def until(self, **expected: int) -> None:
        """Returns when the neighbour's lease says so in the ledger."""

        async def follow() -> None:
            client = BalloondClient(self.address)
            async with asyncio.timeout(TIMEOUT_S):
                async for state in client.watch():
                    for lease in state.devices[0].leases if state is not None else ():
                        if lease.model == "neighbour" and all(getattr(lease, k) == v for k, v in expected.items()):
                            break
                    else:
                        continue
                    break
            await client.close()

        asyncio.run(follow())

    def end(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait()


@contextlib.contextmanager
def node(on: Setting, capacity: int, extent_bytes: int) -> Iterator[Node]:
    with tempfile.TemporaryDirectory() as folder:
        it = Node(Path(folder), on, capacity, extent_bytes)
        try:
            yield it
        finally:
            it.end()


def attach(
    handoff: str, device: str, model: str, extent_bytes: int, span: int, reserve: int = 0, large: int = LARGE
) -> tuple[Lease, ElasticRange, Mapper]:
    lease = Lease.attach(handoff, device, model, timeout_s=TIMEOUT_S)
    marks = {"low": reserve, "high": reserve, "large": large}
    mapper = backends.mapper(device)
    return lease, ElasticRange(lease, mapper, span_bytes=span, extent_bytes=extent_bytes, **marks), mapper


# --- there and back


def there_and_back(
    on: Setting, pages: int, nbytes: int, rounds: int, large: int = LARGE, settle_s: float = 0.1
) -> dict[str, Any]:
    """`settle_s`: between two rounds, for the keeper to close what the one before gave back."""
    extent_bytes = pages * on.page_bytes
    count = nbytes // extent_bytes
    there, back = [], []
    with node(on, 2 * nbytes, extent_bytes) as it:
        lease, kv, _ = attach(it.handoff, on.device, "engine", extent_bytes, nbytes, large=large)
        probe = Lease.attach(it.handoff, on.device, "neighbour", timeout_s=TIMEOUT_S)
        for _ in range(rounds + 2):
            began = time.perf_counter()
            mine = kv.acquire(count, timeout_s=TIMEOUT_S)
            there.append(time.perf_counter() - began)
            assert len(mine) == count
            began = time.perf_counter()
            kv.release(mine)
            kv.empty()
            _heard(lease)
            back.append(time.perf_counter() - began)
            time.sleep(settle_s)
        kv.close()
        lease.detach()
        probe.detach()
    return {
        "pages_per_extent": pages,
        "large_extent": large,
        "extents": count,
        "there_s": there[2:],
        "back_s": back[2:],
        "pages_per_s_there": _report.spread([count * pages / s for s in there[2:]]),
        "pages_per_s_back": _report.spread([count * pages / s for s in back[2:]]),
    }


def _heard(lease: Lease) -> None:
    """Returns when balloond has dealt with all that the lease sent before: an impossible growth is refused after it."""
    with contextlib.suppress(Exception):
        lease.grow(1, 1, 1, timeout_s=TIMEOUT_S)


# --- the neighbour


def neighbour(
    channel: multiprocessing.connection.Connection, handoff: str, device: str, extent_bytes: int, reserve: bool
) -> None:
    """A process whose loop only waits: for commands, and for its driver."""
    count = GIB // extent_bytes
    lease, kv, mapper = attach(handoff, device, "neighbour", extent_bytes, GIB, reserve=count if reserve else 0)
    mine: list[int] = []
    while True:
        ready, _, _ = select.select([channel, kv.wake_fd], [], [])
        if kv.wake_fd in ready and (wanted := kv.take_reclaims()):
            leaving = -(-wanted // extent_bytes)
            kv.release(mine[:leaving])
            del mine[:leaving]
            kv.reclaimed()
            kv.usage(0, [(60.0, len(mine) * extent_bytes)])
        if channel not in ready:
            continue
        command, write = channel.recv()
        if command == "end":
            break
        mine += kv.acquire(count - len(mine), timeout_s=TIMEOUT_S)
        if write:
            for index in mine:
                mapper.poison(kv.address + index * extent_bytes, extent_bytes)
        if reserve:
            kv.release(mine)
            mine.clear()
        else:
            kv.usage(0, [(60.0, len(mine) * extent_bytes)])
        channel.send("ok")
    kv.close()
    lease.detach()
    channel.send("ok")


def from_neighbour(on: Setting, pages: int, rounds: int, write: bool, reserve: bool) -> dict[str, Any]:
    extent_bytes = pages * on.page_bytes
    count = GIB // extent_bytes
    taken: list[float] = []
    context = multiprocessing.get_context("spawn")
    with node(on, GIB, extent_bytes) as it:
        here, there = context.Pipe()
        arguments = (there, it.handoff, on.device, extent_bytes, reserve)
        other = context.Process(target=neighbour, args=arguments, daemon=True)
        other.start()
        lease, kv, _ = attach(it.handoff, on.device, "engine", extent_bytes, GIB)
        for _ in range(rounds + 1):
            here.send(("fill", write))
            here.recv()
            it.until(**{"kv_reserve_bytes" if reserve else "kv_cached_bytes": GIB})
            began = time.perf_counter()
            mine: list[int] = []
            while len(mine) < count:
                mine += kv.acquire(count - len(mine), timeout_s=TIMEOUT_S)
            taken.append(time.perf_counter() - began)
            kv.release(mine)
            kv.empty()
            _heard(lease)
        here.send(("end", False))
        here.recv()
        kv.close()
        lease.detach()
        other.join(TIMEOUT_S)
    return {
        "pages_per_extent": pages,
        "written": write,
        "from": "reserve" if reserve else "prefixes",
        "seconds": taken[1:],
        "ms": _report.spread([1e3 * s for s in taken[1:]]),
    }


def main() -> None:
    parser = _report.arguments("page_path", __doc__ or "")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it works")
    parser.add_argument("--device", type=setting, default=setting("cpu:0"), help="cpu:0 (the default) or cuda:0")
    options: argparse.Namespace = parser.parse_args()
    on: Setting = options.device
    rounds = 3 if options.quick else ROUNDS
    paths = [
        there_and_back(on, pages, on.there_and_back_bytes, rounds, large)
        for large in (1, LARGE)
        for pages in on.pages_per_extent
    ]
    _report.table(
        [
            "pages an extent",
            "in a large one",
            "extents",
            "pages/s there (p50)",
            "pages/s back (p50)",
            "us an extent there",
            "back",
        ],
        [
            [
                path["pages_per_extent"],
                path["pages_per_extent"] * path["large_extent"],
                path["extents"],
                f"{path['pages_per_s_there']['p50']:,.0f}",
                f"{path['pages_per_s_back']['p50']:,.0f}",
                1e6 * _report.quantile(path["there_s"], 0.5) / path["extents"],
                1e6 * _report.quantile(path["back_s"], 0.5) / path["extents"],
            ]
            for path in paths
        ],
    )
    singles = [
        there_and_back(on, pages, pages * on.page_bytes, 20 if options.quick else SINGLES, settle_s=0.01)
        for pages in on.pages_per_extent
    ]
    _report.table(
        ["pages an extent", "one there, us p50", "p99", "one back, us p50", "p99"],
        [
            [one["pages_per_extent"], *(1e6 * _report.quantile(one[k], q) for k in ("there_s", "back_s") for q in Q)]
            for one in singles
        ],
    )
    rounds = 2 if options.quick else NEIGHBOUR_ROUNDS
    gibs = [
        from_neighbour(on, pages, rounds, write, reserve)
        for pages in on.pages_per_extent[1:]
        for write, reserve in ((False, False), (True, False), (False, True))
    ]
    _report.table(
        ["1 GiB from", "pages an extent", "written", "p50 ms", "p99 ms", "min ms"],
        [
            [gib["from"], gib["pages_per_extent"], gib["written"], gib["ms"]["p50"], gib["ms"]["p99"], gib["ms"]["min"]]
            for gib in gibs
        ],
    )
    _report.write(
        options.out,
        "page_path",
        {
            "device": on.device,
            "page_bytes": on.page_bytes,
            "there_and_back": paths,
            "one": singles,
            "one_gib_of_a_neighbour": gibs,
        },
    )


if __name__ == "__main__":
    main()
