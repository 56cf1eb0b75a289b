"""The keeper's records, sorted for a ledger that is to be rebuilt."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from balloond.node import records
from balloond.node.records import BookingFacts, BorrowFacts, ExtentFacts, LeaseFacts
from protos import keeper_pb2
from services.telemetry import log

_log = log.get(__name__)


@dataclass
class RecoveredState:
    """Bookings, leases and extents of an earlier balloond, read from the keeper's records. Each extent has its
    descriptor; `unusable` has the ids of records that cannot be read, to be forgotten."""

    bookings: list[BookingFacts] = field(default_factory=list)
    leases: list[LeaseFacts] = field(default_factory=list)
    extents: list[tuple[ExtentFacts, int]] = field(default_factory=list)
    borrows: list[BorrowFacts] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)

    def given_out(self, device: str) -> bool:
        """Whether a process may hold memory of the device."""
        return device in {lease.device for lease in self.leases} | {booked.device for booked in self.bookings}


def sort(held: Iterable[tuple[keeper_pb2.Record, int]]) -> RecoveredState:
    """Sorts records, each with its descriptor (-1: none), and takes the descriptors over; those of extents without a
    lease are closed."""
    found = RecoveredState()
    for record, fd in held:
        try:
            facts = records.decode(record)
        except ValueError as error:
            _log.warning("record not understood", why=str(error))
            found.unusable.append(record.id)
            _close(fd)
            continue
        match facts:
            case ExtentFacts():
                found.extents.append((facts, fd))
            case LeaseFacts():
                found.leases.append(facts)
            case BookingFacts():
                found.bookings.append(facts)
            case BorrowFacts():
                found.borrows.append(facts)
    tokens = {lease.token for lease in found.leases}
    for facts, fd in found.extents:
        if facts.token not in tokens or fd < 0:
            found.unusable.append(records.extent_id(facts.id))
            _close(fd)
    found.extents = [(facts, fd) for facts, fd in found.extents if facts.token in tokens and fd >= 0]
    return found


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
