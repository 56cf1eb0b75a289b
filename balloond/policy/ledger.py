"""The ledger of one device: what each of its bytes is used for.

Conservation, always: leased + free + booked + stranded = capacity. `free` is negative while a booking waits for memory
that leases still hold (quotas are booked at once), or while stranded extents turned up that had not been counted;
nothing is granted then.

An extent is freed when every process that was sent it has given it back or is dead: the engine of its lease, and each
loader that borrowed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from services.errors import Exists, Invalid, NotFound, Refused, Unmet

Kind = Literal["weights", "kv", "graphs"]
"""Use of an extent. CUDA graphs are a model's own like its weights, and counted with them, but no part of an image."""


@dataclass(slots=True)
class Extent:
    """One extent that is not free."""

    id: int
    bytes: int
    kind: Kind
    lease_id: str
    stranded: bool = False
    held: bool = True
    """True while the process of the extent's lease has its descriptor."""
    borrowers: set[str] | None = None
    """Loaders that were sent it and have not given it back; None if there are none."""


@dataclass(frozen=True)
class Booking:
    """A model's memory on this device, apart from what is elastic. Sizes in bytes."""

    quota: int = 0
    """Bytes private to the engine, never mapped by balloond."""
    weights: int = 0
    """Bytes of weights and CUDA graphs that the model is entitled to; they are not set aside."""
    floor: int = 0
    """Least bytes of KV that the model keeps: no other model is given any of them."""

    @property
    def total(self) -> int:
        return self.quota + self.weights + self.floor


@dataclass
class LeaseRecord:
    """Lease of one process on one device: the extents that it holds. Sizes in bytes."""

    id: str
    model: str
    token: str
    suspended: bool = False
    ended: bool = False
    """Whether the process is gone; the record stays only while a loader has extents of it."""
    weights_bytes: int = 0
    """Bytes of weights and CUDA graphs, stranded ones included, as in `kv_bytes`."""
    kv_bytes: int = 0
    extents: dict[int, Extent] = field(default_factory=dict)
    kv_extent_bytes: int = 0
    """Bytes of its smallest KV extent so far: what it gives back comes in steps of this, or larger ones where only
    those are empty."""


