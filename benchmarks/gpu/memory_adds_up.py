"""Is the ledger what the device says, and what happens when the device is full to the last page?

    python -m benchmarks.gpu.memory_adds_up --out DIR --commit HASH [--device cuda:0] [--shape 8b]

Four engines on one device, their limits open, and all of the device theirs.

    load    requests of all lengths on all engines. Every second the ledger (leased, booked for private memory, and the
            spares) beside NVML's used bytes less those before balloond started: the aim is 1 % between them. What NVML
            has beyond leases and spares is the engines' own: booked as each measured it (or `--quota-gib`), seen here
    full    long prompts and answers on all engines at once, half as much again as there is memory. Somebody loses every
            race for the last extent: it is refused, its requests wait, are retracted or parked, and all are answered

Exit status 1 if an engine died or a request failed, or if the device never was full, or nobody ever was refused memory,
retracted or parked: then nothing was shown. Without a GPU there is nothing to compare the ledger with.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from balloond import backends
from benchmarks.gpu import fleet, neighbours, report
from benchmarks.gpu.fleet import Client, Reply, say
from benchmarks.gpu.neighbours import Shared
from benchmarks.gpu.series import Account, drift
from services.runtime import tasks
from testing.engines import harness

AIM = 0.01


def parse() -> argparse.Namespace:
    parser = fleet.parser(__doc__ or "")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--kv-gib", type=float, help="of the device, for all; left out, on a GPU: what there is")
    parser.add_argument("--quota-gib", type=float, help="booked for an engine's own memory; left out: what it measured")
    parser.add_argument("--load", type=float, default=15.0, help="seconds")
    parser.add_argument("--rate", type=float, default=16.0, help="requests per second over all engines, under load")
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer when the device is full")
    parser.add_argument("--too-much", type=float, default=1.5, help="KV that is asked for at once over what there is")
    parser.add_argument("--options", default="{}", help="engine options as JSON")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


class AddsUp:
    _at: harness.Node
    _clients: list[Client]

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given = given
        self._folder = folder
        self._shared = Shared(folder, given.shape, given.device, given.context, given.options)
        self._extent = (64 << 10) if self._shared.on_host else 8 << 20
        self._prompt = self._shared.prompts(given.seed)
        self._used_before = self._nvml() or 0
        self._begun = time.monotonic()
        self._accounts: dict[str, list[Account]] = {"idle": [], "load": [], "full": []}
        self._free: list[tuple[float, int]] = []
        """(seconds, bytes) while the device is filled."""
        self._events: dict[int, tuple[str, str, str]] = {}
        """By sequence: (model, what, detail)."""
        self._problems: list[str] = []

    async def run(self) -> list[str]:
        given = self._given
        names = [f"engine-{number}" for number in range(given.engines)]
        kv_bytes = int(given.kv_gib * 2**30) if given.kv_gib else None
        quota = 0 if self._shared.on_host else int(given.quota_gib * 2**30) if given.quota_gib else None
        floor = 8 * self._extent
        async with self._shared.engines(self._folder, names, kv_bytes, floor, quota) as (self._at, self._clients):
            await neighbours.warm_up(self._shared, self._clients, 16, given.context // 2)
            await asyncio.sleep(2.0)
            await self._account("idle")
            say(f"warm; {self._told('idle')}")
            load: list[Reply] = []
            full: list[Reply] = []
            try:
                await self._load(load)
                await self._fill(full)
                await neighbours.quiet(self._clients)
            except Exception as error:  # what was found so far is written all the same
                self._problems.append(f"{type(error).__name__}: {error}")
            await self._hear()
            self._planner(load, full)
            self._report(load, full)
        return self._problems

    # --- looking

    def _nvml(self) -> int | None:
        """Used bytes of the device; None without a GPU."""
        if self._shared.on_host:
            return None
        hardware = backends.look(self._given.device)
        return hardware.total_bytes - hardware.free_bytes

    async def _account(self, phase: str) -> None:
        """Ledger and NVML at one moment; counted as still if the ledger says the same before and after."""
        device = (await self._at.client.inspect()).devices[0]
        used = self._nvml()
        again = (await self._at.client.inspect()).devices[0]
        self._accounts[phase].append(
            Account(
                at_s=round(time.monotonic() - self._begun, 3),
                leased=again.leased_bytes,
                booked=again.booked_bytes,
                set_aside=0 if self._shared.on_host else neighbours.SET_ASIDE_BYTES,
                used=None if used is None else used - self._used_before,
                still=device.leased_bytes == again.leased_bytes,
            )
        )

    async def _hear(self) -> None:
        for event in await self._at.client.events():
            self._events[event.sequence] = event.model, event.what, event.detail

    async def _watch(self, phase: str) -> None:
        """Every second, for ever."""
        while True:
            await asyncio.sleep(1.0)
            await self._account(phase)
            say(f"{phase}: {sum(len(client.open) for client in self._clients)} requests open; {self._told(phase)}")

    async def _watch_free(self) -> None:
        while True:
            free = (await self._at.client.inspect()).devices[0].free_bytes
            self._free.append((round(time.monotonic() - self._begun, 3), free))
            await self._hear()
            await asyncio.sleep(0.1)

    def _told(self, phase: str) -> str:
        last = self._accounts[phase][-1]
        told = f"leased {last.leased / 2**30:.3f} GiB, booked {last.booked / 2**30:.3f}"
        if last.used is None:
            return told
        return f"{told}, NVML {last.used / 2**30:.3f}: {100 * last.difference:+.2f} %"

    # --- load

    async def _load(self, replies: list[Reply]) -> None:
        chance = random.Random(self._given.seed)
        watching = tasks.spawn(self._watch("load"), "accounts")
        end = time.monotonic() + self._given.load
        while time.monotonic() < end:
            await asyncio.sleep(chance.expovariate(self._given.rate))
            length = round(self._given.context / 2 * chance.random() ** 3) + 5
            replies.append(chance.choice(self._clients).ask(self._prompt(length), chance.randint(5, 200)))
        await neighbours.quiet(self._clients)
        await tasks.cancel(watching)

    async def _fill(self, replies: list[Reply]) -> None:
        """More at once than there is memory for."""
        given = self._given
        device = (await self._at.client.inspect()).devices[0]
        weights = sum(lease.weights_bytes for lease in device.leases)
        there_is = device.capacity_bytes - device.booked_bytes - weights
        each = -(-int(given.too_much * self._shared.tokens(there_is)) // (given.context * len(self._clients)))
        say(f"{there_is / 2**20:.0f} MiB for KV; {each} prompts to each of {len(self._clients)} engines")
        watching = [tasks.spawn(self._watch("full"), "accounts"), tasks.spawn(self._watch_free(), "free")]
        for client in self._clients:
            for _ in range(each):
                replies.append(client.ask(self._prompt(given.context - given.output - 16), given.output))
        begun = time.monotonic()
        try:
            await neighbours.quiet(self._clients)
        finally:
            await tasks.cancel(*watching)
        say(f"all answered after {time.monotonic() - begun:.1f} s")

    # --- what came of it

    def _planner(self, load: Sequence[Reply], full: Sequence[Reply]) -> None:
        failed = [*neighbours.broken(load), *neighbours.broken(full)]
        if failed:
            self._problems.append(f"{len(failed)} requests failed, the first: {failed[0].finish} {failed[0].error!r}")
        least = min((free for _, free in self._free), default=None)
        if least is None or least >= len(self._clients) * self._extent:
            self._problems.append(f"the device never was full: {least} bytes were free")
        if not (self._lost() or any(reply.parked for reply in full)):
            self._problems.append("nobody was refused memory, retracted or parked")

    def _lost(self) -> dict[str, int]:
        """Races for memory that somebody lost."""
        what = Counter(what for _, what, _ in self._events.values())
        retractions = sum(client.stats.retractions for client in self._clients)
        return {name: count for name, count in (("refused", what["refused"]), ("retracted", retractions)) if count}

    def _report(self, load: Sequence[Reply], full: Sequence[Reply]) -> None:
        counted = Counter(what for _, what, _ in self._events.values())
        say(f"events of balloond: {dict(counted)}")
        stats = neighbours.stats_of(self._clients)
        rows = [
            (name, *(each.get(what, 0) for what in ("retractions", "evicted_tokens", "decode_tokens")))
            for name, each in stats.items()
        ]
        report.table("engines", ("engine", "retractions", "evicted tokens", "decoded tokens"), rows)
        parked = sum(reply.parked for reply in full)
        answered = sum(reply.ok for reply in full)
        least = min((free for _, free in self._free), default=0)
        say(f"full: {least} bytes were free at least; {self._lost()}, parked {parked}")
        say(
            f"{answered} of {len(full)} requests were answered, {sum(reply.ok for reply in load)} of {len(load)} before"
        )
        if not self._shared.on_host:
            self._show_accounts()
        body = {
            "arguments": {key: str(value) for key, value in vars(self._given).items() if key != "out"},
            "aim": AIM,
            "accounts": {phase: [asdict(each) for each in some] for phase, some in self._accounts.items()},
            "free_bytes": self._free,
            "events": dict(counted),
            "refusals": [f"{model}: {detail}" for model, what, detail in self._events.values() if what == "refused"][
                :50
            ],
            "lost": self._lost(),
            "parked": [reply.parked for reply in full],
            "ttft_s": {
                "load": [round(reply.ttft_s, 4) for reply in load],
                "full": [round(reply.ttft_s, 4) for reply in full],
            },
            "answered": {"load": sum(reply.ok for reply in load), "full": answered},
            "asked": {"load": len(load), "full": len(full)},
            "measured": {client.name: fleet.as_dict(client.measured) for client in self._clients},
            "stats": stats,
            "problems": self._problems,
        }
        report.write(self._given.out, "gpu_memory_adds_up", self._given.commit, body)

    def _show_accounts(self) -> None:
        rows = []
        for phase, accounts in self._accounts.items():
            if not accounts:
                continue
            worst = max(accounts, key=lambda account: abs(account.difference))
            private = [account.private / len(self._clients) / 2**30 for account in accounts]
            shares = (f"{100 * worst.difference:+.2f} %", f"{min(private):.3f}", f"{max(private):.3f}")
            rows.append((phase, len(accounts), *shares, f"{drift(accounts) / 2**20:.1f}"))
        header = ("phase", "readings", "ledger - NVML, worst", "an engine's own, GiB: least", "most", "drift MiB")
        report.table("the ledger beside NVML", header, rows)
        worst_of_all = max(abs(account.difference) for some in self._accounts.values() for account in some)
        say(f"within {100 * worst_of_all:.2f} %, aim 1 %: {'met' if worst_of_all <= AIM else 'MISSED'}")


async def main() -> None:
    fleet.begin()
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        problems = await AddsUp(given, Path(folder)).run()
    fleet.fail(problems)


if __name__ == "__main__":
    asyncio.run(main())
