"""Load on one side of a comparison, as its client sees it, by the clock of the side (`turns`), cut into windows."""

from __future__ import annotations

import asyncio
import bisect
import gc
import itertools
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.gpu import cores, report
from benchmarks.gpu.fleet import Client, Reply, as_dict
from benchmarks.gpu.turns import Clock
from protos import common_pb2
from services.runtime import tasks

DRAIN_S = 120.0


@dataclass(frozen=True)
class Shape:
    """Sizes of all requests. Prompts are random, so that none begins like another but for `shared_tokens`."""

    prompt_tokens: int
    output_tokens: int
    vocabulary: int
    shared_tokens: int = 0
    """Tokens that all prompts begin with, as with a system prompt."""

    def prompts(self, seed: int) -> Callable[[], list[int]]:
        """A function that makes the next prompt; with equal seeds the prompts are the same."""
        begin = np.random.default_rng(0).integers(3, self.vocabulary, self.shared_tokens).tolist()
        chance, own = np.random.default_rng(seed), self.prompt_tokens - self.shared_tokens
        return lambda: begin + chance.integers(3, self.vocabulary, own).tolist()


@dataclass
class Window:
    """What was measured. Times in seconds of the side's clock."""

    side: str
    seconds: float = 0.0
    tokens: int = 0
    """That arrived."""
    ttft_s: list[float] = field(default_factory=list)
    """Of requests whose first token came in the window."""
    tpot_s: list[float] = field(default_factory=list)
    """Of requests whose last token did."""
    requests: int = 0
    """That ended."""
    failed: int = 0
    parked: int = 0
    cpu_s: float = 0.0
    """What the side's engines had of their cores. Waiting for a GPU is work for a core."""
    waited_s: float = 0.0
    """How long their threads waited for a core."""
    late_s: float = 0.0
    """How much later than due the client sent, at worst."""

    def measures(self) -> dict[str, float]:
        return {
            "mean TTFT": _mean(self.ttft_s),
            "mean TPOT": _mean(self.tpot_s),
            "tokens/s": self.tokens / self.seconds,
            "p99 TTFT": report.quantile(self.ttft_s, 0.99),
            "p99 TPOT": report.quantile(self.tpot_s, 0.99),
            "CPU / 1000 tokens": 1e3 * self.cpu_s / self.tokens if self.tokens else float("nan"),
        }


@dataclass(frozen=True)
class Side:
    """Engines that share a load; one is the usual case."""

    name: str
    clients: Sequence[Client]

    def received(self) -> int:
        return sum(client.received for client in self.clients)

    async def quiet(self) -> None:
        await asyncio.gather(*(client.quiet(DRAIN_S) for client in self.clients))

    def pids(self) -> list[int]:
        return [client.engine.pid for client in self.clients]

    def stats(self) -> list[dict[str, Any]]:
        return [as_dict(client.stats) for client in self.clients]


@dataclass(frozen=True)
class _Edge:
    """Between two windows."""

    at: float
    received: int
    cpu_s: float
    waited_s: float


@dataclass
class _Request:
    reply: Reply
    due: float


class Load:
    """Requests on one side, from `begin` to `end`."""

    def __init__(self, side: Side, clock: Clock, shape: Shape, seed: int) -> None:
        self._side = side
        self._clock = clock
        self._shape = shape
        self._seed = seed
        self._prompt = shape.prompts(seed)
        self._requests: list[_Request] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._edges: list[_Edge] = []
        self.before = side.stats()

    def begin_steady(self, rate: float) -> None:
        """Poisson arrivals at `rate` requests per second over all engines of the side, by its clock."""
        self._spawn(self._arrive(rate))

    def begin_full(self, in_flight: int) -> None:
        """As many requests as `in_flight` at all times, over all engines. The first ones are of uneven lengths, so that
        they do not end together."""
        for number in range(in_flight):
            self._spawn(self._slot(number, in_flight))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(tasks.spawn(work, "load"))

    async def _arrive(self, rate: float) -> None:
        chance = random.Random(self._seed)
        due = 0.0
        while True:
            due += chance.expovariate(rate)
            client = self._side.clients[chance.randrange(len(self._side.clients))]
            await self._clock.reach(due)
            self._ask(client, self._shape.output_tokens, due)

    async def _slot(self, number: int, in_flight: int) -> None:
        client = self._side.clients[number % len(self._side.clients)]
        length = max(2, self._shape.output_tokens * (number + 1) // in_flight)
        while True:
            reply = self._ask(client, length, self._clock.now())
            await reply.ended.wait()
            length = self._shape.output_tokens
            if reply.error:
                return

    def _ask(self, client: Client, length: int, due: float) -> Reply:
        reply = client.ask(self._prompt(), length)
        self._requests.append(_Request(reply, due))
        return reply

    def edge(self) -> None:
        """A window ends here, and the next one begins. The side stands."""
        cpu_s, waited_s = cores.used_s(self._side.pids())
        self._edges.append(_Edge(self._clock.now(), self._side.received(), cpu_s, waited_s))

    async def end(self) -> None:
        """The side runs."""
        await tasks.cancel(*self._tasks)
        for client in self._side.clients:
            client.abort_all()
        await self._side.quiet()

    def windows(self) -> list[Window]:
        """One between each two edges."""
        found = [
            Window(
                self._side.name,
                after.at - before.at,
                after.received - before.received,
                cpu_s=after.cpu_s - before.cpu_s,
                waited_s=after.waited_s - before.waited_s,
            )
            for before, after in itertools.pairwise(self._edges)
        ]
        for request in self._requests:
            self._sort_in(request, found)
        return found

    def _sort_in(self, request: _Request, found: list[Window]) -> None:
        reply = request.reply
        first, last = self._clock.at(reply.first_s), self._clock.at(reply.last_s)
        if reply.first_s and (window := self._at(first, found)) is not None:
            window.ttft_s.append(round(first - request.due, 6))
            late = self._clock.at(reply.asked_s) - request.due
            window.late_s = max(window.late_s, late)
        if reply.ended.is_set() and reply.finish != common_pb2.ABORTED:
            window = self._at(last if reply.last_s else self._clock.at(reply.asked_s), found)
            if window is not None:
                window.requests += 1
                window.failed += not reply.ok
                window.parked += reply.parked
                if reply.ok and 2 * len(reply.tokens) >= self._shape.output_tokens:
                    window.tpot_s.append(round((last - first) / (len(reply.tokens) - 1), 7))

    def _at(self, when: float, found: list[Window]) -> Window | None:
        number = bisect.bisect_right([edge.at for edge in self._edges], when) - 1
        return found[number] if 0 <= number < len(found) else None


async def warm_up(client: Client, shape: Shape, most: int, seed: int) -> None:
    """Batches of all sizes, so that no kernel is compiled later."""
    prompt = shape.prompts(seed)
    size = 1
    while size <= most:
        for _ in range(size):
            client.ask(prompt(), 8)
        await client.quiet(DRAIN_S)
        size *= 2
    for _ in range(min(most, 16)):
        client.ask(prompt(), shape.output_tokens)
        await asyncio.sleep(0.02)
    await client.quiet(DRAIN_S)


@contextmanager
def no_collector() -> Iterator[None]:
    """Python's collector would stop the client in the middle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _mean(samples: Sequence[float]) -> float:
    return sum(samples) / len(samples) if samples else float("nan")
