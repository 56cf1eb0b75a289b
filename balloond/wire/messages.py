"""Conversions between protobuf messages and the policy's values. Pure, in pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from balloond.node.events import Event
from balloond.policy.claims import RefusalReason, RoomAnswer, UsageReport, WantedExtents
from balloond.policy.device import DevicePolicy
from balloond.policy.kv_limits import Limit, LimitOutcome
from balloond.policy.ledger import Booking, Kind, LeaseRecord
from protos import balloond_pb2, handoff_pb2
from services.errors import Invalid

KINDS: dict[Kind, handoff_pb2.Kind] = {
    "weights": handoff_pb2.WEIGHTS,
    "kv": handoff_pb2.KV,
    "graphs": handoff_pb2.GRAPHS,
}
_KINDS: dict[int, Kind] = {number: kind for kind, number in KINDS.items()}
WHYS: dict[RefusalReason, handoff_pb2.Refused.Why] = {
    "over_limit": handoff_pb2.Refused.OVER_LIMIT,
    "exhausted": handoff_pb2.Refused.EXHAUSTED,
    "not_booked": handoff_pb2.Refused.NOT_BOOKED,
    "unknown": handoff_pb2.Refused.UNKNOWN,
    "peer": handoff_pb2.Refused.PEER,
}
_STATES = {
    "applied": balloond_pb2.APPLIED,
    "deferred": balloond_pb2.DEFERRED,
    "stale": balloond_pb2.STALE,
    "conflict": balloond_pb2.CONFLICT,
}


LONGEST_NAME = 256
"""Most characters of a model's name or a token: the keeper's records have them."""
_MOST = 1 << 48
"""Most bytes of any one thing that a process reports: impossible numbers would not fit the sums that are passed on."""
_LARGEST = (1 << 63) - 1
"""Largest number that 64 bits carry."""


def kind(number: int) -> Kind:
    """Kind of extents by its number in messages. Raises Invalid for an unknown number."""
    if number not in _KINDS:
        raise Invalid(f"no kind {number} of extents")
    return _KINDS[number]


def wanted(message: handoff_pb2.Grow) -> WantedExtents:
    """Extents that a Grow requests. Raises Invalid for an unknown kind."""
    return WantedExtents(
        kind(message.kind),
        message.bytes,
        message.count,
        message.min_count,
        message.for_reserve,
        message.behind_bytes,
        message.cached_bytes,
    )


def handoff_limit(limit: Limit, floor: int) -> handoff_pb2.Limit:
    return handoff_pb2.Limit(
        revision=limit.revision, bytes=limit.bytes, floor_bytes=floor, deadline_ms=limit.deadline_ms
    )


def report(message: handoff_pb2.Report, now: float) -> UsageReport:
    """Report of a lease; ages become times on this process's clock, which says `now`. Raises Invalid for impossible
    numbers."""
    told = (message.held_bytes, message.used_bytes, message.reserve_bytes, message.returned_bytes)
    if not all(0 <= number <= _MOST for number in (*told, *(cached.bytes for cached in message.cached))):
        raise Invalid(f"a report of {told} bytes, and prefixes, makes no sense")
    return UsageReport(
        at=now,
        limit_revision=message.limit_revision,
        held=message.held_bytes,
        used=message.used_bytes,
        reserve=message.reserve_bytes,
        cached=tuple((now - max(0, cached.age_ms) / 1e3, cached.bytes) for cached in message.cached),
        reclaim_id=message.reclaim_id,
        returned=message.returned_bytes,
    )


def booking(request: balloond_pb2.SetBookingRequest) -> Booking:
    """Booking of a request. Raises Invalid for a model's name that is empty or too long."""
    if not 0 < len(request.model) <= LONGEST_NAME:
        raise Invalid(f"model: a name of {len(request.model)} characters, not of 1 to {LONGEST_NAME}")
    return Booking(request.quota_bytes, request.weights_bytes, request.floor_bytes)


def outcome(outcome: LimitOutcome, held: int) -> balloond_pb2.SetLimitResponse:
    return balloond_pb2.SetLimitResponse(
        state=_STATES[outcome.state],
        revision=outcome.limit.revision,
        held_bytes=held,
        overage_bytes=outcome.overage,
    )


def room(answer: RoomAnswer) -> balloond_pb2.MakeRoomResponse:
    taken = [balloond_pb2.Taken(model=t.model, what=t.what, bytes=t.bytes) for t in answer.taken]
    return balloond_pb2.MakeRoomResponse(free_bytes=answer.free, short_bytes=bytes_of(answer.short), taken=taken)


def bytes_of(number: int) -> int:
    """`number` of lacking bytes, as far as 64 bits carry it: a request for all there is lacks more."""
    return min(number, _LARGEST)


def events(events: Iterable[Event], now: float) -> balloond_pb2.EventsResponse:
    return balloond_pb2.EventsResponse(
        events=[
            balloond_pb2.Event(
                sequence=e.sequence, age_s=now - e.at, device=e.device, model=e.model, what=e.what, detail=e.detail
            )
            for e in events
        ]
    )


def node(
    name: str, revision: int, devices: Iterable[DevicePolicy], process_of: Callable[[str], int]
) -> balloond_pb2.NodeState:
    return balloond_pb2.NodeState(node=name, revision=revision, devices=[_device(d, process_of) for d in devices])


def _device(device: DevicePolicy, process_of: Callable[[str], int]) -> balloond_pb2.DeviceState:
    ledger = device.ledger
    return balloond_pb2.DeviceState(
        device=device.name,
        capacity_bytes=ledger.capacity,
        leased_bytes=ledger.leased,
        free_bytes=ledger.free,
        booked_bytes=ledger.booked,
        stranded_bytes=ledger.stranded,
        page_bytes=ledger.page_bytes,
        leases=[_lease(device, lease, process_of(lease.id)) for lease in ledger.leases.values()],
        bookings=[_booking(device, model) for model in ledger.bookings],
    )


def _booking(device: DevicePolicy, model: str) -> balloond_pb2.Booking:
    booking, limit = device.ledger.bookings[model], device.limits.get(model)
    return balloond_pb2.Booking(
        model=model,
        quota_bytes=booking.quota,
        weights_bytes=booking.weights,
        floor_bytes=booking.floor,
        limit_bytes=limit.bytes,
        limit_revision=limit.revision,
        demand_weight=device.reclaims.demand.get(model, 0.0),
    )


def _lease(device: DevicePolicy, lease: LeaseRecord, pid: int) -> balloond_pb2.LeaseState:
    report = device.reclaims.reports.get(lease.id, UsageReport())
    return balloond_pb2.LeaseState(
        lease_id=lease.id,
        model=lease.model,
        pid=pid,
        suspended=lease.suspended,
        weights_bytes=lease.weights_bytes,
        kv_bytes=lease.kv_bytes,
        kv_used_bytes=report.used,
        kv_cached_bytes=sum(nbytes for _, nbytes in report.cached),
        kv_reserve_bytes=report.reserve,
        overage_bytes=max(0, lease.kv_bytes - device.limits.bytes_of(lease.model)),
        extents=len(lease.extents),
    )
