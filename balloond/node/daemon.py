"""The owner of the node's state: takes requests, lets the device's policy decide, carries the decisions out.

Nothing is awaited between reading the state and changing it. What takes time (the keeper's answer) comes after the
decision, and checks when it is done whether the decision still holds.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from balloond.keeper.client import KeeperClient, Kept
from balloond.node import records
from balloond.node.events import EventHistory
from balloond.node.extent_store import ExtentStore
from balloond.node.processes import NOBODY, DeathWatch, ProcessIdentity
from balloond.node.records import BookingFacts, BorrowFacts, LeaseFacts
from balloond.node.recovery import RecoveredState
from balloond.policy.claims import (
    AskBack,
    Decision,
    Freed,
    Grant,
    LimitChanged,
    Note,
    RefusalReason,
    RefuseClaim,
    RoomAnswer,
    UsageReport,
    WantedExtents,
)
from balloond.policy.device import DevicePolicy
from balloond.policy.kv_limits import Limit, LimitOutcome
from balloond.policy.ledger import Booking, Extent, Kind, LeaseRecord
from services.errors import Exists, NotFound, Refused, Unavailable
from services.rpc.watch import Watched
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_MOST_LENT = 6000
"""Most extents of one lease that are lent to one borrower: the keeper's record of them, 17 bytes each, fits a message
of 128 KiB."""
_PART = 32
"""Most extents that are created, recorded and sent together."""


class Session(Protocol):
    """A connected process, as far as the daemon sends to it. No method waits."""

    def granted(self, request_id: int, extents: Sequence[Extent], fds: Sequence[int], last: bool) -> None: ...
    def refused(self, request_id: int, why: RefusalReason, short: int, detail: str) -> None: ...
    def limit(self, limit: Limit, floor: int) -> None: ...
    def reclaim(self, reclaim_id: int, nbytes: int, deep: bool) -> None: ...
    def close(self) -> None: ...


class Daemon:
    """All devices of a node. `now` returns seconds of a monotonic clock, `secret` a new token at each call."""

    def __init__(
        self,
        devices: Mapping[str, DevicePolicy],
        store: ExtentStore,
        keeper: KeeperClient,
        now: Callable[[], float],
        secret: Callable[[], str],
    ) -> None:
        self.devices = dict(devices)
        self.history = EventHistory()
        self.changed: Watched[None] = Watched(None)
        self.now = now
        self._store = store
        self._keeper = keeper
        self._secret = secret
        self._sessions: dict[str, Session] = {}
        self._facts: dict[str, LeaseFacts] = {}
        """Facts of each lease by its id, ended leases with extents left included."""
        self._borrows: dict[tuple[str, str], BorrowFacts] = {}
        """Extents that are lent, by (borrower, lease id)."""
        self._deaths = DeathWatch()
        """Processes whose death is watched for, by lease id or borrower."""
        self._creating: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._rooms: dict[int, asyncio.Future[RoomAnswer]] = {}
        self._timer: asyncio.TimerHandle | None = None

    # --- leases

    async def attach(self, process: ProcessIdentity, device_name: str, model: str) -> LeaseFacts:
        """Opens a lease and returns it once the keeper has its record. Raises NotFound without the device, Unmet
        without a booking, Unavailable if the process is gone or cannot be watched."""
        device = self.device(device_name)
        for lease in device.ledger.of_model(model):
            # The message Attached was lost: the process does not know that it has this lease.
            if lease.suspended and not lease.extents and self._facts[lease.id].process == process:
                self._ended(lease.id)
        token = self._secret()
        facts = LeaseFacts(token[:8], device_name, model, token, process)
        device.open(facts.id, model, token)
        await self._opened(device, facts)
        return facts

    async def adopt(
        self, process: ProcessIdentity, device_name: str, model: str, token: str, held: Sequence[tuple[int, int, Kind]]
    ) -> LeaseFacts:
        """Takes in a lease that neither this balloond nor the keeper knows: its process lives on, so what it holds is
        stranded. Without a booking its model is entitled to the weights that it has until one is made. Raises NotFound
        without the device, Exists if the token's lease id is taken, Invalid for extents that cannot exist, Unavailable
        if the process is gone or cannot be watched."""
        device = self.device(device_name)
        facts = LeaseFacts(token[:8], device_name, model, token, process)
        if facts.id in self._facts:
            raise Exists(f"lease {facts.id} exists")
        device.ledger.check_held(held)
        if model not in device.ledger.bookings:
            weights = sum(nbytes for _, nbytes, kind in held if kind != "kv")
            try:
                decisions = device.book(self.now(), model, Booking(weights=weights))
            except Refused:
                # Other models have booked the memory meanwhile. It is still held, so it is still counted.
                decisions = device.book(self.now(), model, Booking())
            self._carry_out(device, decisions)
            self._keep_booking(device, model)
        device.open(facts.id, model, token)
        device.ledger.suspend(facts.id)
        await self._opened(device, facts)
        return facts

    async def _opened(self, device: DevicePolicy, facts: LeaseFacts) -> None:
        self._facts[facts.id] = facts
        try:
            self._deaths.watch(facts.id, facts.process, lambda: self._ended(facts.id))
        except OSError as error:  # the process is gone, or its death would not be noticed
            self._ended(facts.id)
            raise Unavailable(str(error)) from None
        self._note(device, facts.model, "lease", f"{facts.id} of process {facts.process.pid}")
        await self._keeper.keep([(records.encode(facts), None)])

    def known(self, token: str) -> LeaseFacts | None:
        """The lease whose secret is `token`, if its process may still live; otherwise None."""
        for device in self.devices.values():
            lease = device.ledger.by_token(token)
            if lease is not None:
                return self._facts[lease.id]
        return None

    def connect(
        self, facts: LeaseFacts, process: ProcessIdentity, session: Session, held: Sequence[tuple[int, int, Kind]]
    ) -> None:
        """Connects the lease's process, which holds exactly `held` as (id, bytes, kind). Raises NotFound if the lease
        has ended meanwhile, Invalid for extents that cannot exist, Unavailable if the process cannot be watched."""
        device = self.device(facts.device)
        device.ledger.lease(facts.id)
        device.ledger.check_held(held)
        if process != facts.process:
            # A process that shows the token is the lease's process.
            try:
                self._deaths.watch(facts.id, process, lambda: self._ended(facts.id))
            except OSError as error:
                raise Unavailable(str(error)) from None
            facts = LeaseFacts(facts.id, facts.device, facts.model, facts.token, process)
            self._facts[facts.id] = facts
            self._keeper.keep_soon([(records.encode(facts), None)])
        old = self._sessions.pop(facts.id, None)
        if old is not None:
            old.close()
        self._sessions[facts.id] = session
        self._carry_out(device, device.resume(self.now(), facts.id, held))

    def limit_of(self, facts: LeaseFacts) -> tuple[Limit, int, int]:
        """(limit, floor in bytes, bytes of a page) of a lease."""
        device = self.device(facts.device)
        return device.limits.get(facts.model), device.ledger.floor(facts.model), device.ledger.page_bytes

    def disconnected(self, lease_id: str, session: Session, unheard: bool = False) -> None:
        """Handles a closed socket: nothing is granted and nothing freed until the process is back or dead. `unheard`:
        the lease is new, and no message has shown that its process knows of it; then it ends, unless it has extents. A
        process that does know of it comes back with its token, and is taken in by that."""
        if self._sessions.get(lease_id) is session:
            if unheard and not self._device_of(lease_id).ledger.lease(lease_id).extents:
                self._ended(lease_id)
                return
            del self._sessions[lease_id]
            device = self._device_of(lease_id)
            self._carry_out(device, device.suspend(self.now(), lease_id))

    def detach(self, lease_id: str) -> None:
        self._ended(lease_id)

    def _ended(self, lease_id: str) -> None:
        """Ends a lease whose process is dead or has detached."""
        self._deaths.forget(lease_id)
        session = self._sessions.pop(lease_id, None)
        device = self._device_of(lease_id)
        lease = device.ledger.leases.get(lease_id)
        if lease is not None and not lease.ended:
            self._carry_out(device, device.end(self.now(), lease_id))
            self._forget_lease_if_over(device, lease_id)
            if facts := self._facts.get(lease_id):
                # A loader holds some of its extents. A successor must not wait for a process that may live on without
                # the lease.
                facts = self._facts[lease_id] = replace(facts, process=NOBODY)
                self._keeper.keep_soon([(records.encode(facts), None)])
        if session is not None:
            session.close()

    def _forget_lease_if_over(self, device: DevicePolicy, lease_id: str) -> None:
        if lease_id not in device.ledger.leases and self._facts.pop(lease_id, None) is not None:
            self._keeper.forget_soon([records.lease_id(lease_id)])

    # --- extents

    def grow(self, lease_id: str, request_id: int, wanted: WantedExtents) -> None:
        device = self._device_of(lease_id)
        self._carry_out(device, device.grow(self.now(), lease_id, request_id, wanted))

    def give_back(self, lease_id: str, ids: Sequence[int]) -> None:
        device = self._device_of(lease_id)
        self._carry_out(device, device.give_back(self.now(), lease_id, ids))

    def report(self, lease_id: str, report: UsageReport) -> None:
        device = self._device_of(lease_id)
        self._carry_out(device, device.report(self.now(), lease_id, report))

    # --- borrowing

    def watch_borrower(self, borrower: ProcessIdentity) -> None:
        """Watches a loader, so that its loans end if it dies. Raises ProcessLookupError if it is gone already, another
        OSError if it cannot be watched."""
        if str(borrower) not in self._deaths:
            self._deaths.watch(str(borrower), borrower, lambda: self._borrower_ended(borrower))

    async def borrow(
        self, borrower: ProcessIdentity, lease_id: str, ids: Sequence[int] = ()
    ) -> tuple[str, list[Extent], list[int]]:
        """Lends the weights extents of a lease, or its KV extents `ids`, to a loader that is watched. Returns the name
        of the device, the extents and their descriptors, once the keeper has recorded the loan. Raises NotFound without
        the lease or one of the extents, Unavailable beyond `_MOST_LENT` extents."""
        device = self._device_of(lease_id)
        facts_before = self._borrows.get((str(borrower), lease_id))
        before = () if facts_before is None else facts_before.extents
        if len({*before, *ids}) > _MOST_LENT:
            raise Unavailable(f"no more than {_MOST_LENT} extents of lease {lease_id} are lent at a time")
        lent = device.ledger.borrow(lease_id, str(borrower), ids)
        all_of_it = {*before, *(extent.id for extent in lent)}
        facts = BorrowFacts(borrower, lease_id, tuple(sorted(all_of_it)))
        self._borrows[str(borrower), lease_id] = facts
        await self._keeper.keep([(records.encode(facts), None)])
        there = [extent for extent in lent if extent in self._store]
        return device.name, there, self._store.descriptors(there)

    def end_borrow(self, borrower: ProcessIdentity, lease_id: str, ids: Sequence[int]) -> None:
        """Ends the loan of extents that a loader has unmapped; no `ids`: of all extents of that lease."""
        facts = self._borrows.get((str(borrower), lease_id))
        if facts is None:
            return  # ended already: a loader repeats the message when it does not know whether it arrived
        returned = set(ids or facts.extents)
        left = tuple(id for id in facts.extents if id not in returned)
        if left:
            facts = self._borrows[str(borrower), lease_id] = BorrowFacts(borrower, lease_id, left)
            self._keeper.keep_soon([(records.encode(facts), None)])
        else:
            del self._borrows[str(borrower), lease_id]
            self._keeper.forget_soon([records.borrow_id(borrower, lease_id)])
        if lease_id not in self._facts:
            return  # its engine gave everything back before anything was borrowed
        device = self._device_of(lease_id)
        self._carry_out(device, device.give_back(self.now(), lease_id, returned, str(borrower)))

    def _borrower_ended(self, borrower: ProcessIdentity) -> None:
        for _, lease_id in [key for key in self._borrows if key[0] == str(borrower)]:
            self.end_borrow(borrower, lease_id, ())

    # --- control

    def device(self, name: str) -> DevicePolicy:
        """The policy of the device `name`. Raises NotFound."""
        if name not in self.devices:
            raise NotFound(f"no device {name!r} on this node; there are {', '.join(self.devices)}")
        return self.devices[name]

    def set_booking(self, device_name: str, model: str, booking: Booking) -> None:
        device = self.device(device_name)
        decisions = device.book(self.now(), model, booking)
        self._keep_booking(device, model)
        self._note(device, model, "booked", f"quota {booking.quota}, weights {booking.weights}, floor {booking.floor}")
        # The message that carries the limit to leases carries the floor too.
        self._carry_out(device, [LimitChanged(model), *decisions])

    def drop_booking(self, device_name: str, model: str) -> None:
        device = self.device(device_name)
        decisions = device.unbook(self.now(), model)
        self._keeper.forget_soon([records.booking_id(device.name, model)])
        self._note(device, model, "booking dropped", "")
        self._carry_out(device, decisions)

    def set_limit(self, device_name: str, model: str, nbytes: int, revision: int, deadline_ms: int) -> LimitOutcome:
        device = self.device(device_name)
        outcome, decisions = device.set_limit(self.now(), model, nbytes, revision, deadline_ms)
        self._carry_out(device, decisions)
        return outcome

    def set_demand(self, device_name: str, weights: Mapping[str, float]) -> None:
        self.device(device_name).set_demand(weights)
        self.changed.set(None)

    async def make_room(
        self, device_name: str, model: str, nbytes: int, may_retract: bool, hold_s: float, within_s: float
    ) -> RoomAnswer:
        """Frees `nbytes` for `model`. Returns when there is room, nothing more can be taken, or `within_s` seconds are
        over; the answer has the bytes that lack."""
        device = self.device(device_name)
        answered: asyncio.Future[RoomAnswer] = asyncio.get_running_loop().create_future()
        now = self.now()
        claim_id, decisions = device.make_room(now, model, nbytes, may_retract, hold_s, now + within_s)
        self._rooms[claim_id] = answered
        self._carry_out(device, decisions)
        try:
            return await answered
        finally:
            if self._rooms.pop(claim_id, None) is not None:
                self._carry_out(device, device.cancel(self.now(), claim_id))

    # --- carrying out

    def _carry_out(self, device: DevicePolicy, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Grant(lease_id, _, extents):
                    first = extents[0]
                    model = self._facts[lease_id].model
                    self._note(device, model, "granted", f"{len(extents)} x {first.bytes} bytes of {first.kind}")
                    if (session := self._sessions.get(lease_id)) is not None:
                        tasks.spawn(self._deliver(device, decision, session), f"deliver to {lease_id}")
                case RefuseClaim(lease_id, request_id, why, short, detail):
                    self._note(device, self._facts[lease_id].model, "refused", f"{why}: {detail}")
                    if (session := self._sessions.get(lease_id)) is not None:
                        session.refused(request_id, why, short, detail)
                case AskBack(lease_id, reclaim_id, nbytes, deep):
                    if (session := self._sessions.get(lease_id)) is not None:
                        session.reclaim(reclaim_id, nbytes, deep)
                case LimitChanged(model):
                    self._tell_limit(device, model)
                case RoomAnswer(claim_id):
                    room = self._rooms.pop(claim_id, None)
                    if room is not None and not room.done():
                        room.set_result(decision)
                case Freed(extents):
                    self._destroy(device, extents)
                case Note(model, what, detail):
                    self._note(device, model, what, detail)
                case _:
                    raise RuntimeError(f"unknown decision {decision!r}")
        self._arm()
        self.changed.set(None)

    async def _deliver(self, device: DevicePolicy, grant: Grant, session: Session) -> None:
        """Creates the extents of a grant and sends them once the keeper has them. It does so in parts: while the keeper
        records one and the process maps another, the next is made."""
        parts = [grant.extents[start : start + _PART] for start in range(0, len(grant.extents), _PART)]
        under_way: deque[tuple[Sequence[Extent], asyncio.Task[None]]] = deque()
        failure: OSError | None = None
        left = deque(parts)
        while left:
            nbytes = sum(extent.bytes for extent in left[0])
            # This comes before the grant's turn: a small grant must not wait behind a large one.
            await self._store.wait_for_headroom(device.name, nbytes, lambda: device.ledger.leased + device.ledger.free)
            # In a turn of the loop one part is created on a device, for whichever grant: so what was made before is
            # sent on time.
            async with self._creating[device.name]:
                if not self._store.has_headroom(device.name, nbytes, device.ledger.leased + device.ledger.free):
                    continue
                if not self._is_there(grant, session):
                    break
                try:
                    token = self._facts[grant.lease_id].token
                    under_way.append((left[0], self._store.create(device.name, token, left[0])))
                except OSError as error:
                    failure = error
                    break
                left.popleft()
                await asyncio.sleep(0)
            while under_way and under_way[0][1].done():
                self._send(grant, under_way.popleft()[0], session)
        for part, kept in under_way:
            await kept
            self._send(grant, part, session)
        if failure is not None:
            self._not_created(device, grant, [extent for part in left for extent in part], failure)

    def _is_there(self, grant: Grant, session: Session) -> bool:
        """Whether the process still waits for the grant. If it is gone, or came back and reported that it does not have
        these extents, they are free already."""
        return self._sessions.get(grant.lease_id) is session

    def _send(self, grant: Grant, part: Sequence[Extent], session: Session) -> None:
        if self._is_there(grant, session):
            last = part[-1] is grant.extents[-1]
            session.granted(grant.request_id, part, self._store.descriptors(part), last)

    def _not_created(self, device: DevicePolicy, grant: Grant, extents: Sequence[Extent], why: OSError) -> None:
        """Gives back what was booked but the machine does not have (descriptors, host memory), and tells the lease:
        this is a refusal, never a failure of balloond."""
        _log.warning("extents not created", device=device.name, why=why.strerror)
        if grant.lease_id in self._facts:
            self._carry_out(device, device.give_back(self.now(), grant.lease_id, [extent.id for extent in extents]))
        if (session := self._sessions.get(grant.lease_id)) is not None:
            short = sum(extent.bytes for extent in extents)
            session.refused(grant.request_id, "exhausted", short, f"the backend could not create it: {why.strerror}")

    def _destroy(self, device: DevicePolicy, extents: Sequence[Extent]) -> None:
        self._store.destroy(device.name, extents)
        for lease_id in {extent.lease_id for extent in extents}:
            if (facts := self._facts.get(lease_id)) is not None:
                nbytes = sum(extent.bytes for extent in extents if extent.lease_id == lease_id)
                self._note(device, facts.model, "freed", f"{nbytes} bytes in {len(extents)} extents")
            self._forget_lease_if_over(device, lease_id)

    def _tell_limit(self, device: DevicePolicy, model: str) -> None:
        self._keep_booking(device, model)
        limit, floor = device.limits.get(model), device.ledger.floor(model)
        for lease in device.ledger.of_model(model):
            if (session := self._sessions.get(lease.id)) is not None:
                session.limit(limit, floor)

    def _note(self, device: DevicePolicy, model: str, what: str, detail: str) -> None:
        self.history.add(self.now(), device.name, model, what, detail)
        _log.debug(what, device=device.name, model=model, detail=detail)

    # --- time

    def _arm(self) -> None:
        due = min((at for d in self.devices.values() if (at := d.next_deadline()) is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            # The timer fires a little late rather than early: an early one would find nothing due and have to be set
            # again.
            self._timer = asyncio.get_running_loop().call_later(max(0.0, due - self.now()) + 0.002, self._tick)

    def _tick(self) -> None:
        for device in self.devices.values():
            self._carry_out(device, device.tick(self.now()))

    # --- the keeper

    def _booking_facts(self, device: DevicePolicy, model: str) -> BookingFacts:
        revision, nbytes = device.limits.kept(model)
        return BookingFacts(device.name, model, device.ledger.bookings[model], revision, nbytes)

    def _keep_booking(self, device: DevicePolicy, model: str) -> None:
        if model in device.ledger.bookings:
            self._keeper.keep_soon([(records.encode(self._booking_facts(device, model)), None)])

    def everything(self) -> Iterable[Kept]:
        """All records that a successor needs, for a keeper that came back empty."""
        for facts in self._facts.values():
            yield records.encode(facts), None
        for borrow in self._borrows.values():
            yield records.encode(borrow), None
        for device in self.devices.values():
            for model in device.ledger.bookings:
                yield records.encode(self._booking_facts(device, model)), None
            for lease in device.ledger.leases.values():
                for extent in lease.extents.values():
                    if extent in self._store:
                        yield self._store.kept(device.name, lease.token, extent)

    def restore(self, found: RecoveredState) -> None:
        """Takes over what a predecessor left. Leases are suspended until their processes come back; those of dead
        processes end. Raises Unavailable if it does not fit the configuration, OSError if processes cannot be
        watched."""
        missing = {f.device for f in found.leases} | {f.device for f in found.bookings}
        missing -= set(self.devices)
        if missing:
            raise Unavailable(f"the keeper holds memory of {', '.join(sorted(missing))}, which the configuration lacks")
        tokens: dict[str, LeaseRecord] = {}
        for booked in found.bookings:
            device = self.devices[booked.device]
            device.ledger.book(booked.model, booked.booking)
            device.limits.restore(booked.model, booked.limit_revision, booked.limit_bytes)
        for facts in found.leases:
            device = self.devices[facts.device]
            if facts.model not in device.ledger.bookings:
                device.ledger.book(facts.model, Booking())
            tokens[facts.token] = device.open(facts.id, facts.model, facts.token)
            self._facts[facts.id] = facts
        for extent, fd in found.extents:
            self.devices[extent.device].ledger.restore(tokens[extent.token].id, extent.id, extent.bytes, extent.kind)
            self._store.take(extent.device, extent.id, extent.bytes, fd)
        for borrow in found.borrows:
            self._restore_borrow(borrow)
        for facts in found.leases:
            self.devices[facts.device].ledger.suspend(facts.id)
            try:
                self._deaths.watch(facts.id, facts.process, lambda id=facts.id: self._ended(id))  # type: ignore[misc]
            except ProcessLookupError:
                self._ended(facts.id)
        self._keeper.forget_soon(found.unusable)

    def _restore_borrow(self, borrow: BorrowFacts) -> None:
        self._borrows[str(borrow.borrower), borrow.lease_id] = borrow
        try:
            self.watch_borrower(borrow.borrower)
        except ProcessLookupError:
            self.end_borrow(borrow.borrower, borrow.lease_id, ())
            return
        for device in self.devices.values():
            device.ledger.restore_borrow(borrow.lease_id, str(borrow.borrower), borrow.extents)

    def _device_of(self, lease_id: str) -> DevicePolicy:
        """The device of a lease. Raises NotFound without the lease."""
        facts = self._facts.get(lease_id)
        if facts is None:
            raise NotFound(f"no lease {lease_id}")
        return self.devices[facts.device]

    def process_of(self, lease_id: str) -> int:
        return self._facts[lease_id].process.pid if lease_id in self._facts else 0
