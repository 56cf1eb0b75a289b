"""Reclaims of a device's leases: what was sent, what leases reported that they have, and what may still come.

Three things free memory: a reclaim that is answered, a limit that was lowered, and a lease that ends. The first two are
"coming" until they came, or their time is over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from balloond.policy import balloon
from balloond.policy.claims import (
    Ask,
    AskBack,
    ClaimPatience,
    ClaimSources,
    Decision,
    Growth,
    LimitChanged,
    Note,
    UsageReport,
    What,
)
from balloond.policy.extents import count_down
from balloond.policy.kv_limits import Limits
from balloond.policy.ledger import LeaseRecord, Ledger

_AHEAD = 32
"""A need divided by this: what is taken beyond it, for leases that decode meanwhile; for 20 GiB, 80 extents. To
find the oldest prefixes once more costs an engine as long as for all of it."""


class Reclaims:
    """Reclaims, reports and lowered limits of one device."""

    def __init__(self, ledger: Ledger, limits: Limits, serials: Iterator[int], patience: ClaimPatience) -> None:
        self.demand: Mapping[str, float] = {}
        self.reports: dict[str, UsageReport] = {}
        self.asks: dict[int, Ask] = {}
        self._lowered_at: dict[str, float] = {}
        """Time at which the limit last fell, by model that holds more than it."""
        self._stuck: set[str] = set()
        """Models that did not come down to their limit in time: nothing is expected of them, and nothing reclaimed."""
        self._ledger = ledger
        self._limits = limits
        self._serials = serials
        self._patience = patience

    # --- what came of it

    def reported(self, lease_id: str, report: UsageReport) -> Ask | None:
        """Takes a report in. Returns the reclaim that it answers, if that is one of this lease's; otherwise None."""
        self.reports[lease_id] = report
        ask = self.asks.get(report.reclaim_id)
        return self.asks.pop(ask.id) if ask is not None and ask.lease_id == lease_id else None

    def came_back(self, lease_id: str, kv: int) -> None:
        """Counts `kv` bytes that the lease gave back as answers to its reclaims."""
        report = self.reports.get(lease_id)
        if report is not None:
            self.reports[lease_id] = replace(report, reserve=max(0, report.reserve - kv))
        for ask in self.asks.values():
            if ask.lease_id == lease_id:
                came = min(kv, ask.remaining)
                ask.remaining -= came
                kv -= came

    def gone(self, lease_id: str) -> None:
        """Forgets the reclaims of a lease of which nothing is to be expected."""
        for ask in [ask for ask in self.asks.values() if ask.lease_id == lease_id]:
            del self.asks[ask.id]

    def lowered(self, now: float, model: str) -> None:
        """Expects memory of `model`, whose limit changed."""
        self._lowered_at[model] = now
        self._stuck.discard(model)

    def expire(self, now: float) -> list[Ask]:
        """Forgets what came or will not come. Returns the reclaims that were not answered in time."""
        late = [ask for ask in self.asks.values() if ask.deadline <= now]
        for ask in late:
            del self.asks[ask.id]
        for model in [*self._lowered_at, *self._stuck]:
            if self._ledger.kv_of(model) <= self._limits.bytes_of(model):
                self._lowered_at.pop(model, None)
                self._stuck.discard(model)
        for model, at in list(self._lowered_at.items()):
            if at + self._patience.shrink_s <= now:
                del self._lowered_at[model]
                self._stuck.add(model)
        return late

    def deadlines(self) -> list[float]:
        return [ask.deadline for ask in self.asks.values()] + [
            at + self._patience.shrink_s for at in self._lowered_at.values()
        ]

    # --- what may still come

    def coming(self) -> int:
        """Bytes that were reclaimed, or are above a lowered limit, and may still come."""
        asked = sum(ask.remaining for ask in self.asks.values())
        return asked + sum(self.overage(model) for model in self._lowered_at)

    def overage(self, model: str) -> int:
        """Bytes that the model holds above its limit, less what reclaims ask of it apart from that."""
        asked = sum(self.asked_of(lease.id) for lease in self._ledger.of_model(model))
        return max(0, self._ledger.kv_of(model) - asked - self._limits.bytes_of(model))

    def asked_of(self, lease_id: str) -> int:
        return sum(ask.remaining for ask in self.asks.values() if ask.lease_id == lease_id)

    # --- taking more

    def own(self, claim: Growth, now: float) -> balloon.OwnCache | None:
        """Prefixes that the claim's lease could evict instead, taken for the youngest where there is no report; None if
        there are none. A report since the claim began says how many are left: the lease may have evicted some while it
        waited."""
        report = self.reports.get(claim.lease_id, UsageReport())
        nbytes = claim.cached
        if report.at > claim.began:
            nbytes = min(nbytes, sum(cached for _, cached in report.cached))
        if nbytes <= 0:
            return None
        oldest = min((last_use for last_use, _ in report.cached), default=now)
        return balloon.OwnCache(nbytes, max(0.0, now - oldest), now)

    def plan(
        self,
        need: int,
        without: str | None,
        dry: Collection[str],
        from_decodes: int,
        own: balloon.OwnCache | None = None,
    ) -> balloon.ReclaimPlan:
        """Plan that takes `need` bytes from models other than `without`; running decodes may be stopped for at most
        `from_decodes` bytes of that. The `dry` leases have nothing but decodes. Where requests of others run, a little
        more is taken: they are served in between, and must not cause a second reclaim."""
        ledger = self._ledger
        holders = [
            self._holder(lease, lease.id in dry)
            for lease in ledger.leases.values()
            if lease.model != without
            and lease.kv_bytes
            and not (lease.ended or lease.suspended or lease.model in self._stuck)
        ]
        floors = {model: booking.floor for model, booking in ledger.bookings.items()}
        weights = sum(lease.weights_bytes for lease in ledger.leases.values())
        shares = balloon.shares(
            self.demand, {lease.model for lease in ledger.leases.values()}, ledger.capacity - ledger.booked - weights
        )
        return balloon.plan(need, holders, floors, shares, from_decodes, self._ahead(need, without), own)

    def _ahead(self, need: int, without: str | None) -> int:
        """Bytes to take beyond `need`, in whole extents, so that a small need adds nothing."""
        running = [lease for lease in self._ledger.leases.values() if lease.model != without and self._runs(lease.id)]
        extent = max((lease.kv_extent_bytes for lease in running), default=0)
        return count_down(need // _AHEAD, extent) * extent if extent else 0

    def _runs(self, lease_id: str) -> bool:
        return self.reports.get(lease_id, UsageReport()).used > 0

    def _holder(self, lease: LeaseRecord, dry: bool) -> balloon.LeaseHoldings:
        """Holdings of a lease less what is leaving it already: that comes out of its reserve first, then out of its
        oldest prefixes."""
        report = UsageReport() if dry else self.reports.get(lease.id, UsageReport())
        leaving = self.asked_of(lease.id) + self.overage(lease.model)
        held = lease.kv_bytes - leaving
        reserve = max(0, report.reserve - leaving)
        leaving -= report.reserve - reserve
        cached = []
        for last_use, nbytes in sorted(report.cached):
            gone = min(leaving, nbytes)
            leaving -= gone
            if nbytes > gone:
                cached.append((last_use, nbytes - gone))
        extent = max(lease.kv_extent_bytes, 1)
        return balloon.LeaseHoldings(lease.id, lease.model, held, reserve, tuple(cached), extent, self._runs(lease.id))

    def take(self, now: float, plan: balloon.ReclaimPlan, owner: int, taken: list[ClaimSources]) -> list[Decision]:
        """Carries a plan out for the claim `owner`. Decodes count as taken at once, the rest when it is answered."""
        out: list[Decision] = []
        for step in plan.steps:
            match step:
                case balloon.TakeReserve(lease_id, _, nbytes):
                    out += self.ask(now, lease_id, "reserve", nbytes, owner)
                case balloon.TakePrefixes(lease_id, _, nbytes):
                    out += self.ask(now, lease_id, "prefixes", nbytes, owner)
                case balloon.LowerLimit(model, limit, nbytes):
                    self._limits.squeeze(model, limit, owner)
                    self.lowered(now, model)
                    out.append(LimitChanged(model))
                    out.append(Note(model, "limit", f"{limit} bytes for now: {nbytes} bytes are wanted by others"))
                    taken.append(ClaimSources(model, "decodes", nbytes))
        return out

    def ask(self, now: float, lease_id: str, what: What, nbytes: int, owner: int) -> list[Decision]:
        ask = Ask(next(self._serials), lease_id, what, owner, nbytes, nbytes, now + self._patience.reclaim_s)
        self.asks[ask.id] = ask
        model = self._ledger.leases[lease_id].model
        return [
            AskBack(lease_id, ask.id, nbytes, deep=what != "reserve"),
            Note(model, "reclaim", f"{nbytes} bytes of {what}"),
        ]

    def ask_again(
        self, now: float, need: int, owner: int, since: float, without: str, dry: Collection[str]
    ) -> list[Decision]:
        """Reclaims up to `need` bytes from leases that have not reported since the time `since`, whatever they reported
        then: reports may be a moment old."""
        out: list[Decision] = []
        for lease in self._ledger.leases.values():
            if need <= 0:
                break
            if lease.model == without or lease.ended or lease.suspended or lease.id in dry:
                continue
            if self.reports.get(lease.id, UsageReport()).at >= since or self.asked_of(lease.id):
                continue
            above = self._ledger.kv_of(lease.model) - self.overage(lease.model) - self._ledger.floor(lease.model)
            extent = max(lease.kv_extent_bytes, 1)
            nbytes = min(-(-need // extent) * extent, max(0, above) // extent * extent, lease.kv_bytes)
            if nbytes > 0:
                out += self.ask(now, lease.id, "prefixes", nbytes, owner)
                need -= nbytes
        return out
