"""What a neighbour's long prompts cost a model that decodes, with the prefill turn and without it.

    python -m benchmarks.gpu.prefill_turn --out DIR --commit HASH [--device cuda:0] [--shape 8b] [--neighbours 1]

The whole system, and models of one shape on one device. The first decodes `--streams` streams all the time; its
neighbours get prompts of `--prompt` tokens, `--in-flight` at a time each, from a client of the group like a gateway (no
text is made of tokens, so nothing waits for a whole word). Twice, the system started anew: with the turn, and with
`arbitration.prefill_turn = false`. Windows: the first alone, beside the neighbours, alone again.

The aim: beside the neighbours and with the turn, the p99 time between two tokens is at most twice what it is alone.

Exit status 1 if a request failed, a neighbour's prompts did not go on in its window, or a window saw no token.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu import fleet, report, shapes
from benchmarks.gpu.fleet import say
from benchmarks.gpu.series import gaps_of
from gateway.groups import GroupLink
from gpu_scheduler.client import GpuSchedulerClient
from protos import common_pb2, gpu_scheduler_pb2
from services import tasks
from tests.end_to_end.world import FOLDER, World, world

AIM = 2.0
FIRST = "first"
ON, OFF = "with the turn", "without it"
_AS_ON_A_GPU = {"page_size": "16", "overlap": "1"}
PROMPT = 64
"""Tokens, of the streams that decode."""


def parse() -> argparse.Namespace:
    parser = fleet.parser(__doc__ or "")
    parser.add_argument("--neighbours", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16, help="that the first model decodes")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens, of the neighbours' requests")
    parser.add_argument("--in-flight", type=int, default=4, help="requests of each neighbour")
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    parser.add_argument("--window", type=float, default=8.0, help="seconds")
    parser.add_argument("--chunk", type=int, default=0, help="chunked_prefill_size of the engines; 0: their own")
    return parser.parse_args()


@dataclass
class Answer:
    """What came of one request; the receiver of its chunks."""

    arrived_s: list[float] = field(default_factory=list)
    finish: common_pb2.Finish = common_pb2.FINISH_UNSPECIFIED
    error: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, chunk: common_pb2.TokenChunk) -> None:
        if chunk.token_ids:
            self.arrived_s.append(time.monotonic())
        if chunk.finish:
            self.finish, self.error = chunk.finish, chunk.error
            self.ended.set()

    def lost(self, reason: str, was_sent: bool) -> None:
        self.error = reason
        self.ended.set()

    @property
    def ok(self) -> bool:
        return self.finish == common_pb2.LENGTH


class Caller:
    """A client of the group that asks one model, again and again."""

    _numbers = 0

    def __init__(self, link: GroupLink, model: str, prompt: Callable[[], list[int]], output_tokens: int) -> None:
        self._link = link
        self._model = model
        self._prompt = prompt
        self._output = output_tokens
        self._open: dict[str, Answer] = {}
        self.answers: list[Answer] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, at_a_time: int) -> None:
        self._tasks = [tasks.spawn(self._repeat(), f"{self._model} {i}") for i in range(at_a_time)]

    async def once(self) -> Answer:
        Caller._numbers += 1
        name = f"benchmark-{Caller._numbers}"
        answer = self._open[name] = Answer()
        self.answers.append(answer)
        sampling = common_pb2.Sampling(max_new_tokens=self._output, ignore_eos=True)
        submit = gpu_scheduler_pb2.Submit(
            request_id=name, model=self._model, token_ids=self._prompt(), sampling=sampling
        )
        self._link.submit(submit, answer)
        await answer.ended.wait()
        del self._open[name]
        return answer

    async def _repeat(self) -> None:
        while (await self.once()).ok:
            pass

    async def stop(self) -> None:
        await tasks.cancel(*self._tasks)
        for name in self._open:
            self._link.cancel(name)
        self._open.clear()

    def failed(self) -> list[str]:
        return [
            f"{self._model}: {one.error or one.finish}" for one in self.answers if one.ended.is_set() and not one.ok
        ]

    async def begun(self, count: int) -> None:
        """Until so many answers have begun."""
        async with asyncio.timeout(120.0):
            while sum(bool(one.arrived_s) for one in self.answers) < count and not self.failed():
                await asyncio.sleep(0.01)


class Side:
    """One system, with the turn or without."""

    def __init__(self, given: argparse.Namespace, name: str) -> None:
        self._given = given
        self.name = name
        self.windows: dict[str, tuple[float, float]] = {}
        self.gaps: dict[str, list[float]] = {}
        self.prompts_per_s = 0.0
        self.most_under_way = 0
        """Neighbours' prompts that engines had at the same time, at most."""
        self.engines_under_way = 0
        """Neighbours that had one, at most."""
        self.problems: list[str] = []
        self._chance = np.random.default_rng(1)

    def _prompts(self, tokens: int) -> Callable[[], list[int]]:
        return lambda: self._chance.integers(3, 2000, tokens).tolist()

    async def run(self, at: World, others: Sequence[str]) -> None:
        given = self._given
        for model in (FIRST, *others):
            begun = time.monotonic()
            await at.complete(model, self._prompts(PROMPT)(), 1)
            say(f"{self.name}: {model} is active after {time.monotonic() - begun:.1f} s")
        address = at.local.unix(at.local.scheduler(given.device))
        link = GroupLink(address)
        running = tasks.spawn(link.run(), "link")
        scheduler = GpuSchedulerClient(address)
        decoding = Caller(link, FIRST, self._prompts(PROMPT), given.context - PROMPT - 16)
        prefilling = [Caller(link, model, self._prompts(given.prompt), 1) for model in others]
        try:
            await asyncio.gather(*(caller.once() for caller in prefilling))
            decoding.start(given.streams)
            await decoding.begun(given.streams)
            await self._alone("before")
            await self._beside(scheduler, prefilling)
            await asyncio.sleep(0.5)
            await self._alone("after")
        finally:
            for caller in (decoding, *prefilling):
                await caller.stop()
            await tasks.cancel(running)
            await scheduler.close()
        self._judge(decoding, prefilling)

    async def _alone(self, name: str) -> None:
        begun = time.monotonic()
        await asyncio.sleep(self._given.window / 2)
        self.windows[name] = (begun, time.monotonic())

    async def _beside(self, scheduler: GpuSchedulerClient, prefilling: Sequence[Caller]) -> None:
        before = [len(caller.answers) for caller in prefilling]
        for caller in prefilling:
            caller.start(self._given.in_flight)
        for caller, so_far in zip(prefilling, before, strict=True):
            await caller.begun(so_far + 1)
        watching = tasks.spawn(self._watch(scheduler), "queue")
        begun = time.monotonic()
        await asyncio.sleep(self._given.window)
        ended = time.monotonic()
        await tasks.cancel(watching)
        for caller in prefilling:
            await caller.stop()
        self.windows["beside"] = (begun, ended)
        answered = [one.arrived_s[-1] for caller in prefilling for one in caller.answers if one.arrived_s]
        self.prompts_per_s = sum(begun <= at < ended for at in answered) / (ended - begun)

    async def _watch(self, scheduler: GpuSchedulerClient) -> None:
        while True:
            queue = await scheduler.inspect()
            under_way = [one.model for one in queue.requests if one.model != FIRST and one.place == "running"]
            self.most_under_way = max(self.most_under_way, len(under_way))
            self.engines_under_way = max(self.engines_under_way, len(set(under_way)))
            await asyncio.sleep(0.05)

    def _judge(self, decoding: Caller, prefilling: Sequence[Caller]) -> None:
        streams = [one.arrived_s for one in decoding.answers]
        self.gaps = {name: gaps_of(streams, *span) for name, span in self.windows.items()}
        self.gaps["alone"] = [*self.gaps["before"], *self.gaps["after"]]
        self.problems += [f"no token came: {name}" for name, each in self.gaps.items() if not each]
        self.problems += decoding.failed()[:1] + [first for caller in prefilling for first in caller.failed()[:1]]
        if self.prompts_per_s * self._given.window < 2:
            self.problems.append(f"only {self.prompts_per_s:.2f} prompts a second were computed beside it")

    def spread(self, name: str) -> dict[str, float]:
        return report.spread(self.gaps[name])

    @property
    def ratio(self) -> float:
        """p99 beside the neighbours over p99 alone."""
        return self.spread("beside")["p99"] / self.spread("alone")["p99"]

    def as_dict(self) -> dict[str, Any]:
        return {
            "between_tokens_s": {name: self.spread(name) for name in self.gaps},
            "p99_ratio": self.ratio,
            "neighbours_prompts_per_s": self.prompts_per_s,
            "most_prompts_under_way": self.most_under_way,
            "most_neighbours_under_way": self.engines_under_way,
            "gaps_s": {name: [round(gap, 6) for gap in each] for name, each in self.gaps.items() if name != "alone"},
        }


