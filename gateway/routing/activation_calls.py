"""Calls to placement to bring a model up: one at a time for each model, however many requests wait for it."""

from __future__ import annotations

import asyncio

import grpc

from gateway.routing.routes import RoutePlace, decode_place
from protos import placement_pb2, placement_pb2_grpc
from services.errors import PrismError
from services.rpc.status import from_rpc
from services.runtime import tasks

_TIME_OUT_S = 10.0
"""Seconds of one call: placement answers as soon as it has chosen a group, or when its `hold_s` (5) is over."""


class ActivationCalls:
    """The calls of `Activate` that are under way."""

    def __init__(self, placement: placement_pb2_grpc.PlacementStub, *, time_out_s: float = _TIME_OUT_S) -> None:
        self._placement = placement
        self._time_out_s = time_out_s
        self._under_way: dict[str, asyncio.Task[RoutePlace | PrismError]] = {}

    async def activate(self, model: str, ttft_left_ms: int) -> RoutePlace:
        """The group chosen for `model`, which has begun to bring it up. Raises the PrismError that placement answered,
        Unavailable if placement is away. Cancelling one waiter leaves the call to the others."""
        call = self._under_way.get(model)
        if call is None:
            call = self._under_way[model] = tasks.spawn(self._call(model, ttft_left_ms), f"activate {model}")
            call.add_done_callback(lambda _: self._under_way.pop(model, None))
        outcome = await asyncio.shield(call)
        if isinstance(outcome, PrismError):
            raise outcome
        return outcome

    async def _call(self, model: str, ttft_left_ms: int) -> RoutePlace | PrismError:
        """The outcome of one call. An error is a value here: it is the answer to all requests that wait, not a failure
        of this task."""
        request = placement_pb2.ActivateRequest(model=model, ttft_left_ms=ttft_left_ms)
        try:
            answer = await self._placement.Activate(request, timeout=self._time_out_s)
        except grpc.aio.AioRpcError as error:
            return from_rpc(error, "placement")
        return decode_place(answer.place)
