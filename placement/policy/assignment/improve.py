"""Local search: from an assignment to one whose largest pressures are lower, one small change after the other.

Algorithm 1 decides once for each model and never looks back, and first-fit-decreasing does not look at pressure at
all. Here the device with the highest pressure is relieved: one of its models goes elsewhere, or changes places with
another one, whichever leaves the least pressure on the devices that it touches. If nothing does, its models and those
of another place are divided anew between the two, all ways tried (`repartition.py`). If that does not help either, the
device with the next highest pressure is looked at. A step is one device looked at; their number is bounded, and there
is no clock.

A change has to leave all devices that it touches below the pressure that it set out to relieve: by more than tau where
it takes a model from the place where it is active, by anything where its models are to be placed or moved anyway. So
the pressures of all devices, in descending order, become lexicographically less with each change, and the search never
comes back to where it was.

A step costs a few passes over the arrays of devices and models for each model of the device without which that device
would be relieved: whatever comes in its place adds to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from placement.policy.assignment import repartition
from placement.policy.field import Field, Floats, pressures_of
from placement.policy.kvpr import Model, Place

STRICTLY = 1e-9
"""Share by which a pressure has to be lower to count as lower."""
_PARTNERS = 16
"""The most places that one pressed place's models are divided with."""
_LEFT_OUT_TRIES = 256
"""How many models are looked at as the one that goes, for all together that packing left out; four times as many pairs
of devices are."""

Numbers = tuple[int, ...]
"""Numbers of the devices of a place."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A model that the search may put elsewhere."""

    model: Model
    place: Place
    home: Place | None
    """Where the model is active; None: nowhere."""


@dataclass(frozen=True, slots=True)
class AssignmentChange:
    """A model's new place, and the pressure that the last step which touched it lowered, before and after."""

    place: Place
    before: float
    after: float


def improve(
    field: Field, placed: Sequence[Placed], steps: int, tau: float, *, divides: bool = True
) -> dict[str, AssignmentChange]:
    """Lowers the largest pressures of `field`, in which all of `placed` are booked beside models that cannot move.
    Changes `field`. Takes at most `steps` steps. Returns the models that end elsewhere."""
    search = _Search(field, placed, tau)
    search.divides = divides
    search.run(steps)
    return search.changes()


def clearly_lower(one: Field, other: Field, tau: float) -> bool:
    """Whether the pressures of `one`, in descending order, fall below those of `other` by more than the share tau
    somewhere, and are nowhere higher before that. Repeating such a change never leads in a circle: each time the
    pressures become lexicographically less."""
    ours, theirs = -np.sort(-one.pressures()), -np.sort(-other.pressures())
    lower = np.flatnonzero(ours < theirs * (1 - tau))
    higher = np.flatnonzero(ours > theirs * (1 + STRICTLY))
    return bool(len(lower)) and (not len(higher) or int(lower[0]) < int(higher[0]))


def place_left_out(
    field: Field, placed: Sequence[Placed], homeless: Sequence[Model], *, divides: bool = True
) -> dict[str, Place]:
    """Places for models of one part that fit nowhere, made by moving one model elsewhere, by an exchange of two, or by
    gathering room on one device. Changes the field, in which `placed` are booked. Returns all new places: of models
    that found one, and of models that went out of the way."""
    search = _Search(field, placed, 0.0)
    search.tries, search.pairs = _LEFT_OUT_TRIES, 4 * _LEFT_OUT_TRIES
    found: dict[str, Place] = {}
    left = sorted((m for m in homeless if m.parts == 1), key=lambda m: (-m.needed, m.name))
    for way in (
        (search.vacate, search.gather) if divides else (search.vacate,)
    ):  # gather comes second: a model that needs much may use up all its pairs
        for model in [m for m in left if m.name not in found]:
            place = field.first(model) or way(model)
            if place is not None:
                field.book(model, place.devices)
                found[model.name] = place
    return found | search.places()


