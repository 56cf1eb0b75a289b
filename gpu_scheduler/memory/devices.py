"""balloond's calls for all devices of a group at once. Byte counts are of one device, each of which holds an equal part
of a model."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from balloond.client import BalloondClient
from protos import balloond_pb2, common_pb2
from services.errors import NotFound, PrismError, Unmet
from services.telemetry import log

T = TypeVar("T")
_log = log.get(__name__)
_UNTIL_BURIED_S = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


def count(spec: common_pb2.ModelSpec) -> int:
    """Number of devices that the model is spread over."""
    return max(1, spec.devices)


def share(total_bytes: int, spec: common_pb2.ModelSpec) -> int:
    """One device's part of a byte count of the whole model, rounded up."""
    return -(-total_bytes // count(spec))


async def all_of(parts: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all parts, in order. Raises the first error, once all parts have ended."""
    results = await asyncio.gather(*parts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


class Devices:
    """The devices of one group, with the balloond of their node."""

    def __init__(
        self, names: Sequence[str], balloond: BalloondClient, until_buried_s: Sequence[float] = _UNTIL_BURIED_S
    ) -> None:
        self._until_buried_s = until_buried_s
        self.names = names
        self._balloond = balloond

    async def inspect(self) -> list[balloond_pb2.DeviceState]:
        """The state of each device of the group now, with its bookings."""
        states = {state.device: state for state in (await self._balloond.inspect()).devices}
        return [states[name] for name in self.names if name in states]

    async def book(self, model: str, *, quota_bytes: int, weights_bytes: int, floor_bytes: int) -> None:
        """Books on every device. Raises Refused with the arithmetic; some devices may be booked by then: call `drop`,
        or book the old values."""
        await self._on_each(
            lambda device: self._balloond.set_booking(
                device, model, quota_bytes=quota_bytes, weights_bytes=weights_bytes, floor_bytes=floor_bytes
            )
        )

    async def drop(self, model: str, unless: Callable[[], bool] = lambda: False) -> None:
        """Drops the model's booking on every device. The lease of an engine that was just killed lives until the kernel
        has ended the process: until then it is tried again, `unless` there is a reason against it by then."""
        await self._on_each(lambda device: self._drop(device, model, unless))

    async def drop_left_over(self, states: Iterable[balloond_pb2.DeviceState], ours: Callable[[str], bool]) -> None:
        """Drops bookings for models that are not `ours`: a killed predecessor's, whose engines died with it, or our own
        that balloond did not answer to drop. They would count against every model."""
        left = sorted({booking.model for state in states for booking in state.bookings if not ours(booking.model)})
        await all_of(self.drop(model, unless=functools.partial(ours, model)) for model in left)

    async def _drop(self, device: str, model: str, unless: Callable[[], bool]) -> None:
        for pause_s in (*self._until_buried_s, None):
            if unless():
                return
            try:
                await self._balloond.drop_booking(device, model)
                return
            except NotFound:
                return
            except PrismError as error:
                if pause_s is None or not isinstance(error, Unmet):
                    _log.warning("booking kept", model=model, on=device, why=str(error))
                    return
                await asyncio.sleep(pause_s)

    async def make_room(
        self, model: str, *, bytes: int, may_retract: bool, hold_ms: int, timeout_s: float
    ) -> tuple[int, str]:
        """Makes room on all devices or on none. Returns (bytes missing on the device that lacks most, that device). If
        one lacks any, the room made on the others is given up."""
        rooms = await self._on_each(
            lambda device: self._balloond.make_room(
                device, model, bytes=bytes, may_retract=may_retract, hold_ms=hold_ms, timeout_s=timeout_s
            )
        )
        short, where = max(zip((room.short_bytes for room in rooms), self.names, strict=True), key=lambda pair: pair[0])
        if short and len(self.names) > 1:
            await self.release_room(model, timeout_s)
        return short, where

    async def release_room(self, model: str, timeout_s: float) -> None:
        await self._on_each(
            lambda device: self._balloond.make_room(
                device, model, bytes=0, may_retract=False, hold_ms=0, timeout_s=timeout_s
            )
        )

    async def set_limit(self, model: str, bytes: int) -> balloond_pb2.SetLimitResponse:
        """Sets the model's limit in bytes on each device; -1: the whole device. Answers for all devices together: sums
        of bytes, and APPLIED once every device has applied it."""
        answers = await self._on_each(lambda device: self._balloond.set_limit(device, model, bytes))
        return balloond_pb2.SetLimitResponse(
            state=max(answer.state for answer in answers),
            revision=max(answer.revision for answer in answers),
            held_bytes=sum(answer.held_bytes for answer in answers),
            overage_bytes=sum(answer.overage_bytes for answer in answers),
        )

    async def set_demand(self, weights: Mapping[str, float]) -> None:
        await self._on_each(lambda device: self._balloond.set_demand(device, weights))

    async def _on_each(self, call: Callable[[str], Awaitable[T]]) -> list[T]:
        return await all_of(call(device) for device in self.names)
