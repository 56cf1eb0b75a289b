"""A steady load: so many open streams all the time, each replaced when it ends, each compared with what it says
undisturbed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from services.runtime import tasks
from testing.patience import PATIENCE_S

_VARIANTS = 5
_REFUSED_PAUSE_S = 0.1


def prompt(variant: int) -> list[int]:
    """Echo engines repeat its last eight tokens: streams of different variants say nothing alike."""
    return list(range(20 + 8 * variant, 60 + 8 * variant))


def body(model: str, variant: int, tokens: int = 0) -> dict[str, Any]:
    """`tokens`: 0, 40 and more, others for each variant, so that streams end and begin all the time."""
    most = tokens or 40 + 10 * variant
    return {"model": model, "prompt": prompt(variant), "max_tokens": most, "temperature": 0, "stream": True}


class Broken(Exception):
    """A stream that a client would call failed; says how."""


@dataclass
class Slot:
    """One of the streams that are open at any time."""

    base: str
    """Of its gateway."""
    others: tuple[str, ...]
    """Asked when that does not take the connection, as a balancer does."""
    model: str
    """May change: of its next stream."""
    variant: int
    told_at: float = 0.0
    """When its last piece of text came, on the monotonic clock."""


@dataclass(frozen=True)
class Failure:
    base: str
    why: str


class Load:
    """`count` streams over the gateways `bases`, for `models`."""

    def __init__(self, http: aiohttp.ClientSession, bases: list[str], models: list[str], count: int) -> None:
        self._http = http
        self._models = models
        self.balanced = False
        """Whether a stream that its gateway does not take is another one's."""
        self.slots = [
            Slot(
                bases[i % len(bases)],
                tuple(base for base in bases if base != bases[i % len(bases)]),
                models[i // len(bases) % len(models)],
                i % _VARIANTS,
            )
            for i in range(count)
        ]
        self._expected: dict[tuple[str, int], str] = {}
        self._running: list[asyncio.Task[None]] = []
        self._ending = False
        self._told = asyncio.Event()
        self.forget()

    def forget(self) -> None:
        """Counts from here."""
        self.ended = 0
        self.wrong: list[str] = []
        self.failures: list[Failure] = []
        self.refused = 0
        """Connections that a gateway did not take: the stream was tried again."""
        self.longest_gap_s = 0.0

    async def learn(self) -> None:
        """What every stream says when nothing happens."""
        kinds = [(model, variant) for model in self._models for variant in range(_VARIANTS)]
        base = self.slots[0].base
        texts = await asyncio.gather(*(self._stream(Slot(base, (), *kind), base) for kind in kinds))
        self._expected = dict(zip(kinds, texts, strict=True))
        for model in self._models:
            own = {text for kind, text in self._expected.items() if kind[0] == model}
            assert len(own) > _VARIANTS // 2, "streams of a model must differ, or a mix-up would not show"

    async def start(self) -> None:
        """Returns when every stream has said something."""
        self._ending = False
        began = time.monotonic()
        self._running = [tasks.spawn(self._keep(slot), f"stream {i}") for i, slot in enumerate(self.slots)]
        await self.all_told_since(began)

    async def all_told_since(self, moment: float) -> None:
        """Returns when every stream has said something after that."""
        async with asyncio.timeout(PATIENCE_S):
            while any(slot.told_at <= moment for slot in self.slots):
                self._told.clear()
                await self._told.wait()

    async def stop(self) -> None:
        """What is open is read to its end."""
        self._ending = True
        await asyncio.gather(*self._running)

    async def cancel(self) -> None:
        await tasks.cancel(*self._running)

    async def _keep(self, slot: Slot) -> None:
        while not self._ending:
            kind = slot.model, slot.variant
            try:
                text = await self._balanced(slot) if self.balanced else await self._stream(slot, slot.base)
            except aiohttp.ClientConnectorError:
                self.refused += 1
                await asyncio.sleep(_REFUSED_PAUSE_S)
                continue
            except (aiohttp.ClientError, OSError, TimeoutError, Broken) as error:
                self.failures.append(Failure(slot.base, f"{kind[0]}: {type(error).__name__}: {error}"))
                continue
            self.ended += 1
            if text != self._expected[kind]:
                self.wrong.append(f"{kind[0]}: {text!r}")

    async def _balanced(self, slot: Slot) -> str:
        for base in (slot.base, *slot.others[:-1]):
            with contextlib.suppress(aiohttp.ClientConnectorError):
                return await self._stream(slot, base)
        return await self._stream(slot, slot.others[-1])

    async def _stream(self, slot: Slot, base: str) -> str:
        """A stream to its end. Raises Broken, and what aiohttp does."""
        text, last = "", time.monotonic()
        url = base + "/v1/completions"
        async with self._http.post(url, json=body(slot.model, slot.variant)) as answer:
            if answer.status != 200:
                raise Broken(f"{answer.status} {(await answer.text())[:300]}")
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: ["):
                    return text
                event = json.loads(line[6:])
                if "error" in event:
                    raise Broken(str(event["error"]))
                now = time.monotonic()
                self.longest_gap_s, last = max(self.longest_gap_s, now - last), now
                text += event["choices"][0]["text"]
                slot.told_at = now
                self._told.set()
        raise Broken("it ended without [DONE]")


@contextlib.asynccontextmanager
async def steady(load: Load) -> Any:
    """The load runs in the block, and what is open at its end is read to its own."""
    load.forget()
    try:
        await load.start()
        yield load
        await load.stop()
    finally:
        await load.cancel()
