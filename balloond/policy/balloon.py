"""Which leases lose what, in which order, when memory is wanted.

    1. the reserves of leases that run nothing
    2. cached prefixes, oldest use first, across all models of the device
    3. the reserves of leases that run: a decode step takes from it within 100 ms, so it is in use
    4. running decodes of the models furthest above their share of demand (w / sum w), by lowered limits

A lease that wants memory and has prefixes of its own could evict these instead, at no cost: nothing has to be unmapped
here and mapped there. So others' prefixes are taken for it only as far as they are clearly older (`OwnCache`). The rest
of them, and what comes later in this order, is taken only for what its own prefixes do not cover. Without that two
models that run on a full device pass memory back and forth, each the oldest of the other's, and wait for it.

Nothing is taken below a floor. No more is taken than is needed, save for the rest of one extent, which is given back
whole, and for what is wanted `ahead`: only the first two steps give that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from balloond.policy.extents import count_down, count_up


@dataclass(frozen=True)
class LeaseHoldings:
    """The state of a lease, as far as this decision needs it. Sizes in bytes."""

    lease_id: str
    model: str
    held: int
    """Bytes of KV that it holds, less what is on its way back already."""
    reserve: int = 0
    cached: tuple[tuple[float, int], ...] = ()
    """(time of last use, bytes) of prefixes that no running request uses."""
    extent: int = 1
    """Bytes of one extent: what it gives back comes in steps of this."""
    running: bool = False
    """Whether requests run on it."""


_CLEARLY_S = 1.0


@dataclass(frozen=True)
class OwnCache:
    """Cached prefixes of the lease that wants memory. Bytes and seconds."""

    bytes: int
    age_s: float
    """Seconds since the oldest of them was used."""
    now: float

    @property
    def before(self) -> float:
        """Time of last use before which others' prefixes are clearly older: at least twice as old, and by at least a
        second. Reported ages come in steps of that."""
        return self.now - max(2 * self.age_s, self.age_s + _CLEARLY_S)


@dataclass(frozen=True)
class TakeReserve:
    lease_id: str
    model: str
    bytes: int


@dataclass(frozen=True)
class TakePrefixes:
    lease_id: str
    model: str
    bytes: int


@dataclass(frozen=True)
class LowerLimit:
    """Bounds the model to `limit` bytes, which is `bytes` below what the steps before have left to it."""

    model: str
    limit: int
    bytes: int


Step = TakeReserve | TakePrefixes | LowerLimit


@dataclass(frozen=True)
class ReclaimPlan:
    steps: tuple[Step, ...]
    short: int
    """Bytes wanted beyond all that can be taken."""

    @property
    def bytes(self) -> int:
        return sum(step.bytes for step in self.steps)


class _AboveFloor:
    """Bytes that each model holds above its floor; each step takes from them."""

    def __init__(self, holders: Iterable[LeaseHoldings], floors: Mapping[str, int]) -> None:
        self._left: dict[str, int] = {}
        for holder in holders:
            self._left.setdefault(holder.model, -floors.get(holder.model, 0))
            self._left[holder.model] += holder.held

    def whole(self, model: str, extent: int) -> int:
        """Bytes of the model above its floor, in whole extents of `extent` bytes."""
        return count_down(self._left[model], extent) * extent

    def take(self, model: str, nbytes: int) -> None:
        self._left[model] -= nbytes


def plan(
    need: int,
    holders: Sequence[LeaseHoldings],
    floors: Mapping[str, int],
    shares: Mapping[str, float],
    from_decodes: int,
    ahead: int = 0,
    own: OwnCache | None = None,
) -> ReclaimPlan:
    """Steps that free `need` bytes, or all that can be taken. Decodes are stopped only until `from_decodes` bytes are
    freed. `floors`: least bytes of KV of each model. `shares`: bytes of KV that each model's demand entitles it to.
    `ahead`: bytes beyond `need` that are taken where no running request is disturbed. `own`: cached prefixes of the
    lease that wants it."""
    above_floor = _AboveFloor(holders, floors)
    steps: list[Step] = []
    before, rest = (own.before, max(0, need - own.bytes)) if own is not None else (inf, need)
    taken = _reserves(need + ahead, [h for h in holders if not h.running], above_floor, steps)
    taken += _prefixes(need + ahead - taken, rest - taken, before, holders, above_floor, steps)
    taken += _reserves(rest - taken, [h for h in holders if h.running], above_floor, steps)
    taken += _decodes(min(rest, from_decodes) - taken, holders, above_floor, shares, steps)
    return ReclaimPlan(tuple(steps), max(0, need - taken))


def shares(demand: Mapping[str, float], models: Iterable[str], total: int) -> dict[str, float]:
    """Each model's part of `total` bytes, by its demand weight; equal parts while no demand is known."""
    names = sorted(set(models))
    weights = {name: max(0.0, demand.get(name, 0.0)) for name in names}
    whole = sum(weights.values())
    if whole <= 0:
        return {name: total / len(names) for name in names}
    return {name: total * weight / whole for name, weight in weights.items()}


