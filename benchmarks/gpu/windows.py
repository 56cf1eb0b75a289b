"""One window of load on one side of a comparison, as its client sees it."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.gpu import cores, pairs, report
from benchmarks.gpu.fleet import Client, Reply, as_dict
from services import tasks

DRAIN_S = 120.0


@dataclass(frozen=True)
class Shape:
    """Of all requests: random prompts, so that none begins like another."""

    prompt_tokens: int
    output_tokens: int
    vocabulary: int

    def prompts(self, seed: int) -> Callable[[], list[int]]:
        chance = np.random.default_rng(seed)
        return lambda: chance.integers(3, self.vocabulary, self.prompt_tokens).tolist()


@dataclass
class Window:
    """What was measured. Times in seconds."""

    side: str
    tokens_per_s: float
    ttft_s: list[float]
    tpot_s: list[float]
    requests: int
    failed: int
    parked: int
    cpu_s: float = 0.0
    """What the side's engines had of their cores while tokens were counted."""
    waited_s: float = 0.0
    """How long their threads waited for a core meanwhile."""
    tokens: int = 0
    """Counted."""
    late_s: float = 0.0
    """How much later than due the client sent, at worst."""
    before: list[dict[str, Any]] = field(default_factory=list)
    after: list[dict[str, Any]] = field(default_factory=list)
    """Statistics of the side's engines."""

    def measures(self) -> dict[str, float]:
        return {
            "mean TTFT": _mean(self.ttft_s),
            "mean TPOT": _mean(self.tpot_s),
            "tokens/s": self.tokens_per_s,
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

    def used_s(self) -> tuple[float, float]:
        return cores.used_s([client.engine.pid for client in self.clients])

    def stats(self) -> list[dict[str, Any]]:
        return [as_dict(client.stats) for client in self.clients]


@dataclass(frozen=True)
class Count:
    """Of the tokens that arrived in a time."""

    tokens: int
    seconds: float
    cpu_s: float
    waited_s: float


async def steady(side: Side, shape: Shape, rate: float, lead_in_s: float, window_s: float, seed: int) -> Window:
    """Poisson arrivals at `rate` requests per second over all engines of the side. Counted are those that arrive after
    the lead-in."""
    prompt = shape.prompts(seed)
    chance = random.Random(seed)
    plan = [
        (due, prompt(), chance.randrange(len(side.clients))) for due in pairs.poisson(rate, lead_in_s + window_s, seed)
    ]
    before = side.stats()
    replies: list[Reply] = []
    late = 0.0
    with _no_collector():
        begun = time.monotonic()
        counting = tasks.spawn(_rate(side, begun + lead_in_s, window_s), "count tokens")
        for due, tokens, number in plan:
            await asyncio.sleep(max(0.0, begun + due - time.monotonic()))
            late = max(late, time.monotonic() - begun - due)
            replies.append(side.clients[number].ask(tokens, shape.output_tokens, asked_s=begun + due))
        count = await counting
        await side.quiet()
    counted = [reply for reply in replies if reply.asked_s >= begun + lead_in_s]
    return _window(side, count, counted, counted, before, late)


async def full(side: Side, shape: Shape, in_flight: int, window_s: float, seed: int) -> Window:
    """As many requests as `in_flight` at all times, over all engines. The first ones are of uneven lengths, so that
    they do not end together; the window begins when all of them have begun."""
    prompt = shape.prompts(seed)
    before = side.stats()
    replies: list[Reply] = []
    ending = False

    async def slot(number: int) -> None:
        client = side.clients[number % len(side.clients)]
        length = max(2, shape.output_tokens * (number + 1) // in_flight)
        while not ending:
            replies.append(reply := client.ask(prompt(), length))
            await reply.ended.wait()
            length = shape.output_tokens
            if reply.error:
                return

    with _no_collector():
        slots = [tasks.spawn(slot(number), f"slot {number}") for number in range(in_flight)]
        while len(replies) < in_flight or not all(reply.first_s or reply.error for reply in replies[:in_flight]):
            await asyncio.sleep(0.01)
        begun = time.monotonic()
        count = await _rate(side, begun, window_s)
        ended = time.monotonic()
        done = [reply for reply in replies if reply.ended.is_set()]
        ending = True
        for client in side.clients:
            client.abort_all()
        await side.quiet()
        await asyncio.gather(*slots)
    started = [reply for reply in replies if begun <= reply.first_s < ended]
    finished = [reply for reply in done if begun <= reply.last_s and 2 * len(reply.tokens) >= shape.output_tokens]
    failed = [reply for reply in done if not reply.ok]
    return _window(side, count, started, [*finished, *failed], before)


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


async def _rate(side: Side, begin_s: float, window_s: float) -> Count:
    """What arrives in a window that begins at `begin_s`."""
    await asyncio.sleep(begin_s - time.monotonic())
    cpu_s, waited_s = side.used_s()
    begun, before = time.monotonic(), side.received()
    await asyncio.sleep(window_s)
    tokens, seconds = side.received() - before, time.monotonic() - begun
    cpu_then_s, waited_then_s = side.used_s()
    return Count(tokens, seconds, cpu_then_s - cpu_s, waited_then_s - waited_s)


def _window(
    side: Side,
    count: Count,
    started: Sequence[Reply],
    finished: Sequence[Reply],
    before: list[dict[str, Any]],
    late_s: float = 0.0,
) -> Window:
    return Window(
        side.name,
        count.tokens / count.seconds,
        [round(reply.ttft_s, 6) for reply in started if reply.first_s],
        [round(reply.tpot_s, 7) for reply in finished if reply.ok],
        len(finished),
        sum(not reply.ok for reply in finished),
        sum(reply.parked for reply in finished),
        count.cpu_s,
        count.waited_s,
        count.tokens,
        late_s,
        before,
        side.stats(),
    )


def _mean(samples: Sequence[float]) -> float:
    return sum(samples) / len(samples) if samples else float("nan")


@contextmanager
def _no_collector() -> Iterator[None]:
    """Python's collector would stop the client in the middle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
