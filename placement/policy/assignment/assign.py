"""Algorithm 1: which model lives where.

Models choose by descending demand; each goes to the place with the least *resulting* pressure, (W + w) / (S - weights)
+ load (W + w), which is infinite where the model does not fit. It leaves its present place only if the best one is
better by more than tau of the pressure of staying, and not within its cool-down. The paper compares pressures before
the model is added, and an absolute tau; resulting pressures include what the model itself brings (a large model on a
small device), and a relative tau means the same at any load.

Pinned models and those in their cool-down do not take part: they are booked where they are before the others choose, so
that no model is put where they will stay.

Where this order leaves a model without a place, first-fit-decreasing by weights decides for all models that may move:
first with each model's present place as its first choice, then without. Its result counts only if it places more models
than the greedy order did. A model that fits nowhere, even with everything that may move gone, changes nothing for the
others.

A tensor-parallel model has n parts on the n least pressured distinct devices of one group, and is judged by the worst
of these.

10,000 models on 10,000 devices take half a second to a second on one core; `field.py` says how and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from math import inf

from placement.policy.assignment.improve import Placed, clearly_lower, improve, place_left_out
from placement.policy.field import Field, Option
from placement.policy.kvpr import Group, Model, Place, pressure_text


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that is to get a place."""

    model: Model
    current: Place | None = None
    """Where the model is active (or on its way to); None: nowhere."""
    moved_at: float = -inf
    """Second at which the model last moved."""


@dataclass(frozen=True, slots=True)
class AssignRules:
    """Numbers of Algorithm 1."""

    tau: float = 0.2
    """A move has to lower the pressure by more than this share of the pressure of staying."""
    cool_down_s: float = 60.0
    """A model that moved stays at least this long: the length of the rate window, so that the effect shows first."""
    explain: int = 3
    """How many of the best places a reason names."""
    improve_steps: int = 32
    """How many steps local search may take; 0: Algorithm 1 alone."""
    divide: bool = True
    """Whether it may divide the models of two places anew; False: moves and exchanges of two alone."""


class ModelKind(Enum):
    """What the algorithm did with a model."""

    PINNED = "pinned"
    COOLING = "cooling down"
    STAYS = "stays"
    MOVES = "moves"
    DISPLACED = "displaced"
    """The model's place has no room for it any more, or is gone."""
    PLACED = "placed"
    """The model had no place before."""
    PACKED = "packed"
    """First-fit-decreasing by weights decided."""
    IMPROVED = "improved"
    """Local search decided."""
    KEPT = "kept"
    """Algorithm 1 would have moved it, and the cluster would have been no better for it."""
    UNPLACED = "unplaced"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a model got its place, with the numbers that were compared."""

    kind: ModelKind
    model: str
    place: Place | None
    demand: float
    pressure: float = inf
    """Resulting pressure at the model's new place."""
    stay_pressure: float = inf
    """Resulting pressure at the model's old place; +inf if it had none or does not fit there any more."""
    tau: float = 0.0
    cool_down_left_s: float = 0.0
    options: tuple[Option, ...] = ()
    """The best places, best first; only the best for a model that stays."""

    @property
    def text(self) -> str:
        """The reason as one sentence, for `explain`."""
        where = self.place.group if self.place else "nowhere"
        best = self.options[0] if self.options else None
        there, stay = pressure_text(self.pressure), pressure_text(self.stay_pressure)
        match self.kind:
            case ModelKind.PINNED:
                return f"pinned to {where}"
            case ModelKind.COOLING:
                return f"stays on {where}: it moved lately, {self.cool_down_left_s:.0f} s of its cool-down are left"
            case ModelKind.STAYS if best is not None:
                return (
                    f"stays on {where}: pressure {stay}, the best is {best.place.group} with "
                    f"{pressure_text(best.pressure)}; a move takes more than {self.tau:.0%} less"
                )
            case ModelKind.MOVES:
                return f"moves to {where}: pressure {there} instead of {stay}, more than {self.tau:.0%} less"
            case ModelKind.DISPLACED:
                return f"moves to {where} (pressure {there}): where it was there is no room for it"
            case ModelKind.PLACED:
                return f"goes to {where}, the least resulting pressure: {there}"
            case ModelKind.PACKED:
                return f"goes to {where}: by demand not every model found a place, so weights decided, largest first"
            case ModelKind.IMPROVED:
                return (
                    f"goes to {where}: from Algorithm 1's answer local search lowered the largest pressure that this "
                    f"touches from {stay} to {there}"
                )
            case ModelKind.KEPT:
                return (
                    f"stays on {where}: what Algorithm 1 proposed does not lower the largest pressures of the cluster "
                    f"by more than {self.tau:.0%}"
                )
            case _:
                return "no place has room for it"


