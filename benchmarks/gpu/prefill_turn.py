"""What a neighbour's long prompts cost a model that decodes: with and without the prefill turn, with and without the
protection of decodes.

    python -m benchmarks.gpu.prefill_turn --out DIR --commit HASH [--device cuda:0] [--shape 8b] [--neighbours 1]

Engines of one shape on one device, and the shared queue of a gpu_scheduler in this process, anew for each of the four
cases, all with its precedence of prefill steps. The first model has `--streams` requests at a time, of `--output`
tokens each, one after the other; its neighbours get prompts of `--prompt` tokens, `--in-flight` at a time each.
Windows of each case: the first alone, beside the neighbours, alone again. Before the cases the first model decodes
without neighbours: `--times` its median step is the TPOT target of all cases.

Measured of the first model: TPOT, of each request that lies wholly in a window, (last - first) / (n - 1) of its tokens;
and the time between two tokens, of which no pace promises anything (gpu_scheduler/engines/sharing/throttle.py says
why).

The aim: with both, the p99 TPOT beside the neighbours is at most twice what it is alone.

Exit status 1 if a request failed, no prompt was computed in a window beside, or a window saw no whole request.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import fleet, neighbours, report
from benchmarks.gpu.fleet import Client, Reply, say
from benchmarks.gpu.neighbours import Shared
from benchmarks.gpu.series import gaps_of
from gpu_scheduler.config import Arbitration
from gpu_scheduler.engines import shared_board
from gpu_scheduler.engines.shared_board import SharedBoard
from gpu_scheduler.engines.sharing.throttle import FREE
from gpu_scheduler.memory.group_memory import GroupMemory
from gpu_scheduler.queue.dispatcher import Dispatcher
from gpu_scheduler.queue.streams import GatewayStream
from gpu_scheduler.residents import Residents
from protos import common_pb2, gpu_scheduler_pb2
from services.runtime import tasks

AIM = 2.0
FIRST = "first"
PROMPT = 64
"""Tokens, of the streams that decode."""
_FLOOR_BYTES = 4 << 20
_WATCH_S = 0.01


@dataclass(frozen=True)
class Case:
    name: str
    prefill_turn: bool
    protect_decodes: bool


BOTH = Case("both", True, True)
CASES = (
    Case("neither", False, False),
    Case("turn only", True, False),
    Case("protection only", False, True),
    BOTH,
)


def parse() -> argparse.Namespace:
    parser = fleet.parser(__doc__ or "")
    parser.add_argument("--neighbours", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16, help="requests of the first model at a time")
    parser.add_argument("--output", type=int, default=128, help="tokens, of the first model's requests")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens, of the neighbours' requests")
    parser.add_argument("--in-flight", type=int, default=2, help="requests of each neighbour")
    parser.add_argument("--context", type=int, default=8192, help="tokens")
    parser.add_argument("--window", type=float, default=7.0, help="seconds beside the neighbours; alone half of it")
    parser.add_argument("--times", type=float, default=AIM, help="TPOT target over the median step alone")
    parser.add_argument("--options", default="{}", help="the engines' own, as JSON")
    return parser.parse_args()


class _Stream(GatewayStream):
    """Where a gateway would be: an answer is told at once."""

    def __init__(self) -> None:
        super().__init__(1, lambda: None)
        self.open: dict[str, Reply] = {}

    def push(self, chunk: common_pb2.TokenChunk) -> None:
        answer = self.open.get(chunk.request_id)
        if answer is None:
            return
        if chunk.token_ids:
            now = time.monotonic()
            answer.first_s = answer.first_s or now
            answer.last_s = now
            answer.arrived_s.append(now)
            answer.tokens.extend(chunk.token_ids)
        if chunk.finish:
            answer.finish, answer.error = chunk.finish, chunk.error
            answer.ended.set()


class Group:
    """The queue over engines that are there already. While it runs it hears them."""

    def __init__(self, rules: Arbitration, clients: Sequence[Client], turn: SharedBoard, context_tokens: int) -> None:
        self.turn = turn
        self.stream = _Stream()
        self._clients = clients
        self.residents = Residents(lambda resident: self.dispatcher.residency_changed(resident))
        self.dispatcher = Dispatcher(
            rules, self.residents, GroupMemory([]), turn, lambda need: None, lambda engine: None
        )
        for client in clients:
            resident = self.residents.enter(common_pb2.ModelSpec(name=client.name, context_tokens=context_tokens))
            resident.engine, resident.measured = client.engine, client.measured
            client.engine.listener = self.dispatcher
            self.residents.set(resident, common_pb2.ACTIVE)
        self._running = tasks.spawn(self.dispatcher.run(), "queue")

    def prefilled(self, models: Sequence[str]) -> int:
        """Prompt tokens that their engines have computed since they started."""
        found = [self.residents.get(model) for model in models]
        return sum(one.stats.prefill_tokens for one in found if one is not None)

    async def close(self) -> None:
        """Everything is cancelled; returns when the engines are idle."""
        self.dispatcher.cancel_stream(self.stream)
        async with asyncio.timeout(60.0):
            while any(one.stats.running or one.stats.waiting for one in self.residents):
                await asyncio.sleep(0.01)
        await tasks.cancel(self._running)
        for client in self._clients:
            client.engine.listener = client
            self.turn.set_throttle(client.engine.index, FREE)


class Caller:
    """Asks one model, again and again."""

    _numbers = 0

    def __init__(self, group: Group, model: str, prompt: Callable[[], list[int]], output_tokens: int) -> None:
        self._group = group
        self._model = model
        self._prompt = prompt
        self.output_tokens = output_tokens
        self.answers: list[Reply] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, at_a_time: int) -> None:
        """The first ones are shorter, so that they do not all end at once."""
        first = [-(-self.output_tokens * (i + 1) // at_a_time) for i in range(at_a_time)]
        self._tasks = [tasks.spawn(self._repeat(tokens), f"{self._model} {i}") for i, tokens in enumerate(first)]

    async def _repeat(self, output_tokens: int) -> None:
        stream = self._group.stream
        while True:
            Caller._numbers += 1
            name = f"benchmark-{Caller._numbers}"
            prompt = self._prompt()
            answer = stream.open[name] = Reply((), time.monotonic())
            self.answers.append(answer)
            sampling = common_pb2.Sampling(max_new_tokens=output_tokens, ignore_eos=True)
            submit = gpu_scheduler_pb2.Submit(request_id=name, model=self._model, token_ids=prompt, sampling=sampling)
            self._group.dispatcher.submit(submit, stream)
            try:
                await answer.ended.wait()
            finally:
                del stream.open[name]
                self._group.dispatcher.cancel(stream, name)
            if not answer.ok:
                return
            output_tokens = self.output_tokens

    async def stop(self) -> None:
        await tasks.cancel(*self._tasks)

    def whole(self, begin_s: float, end_s: float) -> list[Reply]:
        """Those of full length, all of whose tokens came in between."""
        full = (one for one in self.answers if one.ok and len(one.arrived_s) == self.output_tokens)
        return [one for one in full if begin_s <= one.arrived_s[0] and one.arrived_s[-1] <= end_s]

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
    """One case, measured."""

    def __init__(self, given: argparse.Namespace, case: Case, prompts: Callable[[int], list[int]]) -> None:
        self._given = given
        self.case = case
        self._prompts = prompts
        self.windows: dict[str, tuple[float, float]] = {}
        self.gaps_s: dict[str, list[float]] = {}
        self.tpots_s: dict[str, list[float]] = {}
        self.ttft_s: list[float] = []
        self.prefilled_per_s = 0.0
        self.chunk_tokens: list[float] = []
        """The bound of a neighbour's prefill steps, sampled."""
        self.pause_ratio: list[float] = []
        self.problems: list[str] = []

    async def run(self, group: Group, others: Sequence[Client]) -> None:
        given = self._given
        decoding = Caller(group, FIRST, lambda: self._prompts(PROMPT), given.output)
        prefilling = [Caller(group, one.name, lambda: self._prompts(given.prompt), 1) for one in others]
        try:
            decoding.start(given.streams)
            await decoding.begun(given.streams)
            await self._alone("before")
            if prefilling:
                await self._beside(group, prefilling, others)
                await asyncio.sleep(0.2)
                await self._alone("after")
        finally:
            for caller in (decoding, *prefilling):
                await caller.stop()
        self._planner(decoding, prefilling)

    async def _alone(self, name: str) -> None:
        begun = time.monotonic()
        await asyncio.sleep(self._given.window / 4)
        self.windows[name] = (begun, time.monotonic())

    async def _beside(self, group: Group, prefilling: Sequence[Caller], others: Sequence[Client]) -> None:
        names = [one.name for one in others]
        for caller in prefilling:
            caller.start(self._given.in_flight)
        for caller in prefilling:
            await caller.begun(1)
        begun, before = time.monotonic(), group.prefilled(names)
        while (now := time.monotonic()) < begun + self._given.window:
            for one in others:
                pace = group.turn.throttle(one.engine.index)
                self.chunk_tokens.append(pace.chunk_tokens)
                self.pause_ratio.append(pace.pause_ratio)
            await asyncio.sleep(_WATCH_S)
        self.prefilled_per_s = (group.prefilled(names) - before) / (now - begun)
        for caller in prefilling:
            await caller.stop()
            self.ttft_s += [one.ttft_s for one in caller.answers if one.arrived_s and one.arrived_s[0] >= begun]
        self.windows["beside"] = (begun, now)

    def _planner(self, decoding: Caller, prefilling: Sequence[Caller]) -> None:
        streams = [one.arrived_s for one in decoding.answers]
        for name, span in self.windows.items():
            self.gaps_s[name] = gaps_of(streams, *span)
            self.tpots_s[name] = [one.tpot_s for one in decoding.whole(*span)]
        for kind in (self.gaps_s, self.tpots_s):
            kind["alone"] = [each for name in ("before", "after") for each in kind.get(name, ())]
        self.problems += [f"no request was whole: {name}" for name, each in self.tpots_s.items() if not each]
        self.problems += decoding.failed()[:1] + [first for caller in prefilling for first in caller.failed()[:1]]
        if prefilling and not self.ttft_s:
            self.problems.append("no prompt was computed beside it")

    @property
    def ratio(self) -> float:
        """p99 TPOT beside the neighbours over that alone."""
        return _ratio(self.tpots_s)

    def as_dict(self) -> dict[str, Any]:
        return {
            "prefill_turn": self.case.prefill_turn,
            "protect_decodes": self.case.protect_decodes,
            "tpot_s": {name: report.spread(each) for name, each in self.tpots_s.items()},
            "tpot_p99_ratio": self.ratio,
            "between_tokens_s": {name: report.spread(each) for name, each in self.gaps_s.items()},
            "between_tokens_p99_ratio": _ratio(self.gaps_s),
            "prefilled_tokens_per_s": self.prefilled_per_s,
            "ttft_s": report.spread(self.ttft_s),
            "chunk_tokens": report.spread(self.chunk_tokens),
            "pause_ratio": report.spread(self.pause_ratio),
            "tpots_s": _rounded(self.tpots_s),
            "gaps_s": _rounded(self.gaps_s),
        }


