"""Requests to balloond for memory when a request could start but its model lacks memory. Which are made and when, the
group's core decides (`policy/memory/request_backoff.py`)."""

from __future__ import annotations

from collections.abc import Callable

from gpu_scheduler.memory.devices import Devices
from gpu_scheduler.policy.queue.decisions import ROOM_FOR_REQUEST, RequestMemory
from services.errors import PrismError
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)


class MemoryRequests:
    """Makes memory requests, without waiting for them. `answered` is called with each and with whether there is
    room."""

    def __init__(self, devices: Devices | None, answered: Callable[[RequestMemory, bool], None]) -> None:
        """`devices`: None if no memory can be had; then no request is answered."""
        self._devices = devices
        self._answered = answered

    def make(self, request: RequestMemory) -> None:
        if self._devices is not None:
            tasks.spawn(self._make(self._devices, request), f"room for {request.model}")

    async def _make(self, devices: Devices, request: RequestMemory) -> None:
        short, facts = 1, {"request": request.for_request, "model": request.model}
        try:
            short, where = await devices.make_room(
                request.model,
                bytes=request.bytes,
                may_retract=False,
                hold_ms=int(1e3 * ROOM_FOR_REQUEST.held_s),
                timeout_s=ROOM_FOR_REQUEST.timeout_s,
            )
            _log.debug("room", **facts, bytes=request.bytes, short=short, on=where)
        except PrismError as error:
            _log.info("no room", **facts, why=str(error))
        finally:
            self._answered(request, short == 0)
