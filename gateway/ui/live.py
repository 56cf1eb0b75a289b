"""Looks at the system again and again while there are viewers, once for all of them, and not at all while there are
none."""

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
    """Second on the gateway's clock at which the look ended."""
    told: ServiceReply | None = None
    """The last reply of the services; None: there was none yet."""
    away: str = ""
    """Why placement is away; empty while it is there."""


class Live:
    """The looks of all viewers, who each call `follow`."""

    def __init__(
        self,
        look: Callable[[], Awaitable[ServiceReply]],
        now: Callable[[], float] = time.monotonic,
        every_s: float = _EVERY_S,
    ) -> None:
        """`look` raises a PrismError if placement is away. `every_s`: seconds between looks."""
        self._look = look
        self._now = now
        self._every_s = every_s
        self._views: Watched[View | None] = Watched(View(at=-every_s))
        """The last view; None once this is closed."""
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
        """Ends the streams of all viewers."""
        self._views.set(None)

    async def _keep(self) -> None:
        """Looks every `every_s` seconds, until it is cancelled, or this is closed."""
        while (last := self._views.value) is not None:
            # Viewers that come and go in a moment cause no more looks than one that stays.
            await asyncio.sleep(last.at + self._every_s - self._now())
            try:
                told: ServiceReply | None = await self._look()
                away = ""
            except PrismError as error:
                told, away = last.told, str(error)
            if self._views.value is not None:
                self._views.set(View(self._now(), told, away))
