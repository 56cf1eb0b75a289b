"""Which models are to move now: Algorithm 1 says where they belong, `moves` in which order they get there, `rounds` how
many moves it takes until the cluster is better off. For half a minute after each move of a round only the rest of that
round is considered, as long as it still makes the cluster better off.

Nothing moves while nobody is late: a move is begun only off a group, or in exchange with one, whose memory is
overbooked or where a request missed a target lately, and never where it would put models to sleep that return more
often than targets are missed (`worth.py`). For requests that are late only models move whose place was chosen before
anything was known of their traffic, once each: every further move that followed a minute's rates cost more than it
brought (decision 035). Where no such move lowers the pressure, models that sleep and will be asked for again soon get
room to be awake, if no device where requests are late has a pressure that rises by more than tau for it.

A model without recent requests neither moves nor is in the way: it hibernates where its memory is wanted. So it counts
as asleep, and a model that moves to its group has it make way (`GroupIndex.activate`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import inf

from placement.policy import kvpr
from placement.policy.assignment.assign import AssignRules, Candidate, ModelKind, Reason, assign, held
from placement.policy.assignment.moves import Move, MovePlan, MoveRules, plan_moves
from placement.policy.assignment.rounds import Outlook
from placement.policy.field import Field, pressures_of
from placement.policy.kvpr import Books, Group, Model, Place
from placement.policy.lifecycle.decisions import PlacedModel
from placement.policy.outcomes import Outcomes, will_return

_MOST_WAVES = 64
"""The most waves that are looked at for a round. Nearly all searches end with the first or the second."""
_PRESSED = 8
"""Number of the most pressed devices off which a single move is looked for if no round is found."""
_GO_ON_S = 30.0
"""Seconds after a move in which only the rest of its round is considered: until the source reports that it has released
the model, an engine that failed is there again, or an idle model has been idle for long enough to make way."""


@dataclass(frozen=True, slots=True)
class RebalanceRules:
    """Rules of assignment, moves and rebalancing."""

    assign: AssignRules = AssignRules()
    moves: MoveRules = MoveRules()
    first_do_no_harm: bool = True
    """Whether models move only where requests miss their targets. False: for a gain in pressure alone, as in the
    paper."""
    headroom: float = 0.4
    """Share of a device's KV memory that stays free of running requests when models that sleep get room."""
    least_share: float = 0.1
    """Share of the demand on its devices below which a model does not move. From 0 to 0.5 it makes no difference of
    half a point (docs/lab/tuning.md)."""


@dataclass(frozen=True, slots=True)
class WantedMove:
    """A migration with its reason."""

    move: Move
    reason: Reason


@dataclass(frozen=True, slots=True)
class Round:
    """Moves that are one change: the cluster is better off after all of them."""

    moves: tuple[WantedMove, ...] = ()
    begin: tuple[WantedMove, ...] = ()
    """The moves of the round that can begin now."""


NONE = Round()


def rebalance(
    groups: Sequence[Group],
    residents: Sequence[PlacedModel],
    moved_at: Mapping[str, float],
    now: float,
    rules: RebalanceRules | None = None,
    last: Round = NONE,
    outcomes: Outcomes | None = None,
    settled: Container[str] = (),
) -> Round:
    """Migrations among `groups` that are wanted now. `residents`: all that holds memory there. `moved_at`: model ->
    second at which it last moved. `last`: the round that was wanted the time before. `outcomes`: what became of
    requests; None: unknown, so that pressure decides alone. `settled`: models whose place was chosen by what they are
    asked for."""
    rules = rules or RebalanceRules()
    active: dict[str, PlacedModel] = {}
    several: set[str] = set()
    """Models that are active on several groups: none of them moves."""
    for resident in residents:
        if not resident.hibernating and active.setdefault(resident.model.name, resident) is not resident:
            several.add(resident.model.name)
    active = {name: resident for name, resident in active.items() if name not in several}
    booked = [(_counted(r), r.place) for r in residents]
    if len(groups) < 2 or not active:
        return NONE

    there = _There(groups, booked, moved_at, now, rules)
    left, came = _left(groups, residents, last)
    if left and came and now - max(moved_at.get(name, -inf) for name in came) < _GO_ON_S:
        lingers = {(each.move.model, each.move.source) for each in last.moves if each.move.model in came}
        outlook = Outlook(groups, [(m, place) for m, place in booked if (m.name, place) not in lingers])
        outlook.make(each.move for each in left)
        if outlook.better(0.0):
            return Round(last.moves, there.beginning(left))
    if outcomes is None or not rules.first_do_no_harm:
        return _search(there, residents, active, {group.name for group in groups})
    late = {
        r.place.group
        for r in residents
        if not r.hibernating and outcomes.missed(r.model.name, now, r.place.group if r.elsewhere else None)
    }
    overbooked = _overcommitted(groups, booked)
    unsettled = {name: r for name, r in active.items() if name not in settled}
    roomy = _with_returning(groups, residents, outcomes, now, rules)
    for movable, troubled in ((active, overbooked), (unsettled, late | overbooked)):
        if not movable or not troubled:
            continue
        found = _search(there, residents, movable, troubled)
        if found.begin:
            return found
        if roomy == booked:
            continue
        found = _search(replace(there, booked=roomy), residents, movable, troubled)
        outlook = Outlook(groups, booked)
        outlook.make(each.move for each in found.moves)
        devices = {device.name for group in groups if group.name in troubled for device in group.devices}
        if found.moves and not outlook.harms(rules.assign.tau, devices):
            return found
    return NONE


