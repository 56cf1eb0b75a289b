"""How much memory is mapped for each byte of KV that is live, and what becomes of an idle engine's prefixes.

    python -m benchmarks.gpu.granularity --out DIR --commit HASH [--device cuda:0] [--shape 8b] [--kv-gib 24]

Live is what running requests use and what is cached. The engine gets requests of mixed lifetimes: prompts of 20 to
`--longest` tokens, answers of 5 to `--output`, Poisson arrivals, a third of the prompts begin like an earlier one, a
tenth of the requests are aborted on their way. Its memory is less than all of them need, so that prefixes are evicted
and what they leave is filled again. Sampled every 100 ms, from the engine's own statistics:

    load    while requests run
    end     all have ended and the driver's reserve has shrunk: the aim is 1.15 bytes mapped for each that is live
    idle    the engine has nothing to do, and nobody wants its memory: it keeps its prefixes
    wanted  a second engine of the device, with long prompts, asks for more than is free
    after   what the first engine has left when that one has ended

Exit status 1 if a request failed, or if nothing was cached, evicted or given up: then nothing was measured. Whether
the aims are met is said, and is not part of the status.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import fleet, neighbours, pairs, report
from benchmarks.gpu.fleet import Client, Reply, say
from benchmarks.gpu.neighbours import Shared
from benchmarks.gpu.series import Held, ratios
from protos import common_pb2
from services.runtime import tasks

AIM = 1.15
SETTLE_S = 2.5
"""The driver shrinks the reserve of an engine that has not grown for a second; then the engine looks once more."""
ABORTED_SHARE = 0.1


def parse() -> argparse.Namespace:
    parser = fleet.parser(__doc__ or "")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--rate", type=float, default=25.0, help="requests per second")
    parser.add_argument("--longest", type=int, default=1500, help="prompt, in tokens")
    parser.add_argument("--output", type=int, default=300, help="longest answer, in tokens")
    parser.add_argument("--kv-gib", type=float, default=24.0, help="of the device, for both engines")
    parser.add_argument("--idle", type=float, default=5.0, help="seconds")
    parser.add_argument(
        "--wanted", type=float, default=0.5, help="share of the first engine's KV that the second takes"
    )
    parser.add_argument("--options", default="{}", help="engine options as JSON")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


@dataclass(frozen=True)
class Request:
    due_s: float
    prompt: list[int]
    output_tokens: int
    abort_after: int | None
    """Tokens of the answer, if it is aborted at all."""


def plan(given: argparse.Namespace, vocabulary: int) -> list[Request]:
    """The first `--requests` arrivals; the same for the same seed."""
    chance = random.Random(given.seed)
    times = pairs.poisson(given.rate, 2 * given.requests / given.rate + 10, given.seed)[: given.requests]
    made: list[Request] = []
    for number, due in enumerate(times):
        prompt = [chance.randrange(3, vocabulary) for _ in range(chance.randint(20, given.longest))]
        if number % 3 == 2:
            like = chance.choice(made).prompt
            begin = like[: min(len(like) // 2, len(prompt) - 1)]
            prompt[: len(begin)] = begin
        answer = chance.randint(5, given.output)
        abort = chance.randrange(answer // 2) if chance.random() < ABORTED_SHARE else None
        made.append(Request(due, prompt, answer, abort))
    return made


class Granularity:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given = given
        self._folder = folder
        context = given.longest + given.output
        self._shared = Shared(folder, given.shape, given.device, context, given.options)
        self._requests = plan(given, self._shared.vocabulary)
        self._kv_bytes = int(given.kv_gib * 2**30)
        self._samples: dict[str, list[Held]] = {}
        self._problems: list[str] = []
        self._begun = 0.0

    async def run(self) -> list[str]:
        floor = 1 << 20 if self._shared.on_host else 256 << 20
        tokens = sum(len(request.prompt) + request.output_tokens for request in self._requests)
        say(f"{len(self._requests)} requests, {tokens * self._shared.kv_bytes_per_token / 2**20:.0f} MiB of KV in all")
        names = ("first", "second")
        async with self._shared.engines(self._folder, names, self._kv_bytes, floor) as (_, clients):
            await neighbours.warm_up(self._shared, clients, 16, self._given.longest)
            say("warm")
            await self._measure(*clients)
        return self._problems

    async def _measure(self, first: Client, second: Client) -> None:
        self._begun = time.monotonic()
        with self._phase("load", first):
            replies = await self._load(first)
        await asyncio.sleep(SETTLE_S)
        self._now("end", first)
        with self._phase("idle", first):
            await asyncio.sleep(self._given.idle)
        stats = {"end": neighbours.stats_of([first, second])}
        with self._phase("wanted", first):
            others = await self._want(first, second)
        await asyncio.sleep(SETTLE_S)
        self._now("after", first)
        stats["after"] = neighbours.stats_of([first, second])
        self._planner(replies, others, first)
        self._report(replies, others, stats)

    def _phase(self, name: str, client: Client) -> Any:
        return neighbours.sampling(lambda: self._now(name, client))

    def _now(self, name: str, client: Client) -> None:
        self._samples.setdefault(name, []).append(neighbours.held(client, self._begun))

    async def _load(self, client: Client) -> list[Reply]:
        replies: list[Reply] = []
        aborts: list[asyncio.Task[None]] = []

        async def abort(reply: Reply, after: int) -> None:
            while len(reply.tokens) < after and not reply.ended.is_set():
                await asyncio.sleep(0.005)
            client.abort(reply)

        begun = time.monotonic()
        for number, request in enumerate(self._requests):
            await asyncio.sleep(max(0.0, begun + request.due_s - time.monotonic()))
            replies.append(reply := client.ask(request.prompt, request.output_tokens))
            if request.abort_after is not None:
                aborts.append(tasks.spawn(abort(reply, request.abort_after), "abort"))
            if number % 100 == 99:
                say(f"{number + 1} sent, {len(client.open)} open: {_show(neighbours.held(client, self._begun))}")
        await asyncio.gather(*aborts)
        await client.quiet(240.0)
        say(f"all answered after {time.monotonic() - begun:.1f} s")
        return replies

    async def _want(self, first: Client, second: Client) -> list[Reply]:
        """Long prompts, one token each, until the second engine has what is free and a share of the first one's."""
        has = first.stats.kv_held_bytes
        wanted = self._kv_bytes - has + int(self._given.wanted * has)
        prompt = self._shared.prompts(self._given.seed + 1)
        count = -(-self._shared.tokens(wanted) // self._given.longest)
        say(f"the second engine wants {wanted / 2**20:.1f} MiB, in {count} prompts")
        replies = [second.ask(prompt(self._given.longest), 1) for _ in range(count)]
        await second.quiet(240.0)
        return replies

    def _planner(self, replies: Sequence[Reply], others: Sequence[Reply], first: Client) -> None:
        ended = (common_pb2.LENGTH, common_pb2.ABORTED)
        failed = [reply for reply in replies if reply.finish not in ended] + neighbours.broken(others)
        if failed:
            self._problems.append(f"{len(failed)} requests failed, the first: {failed[0].finish} {failed[0].error!r}")
        if not any(reply.finish == common_pb2.ABORTED for reply in replies):
            self._problems.append("no request was aborted")
        if not first.stats.evicted_tokens:
            self._problems.append("nothing was evicted: give less memory")
        end, after = self._samples["end"][-1], self._samples["after"][-1]
        if not end.cached:
            self._problems.append("nothing was cached at the end")
        if after.held >= end.held:
            self._problems.append("the idle engine gave nothing up")

    def _report(self, replies: Sequence[Reply], others: Sequence[Reply], stats: dict[str, Any]) -> None:
        extent = 8 << 20 if not self._shared.on_host else 64 << 10
        found = {name: ratios(some, 64 * extent) for name, some in self._samples.items()}
        rows = []
        for name, each in found.items():
            last = self._samples[name][-1]
            spread = each["without reserve"]
            mib = (last.live / 2**20, last.held / 2**20, last.reserve / 2**20)
            rows.append((name, spread["n"], f"{spread['p50']:.3f}", f"{spread['max']:.3f}", f"{last.ratio:.3f}"))
            rows[-1] += (f"{last.ratio_with_reserve:.3f}", *(f"{value:.2f}" for value in mib))
        header = (
            "phase",
            "samples",
            "mapped / live, p50",
            "max",
            "last",
            "with reserve",
            "live MiB",
            "held",
            "reserve",
        )
        report.table("bytes mapped for each that is live", header, rows)
        end, idle, after = (self._samples[name][-1] for name in ("end", "idle", "after"))
        say(f"end: {end.ratio:.3f} of at most {AIM} {'met' if end.ratio <= AIM else 'MISSED'}")
        kept = idle.cached == end.cached
        say(f"idle: prefixes {'kept' if kept else 'NOT kept'}: {end.cached} bytes, then {idle.cached}")
        say(f"wanted: {(end.held - after.held) / 2**20:.2f} MiB given up, {after.cached / 2**20:.2f} MiB still cached")
        body = {
            "arguments": {key: str(value) for key, value in vars(self._given).items() if key != "out"},
            "aim": AIM,
            "kv_bytes_per_token": self._shared.kv_bytes_per_token,
            "extent_bytes": extent,
            "ratios": found,
            "kept_while_idle": kept,
            "aborted": sum(reply.finish == common_pb2.ABORTED for reply in replies),
            "prompt_tokens": [len(reply.prompt) for reply in replies],
            "answer_tokens": [len(reply.tokens) for reply in replies],
            "cached_tokens": [reply.cached_tokens for reply in replies],
            "prompts_of_the_second": len(others),
            "ttft_of_the_second_s": [round(reply.ttft_s, 5) for reply in others],
            "stats": stats,
            "samples": {name: [list(asdict(each).values()) for each in some] for name, some in self._samples.items()},
            "problems": self._problems,
        }
        report.write(self._given.out, "gpu_granularity", self._given.commit, body)


def _show(now: Held) -> str:
    return (
        f"{now.live / 2**20:.1f} MiB live, {now.ratio:.3f} mapped for each ({now.ratio_with_reserve:.3f} with reserve)"
    )


async def main() -> None:
    fleet.begin()
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        problems = await Granularity(given, Path(folder)).run()
    fleet.fail(problems)


if __name__ == "__main__":
    asyncio.run(main())
