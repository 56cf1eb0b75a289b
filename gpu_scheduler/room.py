"""Asking balloond for room when a request could go but its model lacks memory."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from gpu_scheduler.devices import Devices
from gpu_scheduler.policy.decisions import NeedMemory
from services import log, tasks
from services.errors import PrismError

_log = log.get(__name__)
_TIMEOUT_S = 5.0
_HELD_S = 1.0
"""Long enough for the engine to grow into the room once its request is there."""


class RoomMaker:
    """One question at a time for each model; the queue looks again when it is answered."""

    def __init__(self, devices: Devices | None, on_room: Callable[[], None]) -> None:
        self._devices = devices
        self._on_room = on_room
        self._asking: set[str] = set()

    def need(self, need: NeedMemory) -> None:
        """Decodes of others are stopped only for a request with a target: best effort waits for them."""
        if self._devices is not None and need.model not in self._asking:
            self._asking.add(need.model)
            tasks.spawn(self._ask(need), f"room for {need.model}")

    async def _ask(self, need: NeedMemory) -> None:
        assert self._devices is not None
        try:
            short, where = await self._devices.make_room(
                need.model,
                bytes=need.bytes,
                may_retract=need.slack < inf,
                hold_ms=int(1e3 * _HELD_S),
                timeout_s=_TIMEOUT_S,
            )
            _log.debug("room", request=need.for_request, model=need.model, bytes=need.bytes, short=short, on=where)
            if short == 0:
                self._on_room()
        except PrismError as error:
            _log.info("no room", request=need.for_request, model=need.model, why=str(error))
        finally:
            self._asking.discard(need.model)
