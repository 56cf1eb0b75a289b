"""Looks again and again while somebody wants to see, once for all of them, and not at all while nobody does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from gateway.ui.look import ServiceReply
from services.errors import PrismError
from services.rpc.watch import Watched
from services.runtime import tasks

_EVERY_S = 1.0


@dataclass(frozen=True)
class View:
    """What is known after a look."""

    at: float
    """When that was, seconds on the gateway's clock."""
    told: ServiceReply | None = None
    """The last that placement told; None: it never did."""
    away: str = ""
    """Not empty while placement is away: why."""


class Live:
    """`follow` for every viewer."""

    def __init__(
        self,
        look: Callable[[], Awaitable[ServiceReply]],
        now: Callable[[], float] = time.monotonic,
        every_s: float = _EVERY_S,
    ) -> None:
        """`look` raises a PrismError when placement is away."""
        self._look = look
        self._now = now
        self._every_s = every_s
        self._views: Watched[View | None] = Watched(View(at=-every_s))
        """None: closed."""
        self._viewers = 0
        self._looking: asyncio.Task[None] | None = None

    async def follow(self) -> AsyncGenerator[View, None]:
        """A view that is not older than the pause between two looks, then each newer one; ends when this is closed."""
        began = self._now()
        self._viewers += 1
        if self._looking is None or self._looking.done():
            self._looking = tasks.spawn(self._keep(), "look for the page")
        try:
            async for view in self._views.follow():
                if view is None:
                    return
                if view.at > began - self._every_s:
                    yield view
        finally:
            self._viewers -= 1
            if not self._viewers and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    def close(self) -> None:
        """Nobody sees anything any more."""
        self._views.set(None)

    async def _keep(self) -> None:
        """Until it is cancelled, or closed."""
        while (last := self._views.value) is not None:
            # Whoever comes and goes in a moment makes no more looks than who stays.
            await asyncio.sleep(last.at + self._every_s - self._now())
            try:
                told: ServiceReply | None = await self._look()
                away = ""
            except PrismError as error:
                told, away = last.told, str(error)
            if self._views.value is not None:
                self._views.set(View(self._now(), told, away))
