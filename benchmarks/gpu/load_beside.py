"""Do those who decode notice that a model is loaded?

    python -m benchmarks.gpu.load_beside --out DIR --commit HASH [--device cuda:1,cuda:0] [--shape 8b]

An engine decodes on the first `--device` meanwhile. Beside it a process loads weights of `--gib` time after time, as
the loader does:

    own        to the first device itself, over its own link, as every load of a neighbour of the engine goes
    both       to the second device over both devices' links, the engine's as much as the other
    spared     the same, but links of devices that work for others are spared, as the loader does
    at once    two loads to the first device at once: both have to progress, and to share

Time between two tokens in each, alone before and after; the aim is a p99 within 5 % of what it is alone. With one
device `both` and `spared` are left out. After each round the table and the JSON file are of all rounds so far.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import fleet, neighbours, report
from benchmarks.gpu.fleet import Reply, say
from benchmarks.gpu.loads import Loads, Order, Span, loads
from benchmarks.gpu.neighbours import Shared
from benchmarks.gpu.series import gaps_of

AIM_RATIO = 1.05
_SETTLE_S = 0.2
"""After a report, while which nobody here took tokens: that is no gap of the engine's."""
PROMPT = 64
"""Tokens, of the streams that decode."""


def parse() -> argparse.Namespace:
    parser = fleet.parser(__doc__ or "")
    parser.add_argument("--gib", type=float, default=4.0, help="of weights, a load")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each kind of load, and alone in between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    return parser.parse_args()


class Trial:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given = given
        self._folder = folder
        self._devices: list[str] = given.device.split(",")
        self._shared = Shared(folder, given.shape, self._devices[0], given.context)
        self._alone: list[Span] = []
        self._loads: dict[str, list[list[list[Span]]]] = {}
        """By kind, by round, by who loads at once."""

    async def run(self) -> list[str]:
        given, shared = self._given, self._shared
        problems: list[str] = []
        say("the engine starts")
        kv_bytes = int(1.5 * given.streams * given.context * shared.kv_bytes_per_token)
        async with shared.engines(self._folder, ("steady",), kv_bytes, kv_bytes // 16) as (_, clients), loads() as them:
            say("it warms up")
            await neighbours.warm_up(shared, clients, given.streams, given.context - 16)
            streams = neighbours.decoding(
                *(clients[0], shared.prompts(1), given.streams, PROMPT, given.context - PROMPT - 16)
            )
            async with streams as replies:
                say(f"{given.streams} streams decode")
                for number in range(given.rounds):
                    await self._round(number, them)
                    problems = self._report(replies)
        return problems

    async def _stay_alone(self) -> None:
        await asyncio.sleep(_SETTLE_S)
        begun = time.monotonic()
        await asyncio.sleep(self._given.seconds)
        self._alone.append((begun, time.monotonic()))

    async def _round(self, number: int, them: Loads) -> None:
        mine, nbytes = self._devices[0], int(self._given.gib * 2**30)
        orders = {"own": Order(mine, [mine], True, nbytes, self._given.seconds)}
        if len(self._devices) > 1:
            other = self._devices[1]
            orders["both"] = Order(other, [other, mine], False, nbytes, self._given.seconds)
            orders["spared"] = Order(other, [other, mine], True, nbytes, self._given.seconds)
        orders["at once"] = Order(mine, [mine], True, nbytes // 2, self._given.seconds, at_once=2)
        for name, order in orders.items():
            await self._stay_alone()
            spans = await them.run(order)
            self._loads.setdefault(name, []).append(spans)
            rates = [order.nbytes * len(some) / (some[-1][1] - some[0][0]) / 1e9 for some in spans]
            say(f"round {number + 1}, {name}: {' and '.join(f'{rate:.1f}' for rate in rates)} GB/s")
        await self._stay_alone()

    def _report(self, replies: Sequence[Reply]) -> list[str]:
        """Answers what went wrong so far."""
        streams = [reply.arrived_s for reply in replies]

        def between(spans: Sequence[Span]) -> list[float]:
            return [gap for begin, end in spans for gap in gaps_of(streams, begin, end)]

        gaps = {"alone": between(self._alone)} | {
            name: between([(some[0][0], some[-1][1]) for each in rounds for some in each[:1]])
            for name, rounds in self._loads.items()
        }
        spreads = {name: report.spread(each) for name, each in gaps.items()}
        problems = [f"no token came while {name!r}" for name, spread in spreads.items() if not spread["n"]]
        if failed := [reply for reply in replies if reply.error]:
            problems.append(f"{len(failed)} streams failed, the first: {failed[0].error}")
        rows = []
        for name, spread in spreads.items():
            ratio = spread["p99"] / spreads["alone"]["p99"]
            seconds = [end - begin for each in self._loads.get(name, ()) for some in each for begin, end in some]
            rate = f"{self._bytes(name) / report.quantile(seconds, 0.5) / 1e9:.1f}" if seconds else ""
            numbers = (f"{1e3 * spread[q]:.3f}" for q in ("p50", "p99", "max"))
            rows.append((name, spread["n"], *numbers, f"{ratio:.3f}", rate))
            if name != "alone":
                say(f"{name}: {ratio:.3f} of alone, aim {AIM_RATIO}: {'met' if ratio <= AIM_RATIO else 'MISSED'}")
        header = ("loads", "gaps", "p50 ms", "p99 ms", "max ms", "p99 / alone", "GB/s of one")
        report.table("between two tokens", header, rows)
        body: dict[str, Any] = {
            "arguments": {key: str(value) for key, value in vars(self._given).items() if key != "out"},
            "aim": AIM_RATIO,
            "between_tokens_s": spreads,
            "alone_s": self._alone,
            "loads_s": self._loads,
            "load_bytes": {name: self._bytes(name) for name in self._loads},
            "gaps_s": {name: [round(gap, 6) for gap in some] for name, some in gaps.items()},
            "problems": problems,
        }
        report.write(self._given.out, "gpu_load_beside", self._given.commit, body)
        return problems

    def _bytes(self, name: str) -> int:
        whole = int(self._given.gib * 2**30)
        return whole // 2 if name == "at once" else whole


async def main() -> None:
    fleet.begin()
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        problems = await Trial(given, Path(folder)).run()
    fleet.fail(problems)


if __name__ == "__main__":
    asyncio.run(main())
