"""Graceful exit: a group that is stopped on purpose lets its running requests leave first. It reports that it is
stopping, and placement, which knows where there is room, moves models with requests away and holds the group until that
is done.

Requests that could not be moved continue in the next process, or elsewhere, as after a death: gateways send them again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from gpu_scheduler.residents import Residents
from services.telemetry import log

_log = log.get(__name__)
_HEARD_S = 1.0
"""Seconds that a watcher of the group has to begin to hold it. A placement of protocol 1.0 never does."""


class GracefulExit:
    """The graceful exit of one group. The service's drain is `leave`."""

    def __init__(
        self,
        residents: Residents,
        requests: Callable[[], int],
        changed: Callable[[], None],
        heard_s: float = _HEARD_S,
    ) -> None:
        """`requests`: returns the number of requests here; `changed`: has the group's state reported."""
        self._heard_s = heard_s
        self._residents = residents
        self._requests = requests
        self._changed = changed
        self._watchers = 0
        self._holders = 0
        self._held = asyncio.Event()
        self._let_go = asyncio.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Counts a watcher of the group's state for the time of the context: without one nothing learns that it is
        stopping."""
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Counts a holder for the time of the context, in which placement moves models away."""
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
        """Reports that the group is stopping, and returns when there is nothing to wait for any more."""
        self._residents.stopping = True
        self._changed()
        if not (self._requests() and self._watchers):
            return
        try:
            async with asyncio.timeout(self._heard_s):
                await self._held.wait()
        except TimeoutError:
            _log.info("running requests are not moved away", requests=self._requests())
            return
        await self._let_go.wait()
        _log.info("left", requests_that_stay=self._requests())
