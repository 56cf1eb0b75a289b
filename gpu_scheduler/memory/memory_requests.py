"""Asking balloond for room when a request could go but its model lacks memory."""

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
"""Long enough for the engine to grow into the room once its request is there."""
_AGAIN_S = 0.05
"""Where there was room for a request and it lacks memory all the same (what others were promised, or its model's limit,
is in the way), the question is put again only after this: nothing else would hold the questions up."""


class MemoryRequests:
    """One question at a time for each model; the queue looks again when it is answered."""

    def __init__(
        self,
        devices: Devices | None,
        on_room: Callable[[], None],
        again_s: float = _AGAIN_S,
        *,
        stop_decodes: bool = False,
    ) -> None:
        """`stop_decodes`: those of others stop for a request with a target; otherwise only up to its model's floor,
        as balloond sees to. Whoever stops has its prompt, and what it has said, computed again: more than is gained."""
        self._devices = devices
        self._on_room = on_room
        self._stop_decodes = stop_decodes
        self._again_s = again_s
        self._asking: set[str] = set()
        self._answered: dict[str, str] = {}
        """Model -> the request that there was room for a moment ago."""
        self._again: set[str] = set()
        """Models whose request of that moment lacked memory once more."""

    def need(self, need: NeedMemory) -> None:
        """Asks, unless that is being done already."""
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
