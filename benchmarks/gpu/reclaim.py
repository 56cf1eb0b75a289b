"""How fast memory goes from one model to another, and whether a third one notices.

    python -m benchmarks.gpu.reclaim --out DIR --commit HASH [--device cuda:0] [--shape 8b] [--gib 20]

Three on one device: a neighbour whose prefix cache is filled with long prompts and which then is idle, a taker (the
driver alone, in a process of its own), and an engine that decodes all the while.

    a  `--gib` of the idle neighbour's prefixes, from the taker's request until mapped at the taker: by its driver alone
       (`growth`), and as gpu_schedulers ask, room first (`room`). The aim is 150 ms for 20 GiB. Where the time goes is
       told by balloond's history and the neighbour's statistics, after the fact
    b  memory that is free, once the taker's limit is raised: one extent, and `--grant-gib`, from the raise and from the
       driver's question until mapped
    c  growth of a real engine under load: what the neighbour holds while it is filled, GB/s, and its prompts' tokens/s
    d  time between two tokens of the decoding engine: alone, while a and b go on, alone again. The aim is a p99 within
       10 % of what it is alone

Exit status 1 if a prompt failed, the neighbour did not lose what was taken, or a window saw no token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import fleet, neighbours, report
from benchmarks.gpu.fleet import Client, Reply, say
from benchmarks.gpu.neighbours import Shared
from benchmarks.gpu.series import fastest, gaps_of
from benchmarks.gpu.taker import Taken, Taker, taker
from protos import balloond_pb2
from testing.engines import harness

AIM_MS = 150.0
AIM_RATIO = 1.10
PROMPT = 64
"""Tokens, of the streams that decode."""
WAYS = ("growth", "room")
KEPT_EXTENTS = 128
"""Free, and held for the streams that decode while others' memory is taken."""
Windows = dict[str, list[tuple[float, float]]]


def parse() -> argparse.Namespace:
    parser = fleet.parser(__doc__ or "")
    parser.add_argument("--gib", type=float, default=20.0, help="of prefixes that are taken")
    parser.add_argument("--rounds", type=int, default=6, help="fillings; by growth and by room in turn")
    parser.add_argument("--streams", type=int, default=16, help="that decode all the while")
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    parser.add_argument("--grant-gib", type=float, default=1.0)
    parser.add_argument("--grants", type=int, default=20)
    parser.add_argument("--singles", type=int, default=200)
    parser.add_argument("--alone", type=float, default=3.0, help="seconds before and after, undisturbed")
    parser.add_argument("--options", default='{"chunked_prefill_size": 8192}', help="engine options as JSON")
    return parser.parse_args()


