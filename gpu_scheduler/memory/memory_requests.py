"""Requests to balloond for memory when a request could start but its model lacks memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

from gpu_scheduler.memory.devices import Devices
from gpu_scheduler.policy.queue.decisions import NeedMemory
from services.errors import PrismError
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_TIMEOUT_S = 5.0
_HELD_S = 1.0
"""Seconds for which balloond holds the room: long enough for the engine to grow into it once its request is there."""
_AGAIN_S = 0.05
"""Seconds until memory is requested again for a request that lacks it although there was room (reservations for running
requests, or its model's limit, are in the way): without this pause the calls would follow one another without end."""


class MemoryRequests:
    """One memory request at a time for each model; the queue plans again when it is answered."""

    def __init__(
        self,
        devices: Devices | None,
        on_room: Callable[[], None],
        again_s: float = _AGAIN_S,
        *,
        stop_decodes: bool = False,
    ) -> None:
        """`stop_decodes`: for a request with a target, other models' decodes may be stopped; otherwise only up to its
        model's floor, which balloond enforces. A stopped request has its prompt and its output so far computed again,
        which costs more than is gained."""
        self._devices = devices
        self._on_room = on_room
        self._stop_decodes = stop_decodes
        self._again_s = again_s
        self._asking: set[str] = set()
        self._answered: dict[str, str] = {}
        """By model: the request for which room was made a moment ago."""
        self._again: set[str] = set()
        """Models whose request in `_answered` lacked memory once more."""

    def need(self, need: NeedMemory) -> None:
        """Requests memory, unless a request for the model is under way."""
        if self._devices is None or need.model in self._asking:
            return
        if self._answered.get(need.model) == need.for_request:
            self._again.add(need.model)
            return
        self._asking.add(need.model)
        tasks.spawn(self._ask(need), f"room for {need.model}")

    async def _ask(self, need: NeedMemory) -> None:
        assert self._devices is not None
        short = 1
        try:
            short, where = await self._devices.make_room(
                need.model,
                bytes=need.bytes,
                may_retract=self._stop_decodes and need.slack < inf,
                hold_ms=int(1e3 * _HELD_S),
                timeout_s=_TIMEOUT_S,
            )
            _log.debug("room", request=need.for_request, model=need.model, bytes=need.bytes, short=short, on=where)
        except PrismError as error:
            _log.info("no room", request=need.for_request, model=need.model, why=str(error))
        finally:
            self._asking.discard(need.model)
        if short == 0:
            await self._answer(need.model, need.for_request)

    async def _answer(self, model: str, request: str) -> None:
        self._answered[model] = request
        self._on_room()
        await asyncio.sleep(self._again_s)
        if self._answered.get(model) == request:
            del self._answered[model]
            if model in self._again:
                self._again.discard(model)
                self._on_room()