def _search(
    there: _There, residents: Sequence[PlacedModel], active: Mapping[str, PlacedModel], troubled: AbstractSet[str]
) -> Round:
    """The round that Algorithm 1 wants, of moves off the groups `troubled` and of what changes places with those."""
    groups, booked, rules, now = there.groups, there.booked, there.rules, there.now
    if not troubled or not _relievable(groups, booked, rules):
        return NONE
    moving = _worth_moving(groups, booked, active, rules)
    assignment = assign(
        groups,
        [Candidate(r.model, r.place, there.moved_at.get(name, -inf)) for name, r in moving.items()],
        now,
        rules.assign,
        [each for r, each in zip(residents, booked, strict=True) if r is not moving.get(r.model.name)],
    )
    target = {
        name: assignment.places[name]
        for name, r in active.items()
        if (place := assignment.places.get(name, r.place)) != r.place
        and not troubled.isdisjoint((r.place.group, place.group))
    }
    moves = there.first_round(target) if target else []
    if all(move.source.group not in troubled for move in moves):
        moves = []
    wanted = tuple(WantedMove(move, assignment.reasons[move.model]) for move in moves)
    if begin := there.beginning(wanted):
        return Round(wanted, begin)
    # Where a whole round finds no room there may still be room for one of its moves.
    one = there.single(r for r in moving.values() if r.place.group in troubled)
    return NONE if one is None else Round((one,), (one,))


@dataclass(frozen=True, slots=True)
class _There:
    """The groups with all that is booked there, the last moves, the time and the rules."""

    groups: Sequence[Group]
    booked: Sequence[tuple[Model, Place]]
    moved_at: Mapping[str, float]
    now: float
    rules: RebalanceRules

    def plan(self, target: Mapping[str, Place], enough: Callable[[tuple[Move, ...]], bool]) -> MovePlan:
        return plan_moves(
            self.groups, self.booked, target, self.now, self.rules.moves, moved_at=self.moved_at, enough=enough
        )

    def beginning(self, wanted: Sequence[WantedMove]) -> tuple[WantedMove, ...]:
        """The wanted moves that can begin now; none if they cannot all be made, one after the other."""
        plan = self.plan({each.move.model: each.move.target for each in wanted}, lambda wave: False)
        first = {move.model for move in plan.waves[0]} if plan.waves and not plan.held else ()
        return tuple(each for each in wanted if each.move.model in first)

    def first_round(self, target: Mapping[str, Place]) -> list[Move]:
        """The first moves on the way to `target` after which the devices are better off by more than tau; none if there
        are no such moves."""
        outlook = Outlook(self.groups, self.booked)
        found: list[Move] = []
        looked_at = 0

        def enough(wave: tuple[Move, ...]) -> bool:
            nonlocal looked_at
            outlook.make(wave)
            for move in wave:
                if outlook.better(self.rules.assign.tau, move):
                    found.extend(outlook.with_it(move))
                    return True
            looked_at += 1
            return looked_at >= _MOST_WAVES

        self.plan(target, enough)
        return found

    def single(self, moving: Iterable[PlacedModel]) -> WantedMove | None:
        """The best move of one model, off one of the most pressed devices, that can be made as things are; None if
        there is none."""
        field = Field(self.groups, {})
        for model, place in self.booked:
            field.book(model, place.devices)
        pressures = field.pressures()
        pressed = {int(number): float(pressures[number]) for number in (-pressures).argsort(kind="stable")[:_PRESSED]}
        best: WantedMove | None = None
        for r in moving:
            worst = max((pressed.get(number, 0.0) for number in field.numbers(r.place)), default=0.0)
            candidate = Candidate(r.model, r.place, self.moved_at.get(r.model.name, -inf))
            if worst <= 0 or held(candidate, self.now, self.rules.assign):
                continue
            behind = _left_behind(field, r)
            for option in field.best(r.model, 2):
                after = max(behind, option.pressure)
                elsewhere = not set(option.place.devices) & set(r.place.devices)
                least = worst * (1 - self.rules.assign.tau)
                if elsewhere and after < least and (best is None or after < best.reason.pressure):
                    reason = Reason(ModelKind.IMPROVED, r.model.name, option.place, r.model.demand, after, worst)
                    best = WantedMove(Move(r.model.name, r.place, option.place), reason)
        return best


