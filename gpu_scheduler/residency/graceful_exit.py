"""A group that is stopped on purpose lets what runs go first: it says that it is stopping, and placement, which knows
where there is room, moves models with requests away and holds it until that is done.

What could not be moved goes on in the next process, or elsewhere, as after a death: gateways send it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from gpu_scheduler.residents import Residents
from services.telemetry import log

_log = log.get(__name__)
_HEARD_S = 1.0
"""How long whoever watches the group has to begin to hold it. A placement of protocol 1.0 never does."""


class GracefulExit:
    """One group's. Its drain is `leave`."""

    def __init__(self, residents: Residents, requests: Callable[[], int], changed: Callable[[], None]) -> None:
        """`requests`: how many are here; `changed` has the group's state told."""
        self._residents = residents
        self._requests = requests
        self._changed = changed
        self._watchers = 0
        self._holders = 0
        self._held = asyncio.Event()
        self._let_go = asyncio.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While somebody follows the group's state: nobody else can hear that it is stopping."""
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While placement moves models away."""
        self._holders += 1
        self._held.set()
        self._let_go.clear()
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._let_go.set()

    async def leave(self) -> None:
        """Returns when there is nothing to wait for any more."""
        self._residents.stopping = True
        self._changed()
        if not (self._requests() and self._watchers):
            return
        try:
            async with asyncio.timeout(_HEARD_S):
                await self._held.wait()
        except TimeoutError:
            _log.info("nobody moves what runs away", requests=self._requests())
            return
        await self._let_go.wait()
        _log.info("left", requests_that_stay=self._requests())