def _reserves(need: int, holders: Sequence[LeaseHoldings], above_floor: _AboveFloor, steps: list[Step]) -> int:
    taken = 0
    # The largest reserves are taken first: fewer processes are disturbed.
    for holder in sorted(holders, key=lambda h: (-h.reserve, h.lease_id)):
        if taken >= need:
            break
        wanted = count_up(need - taken, holder.extent) * holder.extent
        has = count_down(holder.reserve, holder.extent) * holder.extent
        nbytes = min(wanted, has, above_floor.whole(holder.model, holder.extent))
        if nbytes > 0:
            above_floor.take(holder.model, nbytes)
            steps.append(TakeReserve(holder.lease_id, holder.model, nbytes))
            taken += nbytes
    return taken


def _prefixes(
    need: int, rest: int, before: float, holders: Sequence[LeaseHoldings], above_floor: _AboveFloor, steps: list[Step]
) -> int:
    """Takes prefixes, oldest first: up to `need` bytes of those last used before `before`, and of others until it has
    `rest` bytes in all. Prefixes are smaller than extents and do not end with them, so a holder is asked for whole
    extents as its prefixes add up. Returns the bytes taken."""
    oldest_first = sorted(
        (last_use, holder.lease_id, nbytes, holder)
        for holder in holders
        for last_use, nbytes in holder.cached
        if nbytes > 0
    )
    asked: dict[str, int] = {}
    cached: dict[str, int] = {}
    order: list[LeaseHoldings] = []
    taken = 0
    for last_use, lease_id, nbytes, holder in oldest_first:
        most = need if last_use < before else rest
        if taken >= most:
            break
        if lease_id not in asked:
            asked[lease_id] = cached[lease_id] = 0
            order.append(holder)
        cached[lease_id] += min(nbytes, most - taken)
        wanted = count_up(cached[lease_id], holder.extent) * holder.extent
        more = min(wanted - asked[lease_id], above_floor.whole(holder.model, holder.extent))
        if more > 0:
            above_floor.take(holder.model, more)
            asked[lease_id] += more
            taken += more
    steps += [TakePrefixes(h.lease_id, h.model, asked[h.lease_id]) for h in order if asked[h.lease_id]]
    return taken


def _decodes(
    need: int,
    holders: Sequence[LeaseHoldings],
    above_floor: _AboveFloor,
    shares: Mapping[str, float],
    steps: list[Step],
) -> int:
    """Brings the models furthest above their share down to a common excess, as high a one as frees enough. Returns the
    bytes taken."""
    if need <= 0:
        return 0
    left: dict[str, int] = {}
    extent: dict[str, int] = {}
    for holder in holders:
        if holder.held > 0:
            left[holder.model] = left.get(holder.model, 0) + holder.held
            extent[holder.model] = max(extent.get(holder.model, 1), holder.extent)
    for step in steps:
        left[step.model] -= step.bytes
    most = {model: above_floor.whole(model, extent[model]) for model in left}
    excess = {model: left[model] - shares.get(model, 0.0) for model in left if most[model] > 0}
    taken = dict.fromkeys(excess, 0)

    def above(model: str, level: float) -> float:
        return min(most[model], max(0.0, excess[model] - level))

    if excess:
        # All come down to a level that does not free quite enough, in whole extents; then one extent at a time is taken
        # from the model with the largest excess.
        low, high = min(excess.values()) - max(most.values()), max(excess.values())
        while high - low > 1:
            middle = (low + high) / 2
            low, high = (low, middle) if sum(above(m, middle) for m in excess) < need else (middle, high)
        taken = {model: int(above(model, high)) // extent[model] * extent[model] for model in excess}
    while sum(taken.values()) < need:
        able = [model for model in taken if most[model] - taken[model] >= extent[model]]
        if not able:
            break
        top = max(able, key=lambda model: excess[model] - taken[model])
        taken[top] += extent[top]
    for model in sorted(excess, key=lambda m: (-excess[m], m)):
        if taken[model]:
            above_floor.take(model, taken[model])
            steps.append(LowerLimit(model, left[model] - taken[model], taken[model]))
    return sum(taken.values())
