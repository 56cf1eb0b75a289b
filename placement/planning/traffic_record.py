"""The traffic of this placement and of the one before it: counted as groups report it, and kept in a file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from placement.planning import traffic_file
from placement.policy.traffic import ExpectedTraffic, TrafficCounts, TrafficHours
from services.telemetry import log

_log = log.get(__name__)
_WRITE_EVERY_S = 60.0
"""Seconds from one write of the file to the next: what a placement that is killed forgets."""


class TrafficRecord:
    """The hourly traffic of all models."""

    def __init__(self, path: str = "", clock: Callable[[], float] = time.time) -> None:
        """`path` empty: no file, and nothing is known at the start. `clock`: seconds since 1970."""
        self._path = path
        self._clock = clock
        self._hours = TrafficHours(traffic_file.read(path) if path else None)
        self._counted_to = clock()
        self.expected: Mapping[str, ExpectedTraffic] = self._hours.expected(self._counted_to)
        """What each model was expected to be asked for, at the start."""
        self._failing = False
        self._writing = asyncio.Lock()

    def observe(self, model: str, counts: TrafficCounts) -> None:
        """Adds what a model was asked for since the last call."""
        self._hours.observe(model, self._clock(), counts)

    async def run(self) -> None:
        """Writes the file every minute, for ever."""
        while True:
            await asyncio.sleep(_WRITE_EVERY_S)
            await self.write()

    async def write(self) -> None:
        """Writes the file. Where that fails, the log says so once, and all goes on."""
        now = self._clock()
        self._hours.observed(self._counted_to, now)
        self._counted_to = now
        if not self._path:
            return
        try:
            async with self._writing:
                # A thread, because a disk may be slow.
                await asyncio.to_thread(traffic_file.write, self._path, traffic_file.encoded(self._hours.hours))
        except OSError as error:
            if not self._failing:
                _log.warning("traffic is not kept: a restart begins without it", file=self._path, why=str(error))
            self._failing = True
        else:
            self._failing = False