@dataclass(frozen=True, slots=True)
class Assignment:
    """A reason for every candidate, and the places of those that have one."""

    places: dict[str, Place]
    reasons: dict[str, Reason]

    @property
    def unplaced(self) -> list[str]:
        """Candidates without a place."""
        return [name for name in self.reasons if name not in self.places]


def assign(
    groups: Sequence[Group],
    candidates: Sequence[Candidate],
    now: float,
    rules: AssignRules | None = None,
    booked: Iterable[tuple[Model, Place]] = (),
) -> Assignment:
    """Places for all candidates. `booked`: what else holds memory on the devices (a hibernating engine's quota). `now`
    is in seconds. Candidates' names have to be unique; a present place that is not in `groups` counts as gone."""
    rules = rules or AssignRules()
    ordered = sorted(candidates, key=lambda c: (-c.model.demand, c.model.name))
    present: dict[str, float] = {}
    for c in ordered:
        if c.current is not None:
            present[c.current.group] = present.get(c.current.group, 0.0) + c.model.demand
    field = Field(groups, present)
    for model, place in booked:
        field.book(model, place.devices)

    places: dict[str, Place] = {}
    reasons: dict[str, Reason] = {}
    free: list[Candidate] = []
    for c in ordered:
        reason = held(c, now, rules) if c.current is not None and field.has(c.current) else None
        if reason is None:
            free.append(c)
            continue
        assert reason.place is not None
        field.book(c.model, reason.place.devices)
        places[c.model.name], reasons[c.model.name] = reason.place, reason

    chosen = _algorithm_1(field, free, rules)
    if rules.improve_steps:
        chosen = _improved(field, free, chosen, rules)
    for name, reason in chosen.items():
        reasons[name] = reason
        if reason.place is not None:
            places[name] = reason.place
    return Assignment(places, reasons)


def held(c: Candidate, now: float, rules: AssignRules) -> Reason | None:
    """The reason for which a model may not move at all, if there is one."""
    left = c.moved_at + rules.cool_down_s - now
    if c.model.pinned:
        return Reason(ModelKind.PINNED, c.model.name, c.current, c.model.demand)
    if left > 0:
        return Reason(ModelKind.COOLING, c.model.name, c.current, c.model.demand, cool_down_left_s=left)
    return None


def _algorithm_1(field: Field, free: Sequence[Candidate], rules: AssignRules) -> dict[str, Reason]:
    """Places by descending demand, and by weights where that leaves models out."""
    chosen = greedy(field.copy(), free, rules)
    homeless = [c for c in free if chosen[c.model.name].place is None]
    if any(field.best(c.model) for c in homeless):
        for stay_first, wide_first in ((True, False), (False, False), (False, True)):
            packed = _first_fit_decreasing(field.copy(), free, stay_first=stay_first, wide_first=wide_first)
            if _unplaced(packed) < _unplaced(chosen):
                chosen = packed
            if not _unplaced(chosen):
                break
        if rules.improve_steps and _unplaced(chosen):
            chosen = _place_left_out(field, free, chosen, rules)
    return chosen


def _place_left_out(
    field: Field, free: Sequence[Candidate], reasons: dict[str, Reason], rules: AssignRules
) -> dict[str, Reason]:
    """The reasons after other models have made room for those that packing left out."""
    after = _booked(field, free, reasons)
    homeless = [c.model for c in free if reasons[c.model.name].place is None and field.best(c.model)]
    found = dict(reasons)
    for name, place in place_left_out(after, _placed(free, reasons), homeless, divides=rules.divide).items():
        found[name] = replace(reasons[name], kind=ModelKind.PACKED, place=place)
    return found


def _placed(free: Sequence[Candidate], reasons: dict[str, Reason]) -> list[Placed]:
    pairs = ((c, reasons[c.model.name].place) for c in free)
    return [Placed(c.model, place, c.current) for c, place in pairs if place is not None]


def _improved(
    field: Field, free: Sequence[Candidate], proposed: dict[str, Reason], rules: AssignRules
) -> dict[str, Reason]:
    """The proposal after local search, if it is clearly better than moving only models that have to; else the latter,
    also after local search. Either way pressures become lexicographically less or nothing moves, so a constant load
    comes to rest."""
    proposal, ours = _search(field, free, proposed, rules)
    if all(c.current is None or proposal[c.model.name].place == c.current for c in free):
        return proposal
    if all(proposed[c.model.name].place == c.current for c in free):
        return proposal  # the search began with every model at home
    kept = _kept(field, free, proposed, rules)
    if _unplaced(proposal) != _unplaced(kept):
        return min(proposal, kept, key=_unplaced)
    if clearly_lower(ours, _booked(field, free, kept), rules.tau):
        return proposal
    return _search(field, free, kept, rules)[0]