class Ledger:
    """Leases, extents and bookings of one device."""

    def __init__(self, capacity: int, page_bytes: int) -> None:
        self.capacity = capacity
        self.page_bytes = page_bytes
        self.free = capacity
        self.leased = 0
        self.booked = 0
        self.stranded = 0
        self.bookings: dict[str, Booking] = {}
        self.leases: dict[str, LeaseRecord] = {}

    def __repr__(self) -> str:
        return (
            f"Ledger(leased {self.leased} + free {self.free} + booked {self.booked} + stranded {self.stranded}"
            f" = {self.capacity}, {len(self.leases)} leases)"
        )

    # --- bookings

    def book(self, model: str, booking: Booking) -> None:
        """Replaces the model's booking. Raises Refused with the arithmetic when all bookings would exceed the
        capacity, Invalid for a negative number; then nothing has changed."""
        if min(booking.quota, booking.weights, booking.floor) < 0:
            raise Invalid(f"a booking cannot be negative: {booking}")
        others = sum(other.total for name, other in self.bookings.items() if name != model)
        if others + booking.total > self.capacity:
            raise Refused(
                f"{model} needs {booking.total:,} bytes (quota {booking.quota:,} + weights {booking.weights:,} + floor "
                f"{booking.floor:,}); other models have booked {others:,} of {self.capacity:,}, which leaves "
                f"{self.capacity - others:,}"
            )
        change = booking.quota - self.quota(model)
        self.booked += change
        self.free -= change
        self.bookings[model] = booking

    def unbook(self, model: str) -> None:
        """Drops the model's booking. Raises NotFound without one, Unmet while a lease of the model lives."""
        if model not in self.bookings:
            raise NotFound(f"{model} has no booking")
        living = next((lease for lease in self.leases.values() if lease.model == model and not lease.ended), None)
        if living is not None:
            raise Unmet(f"{model} has lease {living.id}, which holds {living.weights_bytes + living.kv_bytes} bytes")
        quota = self.quota(model)
        self.booked -= quota
        self.free += quota
        del self.bookings[model]

    def quota(self, model: str) -> int:
        return self.bookings[model].quota if model in self.bookings else 0

    def floor(self, model: str) -> int:
        return self.bookings[model].floor if model in self.bookings else 0

    # --- leases

    def open(self, lease_id: str, model: str, token: str) -> LeaseRecord:
        """Opens a lease. Raises Exists if its id is taken, Unmet without a booking."""
        if lease_id in self.leases:
            raise Exists(f"lease {lease_id} exists")
        if model not in self.bookings:
            raise Unmet(f"{model} has no booking")
        lease = self.leases[lease_id] = LeaseRecord(lease_id, model, token)
        return lease

    def lease(self, lease_id: str) -> LeaseRecord:
        """The lease with this id, if its process may still live. Raises NotFound."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.ended:
            raise NotFound(f"no lease {lease_id}")
        return lease

    def by_token(self, token: str) -> LeaseRecord | None:
        return next((lease for lease in self.leases.values() if lease.token == token and not lease.ended), None)

    def of_model(self, model: str) -> list[LeaseRecord]:
        return [lease for lease in self.leases.values() if lease.model == model and not lease.ended]

    def kv_of(self, model: str) -> int:
        """Bytes of KV that the model's leases hold."""
        return sum(lease.kv_bytes for lease in self.leases.values() if lease.model == model)

    def weights_of(self, model: str) -> int:
        return sum(lease.weights_bytes for lease in self.leases.values() if lease.model == model)

    def suspend(self, lease_id: str) -> None:
        self.lease(lease_id).suspended = True

    def check_held(self, held: Iterable[tuple[int, int, Kind]]) -> None:
        """Raises Invalid for extents that a process cannot hold of this device."""
        for id, nbytes, _ in held:
            if not 0 < nbytes <= self.capacity or nbytes % self.page_bytes:
                raise Invalid(f"extent {id} of {nbytes} bytes: not whole pages of {self.page_bytes}")

    def resume(self, lease_id: str, held: Iterable[tuple[int, int, Kind]]) -> list[Extent]:
        """Takes a lease up again whose process has exactly `held` as (id, bytes, kind): what it does not name counts as
        given back, what is not known here is stranded. Returns the extents that became free."""
        lease = self.lease(lease_id)
        lease.suspended = False
        named = {id: (nbytes, kind) for id, nbytes, kind in held}
        freed = self.give_back(lease_id, [id for id, e in lease.extents.items() if e.held and id not in named])
        for id, (nbytes, kind) in named.items():
            if id not in lease.extents:
                self._add(lease, Extent(id, nbytes, kind, lease_id, stranded=True))
        return freed

    def end(self, lease_id: str) -> list[Extent]:
        """Ends a lease whose process has detached or is dead. Returns the extents that became free; those that loaders
        have follow later."""
        lease = self.lease(lease_id)
        freed = self.give_back(lease_id, [id for id, extent in lease.extents.items() if extent.held])
        lease.ended = True
        self._forget_if_over(lease)
        return freed

    # --- extents

    def grant(self, lease_id: str, kind: Kind, nbytes: int, ids: Sequence[int]) -> list[Extent]:
        """Books one new extent for each id. Raises Refused when the bytes are not free, Invalid unless they are whole
        pages, Unmet while the lease is suspended."""
        lease = self.lease(lease_id)
        if nbytes <= 0 or nbytes % self.page_bytes:
            raise Invalid(f"an extent of {nbytes} bytes is not whole pages of {self.page_bytes}")
        if lease.suspended:
            raise Unmet(f"lease {lease_id} is suspended")
        if nbytes * len(ids) > self.free:
            raise Refused(f"{nbytes * len(ids)} bytes requested, {self.free} free of {self.capacity}")
        extents = [Extent(id, nbytes, kind, lease_id) for id in ids]
        for extent in extents:
            self._add(lease, extent)
        return extents

    def restore(self, lease_id: str, id: int, nbytes: int, kind: Kind) -> None:
        """Adds an extent that the keeper knows of, when the ledger is rebuilt."""
        self._add(self.lease(lease_id), Extent(id, nbytes, kind, lease_id))

    def borrow(self, lease_id: str, borrower: str, ids: Iterable[int] = ()) -> list[Extent]:
        """Lends all weights extents of a lease that have a descriptor, or its KV extents `ids`, to `borrower`, and
        returns them. Raises NotFound without the lease, and for an extent that cannot be lent."""
        lease, ids = self.lease(lease_id), list(ids)
        kind = "kv" if ids else "weights"
        lent = [e for e in lease.extents.values() if e.kind == kind and e.held and not e.stranded]
        if ids:
            there = {extent.id: extent for extent in lent}
            if missing := [id for id in ids if id not in there]:
                raise NotFound(f"lease {lease_id} has no KV extent {missing[0]}")
            lent = [there[id] for id in ids]
        for extent in lent:
            extent.borrowers = (extent.borrowers or set()) | {borrower}
        return lent

    def restore_borrow(self, lease_id: str, borrower: str, ids: Iterable[int]) -> None:
        lease = self.leases.get(lease_id)
        for id in ids:
            if lease is not None and id in lease.extents:
                lease.extents[id].borrowers = (lease.extents[id].borrowers or set()) | {borrower}

    def give_back(self, lease_id: str, ids: Iterable[int], borrower: str | None = None) -> list[Extent]:
        """Marks extents that the lease's process, or `borrower`, no longer has. Unknown ids are ignored: they are free
        already. Returns the extents that became free."""
        lease = self.leases.get(lease_id)
        if lease is None:
            return []
        freed: list[Extent] = []
        for id in ids:
            extent = lease.extents.get(id)
            if extent is None:
                continue
            if borrower is None:
                extent.held = False
            elif extent.borrowers is not None:
                extent.borrowers.discard(borrower)
            if not extent.held and not extent.borrowers:
                self._remove(lease, extent)
                freed.append(extent)
        if lease.ended:
            self._forget_if_over(lease)
        return freed

    def end_borrower(self, borrower: str) -> list[Extent]:
        """Takes all extents back from a loader that is dead. Returns the extents that became free."""
        freed: list[Extent] = []
        for lease in list(self.leases.values()):
            lent = [id for id, extent in lease.extents.items() if extent.borrowers and borrower in extent.borrowers]
            freed += self.give_back(lease.id, lent, borrower)
        return freed

    def _add(self, lease: LeaseRecord, extent: Extent) -> None:
        lease.extents[extent.id] = extent
        if extent.kind == "kv":
            lease.kv_bytes += extent.bytes
            lease.kv_extent_bytes = min(lease.kv_extent_bytes or extent.bytes, extent.bytes)
        else:
            lease.weights_bytes += extent.bytes
        if extent.stranded:
            self.stranded += extent.bytes
        else:
            self.leased += extent.bytes
        self.free -= extent.bytes

    def _remove(self, lease: LeaseRecord, extent: Extent) -> None:
        del lease.extents[extent.id]
        if extent.kind == "kv":
            lease.kv_bytes -= extent.bytes
        else:
            lease.weights_bytes -= extent.bytes
        if extent.stranded:
            self.stranded -= extent.bytes
        else:
            self.leased -= extent.bytes
        self.free += extent.bytes

    def _forget_if_over(self, lease: LeaseRecord) -> None:
        if not lease.extents:
            self.leases.pop(lease.id, None)

    # --- conservation

    def check(self) -> None:
        """Counts everything anew. Raises AssertionError with the numbers when a byte is missing or counted twice."""
        seen: set[int] = set()
        leased = stranded = 0
        for lease in self.leases.values():
            kv = weights = 0
            for id, extent in lease.extents.items():
                assert id == extent.id and id not in seen, f"extent {id} is counted twice"
                assert extent.lease_id == lease.id and (extent.held or extent.borrowers), f"no lease holds extent {id}"
                assert not (lease.ended and extent.held), f"extent {id} is held by lease {lease.id}, which has ended"
                seen.add(id)
                kv += extent.bytes if extent.kind == "kv" else 0
                weights += extent.bytes if extent.kind != "kv" else 0
                leased += 0 if extent.stranded else extent.bytes
                stranded += extent.bytes if extent.stranded else 0
            assert (kv, weights) == (lease.kv_bytes, lease.weights_bytes), (
                f"lease {lease.id}: {kv} + {weights}, {lease}"
            )
        booked = sum(booking.quota for booking in self.bookings.values())
        counted = (leased, booked, stranded)
        assert counted == (self.leased, self.booked, self.stranded), f"counted {counted}, kept {self!r}"
        assert leased + self.free + booked + stranded == self.capacity, repr(self)