def _ratio(samples: dict[str, list[float]]) -> float:
    return report.quantile(samples["beside"], 0.99) / report.quantile(samples["alone"], 0.99)


def _rounded(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    """By window."""
    return {name: [round(each, 6) for each in window] for name, window in samples.items() if name != "alone"}


async def measure(
    given: argparse.Namespace, shared: Shared, clients: Sequence[Client], turn: SharedBoard
) -> tuple[float, list[Side]]:
    """The target in seconds, and the cases."""
    prompts = shared.prompts(1)

    async def side(case: Case, target_s: float, others: Sequence[Client]) -> Side:
        made = Side(given, case, prompts)
        rules = Arbitration(
            prefill_turn=case.prefill_turn, protect_decodes=case.protect_decodes, default_tpot_ms=1e3 * target_s
        )
        group = Group(rules, clients, turn, given.context)
        try:
            await made.run(group, others)
        finally:
            await group.close()
        return made

    alone = await side(CASES[0], 1.0, [])
    step_s, tpot_s = (report.quantile(samples["alone"], 0.5) for samples in (alone.gaps_s, alone.tpots_s))
    target_s = given.times * step_s
    say(f"the target is {1e3 * target_s:.2f} ms, TPOT alone {1e3 * tpot_s:.2f} ms")
    sides = []
    for case in CASES:
        sides.append(await side(case, target_s, clients[1:]))
        say(f"{case.name}: p99 TPOT is {sides[-1].ratio:.2f} of alone")
    return target_s, sides


def show(sides: Sequence[Side]) -> None:
    header = ("", "alone p50", "p99", "beside p50", "p99", "p99 ratio")
    for title, rows in (
        ("TPOT by request, ms", [(side.case.name, *_figures(side.tpots_s)) for side in sides]),
        ("between two tokens, ms", [(side.case.name, *_figures(side.gaps_s)) for side in sides]),
    ):
        report.table(title, header, rows)
    prefills = [
        (
            side.case.name,
            f"{side.prefilled_per_s:.0f}",
            *(f"{1e3 * report.quantile(side.ttft_s, q):.0f}" for q in (0.5, 0.99)),
            f"{report.quantile(side.chunk_tokens, 0.5):.0f}",
            f"{report.quantile(side.pause_ratio, 0.5):.2f}",
        )
        for side in sides
    ]
    header = ("", "tokens/s", "TTFT p50, ms", "p99", "chunk", "pause for each second")
    report.table("prefills of the neighbours", header, prefills)
    ratio = sides[-1].ratio
    say(f"{sides[-1].case.name}: p99 TPOT is {ratio:.2f} of alone, aim {AIM}: {'met' if ratio <= AIM else 'MISSED'}")


def _figures(samples: dict[str, list[float]]) -> tuple[str, ...]:
    """p50 and p99 alone and beside, and the ratio of the latter."""
    each = (report.quantile(samples[name], q) for name in ("alone", "beside") for q in (0.5, 0.99))
    return *(f"{1e3 * value:.2f}" for value in each), f"{_ratio(samples):.2f}"


async def main() -> None:
    fleet.begin()
    given = parse()
    fd = shared_board.create()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shared = Shared(folder, given.shape, given.device, given.context, given.options)
        kv_tokens = (given.streams + 2 * given.neighbours * given.in_flight) * given.context
        kv_bytes = kv_tokens * shared.kv_bytes_per_token if shared.on_host else None
        names = [FIRST, *(f"neighbour-{number}" for number in range(given.neighbours))]
        async with shared.engines(folder, names, kv_bytes, _FLOOR_BYTES, board_fd=fd) as (_, clients):
            await neighbours.warm_up(shared, clients, given.streams, given.prompt)
            say("warm")
            target_s, sides = await measure(given, shared, clients, SharedBoard(fd))
    show(sides)
    problems = [f"{side.case.name}: {problem}" for side in sides for problem in side.problems]
    body = {
        "arguments": {key: str(value) for key, value in vars(given).items() if key != "out"},
        "aim": AIM,
        "target_s": target_s,
        "measured": {client.name: fleet.as_dict(client.measured) for client in clients},
        "sides": {side.case.name: side.as_dict() for side in sides},
        "problems": problems,
    }
    report.write(given.out, "gpu_prefill_turn", given.commit, body)
    fleet.fail(problems)


if __name__ == "__main__":
    asyncio.run(main())
