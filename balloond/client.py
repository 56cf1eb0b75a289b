"""Client of balloond for the other services. Every call raises PrismError if balloond refuses it or is away."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Mapping
from typing import Any

import grpc

from protos import balloond_pb2, balloond_pb2_grpc
from services.rpc import rpc
from services.rpc.status import from_rpc
from services.rpc.watch import follow_stream

_TIMEOUT_S = 5.0
"""Seconds that a call which never blocks may take; a restarting balloond answers within it."""
WARM_ENGINES = "(warm engines)"
"""Name of a booking that is no model's: memory of a device that engines without a model keep until a model wants it."""


def booked(devices: Iterable[balloond_pb2.DeviceState]) -> Hashable:
    """Sizes and bookings of `devices`, to be compared: the part of their state that decisions rest on, and that
    followers receive at once. Free bytes, which change with every page, are left out."""
    return tuple(
        (
            device.device,
            device.capacity_bytes,
            tuple((b.model, b.weights_bytes, b.floor_bytes, b.quota_bytes) for b in device.bookings),
        )
        for device in devices
    )


class BalloondClient:
    """A node's balloond at a gRPC address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = rpc.channel(address)
        self._stub = balloond_pb2_grpc.BalloondStub(self._channel)  # type: ignore[no-untyped-call]

    async def close(self) -> None:
        await self._channel.close()

    async def set_booking(
        self, device: str, model: str, *, quota_bytes: int, weights_bytes: int, floor_bytes: int
    ) -> None:
        """Books memory of `device` for `model`, in place of its earlier booking. Raises Refused with the arithmetic."""
        request = balloond_pb2.SetBookingRequest(
            device=device,
            model=model,
            quota_bytes=quota_bytes,
            weights_bytes=weights_bytes,
            floor_bytes=floor_bytes,
        )
        await self._call(self._stub.SetBooking, request)

    async def drop_booking(self, device: str, model: str) -> None:
        """Drops the model's booking. Raises NotFound if it has none, Unmet while a lease of the model lives."""
        request = balloond_pb2.DropBookingRequest(device=device, model=model)
        await self._call(self._stub.DropBooking, request, again=False)

    async def set_limit(
        self, device: str, model: str, bytes: int, *, revision: int = 0, deadline_ms: int = 0
    ) -> balloond_pb2.SetLimitResponse:
        """Sets the most bytes of KV that `model` may hold; -1 is the whole device. Revision 0 is the next one. Raises
        Invalid below the floor."""
        request = balloond_pb2.SetLimitRequest(
            device=device, model=model, bytes=bytes, revision=revision, deadline_ms=deadline_ms
        )
        return await self._call(self._stub.SetLimit, request)  # type: ignore[no-any-return]

    async def make_room(
        self, device: str, model: str, *, bytes: int, may_retract: bool, hold_ms: int, timeout_s: float
    ) -> balloond_pb2.MakeRoomResponse:
        """Frees `bytes` for `model`. Returns when there is room, nothing more can be taken, or `timeout_s` is over;
        `short_bytes` of the response is what lacks."""
        request = balloond_pb2.MakeRoomRequest(
            device=device, model=model, bytes=bytes, may_retract=may_retract, hold_ms=hold_ms
        )
        return await self._call(self._stub.MakeRoom, request, timeout_s)  # type: ignore[no-any-return]

    async def set_demand(self, device: str, weights: Mapping[str, float]) -> None:
        await self._call(self._stub.SetDemand, balloond_pb2.SetDemandRequest(device=device, weights=weights))

    async def inspect(self, with_keeper: bool = False, timeout_s: float = _TIMEOUT_S) -> balloond_pb2.NodeState:
        """The node's state. `with_keeper`: it includes whether the keeper answers; while the keeper does not, the call
        takes half a second, or half of `timeout_s`."""
        request = balloond_pb2.InspectRequest(with_keeper=with_keeper)
        return await self._call(self._stub.Inspect, request, timeout_s)  # type: ignore[no-any-return]

    async def events(self, limit: int = 0) -> list[balloond_pb2.Event]:
        """The last `limit` events, oldest first; 0: all that are kept."""
        answer = await self._call(self._stub.Events, balloond_pb2.EventsRequest(limit=limit))
        return list(answer.events)

    def watch(
        self, pages_ms: Callable[[], int] = lambda: 0, heard: bool = False
    ) -> AsyncIterator[balloond_pb2.NodeState | None]:
        """Yields the node's state now and after every change, for ever, and None when balloond was lost. `pages_ms`:
        least milliseconds between messages with the same bookings, called when a stream is opened. `heard`: see
        `follow_stream`."""
        return follow_stream(
            lambda: self._stub.Watch(balloond_pb2.WatchRequest(pages_ms=pages_ms())), "balloond", heard=heard
        )

    async def _call(self, method: Any, request: Any, timeout_s: float = _TIMEOUT_S, again: bool = True) -> Any:
        try:
            return await rpc.answer(method, request, timeout_s, again)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, f"balloond at {self._address}") from None
