"""The state of one device and everything that is decided about it.

Every method takes `now`, changes the state at once and returns what has to be done. Claims (growths and rooms) are
served first come, first served: memory that an earlier one waits for is not given to a later one. If a lease waits for
several growths, only its first is before the first of another lease.

Free bytes may be held for a model (`make_room`). They are the model's, whichever claims wait before it: only its own
growths take turns for them.

A room gathers much for long, so small growths pass it: the first growth of a lease gets the least that will do, if what
is free and on its way suffices for the rooms too. All that passes a room is at most a 16th of its need; the room is
served when so much has come back besides.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from balloond.policy.claims import (
    Claim,
    ClaimPatience,
    ClaimSources,
    Decision,
    Freed,
    Grant,
    Growth,
    HoldRoom,
    LimitChanged,
    Note,
    RefuseClaim,
    RoomAnswer,
    RoomClaim,
    UsageReport,
    WantedExtents,
)
from balloond.policy.kv_limits import LimitOutcome, Limits
from balloond.policy.ledger import Booking, Extent, Kind, LeaseRecord, Ledger
from balloond.policy.reclaims import Reclaims
from services.errors import Invalid, NotFound

_BOOKINGS = 0
"""Owner of reclaims in place of a claim's id: memory that a booking needs and other models still hold."""

_PASSING = 16
"""A room's need divided by this: the bytes that may pass it."""