def listed(given: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """The models of the catalogue: on a GPU one checkpoint under several names."""
    names = [FIRST, *(f"neighbour-{number}" for number in range(given.neighbours))]
    on_gpu = given.device.startswith("cuda")
    path = shapes.write_checkpoint(folder / given.shape, given.shape) if on_gpu else FOLDER / "llama-debian"
    return {name: {"path": str(path), "context_tokens": given.context} for name in names}


async def measure(given: argparse.Namespace, models: dict[str, dict[str, Any]], name: str) -> Side:
    on_gpu = given.device.startswith("cuda")
    options = {} if on_gpu else dict(_AS_ON_A_GPU)
    if given.chunk:
        options["chunked_prefill_size"] = str(given.chunk)
    local: dict[str, Any] = {"devices": {given.device: None if on_gpu else 64 << 20}, "engines": len(models) + 1}
    if on_gpu:
        local |= {"host_capacity_bytes": 1 << 30, "gateway": {"park_time_out_s": 400.0}}
    local["arbitration"] = {"prefill_turn": name == ON}
    side = Side(given, name)
    async with world("sglang", models, options=options, **local) as at:
        await side.run(at, [model for model in models if model != FIRST])
    return side


def show(sides: Sequence[Side]) -> None:
    rows = []
    for side in sides:
        for name in ("before", "after", "alone", "beside"):
            spread = side.spread(name)
            values = (f"{1e3 * spread[q]:.2f}" for q in ("p50", "p99", "max"))
            beside = (f"{side.ratio:.2f}", f"{side.prompts_per_s:.2f}", side.most_under_way)
            rows.append((side.name, name, spread["n"], *values, *(beside if name == "beside" else ("", "", ""))))
    header = ("", "window", "gaps", "p50", "p99", "max", "p99 / alone", "prompts/s", "under way")
    report.table("between two tokens of the first model, ms", header, rows)
    ratio = sides[0].ratio
    say(f"{sides[0].name}: p99 is {ratio:.2f} of alone, aim {AIM}: {'met' if ratio <= AIM else 'MISSED'}")


async def main() -> None:
    fleet.begin()
    given = parse()
    with tempfile.TemporaryDirectory() as folder:
        models = listed(given, Path(folder))
        say("checkpoint written")
        sides = [await measure(given, models, name) for name in (ON, OFF)]
    show(sides)
    problems = [f"{side.name}: {problem}" for side in sides for problem in side.problems]
    body = {
        "arguments": {key: str(value) for key, value in vars(given).items() if key != "out"},
        "aim": AIM,
        "sides": {side.name: side.as_dict() for side in sides},
        "problems": problems,
    }
    report.write(given.out, "gpu_prefill_turn", given.commit, body)
    fleet.fail(problems)


if __name__ == "__main__":
    asyncio.run(main())
