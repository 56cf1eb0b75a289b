"""State that others follow, and following others' streams.

A `Watched` value is sent whole: first as it is, then as it is after each change, with changes in between left out. So a
slow follower gets fewer messages, never stale ones, and a reconnect needs no history.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import grpc

from services import log

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

    async def follow(self, min_interval_s: float = 0.0, max_interval_s: float | None = None) -> AsyncIterator[T]:
        """The present value, then the latest after each change: at most one per `min_interval_s`, and with
        `max_interval_s` one at least that often, changed or not."""
        while True:
            seen = self.revision
            yield self._value
            if min_interval_s:
                await asyncio.sleep(min_interval_s)
            try:
                async with asyncio.timeout(max_interval_s):
                    await self.changed(seen)
            except TimeoutError:
                pass


async def follow_stream(
    open_stream: Callable[[], Any], name: str, first_wait_s: float = 0.05, longest_wait_s: float = 0.5
) -> AsyncIterator[Any]:
    """Messages of a server stream, opened again for ever when it breaks, with growing waits in between. Yields None
    once each time it was lost, so that the follower can mark what it knows as old. A refusal is logged once, as long as
    it is the same, and so is that it cannot be reached from the beginning."""
    wait = first_wait_s
    lost = True
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