def _left_behind(field: Field, resident: PlacedModel) -> float:
    """The highest pressure on a model's devices if it leaves them."""
    rows, model = list(field.numbers(resident.place)), resident.model
    demand, left = field.demand[rows] - model.part_demand, field.left[rows] + model.fixed
    return float(pressures_of(demand, left, field.load[rows]).max()) if (left > 0).all() else inf


def _left(groups: Sequence[Group], residents: Sequence[PlacedModel], last: Round) -> tuple[list[WantedMove], list[str]]:
    """The moves of a round that are still to be made, and the models that have moved."""
    names = {each.move.model for each in last.moves}
    at: dict[str, dict[Place, PlacedModel]] = {}
    for r in residents if names else ():
        if r.model.name in names and not r.hibernating:
            at.setdefault(r.model.name, {})[r.place] = r
    came = [each.move.model for each in last.moves if each.move.target in at.get(each.move.model, {})]
    known = {device.name for group in groups for device in group.devices} if came else set()
    left = [
        each
        for each in last.moves
        if each.move.model not in came
        and (resident := at.get(each.move.model, {}).get(each.move.source)) is not None
        and not _idle(resident)
        and known.issuperset(each.move.target.devices)
    ]
    return left, came


def _idle(resident: PlacedModel) -> bool:
    """Whether the model has had no recent requests, and may leave."""
    return resident.model.demand <= kvpr.LEAST_DEMAND and resident.idle_s > 0.0 and not resident.model.pinned


def _counted(resident: PlacedModel) -> Model:
    return resident.model.asleep() if _idle(resident) else resident.booked


def _overcommitted(groups: Sequence[Group], booked: Iterable[tuple[Model, Place]]) -> set[str]:
    """Names of the groups with a device that lacks memory for what is booked there."""
    books = Books(groups)
    for model, place in booked:
        books.book(model, place.devices)
    return {group.name for group in groups if any(books.free(device.name) < 0 for device in group.devices)}


def _with_returning(
    groups: Sequence[Group], residents: Sequence[PlacedModel], outcomes: Outcomes, now: float, rules: RebalanceRules
) -> list[tuple[Model, Place]]:
    """What is booked if the models that sleep and will be asked for again soon are awake where they are, but for those
    whose memory the KV of running requests needs."""
    returning = {r.model.name for r in residents if r.hibernating and will_return(outcomes, r.model.name, now)}
    for group in groups if returning else ():
        here = [r for r in residents if r.place.group == group.name]
        for device in group.devices:
            on = [r for r in here if device.name in r.place.devices]
            fixed = sum((r.model if r.model.name in returning else r.booked).fixed for r in on)
            wanted = sum(r.kv_used + r.kv_lacking for r in on)
            if wanted > (1 - rules.headroom) * max(0, device.capacity - fixed):
                returning -= {r.model.name for r in on}
    return [(r.model if r.hibernating and r.model.name in returning else _counted(r), r.place) for r in residents]


def _worth_moving(
    groups: Sequence[Group],
    booked: Iterable[tuple[Model, Place]],
    active: Mapping[str, PlacedModel],
    rules: RebalanceRules,
) -> dict[str, PlacedModel]:
    """Active models with recent requests, by name: those with their share of the demand, and all models of a device
    that is overcommitted."""
    books = Books(groups)
    demand: dict[str, float] = {}
    for model, place in booked:
        books.book(model, place.devices)
        for device in place.devices:
            demand[device] = demand.get(device, 0.0) + model.part_demand
    return {
        name: r
        for name, r in active.items()
        if not _idle(r)
        and any(
            r.model.part_demand >= rules.least_share * demand[device] or books.free(device) < 0
            for device in r.place.devices
        )
    }


def _relievable(groups: Sequence[Group], booked: Iterable[tuple[Model, Place]], rules: RebalanceRules) -> bool:
    """Whether a move could lower the pressure of any device by more than tau. It could not if one model has so much of
    the demand that it would bring as much pressure along to the largest device of all, alone there.

    This is asked once a period, and the answer is nearly always no: so it goes through the models once, with little
    else.
    """
    on: dict[str, list[Model]] = {}
    for model, place in booked:
        for device in place.devices:
            on.setdefault(device, []).append(model)
    devices = {device.name: device for group in groups for device in group.devices}
    largest = max(device.capacity for device in devices.values())
    least_load = min(device.load for device in devices.values())
    for name, models in on.items():
        at = devices[name]
        left = at.capacity
        demand = heaviest = 0.0
        for model in models:
            left -= model.fixed
            demand += model.part_demand
            heaviest = max(heaviest, model.part_demand)
        pressure = kvpr.pressure(demand, left, 0, at.load)
        if sum(model.needed for model in models) > at.capacity:
            return True
        fixed = next(model.fixed for model in models if model.part_demand == heaviest)
        if kvpr.pressure(heaviest, largest, fixed, least_load) < pressure * (1 - rules.assign.tau):
            return True
    return False
