"""Books what idle engines of the warm pool keep of the devices: contexts and loaded kernels of engines that had a
model. Without that the ledger would grant memory that is not there.

The booking gives way to any model: an engine that had a model only comes up faster than one that had none.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection

from balloond.client import WARM_ENGINES
from gpu_scheduler.engines.warm_pool import WarmPool
from gpu_scheduler.memory.devices import Devices
from services.errors import PrismError, Refused
from services.telemetry import log

_log = log.get(__name__)
_AGAIN_S = 1.0
"""Seconds until another attempt, after balloond was away or the model that has just left was still booked."""


class WarmBooking:
    """The booking for all warm pools of one group. `keep` runs as long as the group does."""

    def __init__(self, pools: Collection[WarmPool], devices: Devices | None, again_s: float = _AGAIN_S) -> None:
        """Without `devices` engines hold no managed memory."""
        self._again_s = again_s
        self._pools = pools
        self._devices = devices
        self._booked: int | None = 0
        """Bytes booked on each device; None: unknown."""
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        for pool in pools:
            pool.idle_changed = self._changed.set

    async def keep(self) -> None:
        """Books what idle engines keep as it changes, for ever. If it cannot be booked, those engines end."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._renew()
            except Refused:
                await asyncio.sleep(self._again_s)
                await self._renew_or_end()
            except PrismError as error:
                self._not_now(error)
                await asyncio.sleep(self._again_s)

    async def _renew_or_end(self) -> None:
        try:
            await self._renew()
        except Refused as error:
            _log.info("no room for what idle engines keep, so they end", why=str(error))
            await self._end_used()
        except PrismError as error:
            self._not_now(error)

    def _not_now(self, error: PrismError) -> None:
        _log.info("what idle engines keep is not booked", why=str(error))
        self._changed.set()

    def books(self, name: str) -> bool:
        """Whether this process books under this name; what a killed predecessor had booked under it does not count."""
        return name == WARM_ENGINES and self._kept() > 0

    def _kept(self) -> int:
        return sum(pool.kept_bytes for pool in self._pools)

    def forget(self) -> None:
        """Notes that balloond is a new process, which may not know what was booked."""
        self._booked = None
        self._changed.set()

    async def lower(self) -> None:
        """Lowers the booking after engines were taken, so that what they keep is not booked twice when this returns.
        Raises PrismError while balloond is away."""
        with contextlib.suppress(Refused):  # another engine came back at the same time; `keep` handles it
            await self._renew()

    async def give_way(self) -> bool:
        """Ends the idle engines that keep memory, for a model that needs it. False if there were none."""
        ended = await self._end_used()
        if ended:
            await self.lower()
        return ended

    async def _end_used(self) -> bool:
        return any([await pool.end_used() for pool in self._pools])

    async def _renew(self) -> None:
        """Books what idle engines keep now. Raises Refused, with the former booking still in force, and other
        PrismErrors."""
        if self._devices is None:
            return
        async with self._lock:
            wanted = self._kept()
            if wanted == self._booked:
                return
            self._booked = None
            if wanted:
                await self._devices.book(WARM_ENGINES, quota_bytes=wanted, weights_bytes=0, floor_bytes=0)
            else:
                await self._devices.drop(WARM_ENGINES)
            self._booked = wanted