def _booked(field: Field, free: Sequence[Candidate], reasons: dict[str, Reason]) -> Field:
    """A copy of the field in which every model is booked where the reasons say."""
    after = field.copy()
    for c in free:
        place = reasons[c.model.name].place
        if place is not None:
            after.book(c.model, place.devices)
    return after


def _search(
    field: Field, free: Sequence[Candidate], reasons: dict[str, Reason], rules: AssignRules
) -> tuple[dict[str, Reason], Field]:
    """Reasons after local search from the places of `reasons`, and the field at its end."""
    after = _booked(field, free, reasons)
    found = dict(reasons)
    placed = _placed(free, reasons)
    changes = improve(after, placed, rules.improve_steps, rules.tau, divides=rules.divide)
    for name, change in changes.items():
        old = found[name]
        found[name] = replace(
            old, kind=ModelKind.IMPROVED, place=change.place, pressure=change.after, stay_pressure=change.before
        )
    for c in free:
        reason = found[c.model.name]
        if reason.kind is ModelKind.IMPROVED and reason.place == c.current:
            found[c.model.name] = replace(reason, kind=ModelKind.KEPT)
    return found, after


def _kept(
    field: Field, free: Sequence[Candidate], proposed: dict[str, Reason], rules: AssignRules
) -> dict[str, Reason]:
    """Reasons with every model that has a place with room staying there; the others then choose, by demand."""
    field = field.copy()
    reasons: dict[str, Reason] = {}
    homeless: list[Candidate] = []
    for c in free:
        name = c.model.name
        stay = field.resulting(c.model, c.current) if c.current is not None and _may_stay(field, c) else inf
        if c.current is None or stay == inf:
            homeless.append(c)
            continue
        field.book(c.model, c.current.devices)
        reasons[name] = proposed[name]
        if proposed[name].kind is not ModelKind.STAYS:
            reasons[name] = replace(
                proposed[name], kind=ModelKind.KEPT, place=c.current, pressure=stay, stay_pressure=stay
            )
    reasons |= greedy(field, homeless, rules)
    return reasons


def greedy(field: Field, ordered: Sequence[Candidate], rules: AssignRules) -> dict[str, Reason]:
    """Lines 5 to 12 of Algorithm 1."""
    reasons: dict[str, Reason] = {}
    for c in ordered:
        model, current = c.model, c.current
        stay = field.resulting(model, current) if current is not None and _may_stay(field, c) else inf
        found = field.best_first(model)
        options = tuple(islice(found, 1))
        if not options:
            kind, place, pressure = ModelKind.UNPLACED, None, inf
        elif stay < inf and not options[0].pressure < stay * (1 - rules.tau):
            kind, place, pressure = ModelKind.STAYS, current, stay
        else:
            options += tuple(islice(found, max(0, rules.explain - 1)))
            kind = ModelKind.PLACED if current is None else ModelKind.MOVES if stay < inf else ModelKind.DISPLACED
            place, pressure = options[0].place, options[0].pressure
        if place is not None:
            field.book(model, place.devices)
        reasons[model.name] = Reason(kind, model.name, place, model.demand, pressure, stay, rules.tau, 0.0, options)
    return reasons


def _first_fit_decreasing(
    field: Field, candidates: Sequence[Candidate], *, stay_first: bool, wide_first: bool
) -> dict[str, Reason]:
    """Places by descending weights: each model goes to the first place that has room. `stay_first`: a model's present
    place comes first. `wide_first`: models of many parts, which need room on many devices of a group at once, go before
    all others."""
    reasons: dict[str, Reason] = {}

    def order(c: Candidate) -> tuple[int, int, str]:
        return -c.model.parts if wide_first else 0, -c.model.needed * c.model.parts, c.model.name

    for c in sorted(candidates, key=order):
        model, current = c.model, c.current
        place = None
        if stay_first and current is not None and _may_stay(field, c) and field.resulting(model, current) < inf:
            place = current
        place = place or field.first(model)
        pressure = inf
        if place is not None:
            pressure = field.resulting(model, place)
            field.book(model, place.devices)
        kind = ModelKind.UNPLACED if place is None else ModelKind.PACKED
        reasons[model.name] = Reason(kind, model.name, place, model.demand, pressure)
    return reasons


def _may_stay(field: Field, c: Candidate) -> bool:
    return c.current is not None and field.has(c.current)


def _unplaced(reasons: dict[str, Reason]) -> int:
    return sum(reason.place is None for reason in reasons.values())
