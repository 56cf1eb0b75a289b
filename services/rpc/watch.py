"""State that others follow, and following other processes' streams.

A `Watched` value is sent whole: first as it is, then as it is after each change, with changes in between left out. So a
slow follower gets fewer messages, never stale ones, and a reconnect needs no history.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable
from math import inf
from typing import Any, Generic, TypeVar

import grpc

from services.telemetry import log

T = TypeVar("T")
_log = log.get(__name__)


class Watched(Generic[T]):
    """A value with a revision that rises with every `set`."""

    def __init__(self, value: T) -> None:
        self._value = value
        self.revision = 0
        self._changed = asyncio.Event()

    @property
    def value(self) -> T:
        return self._value

    def set(self, value: T) -> None:
        self._value = value
        self.revision += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self, since: int) -> None:
        """Returns once the revision is above `since`."""
        while self.revision <= since:
            await self._changed.wait()

    async def follow(self, min_interval_s: float = 0.0) -> AsyncIterator[T]:
        """The present value, then the latest after each change: at most one in `min_interval_s` seconds."""
        while True:
            seen = self.revision
            yield self._value
            if min_interval_s:
                await asyncio.sleep(min_interval_s)
            await self.changed(seen)


class ThrottledFollower(Generic[T]):
    """Chooses the states that a follower of many peers gets: a state whose facts differ from those of the last one sent
    goes at once, a state that differs in figures alone when some time has passed."""

    def __init__(
        self,
        facts: Callable[[T], Hashable],
        figures_s: float,
        signs: Callable[[T], Hashable] = lambda state: None,
        signs_s: float = inf,
    ) -> None:
        """`facts`: part of a state that goes at once. `figures_s`: seconds between states whose facts are equal.
        `signs`: part of a state whose change shortens that to `signs_s` seconds, if `figures_s` is more."""
        self._facts_of, self._signs_of = facts, signs
        self._figures_s, self._signs_s = figures_s, min(figures_s, signs_s)
        self._facts: Hashable = None
        self._signs: Hashable = None
        self._told_at = -inf

    def wait_s(self, state: T, now: float) -> float:
        """Seconds until the follower gets the state, if nothing else changes until then; 0: it gets it now. `now` is in
        seconds of a clock that does not go back."""
        facts, signs = self._facts_of(state), self._signs_of(state)
        if facts == self._facts:
            left = self._told_at + (self._figures_s if signs == self._signs else self._signs_s) - now
            if left > 0.0:
                return left
        self._facts, self._signs, self._told_at = facts, signs, now
        return 0.0


async def follow_sparingly(
    changes: Watched[Any],
    build: Callable[[], T],
    sparing: ThrottledFollower[T],
    least_s: float,
    longest_s: float | None,
) -> AsyncIterator[T]:
    """States that `build` makes, now and after changes, as often as `sparing` says: at most one in `least_s` seconds,
    and at least one in `longest_s` seconds (None: no such bound)."""
    now = asyncio.get_running_loop().time
    while True:
        seen, state = changes.revision, build()
        wait_s: float | None = sparing.wait_s(state, now())
        if not wait_s:
            yield state
            wait_s = longest_s
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if wait_s is None else max(0.0, wait_s - least_s)):
                await changes.changed(seen)


async def follow_stream(
    open_stream: Callable[[], Any],
    name: str,
    first_wait_s: float = 0.05,
    longest_wait_s: float = 0.5,
    heard: bool = False,
) -> AsyncGenerator[Any, None]:
    """Messages of a server stream, which is opened again for ever when it breaks, with growing waits in between. Yields
    None once each time it was lost, so that the follower can mark what it knows as old; `heard`: the follower already
    knows something at the start, so that None also reports that the stream cannot be opened. A refusal is logged once
    as long as it stays the same, and so is a peer that cannot be reached from the beginning."""
    wait = first_wait_s
    lost = not heard
    refused = ""
    told = False
    while True:
        try:
            async for message in open_stream():
                if lost:
                    _log.debug("stream opened", stream=name)
                lost, wait, refused, told = False, first_wait_s, "", True
                yield message
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                if error.details() != refused:
                    _log.error("stream refused", stream=name, why=error.details())
                refused = error.details() or ""
            elif not lost:
                _log.warning("stream lost", stream=name, code=error.code().name, detail=error.details())
            elif not told and wait == longest_wait_s:
                # Not sooner: processes that are started together find each other within a second.
                _log.warning("not reached yet", stream=name, code=error.code().name, detail=error.details())
                told = True
        if not lost:
            lost = True
            yield None
        await asyncio.sleep(wait)
        wait = min(2 * wait, longest_wait_s)
