"""balloond's records in the keeper, encoded and decoded: what its successor needs to know."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from balloond.node.processes import ProcessIdentity
from balloond.policy.ledger import Booking, Kind
from protos import keeper_pb2

OWNER = "balloond"


@dataclass(frozen=True)
class LeaseFacts:
    id: str
    device: str
    model: str
    token: str
    process: ProcessIdentity


@dataclass(frozen=True)
class ExtentFacts:
    id: int
    device: str
    bytes: int
    kind: Kind
    token: str
    """Token of the extent's lease."""


@dataclass(frozen=True)
class BookingFacts:
    device: str
    model: str
    booking: Booking
    limit_revision: int
    limit_bytes: int


@dataclass(frozen=True)
class BorrowFacts:
    """Extents of a lease that a loader was sent."""

    borrower: ProcessIdentity
    lease_id: str
    extents: tuple[int, ...]


Facts = LeaseFacts | ExtentFacts | BookingFacts | BorrowFacts


def extent_id(id: int) -> str:
    return f"extent/{id}"


def lease_id(id: str) -> str:
    return f"lease/{id}"


def booking_id(device: str, model: str) -> str:
    return f"booking/{device}/{model}"


def borrow_id(borrower: ProcessIdentity, lease: str) -> str:
    return f"borrow/{borrower}/{lease}"


def encode(facts: Facts) -> keeper_pb2.Record:
    match facts:
        case ExtentFacts(id, device, nbytes, kind, token):
            return keeper_pb2.Record(
                id=extent_id(id),
                owner=OWNER,
                device=device,
                bytes=nbytes,
                kind=kind,
                lease_token=token,
                has_descriptor=True,
            )
        case LeaseFacts(id, device, model, token, process):
            return keeper_pb2.Record(
                id=lease_id(id),
                owner=OWNER,
                device=device,
                kind="lease",
                lease_token=token,
                detail=_json(model=model, process=asdict(process)),
            )
        case BookingFacts(device, model, booking, revision, nbytes):
            return keeper_pb2.Record(
                id=booking_id(device, model),
                owner=OWNER,
                device=device,
                kind="booking",
                detail=_json(model=model, booking=asdict(booking), limit_revision=revision, limit_bytes=nbytes),
            )
        case BorrowFacts(borrower, lease, extents):
            return keeper_pb2.Record(
                id=borrow_id(borrower, lease),
                owner=OWNER,
                kind="borrow",
                detail=_json(borrower=asdict(borrower), lease_id=lease, extents=extents),
            )


def decode(record: keeper_pb2.Record) -> Facts:
    """The facts of a record. Raises ValueError for a record that balloond did not write."""
    kind = record.kind
    if kind in ("kv", "weights", "graphs"):
        number = int(record.id.removeprefix("extent/"))
        return ExtentFacts(number, record.device, record.bytes, kind, record.lease_token)  # type: ignore[arg-type]
    try:
        detail = json.loads(record.detail)
        if kind == "lease":
            id = record.id.removeprefix("lease/")
            return LeaseFacts(
                id, record.device, detail["model"], record.lease_token, ProcessIdentity(**detail["process"])
            )
        if kind == "booking":
            booking = Booking(**detail["booking"])
            return BookingFacts(
                record.device, detail["model"], booking, detail["limit_revision"], detail["limit_bytes"]
            )
        if kind == "borrow":
            return BorrowFacts(ProcessIdentity(**detail["borrower"]), detail["lease_id"], tuple(detail["extents"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"record {record.id}: {error!r}") from None
    raise ValueError(f"record {record.id} has kind {kind!r}")


def _json(**values: object) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode()
