"""Which models are to move now: Algorithm 1 says where they belong, `moves` in which order they get there.

A model that nobody has asked for lately neither moves nor is in the way: it sleeps where its memory is wanted. So it
counts as asleep, and who moves to where it is has it make way (`Standing.activate`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from placement.policy import kvpr
from placement.policy.assign import AssignRules, Candidate, Reason, assign
from placement.policy.decisions import Resident
from placement.policy.kvpr import Books, Group, Model, Place
from placement.policy.moves import Move, MoveRules, plan_moves


@dataclass(frozen=True, slots=True)
class RebalanceRules:
    """Numbers of both."""

    assign: AssignRules = AssignRules()
    moves: MoveRules = MoveRules()
    least_pressure: float = 0.05
    """Nothing moves off a group with less: a move would cost more than it brings."""
    least_share: float = 0.1
    """Nor does a model with a smaller share of the demand on its devices."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A migration that can begin now."""

    move: Move
    reason: Reason


def rebalance(
    groups: Sequence[Group],
    residents: Sequence[Resident],
    moved_at: Mapping[str, float],
    now: float,
    rules: RebalanceRules | None = None,
) -> list[Wanted]:
    """Migrations among `groups`. `residents`: all that holds memory there. `moved_at`: when a model last moved
    (seconds)."""
    rules = rules or RebalanceRules()
    active: dict[str, Resident] = {}
    for resident in residents:
        if not resident.hibernating:
            active.setdefault(resident.model.name, resident)
    booked = [(_counted(r), r.place) for r in residents]
    if len(groups) < 2 or not active or not _relievable(groups, booked, rules):
        return []
    moving = _worth_moving(groups, booked, active, rules)
    assignment = assign(
        groups,
        [Candidate(r.model, r.place, moved_at.get(name, -inf)) for name, r in moving.items()],
        now,
        replace(rules.assign, least_pressure=rules.least_pressure),
        [each for r, each in zip(residents, booked, strict=True) if r is not moving.get(r.model.name)],
    )
    if all(assignment.places.get(name, r.place) == r.place for name, r in active.items()):
        return []
    plan = plan_moves(groups, booked, assignment.places, now, rules.moves, moved_at=moved_at, most_waves=1)
    first = plan.waves[0] if plan.waves else ()
    wanted = (Wanted(move, assignment.reasons[move.model]) for move in first)
    return [each for each in wanted if not each.reason.stay_pressure < rules.least_pressure]


def _idle(resident: Resident) -> bool:
    """Whether nobody has asked for it lately, and it may leave."""
    return resident.model.demand <= kvpr.LEAST_DEMAND and resident.idle_s > 0.0 and not resident.model.pinned


def _counted(resident: Resident) -> Model:
    return resident.model.asleep() if _idle(resident) else resident.booked


def _worth_moving(
    groups: Sequence[Group],
    booked: Iterable[tuple[Model, Place]],
    active: Mapping[str, Resident],
    rules: RebalanceRules,
) -> dict[str, Resident]:
    """Of those that are active and asked for, by name: those with their share of the demand, and all where a device
    is overcommitted."""
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
    """Whether any device has a pressure worth a move that a move could lower by more than tau. It could not where one
    model brings so much of it that it would bring as much along to the largest device of all, alone there.

    Asked once a period, and nearly always answered with no: so it goes through the models once, with little else."""
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
        if pressure < rules.least_pressure:
            continue
        if sum(model.needed for model in models) > at.capacity:
            return True
        fixed = next(model.fixed for model in models if model.part_demand == heaviest)
        if kvpr.pressure(heaviest, largest, fixed, least_load) < pressure * (1 - rules.assign.tau):
            return True
    return False