class DevicePolicy:
    """One device. `extent_ids` never repeats on the node; `serials` numbers claims and reclaims, from 1."""

    def __init__(
        self,
        name: str,
        capacity: int,
        page_bytes: int,
        extent_ids: Iterator[int],
        serials: Iterator[int],
        patience: ClaimPatience,
    ) -> None:
        self.name = name
        self.ledger = Ledger(capacity, page_bytes)
        self.limits = Limits(capacity)
        self.reclaims = Reclaims(self.ledger, self.limits, serials, patience)
        self.claims: list[Claim] = []
        self.holds: dict[str, HoldRoom] = {}
        self._extent_ids = extent_ids
        self._serials = serials
        self._patience = patience

    def __repr__(self) -> str:
        waiting = f"{len(self.claims)} claims, {len(self.reclaims.asks)} asks"
        return f"DevicePolicy({self.name}, {self.ledger!r}, {waiting}, {self.holds})"

    # --- leases

    def open(self, lease_id: str, model: str, token: str) -> LeaseRecord:
        """Opens a lease. Raises Unmet without a booking."""
        return self.ledger.open(lease_id, model, token)

    def suspend(self, now: float, lease_id: str) -> list[Decision]:
        """Suspends a lease whose socket closed. Its claims are dropped: the process makes them again when it is
        back."""
        self.ledger.suspend(lease_id)
        return self._settle(now, self._stop_waiting(lease_id))

    def resume(self, now: float, lease_id: str, held: Iterable[tuple[int, int, Kind]]) -> list[Decision]:
        return self._settle(now, _freed(self.ledger.resume(lease_id, held)))

    def end(self, now: float, lease_id: str) -> list[Decision]:
        """Ends a lease whose process has detached or is dead."""
        lease = self.ledger.lease(lease_id)
        note = Note(lease.model, "lease ended", f"{lease_id} gave {lease.weights_bytes + lease.kv_bytes} bytes back")
        freed = self.ledger.end(lease_id)
        self.reclaims.reports.pop(lease_id, None)
        return self._settle(now, [note, *_freed(freed), *self._stop_waiting(lease_id)])

    def _stop_waiting(self, lease_id: str) -> list[Decision]:
        out: list[Decision] = []
        for claim in [c for c in self.claims if isinstance(c, Growth) and c.lease_id == lease_id]:
            self._drop(claim, out)
        self.reclaims.gone(lease_id)
        return out

    def give_back(self, now: float, lease_id: str, ids: Iterable[int], borrower: str | None = None) -> list[Decision]:
        freed = self.ledger.give_back(lease_id, ids, borrower)
        self.reclaims.came_back(lease_id, sum(extent.bytes for extent in freed if extent.kind == "kv"))
        return self._settle(now, _freed(freed))

    def end_borrower(self, now: float, borrower: str) -> list[Decision]:
        return self._settle(now, _freed(self.ledger.end_borrower(borrower)))

    def report(self, now: float, lease_id: str, report: UsageReport) -> list[Decision]:
        """Takes in what a lease reports of itself, possibly as the answer to a reclaim."""
        lease = self.ledger.lease(lease_id)
        ask = self.reclaims.reported(lease_id, report)
        if ask is not None:
            for claim in self.claims:
                if claim.id == ask.claim_id and report.returned > 0:
                    claim.taken.append(ClaimSources(lease.model, ask.what, report.returned))
                if report.returned < ask.asked:
                    claim.dry.add(lease_id)
        return self._settle(now, [])

    # --- growth

    def grow(self, now: float, lease_id: str, request_id: int, wanted: WantedExtents) -> list[Decision]:
        """Claims extents for a lease; those for its reserve are granted or refused at once. Raises NotFound without the
        lease."""
        lease = self.ledger.lease(lease_id)
        kind, nbytes, count = wanted.kind, wanted.bytes, wanted.count
        least = count if wanted.min_count <= 0 else min(wanted.min_count, count)
        if count <= 0 or nbytes <= 0 or nbytes % self.ledger.page_bytes:
            detail = f"{count} extents of {nbytes} bytes: not whole pages of {self.ledger.page_bytes}"
            return [RefuseClaim(lease_id, request_id, "unknown", 0, detail)]
        if lease.model not in self.ledger.bookings:
            return [RefuseClaim(lease_id, request_id, "not_booked", 0, f"{lease.model} has no booking on {self.name}")]
        claim = Growth(
            id=next(self._serials),
            model=lease.model,
            need=least * nbytes,
            want=count * nbytes,
            behind=max(0, wanted.behind),
            may_retract=least * nbytes <= self._entitled(lease.model, kind),
            began=now,
            deadline=now + self._patience.grow_s,
            lease_id=lease_id,
            request_id=request_id,
            kind=kind,
            bytes=nbytes,
            count=count,
            min_count=least,
            cached=max(0, wanted.cached) if kind == "kv" else 0,
        )
        if not wanted.only_free:
            self.claims.insert(self._place_of(claim), claim)
            return self._settle(now, [])
        self.claims.append(claim)
        out: list[Decision] = []
        self._serve(now, out)
        if claim in self.claims:
            left = self._left(claim.model, [other for other in self.claims if other is not claim])
            self._refuse(claim, claim.need - max(0, left), out)
        return out

    def _place_of(self, claim: Growth) -> int:
        """Index in `claims`: behind claims that have as many of their own lease before them, so that a small growth
        does not wait for all parts of a large one."""
        before = Counter(other.lease_id for other in self.claims if isinstance(other, Growth))[claim.lease_id]
        seen: Counter[str] = Counter()
        for place, other in enumerate(self.claims):
            if isinstance(other, Growth):
                if seen[other.lease_id] > before:
                    return place
                seen[other.lease_id] += 1
        return len(self.claims)

    def _entitled(self, model: str, kind: Kind) -> int:
        """Bytes for which running decodes of others may be stopped: what the model lacks of its booked weights, or of
        its floor of KV."""
        booking = self.ledger.bookings.get(model, Booking())
        if kind != "kv":
            return booking.weights - self.ledger.weights_of(model)
        return booking.floor - self.ledger.kv_of(model)

    # --- control

    def book(self, now: float, model: str, booking: Booking) -> list[Decision]:
        """Replaces the model's booking. Raises Refused with the arithmetic."""
        self.ledger.book(model, booking)
        changed = self.limits.raise_to(model, booking.floor)
        out: list[Decision] = [LimitChanged(model)] if changed else []
        if booking.weights + booking.floor == 0:
            # The model went to sleep: room that was still held for its waking would only keep others waiting.
            self._release_hold(model, out)
        return self._settle(now, out)

    def unbook(self, now: float, model: str) -> list[Decision]:
        """Drops the model's booking. Raises NotFound without one, Unmet while a lease of the model lives."""
        self.ledger.unbook(model)
        self.limits.forget(model)
        out: list[Decision] = []
        self._release_hold(model, out)
        return self._settle(now, out)

    def set_limit(
        self, now: float, model: str, nbytes: int, revision: int, deadline_ms: int
    ) -> tuple[LimitOutcome, list[Decision]]:
        """Sets the model's limit in bytes. Raises NotFound without a booking, Invalid below the floor."""
        if model not in self.ledger.bookings:
            raise NotFound(f"{model} has no booking on {self.name}")
        floor, held = self.ledger.floor(model), self.ledger.kv_of(model)
        outcome = self.limits.set(model, nbytes, revision, deadline_ms, floor=floor, held=held)
        out: list[Decision] = []
        if outcome.changed:
            self.reclaims.lowered(now, model)
            out = [LimitChanged(model), Note(model, "limit", f"{outcome.limit.bytes} bytes, {outcome.state}")]
        return outcome, self._settle(now, out)

    def set_demand(self, weights: Mapping[str, float]) -> None:
        """Sets the models' demand weights. Raises Invalid for a weight that is negative, infinite or no number."""
        for model, weight in weights.items():
            if not (weight >= 0 and math.isfinite(weight)):
                raise Invalid(f"a demand of {weight} of {model} makes no sense")
        self.reclaims.demand = dict(weights)

    def make_room(
        self, now: float, model: str, nbytes: int, may_retract: bool, hold_s: float, deadline: float
    ) -> tuple[int, list[Decision]]:
        """Claims a room of `nbytes`. Returns the claim's id and decisions, among which its RoomAnswer may be already.
        With no bytes, what was held for the model is given up."""
        if nbytes <= 0:
            # The answer comes at once: with no bytes there is nothing that an earlier claim could be before it for.
            claim_id, out = next(self._serials), list[Decision]()
            self._release_hold(model, out)
            out.append(RoomAnswer(claim_id, max(0, self._available(model)), 0, ()))
            return claim_id, self._settle(now, out)
        claim = RoomClaim(
            id=next(self._serials),
            model=model,
            need=nbytes,
            want=nbytes,
            may_retract=may_retract,
            began=now,
            deadline=deadline,
            hold_s=hold_s,
        )
        self.claims.append(claim)
        return claim.id, self._settle(now, [])

    def cancel(self, now: float, claim_id: int) -> list[Decision]:
        """Drops a room whose caller no longer waits for it."""
        out: list[Decision] = []
        for claim in [c for c in self.claims if c.id == claim_id]:
            self._drop(claim, out)
        return self._settle(now, out)

    # --- time

    def next_deadline(self) -> float | None:
        """Time at which `tick` is due; None if nothing waits."""
        times = [claim.deadline for claim in self.claims] + [hold.until for hold in self.holds.values()]
        if self.claims or self.ledger.free < 0:
            times += self.reclaims.deadlines()
        return min(times, default=None)

    def tick(self, now: float) -> list[Decision]:
        return self._settle(now, [])

    # --- serving the claims

    def _settle(self, now: float, out: list[Decision]) -> list[Decision]:
        self._expire(now, out)
        self._serve(now, out)
        while self._take_from_others(now, out):
            self._serve(now, out)
        self._serve(now, out)  # with more on its way, a growth may pass a room
        if self._unheld() >= 0:
            self._lift(_BOOKINGS, out)
        return out

    def _expire(self, now: float, out: list[Decision]) -> None:
        for ask in self.reclaims.expire(now):
            for claim in self.claims:
                claim.dry.add(ask.lease_id)
            out.append(
                Note(self.ledger.leases[ask.lease_id].model, "reclaim", f"{ask.asked} bytes: not answered in time")
            )
        for model in [model for model, hold in self.holds.items() if hold.until <= now]:
            self._release_hold(model, out)
        for claim in [claim for claim in self.claims if claim.deadline <= now]:
            short = max(1, claim.need - self._available(claim.model))
            if isinstance(claim, Growth):
                self._refuse(claim, short, out)
            else:
                self._answer(now, claim, short, out)

    def _serve(self, now: float, out: list[Decision]) -> None:
        """Grants what can be granted, in the order of the claims."""
        waiting: list[Claim] = []
        for claim in list(self.claims):
            available = self._left(claim.model, waiting)
            if isinstance(claim, Growth):
                allowed, over = self._within_limit(claim)
                fits = min(allowed, available // claim.bytes)
                if allowed < claim.min_count:
                    self._drop(claim, out)
                    held, limit = self.ledger.kv_of(claim.model), self.limits.get(claim.model)
                    detail = f"{claim.need} bytes requested, {held} held, limit {limit.bytes}"
                    out.append(RefuseClaim(claim.lease_id, claim.request_id, "over_limit", over, detail))
                    continue
                if fits >= claim.min_count:
                    self._grant(claim, fits, out)
                    continue
                if self._passes(claim, waiting):
                    self._grant(claim, claim.min_count, out)
                    continue
            elif available >= claim.need:
                self._answer(now, claim, 0, out)
                continue
            waiting.append(claim)

    def _left(self, model: str, before: Iterable[Claim]) -> int:
        """Bytes for this model once the claims `before` have what they need. Negative if a booking exceeds what is
        free."""
        before = list(before)
        own = sum(claim.need for claim in before if isinstance(claim, Growth) and claim.model == model)
        unheld = self._unheld()
        return max(0, self._held_for(model) - own) + max(min(0, unheld), unheld - self._beyond_holds(before))

    def _passes(self, claim: Growth, before: Sequence[Claim]) -> bool:
        """Whether the least that will do is granted before the rooms that wait, which then count it."""
        rooms = [other for other in before if isinstance(other, RoomClaim)]
        growths = [other for other in before if isinstance(other, Growth)]
        if not rooms or claim.behind or claim.lease_id in {other.lease_id for other in growths}:
            return False
        beyond = self._beyond_holds([*before, claim])
        passing = beyond - self._beyond_holds(before)
        if self._left(claim.model, growths) < claim.need or self._lacking() + beyond > 0:
            return False
        if any(room.passed + passing > room.need // _PASSING for room in rooms):
            return False
        for room in rooms:
            room.passed += passing
        return True

    def _within_limit(self, claim: Growth) -> tuple[int, int]:
        """(extents that the limit allows, bytes by which the fewest that will do are over it)."""
        if claim.kind != "kv":
            return claim.count, 0
        left = self.limits.bytes_of(claim.model) - self.ledger.kv_of(claim.model)
        return min(claim.count, max(0, left // claim.bytes)), max(0, claim.need - left)

    def _available(self, model: str) -> int:
        """Bytes that are free for this model: those held for others are not."""
        return self._unheld() + self._held_for(model)

    def _unheld(self) -> int:
        return self.ledger.free - sum(hold.bytes for hold in self.holds.values())

    def _held_for(self, model: str) -> int:
        hold = self.holds.get(model)
        return hold.bytes if hold is not None else 0

    def _beyond_hold(self, claim: Claim, nbytes: int) -> int:
        return max(0, nbytes - self._held_for(claim.model))

    def _beyond_holds(self, claims: Iterable[Claim]) -> int:
        """Bytes that these claims need beyond those held for their models."""
        needs: Counter[str] = Counter()
        for claim in claims:
            needs[claim.model] += claim.need
        return sum(max(0, need - self._held_for(model)) for model, need in needs.items())

    def _grant(self, claim: Growth, count: int, out: list[Decision]) -> None:
        ids = [next(self._extent_ids) for _ in range(count)]
        extents = self.ledger.grant(claim.lease_id, claim.kind, claim.bytes, ids)
        out.append(Grant(claim.lease_id, claim.request_id, tuple(extents)))
        if (hold := self.holds.get(claim.model)) is not None:
            hold.bytes -= count * claim.bytes
            if hold.bytes <= 0:
                self._release_hold(claim.model, out)
        self._drop(claim, out)

    def _answer(self, now: float, claim: Claim, short: int, out: list[Decision]) -> None:
        """Answers a room: its bytes are there, or `short` bytes will not come."""
        assert isinstance(claim, RoomClaim)
        free = max(0, self._available(claim.model))
        if short or claim.hold_s <= 0:
            self._drop(claim, out)
        else:
            # The limits that were lowered for it stay low as long as the room is held, so that the victims do not
            # take it back.
            self._release_hold(claim.model, out)
            self.holds[claim.model] = HoldRoom(claim.need, now + claim.hold_s, claim.id)
            self.claims.remove(claim)
        out.append(RoomAnswer(claim.id, free, short, tuple(claim.taken)))
        out.append(Note(claim.model, "room", f"{claim.need} bytes wanted, {short} short, {_tell(claim.taken)}"))

    def _refuse(self, claim: Growth, short: int, out: list[Decision]) -> None:
        ledger = self.ledger
        detail = (
            f"{claim.need} bytes requested, {max(0, self._available(claim.model))} free for {claim.model}; capacity "
            f"{ledger.capacity}, leased {ledger.leased}, booked {ledger.booked}, stranded {ledger.stranded}"
        )
        self._drop(claim, out)
        out.append(RefuseClaim(claim.lease_id, claim.request_id, "exhausted", max(1, short), detail))

    def _drop(self, claim: Claim, out: list[Decision]) -> None:
        self.claims.remove(claim)
        self._lift(claim.id, out)

    def _release_hold(self, model: str, out: list[Decision]) -> None:
        hold = self.holds.pop(model, None)
        if hold is not None:
            self._lift(hold.claim_id, out)

    def _lift(self, owner: int, out: list[Decision]) -> None:
        out += [LimitChanged(model) for model in self.limits.lift(owner)]

    # --- taking from others

    def _take_from_others(self, now: float, out: list[Decision]) -> bool:
        """Reclaims from others what the claims lack and was not reclaimed yet. A claim for which nothing is left to
        take is answered; it returns True then, so that the claims after it are looked at anew."""
        lacking = self._lacking()
        if lacking > 0:
            # A quota was booked whose bytes other models still hold.
            plan = self.reclaims.plan(lacking, None, (), from_decodes=lacking)
            out += self.reclaims.take(now, plan, _BOOKINGS, [])
        earlier = 0
        for number, claim in enumerate(self.claims, start=1):
            first = number == 1
            lacking = earlier + self._lacking()
            earlier += self._beyond_hold(claim, claim.need)
            wanted = self._lacking() + self._wanted(self.claims[:number], claim)
            if wanted <= 0:
                continue
            entitled = self._entitled_to(claim)
            from_decodes = lacking + self._beyond_hold(claim, entitled) if entitled else 0
            own = self.reclaims.own(claim, now) if isinstance(claim, Growth) else None
            plan = self.reclaims.plan(wanted, claim.model, claim.dry, from_decodes, own)
            short = lacking + self._beyond_hold(claim, claim.need) - plan.bytes
            if isinstance(claim, Growth):
                # No lease is disturbed for a growth that cannot be met anyway. A growth that is not the first may still
                # find memory when those before it are answered.
                if short <= 0:
                    out += self.reclaims.take(now, plan, claim.id, claim.taken)
                elif first:
                    self._refuse(claim, short, out)
                    return True
                continue
            out += self.reclaims.take(now, plan, claim.id, claim.taken)
            if short > 0:
                out += (more := self.reclaims.ask_again(now, short, claim.id, claim.began, claim.model, claim.dry))
                if not more and not self.reclaims.coming():
                    self._answer(now, claim, short, out)
                    return True
        return False

    def _wanted(self, claims: Iterable[Claim], last: Claim) -> int:
        """Bytes that these claims want in all, beyond those held for their models; `last` is one of them. What a lease
        will want behind its growths counts once, and only as far as its limit goes. Other leases' evictable bytes are
        subtracted, down to the least that they wait for."""
        asked: defaultdict[tuple[str, str], int] = defaultdict(int)
        least: defaultdict[tuple[str, str], int] = defaultdict(int)
        instead: defaultdict[tuple[str, str], int] = defaultdict(int)
        totals: dict[tuple[str, str], tuple[Claim, int]] = {}
        for claim in claims:
            who, behind = ("room", str(claim.id)), 0
            if isinstance(claim, Growth):
                who = (claim.kind, claim.lease_id)
                least[who] += claim.need
                if not (isinstance(last, Growth) and last.lease_id == claim.lease_id):
                    instead[who] = max(instead[who], claim.cached)
                left = self.limits.bytes_of(claim.model) - self.ledger.kv_of(claim.model) - asked[who] - claim.want
                behind = claim.behind if claim.kind != "kv" else max(0, min(claim.behind, left))
            asked[who] += claim.want
            _, before = totals.get(who, (claim, 0))
            totals[who] = claim, max(before, asked[who] + behind)
        return sum(
            self._beyond_hold(claim, max(least[who], nbytes - instead[who])) for who, (claim, nbytes) in totals.items()
        )

    def _entitled_to(self, claim: Claim) -> int:
        """Bytes of the claim that may come from running decodes. A growth with `may_retract` may take its need, and
        what it will want beyond that as far as its model is entitled to it. A room without `may_retract`, for a request
        that waits for others, may take them up to its model's floor."""
        if isinstance(claim, Growth):
            if not claim.may_retract:
                return 0
            return max(claim.need, min(claim.want + claim.behind, self._entitled(claim.model, claim.kind)))
        return claim.want if claim.may_retract else max(0, min(claim.want, self._entitled(claim.model, "kv")))

    def _lacking(self) -> int:
        """Bytes by which the holds and bookings exceed what is free or coming; negative: bytes left for claims."""
        return -self._unheld() - self.reclaims.coming()


def _freed(extents: list[Extent]) -> list[Decision]:
    return [Freed(tuple(extents))] if extents else []


def _tell(taken: Iterable[ClaimSources]) -> str:
    return "taken " + (", ".join(f"{t.bytes} of {t.model}'s {t.what}" for t in taken) or "from no lease")