class _Search:
    def __init__(self, field: Field, placed: Sequence[Placed], tau: float) -> None:
        self._field = field
        self._placed = placed
        self._tau = tau
        self.tries = 0
        """Number of models that `vacate` may still look at."""
        self.divides = True
        self.pairs = 0
        """Number of pairs of devices that `gather` may still look at."""
        self._places = [p.place for p in placed]
        self._numbers = [field.numbers(p.place) for p in placed]
        self._known = dict(zip(self._numbers, self._places, strict=True))
        """Numbers of devices -> the place that has them, also places where no model is any more."""
        self._steps_of: dict[int, tuple[float, float]] = {}
        self._on: dict[int, list[int]] = {}
        for i, numbers in enumerate(self._numbers):
            for device in numbers:
                self._on.setdefault(device, []).append(i)
        self._demand = np.array([p.model.part_demand for p in placed])
        self._fixed = np.array([float(p.model.fixed) for p in placed])
        self._needed = np.array([float(p.model.needed) for p in placed])
        self._at_home = np.array([p.home == p.place for p in placed], dtype=np.bool_)
        self._alike: dict[int, NDArray[np.int64]] = {}
        self._columns: dict[int, NDArray[np.int64]] = {}
        """Number of parts -> for all models of so many: the devices of their first parts, of their second parts, and so
        on."""
        for parts in {p.model.parts for p in placed}:
            self._alike[parts] = np.array([i for i, p in enumerate(placed) if p.model.parts == parts])
            self._columns[parts] = np.array([self._numbers[i] for i in self._alike[parts]]).T.copy()
        self._apart: dict[int, NDArray[np.int64]] = {}
        """Number of parts -> the devices of the places of models of so many, each place once, as they were at the first
        use."""
        self._row = {int(i): row for alike in self._alike.values() for row, i in enumerate(alike)}

    def run(self, steps: int) -> None:
        pressures = self._field.pressures()
        looked_at = np.zeros(len(pressures), dtype=np.bool_)
        changed = False
        for _ in range(steps):
            device = int(np.where(looked_at, -1.0, pressures).argmax()) if len(pressures) else 0
            if not len(pressures) or looked_at[device] or pressures[device] <= 0:
                if not changed:
                    return
                changed = False
                looked_at[:] = False
                continue
            touched = self._relieve(device, float(pressures[device]))
            looked_at[device] = True
            if touched:
                changed = True
                looked_at[touched] = False
                pressures = self._field.pressures()

    def changes(self) -> dict[str, AssignmentChange]:
        moved = self.places()
        return {
            p.model.name: AssignmentChange(moved[p.model.name], *self._steps_of[i])
            for i, p in enumerate(self._placed)
            if p.model.name in moved
        }

    def places(self) -> dict[str, Place]:
        """Model -> new place, for models that end elsewhere."""
        pairs = zip(self._placed, self._places, strict=True)
        return {p.model.name: place for p, place in pairs if place != p.place}

    def vacate(self, model: Model) -> Place | None:
        """A place for a model of one part that fits nowhere, after one change of other models that makes it fit: the
        device that lacks least comes first, and of the changes there the one that moves the fewest bytes."""
        field, ones = self._field, self._alike.get(1)
        if ones is None or self.tries == 0:
            return None
        at, needed, fixed = self._columns[1][0], self._needed[ones], self._fixed[ones]
        free, left = field.free[at], field.left[at]
        fits_then = (free + needed >= model.needed) & (left + fixed > model.fixed)
        rows = np.flatnonzero(fits_then)
        for row in rows[np.lexsort((needed[rows], -free[rows]))]:
            if self.tries == 0:
                return None
            self.tries -= 1
            i, device = int(ones[row]), int(at[row])
            moved = self._placed[i].model
            spot = field.first(moved)  # not its present place, which it leaves to the other
            if spot is not None and device not in field.numbers(spot):
                here = self._places[i]
                self._put([(i, spot)])
                return here
            # or it changes places with a smaller model, which leaves enough room beside it
            swaps = (
                (field.free[device] + needed[row] - needed >= model.needed)
                & (field.left[device] + fixed[row] - fixed > model.fixed)
                & (free + needed >= needed[row])
                & (left + fixed > fixed[row])
                & (at != device)
            )
            if swaps.any():
                other = int(ones[np.where(swaps, needed, inf).argmin()])
                here = self._places[i]
                self._put([(i, self._places[other]), (other, here)])
                return here
        return None

    def gather(self, model: Model) -> Place | None:
        """A place for a model of one part that fits nowhere: the room of several devices is brought together on one.
        The models of that device and of another one are divided anew, then with the next device; devices with the most
        room come first."""
        if 1 not in self._columns or self.pairs == 0:
            return None
        freest = [(number,) for number in map(int, _least(-self._field.free, _PARTNERS))]
        if sum(float(self._field.free[number]) for (number,) in freest) < model.needed:
            return None
        for here in freest:
            before: dict[int, Numbers] = {}
            for there in freest:
                those = [i for n in (here, there) for i in self._on.get(n[0], ()) if self._numbers[i] == n]
                if there == here or self.pairs == 0 or len(those) > repartition.MOST:
                    continue
                self.pairs -= 1
                models = [self._placed[i].model for i in those]
                on = repartition.gather(models, self._side(here, those), self._side(there, those))
                if on is None:
                    continue
                to = [here if is_here else there for is_here in on]
                moved = [(i, n) for i, n in zip(those, to, strict=True) if self._numbers[i] != n]
                before = {i: self._numbers[i] for i, _ in moved} | before
                self._place_at(moved)
                if self._field.free[here[0]] >= model.needed and self._field.left[here[0]] > model.fixed:
                    return self._field.single(here[0])
            self._place_at(list(before.items()))
        return None

    def _relieve(self, device: int, pressure: float) -> list[int]:
        """Makes the best change for the device, if there is one. Returns the devices that it touched."""
        best: tuple[float, int, int, Place | None] = (inf, -1, -1, None)
        for i in self._on.get(device, ()):
            limit = self._limit(pressure, bool(self._at_home[i]))
            left_behind = self._left_behind(i)
            if left_behind >= limit or left_behind >= best[0]:
                continue
            worst, place = self._elsewhere(i, left_behind)
            if worst < limit and worst < best[0]:
                best = worst, i, -1, place
            worst, other = self._swap(i, pressure)
            if worst < best[0]:
                best = worst, i, other, None
        worst, i, other, place = best
        if i < 0:
            return self._divide(device, pressure) if self.divides else []
        touched = {*self._numbers[i]}
        if place is None:
            touched |= {*self._numbers[other]}
            mine, theirs = self._places[i], self._places[other]
            self._put([(i, theirs), (other, mine)])
            self._steps_of[other] = (pressure, worst)
        else:
            self._put([(i, place)])
            touched |= {*self._numbers[i]}
        self._steps_of[i] = (pressure, worst)
        return sorted(touched)

    def _divide(self, device: int, pressure: float) -> list[int]:
        """Makes the best division between a place of the device and another place that relieves the device, if there is
        one. Returns the devices that it touched."""
        limit, home_limit = self._limit(pressure, False), self._limit(pressure, True)
        best: tuple[repartition.Division, list[int], Numbers, Numbers] | None = None
        for here in {self._numbers[i] for i in self._on.get(device, ())}:
            for there, least in self._partners(here):
                if least >= min(limit, best[0].pressure if best else inf):
                    break
                those = [i for n in (here, there) for i in self._on.get(n[0], ()) if self._numbers[i] == n]
                those = sorted(those, key=lambda i: -self._demand[i])[: repartition.MOST]
                found = repartition.divide(
                    [self._placed[i].model for i in those],
                    [self._numbers[i] == here for i in those],
                    [bool(self._at_home[i]) for i in those],
                    self._side(here, those),
                    self._side(there, those),
                    limit,
                    home_limit,
                )
                if found is not None and (best is None or found.pressure < best[0].pressure):
                    best = found, those, here, there
        if best is None:
            return []
        found, those, here, there = best
        moves = [(i, here if on else there) for i, on in zip(those, found.there, strict=True)]
        moved = [(i, to) for i, to in moves if self._numbers[i] != to]
        self._place_at(moved)
        for i, _ in moved:
            self._steps_of[i] = (pressure, found.pressure)
        return sorted({*here, *there})

    def _place_at(self, moves: Sequence[tuple[int, Numbers]]) -> None:
        """Books models elsewhere, by numbers of devices; for models of several parts these have to be of a place that a
        model has had."""
        self._put([(i, self._field.single(to[0]) if len(to) == 1 else self._known[to]) for i, to in moves])

    def _partners(self, here: Numbers) -> list[tuple[Numbers, float]]:
        """Other places for as many parts, each with the pressure below which no division with it can come; those that
        can come lowest are first. For models of one part these are all devices, for others the places that such models
        have."""
        field, parts = self._field, len(here)
        mine = list(here)
        if parts == 1:
            columns = np.arange(len(field.demand))[None]
        else:
            if parts not in self._apart:
                self._apart[parts] = np.unique(self._columns[parts], axis=1)
            columns = self._apart[parts]
        demand = field.demand[columns].sum(axis=0) + field.demand[mine].sum()
        left = field.left[columns].sum(axis=0) + field.left[mine].sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            least = np.where(left > 0, demand / left, inf)
            by_load = demand / ((1 / field.load[columns]).sum(axis=0) + (1 / field.load[mine]).sum())
        np.maximum(least, by_load, out=least)
        least[np.isin(columns, mine).any(axis=0)] = inf
        return [(tuple(map(int, columns[:, k])), float(least[k])) for k in _least(least, _PARTNERS)]

    def _side(self, numbers: Numbers, without: Iterable[int]) -> repartition.Side:
        field, rows = self._field, list(numbers)
        gone = [i for i in without if self._numbers[i] == numbers]
        return repartition.Side(
            field.demand[rows] - self._demand[gone].sum(),
            field.left[rows] + self._fixed[gone].sum(),
            field.free[rows] + self._needed[gone].sum(),
            field.load[rows],
        )

    def _limit(self, pressure: float, at_home: bool) -> float:
        return pressure * (1 - (max(self._tau, STRICTLY) if at_home else STRICTLY))

    def _left_behind(self, i: int) -> float:
        """The highest pressure on a model's devices if it leaves them."""
        field, demand, fixed = self._field, float(self._demand[i]), float(self._fixed[i])
        found = 0.0
        for row in self._numbers[i]:
            total = float(field.demand[row]) - demand
            found = max(found, total / (float(field.left[row]) + fixed) + total * float(field.load[row]))
        return found

    def _elsewhere(self, i: int, left_behind: float) -> tuple[float, Place | None]:
        """The best place for a model if it leaves its present one, and the highest pressure on the devices touched."""
        field, rows = self._field, list(self._numbers[i])
        kept = field.demand[rows], field.left[rows], field.free[rows]
        field.demand[rows] -= self._demand[i]
        field.left[rows] += self._fixed[i]
        field.free[rows] += self._needed[i]
        options = field.best(self._placed[i].model)
        field.demand[rows], field.left[rows], field.free[rows] = kept
        if not options:
            return inf, None
        return max(options[0].pressure, left_behind), options[0].place

    def _swap(self, i: int, pressure: float) -> tuple[float, int]:
        """The best model to change places with, among those of as many parts, and the highest pressure on the devices
        touched."""
        field, parts = self._field, self._placed[i].model.parts
        alike, columns = self._alike[parts], self._columns[parts]
        demand, fixed, needed = (of[alike] - of[i] for of in (self._demand, self._fixed, self._needed))
        at_home = self._at_home[alike] | self._at_home[i]
        limit = np.where(at_home, self._limit(pressure, True), self._limit(pressure, False))
        worst = np.zeros(len(alike))
        bad = np.zeros(len(alike), dtype=np.bool_)
        with np.errstate(divide="ignore", invalid="ignore"):
            for mine in self._numbers[i]:
                left = field.left[mine] - fixed
                bad |= (needed > field.free[mine]) | (left <= 0)
                np.maximum(worst, pressures_of(field.demand[mine] + demand, left, field.load[mine]), out=worst)
            for theirs in columns:
                left = field.left[theirs] + fixed
                bad |= (-needed > field.free[theirs]) | (left <= 0)
                np.maximum(worst, pressures_of(field.demand[theirs] - demand, left, field.load[theirs]), out=worst)
                for mine in self._numbers[i]:
                    bad |= theirs == mine
        bad |= ~(worst < limit)
        worst[bad] = inf
        row = int(worst.argmin())
        return float(worst[row]), int(alike[row])

    def _put(self, moves: Iterable[tuple[int, Place]]) -> None:
        """Books models elsewhere."""
        field = self._field
        for i, place in moves:
            rows = list(self._numbers[i])
            field.demand[rows] -= self._demand[i]
            field.left[rows] += self._fixed[i]
            field.free[rows] += self._needed[i]
            for row in rows:
                self._on[row].remove(i)
                if not self._on[row] and abs(field.demand[row]) < STRICTLY * self._demand[i]:
                    field.demand[row] = 0.0  # rounding error of adding and subtracting demands
            self._places[i], self._numbers[i] = place, field.numbers(place)
            self._known[self._numbers[i]] = place
            self._columns[len(rows)][:, self._row[i]] = self._numbers[i]
            self._at_home[i] = place == self._placed[i].home
            rows = list(self._numbers[i])
            field.demand[rows] += self._demand[i]
            field.left[rows] -= self._fixed[i]
            field.free[rows] -= self._needed[i]
            for row in rows:
                self._on.setdefault(row, []).append(i)


def _least(values: Floats, count: int) -> NDArray[np.int64]:
    """Indices of the `count` least values, in ascending order of value."""
    found = np.argpartition(values, count)[:count] if len(values) > count else np.arange(len(values))
    ordered: NDArray[np.int64] = found[np.argsort(values[found], kind="stable")]
    return ordered
