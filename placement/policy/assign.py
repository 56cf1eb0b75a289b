"""Algorithm 1: which model lives where.

Models by descending demand; each goes to the place with the least *resulting* pressure (W + w) / (S - weights),
infinite where it does not fit. It leaves the place it has only if that is better by more than tau of the pressure of
staying, and not within its cool-down. The paper compares pressures before the model is added and an absolute tau;
resulting pressures see what the model itself brings (a large model on a small device), and a relative tau means the
same at any load.

Pinned models and those in their cool-down do not take part: they are booked where they are before the others choose, so
that nobody is put where they will stay.

Where this order leaves a model without a place, first-fit-decreasing by weights decides for all that may move: first
with each model's present place as its first choice, then without. It counts only if it places more models than the
greedy order did. A model that fits nowhere, even with everything that may move gone, changes nothing for the others.

Tensor-parallel models: n parts on the n least pressured distinct devices of one group, judged by the worst of these.

10,000 models on 10,000 devices take about half a second on one core; `field.py` says how and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from placement.policy.field import Field, Option
from placement.policy.kvpr import Group, Model, Place


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that is to have a place."""

    model: Model
    current: Place | None = None
    """Where it is active (or on its way to); None: nowhere."""
    moved_at: float = -inf
    """When it last moved (seconds)."""


@dataclass(frozen=True, slots=True)
class AssignRules:
    """Numbers of Algorithm 1."""

    tau: float = 0.2
    """A move has to lower the pressure by more than this share of the pressure of staying."""
    cool_down_s: float = 60.0
    """A model that moved stays at least this long: the length of the rate window, so that the effect shows first."""
    explain: int = 3
    """How many of the best places a reason names."""


class Kind(Enum):
    """What the algorithm did with a model."""

    PINNED = "pinned"
    COOLING = "cooling down"
    STAYS = "stays"
    MOVES = "moves"
    DISPLACED = "displaced"
    """Its place has no room for it any more, or is gone."""
    PLACED = "placed"
    """It had no place."""
    PACKED = "packed"
    """First-fit-decreasing by weights decided."""
    UNPLACED = "unplaced"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a model got its place, with the numbers that were compared."""

    kind: Kind
    model: str
    place: Place | None
    demand: float
    pressure: float = inf
    """Resulting pressure at the place that it got."""
    stay_pressure: float = inf
    """Resulting pressure where it was; +inf if it was nowhere or does not fit there any more."""
    tau: float = 0.0
    cool_down_left_s: float = 0.0
    options: tuple[Option, ...] = ()
    """The best places, best first."""

    @property
    def text(self) -> str:
        """One sentence for `explain`."""
        where = self.place.group if self.place else "nowhere"
        best = self.options[0] if self.options else None
        match self.kind:
            case Kind.PINNED:
                return f"pinned to {where}"
            case Kind.COOLING:
                return f"stays on {where}: it moved lately, {self.cool_down_left_s:.0f} s of its cool-down are left"
            case Kind.STAYS if best is not None:
                return (
                    f"stays on {where}: pressure {self.stay_pressure:.4g}, the best is {best.place.group} with "
                    f"{best.pressure:.4g}; a move takes more than {self.tau:.0%} less"
                )
            case Kind.MOVES:
                return (
                    f"moves to {where}: pressure {self.pressure:.4g} instead of {self.stay_pressure:.4g}, "
                    f"more than {self.tau:.0%} less"
                )
            case Kind.DISPLACED:
                return f"moves to {where} (pressure {self.pressure:.4g}): where it was there is no room for it"
            case Kind.PLACED:
                return f"goes to {where}, the least resulting pressure: {self.pressure:.4g}"
            case Kind.PACKED:
                return f"goes to {where}: by demand not every model found a place, so weights decided, largest first"
            case _:
                return "no place has room for it"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Every candidate has a reason; one without a place is not in `places`."""

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
    """Places for all candidates. `booked`: what else holds memory on the devices (a hibernating engine's quota).

    Names are unique, each place is one of `groups` or counts as gone.
    """
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
        reason = _fixed(c, now, rules) if c.current is not None and field.has(c.current) else None
        if reason is None:
            free.append(c)
            continue
        assert reason.place is not None
        field.book(c.model, reason.place.devices)
        places[c.model.name], reasons[c.model.name] = reason.place, reason

    chosen = _greedy(field.copy(), free, rules)
    homeless = [c for c in free if chosen[c.model.name].place is None]
    if any(field.best(c.model) for c in homeless):
        for stay_first in (True, False):
            packed = _first_fit_decreasing(field.copy(), free, stay_first=stay_first)
            if _unplaced(packed) < _unplaced(chosen):
                chosen = packed
            if not _unplaced(chosen):
                break
    for name, reason in chosen.items():
        reasons[name] = reason
        if reason.place is not None:
            places[name] = reason.place
    return Assignment(places, reasons)


def _fixed(c: Candidate, now: float, rules: AssignRules) -> Reason | None:
    """The reason for which a model may not move at all, if there is one."""
    left = c.moved_at + rules.cool_down_s - now
    if c.model.pinned:
        return Reason(Kind.PINNED, c.model.name, c.current, c.model.demand)
    if left > 0:
        return Reason(Kind.COOLING, c.model.name, c.current, c.model.demand, cool_down_left_s=left)
    return None


def _greedy(field: Field, ordered: Sequence[Candidate], rules: AssignRules) -> dict[str, Reason]:
    """Lines 5 to 12 of Algorithm 1."""
    reasons: dict[str, Reason] = {}
    for c in ordered:
        model, current = c.model, c.current
        options = tuple(field.best(model, max(1, rules.explain)))
        stay = field.resulting(model, current) if current is not None and _may_stay(field, c) else inf
        if not options:
            kind, place, pressure = Kind.UNPLACED, None, inf
        elif stay < inf and not options[0].pressure < stay * (1 - rules.tau):
            kind, place, pressure = Kind.STAYS, current, stay
        else:
            kind = Kind.PLACED if current is None else Kind.MOVES if stay < inf else Kind.DISPLACED
            place, pressure = options[0].place, options[0].pressure
        if place is not None:
            field.book(model, place.devices)
        reasons[model.name] = Reason(kind, model.name, place, model.demand, pressure, stay, rules.tau, 0.0, options)
    return reasons


def _first_fit_decreasing(field: Field, candidates: Sequence[Candidate], *, stay_first: bool) -> dict[str, Reason]:
    """By weights, each model to the first place that has room; `stay_first`: that is the one where it is."""
    reasons: dict[str, Reason] = {}
    for c in sorted(candidates, key=lambda c: (-c.model.needed * c.model.parts, c.model.name)):
        model, current = c.model, c.current
        place = None
        if stay_first and current is not None and _may_stay(field, c) and field.resulting(model, current) < inf:
            place = current
        place = place or field.first(model)
        pressure = inf
        if place is not None:
            pressure = field.resulting(model, place)
            field.book(model, place.devices)
        kind = Kind.UNPLACED if place is None else Kind.PACKED
        reasons[model.name] = Reason(kind, model.name, place, model.demand, pressure)
    return reasons


def _may_stay(field: Field, c: Candidate) -> bool:
    return c.current is not None and field.has(c.current)


def _unplaced(reasons: dict[str, Reason]) -> int:
    return sum(reason.place is None for reason in reasons.values())