class Reclaim:
    _at: harness.Node
    _neighbour: Client
    _steady: Client
    _taker: Taker

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given = given
        self._folder = folder
        self._shared = Shared(folder, given.shape, given.device, given.context, given.options)
        self._extent = (64 << 10) if self._shared.on_host else 8 << 20
        self._bytes = int(given.gib * 2**30) // self._extent * self._extent
        self._prompt = self._shared.prompts(1)
        self._windows: Windows = {}
        self._takes: list[dict[str, Any]] = []
        self._fills: list[dict[str, Any]] = []
        self._grants: list[dict[str, Any]] = []
        self._problems: list[str] = []

    async def run(self) -> list[str]:
        given = self._given
        streams = given.streams * given.context * self._shared.kv_bytes_per_token
        beside = int(1.1 * streams) + 2 * given.context * self._shared.kv_bytes_per_token
        kv_bytes = self._bytes + beside + int(given.grant_gib * 2**30) + 2 * KEPT_EXTENTS * self._extent
        floor = 16 * self._extent
        async with self._shared.engines(self._folder, ("neighbour", "steady"), kv_bytes, floor) as (at, clients):
            self._at, (self._neighbour, self._steady) = at, clients
            await at.book("taker", floor_bytes=0, weights_bytes=0)
            await at.limit("steady", int(1.1 * streams))
            span = 2 * kv_bytes // self._extent * self._extent
            async with taker(at.handoff, given.device, "taker", self._extent, span) as self._taker:
                await neighbours.warm_up(self._shared, clients, given.streams, given.context - 16)
                say("warm")
                decoding = neighbours.decoding(
                    self._steady, self._prompt, given.streams, PROMPT, given.context - PROMPT - 16
                )
                async with decoding as replies:
                    await self._measure()
                    self._report(replies)
        return self._problems

    async def _measure(self) -> None:
        await self._alone("before", self._given.alone)
        for number in range(self._given.rounds):
            await self._fill()
            await self._alone("between", 1.0)
            await self._take(WAYS[number % len(WAYS)])
        await self._alone("between", 1.0)
        await self._grant_all()
        await self._alone("after", self._given.alone)

    def _window(self, name: str, begin_s: float) -> None:
        """It ends now."""
        self._windows.setdefault(name, []).append((begin_s, time.monotonic()))

    async def _alone(self, name: str, seconds: float) -> None:
        begun = time.monotonic()
        await asyncio.sleep(seconds)
        self._window(name, begun)

    # --- c

    async def _fill(self) -> None:
        """Long prompts of one token each, until the neighbour has so many bytes of prefixes."""
        engine, length = self._neighbour, self._given.context - 16
        samples: list[tuple[float, float]] = []
        begun = time.monotonic()
        before = await self._kv_of("neighbour")
        replies: list[Reply] = []
        with neighbours.sampling(lambda: samples.append((time.monotonic(), engine.stats.kv_held_bytes)), 0.05):
            while engine.stats.kv_cached_bytes < self._bytes and not neighbours.broken(replies):
                missing = self._bytes - engine.stats.kv_cached_bytes
                count = -(-self._shared.tokens(missing) // length) + 1
                more = [engine.ask(self._prompt(length), 1) for _ in range(count)]
                await engine.quiet(120.0)
                replies += [reply for reply in more if not reply.ok] or more
        self._window("neighbour prefills", begun)
        seconds = time.monotonic() - begun
        if failed := neighbours.broken(replies):
            self._problems.append(f"{len(failed)} prompts failed, the first: {failed[0].error!r}")
            raise RuntimeError(self._problems[-1])
        await self._idle_in_the_ledger()
        grown = await self._kv_of("neighbour") - before
        self._fills.append(
            {
                "seconds": seconds,
                "grown_bytes": grown,
                "mean_bytes_per_s": grown / seconds,
                "fastest_bytes_per_s": fastest(samples, 0.3),
                "prompt_tokens_per_s": sum(len(reply.prompt) for reply in replies) / seconds,
                "parked": sum(reply.parked for reply in replies),
            }
        )
        say(f"filled: {json.dumps({name: round(value, 3) for name, value in self._fills[-1].items()})}")

    async def _idle_in_the_ledger(self) -> None:
        """Until balloond knows what the neighbour has."""

        async def known() -> bool:
            for lease in (await self._at.client.inspect()).devices[0].leases:
                if lease.model == "neighbour":
                    return lease.kv_cached_bytes >= self._neighbour.stats.kv_cached_bytes and not lease.kv_used_bytes
            return False

        await self._at.until(known)

    # --- a

    async def _take(self, way: str) -> None:
        had, evicting_s = self._neighbour.stats.kv_held_bytes, self._neighbour.stats.evicting_s
        await self._shut_away()
        wanted = self._bytes
        begun = time.monotonic()
        room = None
        if way == "room":
            room = await self._room("taker", wanted)
        room_s = time.monotonic() - begun
        taken = await self._taker.take(wanted // self._extent)
        self._window("reclaim", begun)
        seconds = taken.mapped_s - begun
        path = await self._path(begun, taken)
        gave = had - await self._kv_of("neighbour")
        begun = time.monotonic()
        given_back_s = await self._taker.give_back()
        self._window("return", begun)
        await self._room("taker", 0)
        await self._room("steady", 0)
        await self._book("shut away", 0)
        path["neighbour_evicting"] = self._neighbour.stats.evicting_s - evicting_s
        self._takes.append(
            {
                "way": way,
                "seconds": seconds,
                "room_s": room_s,
                "driver_s": taken.seconds,
                "attempts": taken.attempts,
                "wanted_bytes": wanted,
                "neighbour_gave_bytes": gave,
                "short_bytes": room.short_bytes if room is not None else 0,
                "give_back_s": given_back_s,
                "path_s": path,
            }
        )
        say(
            f"{way}: {wanted / 2**20:.0f} MiB in {1e3 * seconds:.1f} ms (room {1e3 * room_s:.1f}, driver "
            f"{1e3 * taken.seconds:.1f} ms, asked {taken.attempts} times); the neighbour gave {gave / 2**20:.0f} MiB; "
            f"given back in {1e3 * given_back_s:.1f} ms"
        )
        say(f"  ms after it began: {json.dumps({name: round(1e3 * value, 1) for name, value in path.items()})}")
        if gave < 0.8 * self._bytes:
            self._problems.append(f"{way}: the neighbour gave {gave} bytes up, not {self._bytes}")

    async def _path(self, begun: float, taken: Taken) -> dict[str, float]:
        """When it happened, in seconds after `begun`, to about a millisecond: an event says only how old it is."""
        asked = time.monotonic()
        events = await self._at.client.events()
        now = (asked + time.monotonic()) / 2
        path = {"asked": taken.asked_s - begun, "mapped": taken.mapped_s - begun}
        for name, what, model in (
            ("reclaim", "reclaim", "neighbour"),
            ("returned", "freed", "neighbour"),
            ("granted", "granted", "taker"),
        ):
            at = [now - event.age_s for event in events if (event.what, event.model) == (what, model)]
            if at := [moment - begun for moment in at if begun - 0.002 <= moment <= taken.mapped_s]:
                path |= {f"first_{name}": at[0], f"last_{name}": at[-1]}
        return path

    async def _shut_away(self) -> None:
        """What is free is kept for the decoding streams, and the rest of it booked for nobody: what is taken is the
        neighbour's."""
        device = (await self._at.client.inspect()).devices[0]
        kept = KEPT_EXTENTS * self._extent
        if device.free_bytes < kept:
            raise RuntimeError(f"{device.free_bytes} bytes are free, {kept} are to be kept for the decoding streams")
        await self._book("shut away", (device.free_bytes - kept) // device.page_bytes * device.page_bytes)
        await self._room("steady", kept)

    async def _room(self, model: str, nbytes: int) -> balloond_pb2.MakeRoomResponse:
        """Held for a while, or given up with 0."""
        return await self._at.client.make_room(
            *(self._given.device, model), bytes=nbytes, may_retract=False, hold_ms=10_000, timeout_s=10.0
        )

    async def _book(self, name: str, quota: int) -> None:
        await self._at.client.set_booking(self._given.device, name, quota_bytes=quota, weights_bytes=0, floor_bytes=0)

    async def _kv_of(self, model: str) -> int:
        leases = (await self._at.client.inspect()).devices[0].leases
        return sum(lease.kv_bytes for lease in leases if lease.model == model)

    # --- b

    async def _grant_all(self) -> None:
        many = int(self._given.grant_gib * 2**30) // self._extent
        for count, times in ((1, self._given.singles), (many, self._given.grants)):
            begun = time.monotonic()
            for _ in range(times):
                await self._grant(count)
            self._window("grants", begun)
            some = [grant for grant in self._grants if grant["extents"] == count]
            spread = report.spread([1e3 * grant["driver_s"] for grant in some])
            say(f"{count} extents of free memory, ms: {json.dumps({k: round(v, 3) for k, v in spread.items()})}")

    async def _grant(self, count: int) -> None:
        nbytes = count * self._extent
        await self._at.limit("taker", 0)
        begun = time.monotonic()
        await self._at.limit("taker", nbytes)
        answered = time.monotonic()
        await self._taker.may_hold(nbytes)
        taken = await self._taker.take(count)
        self._grants.append(
            {
                "extents": count,
                "limit_s": answered - begun,
                "driver_s": taken.seconds,
                "since_raised_s": taken.mapped_s - begun,
                "attempts": taken.attempts,
            }
        )
        await self._taker.give_back()

    # --- what came of it

    def _report(self, replies: Sequence[Reply]) -> None:
        streams = [reply.arrived_s for reply in replies]
        found = {name: [gaps_of(streams, begin, end) for begin, end in spans] for name, spans in self._windows.items()}
        pooled = {name: [gap for some in each for gap in some] for name, each in found.items()}
        alone = [gap for name in ("before", "between", "after") for gap in pooled[name]]
        spreads = {"alone": report.spread(alone)} | {name: report.spread(each) for name, each in pooled.items()}
        for name, spread in spreads.items():
            if not spread["n"]:
                self._problems.append(f"no token came in the window {name!r}")
        self._show(spreads)
        body = {
            "arguments": {key: str(value) for key, value in vars(self._given).items() if key != "out"},
            "aims": {"milliseconds": AIM_MS, "ratio": AIM_RATIO},
            "extent_bytes": self._extent,
            "bytes": self._bytes,
            "takes": self._takes,
            "fills": self._fills,
            "grants": self._grants,
            "measured": {c.name: fleet.as_dict(c.measured) for c in (self._neighbour, self._steady)},
            "stats": neighbours.stats_of([self._neighbour, self._steady]),
            "between_tokens_s": spreads,
            "windows_s": self._windows,
            "gaps_s": {name: [[round(gap, 6) for gap in some] for some in each] for name, each in found.items()},
            "problems": self._problems,
        }
        report.write(self._given.out, "gpu_reclaim", self._given.commit, body)

    def _show(self, spreads: dict[str, dict[str, float]]) -> None:
        rows = []
        for way in WAYS:
            some = [1e3 * take["seconds"] for take in self._takes if take["way"] == way]
            rows.append((f"{self._bytes / 2**20:.0f} MiB by {way}", len(some), *(_quantiles(some))))
        for count in sorted({grant["extents"] for grant in self._grants}):
            for key in ("driver_s", "since_raised_s"):
                some = [1e3 * grant[key] for grant in self._grants if grant["extents"] == count]
                rows.append((f"{count} free extents, {key}", len(some), *(_quantiles(some))))
        report.table("from asking until mapped, ms", ("what", "times", "p50", "p99", "max"), rows)
        base = spreads["alone"]
        rows = [
            (
                name,
                each["n"],
                *(f"{1e3 * each[q]:.3f}" for q in ("p50", "p99", "max")),
                f"{each['p99'] / base['p99']:.3f}",
            )
            for name, each in spreads.items()
        ]
        report.table("between two tokens, ms", ("window", "gaps", "p50", "p99", "max", "p99 / alone"), rows)
        worst = max(take["seconds"] for take in self._takes) * 1e3
        ratio = max(spreads[name]["p99"] for name in ("reclaim", "return", "grants")) / base["p99"]
        say(f"slowest take {worst:.1f} ms, aim {AIM_MS:.0f} for 20 GiB: {'met' if worst <= AIM_MS else 'MISSED'}")
        say(f"p99 beside it {ratio:.3f} of alone, aim {AIM_RATIO}: {'met' if ratio <= AIM_RATIO else 'MISSED'}")


def _quantiles(samples: Sequence[float]) -> tuple[str, ...]:
    spread = report.spread(samples)
    return tuple(f"{spread[q]:.3f}" for q in ("p50", "p99", "max"))


async def main() -> None:
    fleet.begin()
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        problems = await Reclaim(given, Path(folder)).run()
    fleet.fail(problems)


if __name__ == "__main__":
    asyncio.run(main())
