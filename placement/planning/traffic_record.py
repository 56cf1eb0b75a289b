"""The traffic of this placement and of the one before it: counted as groups report it, and kept in a file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping

from placement.planning import traffic_file
from placement.policy.traffic import ExpectedTraffic, TrafficCounts, TrafficHour, TrafficHours
from services.telemetry import log

_log = log.get(__name__)
_WRITE_EVERY_S = 60.0
"""Seconds from one write of the file to the next: what a placement that is killed forgets."""


class TrafficRecord:
    """The hourly traffic of all models."""

    def __init__(
        self,
        path: str = "",
        clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path` empty: no file, and nothing is known at the start. `clock`: seconds since 1970, and may be set.
        `uptime`: seconds since any moment, and is never set."""
        self._path = path
        self._clock = clock
        self._uptime = uptime
        hours, self.settled = self._read()
        """Models whose places on groups were chosen by what they are asked for, or corrected since, at the start."""
        self._hours = TrafficHours(hours)
        self._settled: Callable[[], Collection[str]] = lambda: self.settled
        self._counted_to = uptime()
        self.expected: Mapping[str, ExpectedTraffic] = self._hours.expected(clock())
        """What each model was expected to be asked for, at the start."""
        self._failing = False
        self._writing = asyncio.Lock()

    def follow(self, settled: Callable[[], Collection[str]]) -> None:
        """Takes the models whose places need no correction, for the placement that comes after this one, from
        `settled` at each write."""
        self._settled = settled

    def _read(self) -> tuple[dict[int, TrafficHour], frozenset[str]]:
        if not self._path:
            return {}, frozenset()
        try:
            return traffic_file.read(self._path)
        except OSError as error:
            _log.warning(
                "no traffic of earlier hours is known, and none is kept: the file cannot be read, and stays as it is",
                file=self._path,
                why=str(error),
            )
            self._path = ""
            return {}, frozenset()

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
        now, uptime = self._clock(), self._uptime()
        # By `uptime`: a clock that is set forward would make an hour in which nothing ran a quiet one.
        self._hours.observed(now - (uptime - self._counted_to), now)
        self._counted_to = uptime
        if not self._path:
            return
        try:
            async with self._writing:
                # A thread, because a disk may be slow.
                content = traffic_file.encoded(self._hours.hours, self._settled())
                await asyncio.to_thread(traffic_file.write, self._path, content)
        except OSError as error:
            if not self._failing:
                told = "traffic is not kept: a restart begins with what the file had"
                _log.warning(told, file=self._path, why=str(error))
            self._failing = True
        else:
            if self._failing:
                _log.info("traffic is kept again", file=self._path)
            self._failing = False
