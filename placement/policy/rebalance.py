"""Which models are to move now: Algorithm 1 says where they belong, `moves` in which order they get there.

A model that nobody has asked for lately neither moves nor is in the way: it sleeps where its memory is wanted. So it
counts as asleep, and who moves to where it is has it make way (`Standing.activate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from placement.policy import kvpr
from placement.policy.assign import AssignRules, Candidate, Reason, assign
from placement.policy.decisions import Resident
from placement.policy.kvpr import Books, Group, Model
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
    if len(groups) < 2 or not active or not _relievable(groups, residents, rules):
        return []
    moving = _worth_moving(groups, residents, active, rules)
    assignment = assign(
        groups,
        [Candidate(r.model, r.place, moved_at.get(name, -inf)) for name, r in moving.items()],
        now,
        replace(rules.assign, least_pressure=rules.least_pressure),
        [(_counted(r), r.place) for r in residents if r is not moving.get(r.model.name)],
    )
    if all(assignment.places.get(name, r.place) == r.place for name, r in active.items()):
        return []
    booked = [(_counted(r), r.place) for r in residents]
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
    groups: Sequence[Group], residents: Sequence[Resident], active: Mapping[str, Resident], rules: RebalanceRules
) -> dict[str, Resident]:
    """Of those that are active and asked for, by name: those with their share of the demand, and all where a device
    is overcommitted."""
    books = Books(groups)
    demand: dict[str, float] = {}
    for resident in residents:
        model = _counted(resident)
        books.book(model, resident.place.devices)
        for device in resident.place.devices:
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


def _relievable(groups: Sequence[Group], residents: Sequence[Resident], rules: RebalanceRules) -> bool:
    """Whether any device has a pressure worth a move that a move could lower by more than tau. It could not where one
    model brings so much of it that it would bring as much along to the largest device of all, alone there."""
    books = Books(groups)
    heaviest: dict[str, Model] = {}
    for resident in residents:
        model = _counted(resident)
        books.book(model, resident.place.devices)
        for device in resident.place.devices:
            known = heaviest.get(device)
            if known is None or model.part_demand > known.part_demand:
                heaviest[device] = model
    largest = max(books.capacity(device.name) for group in groups for device in group.devices)
    for device, model in heaviest.items():
        pressure = books.pressure(device)
        alone = kvpr.pressure(model.part_demand, largest, model.fixed)
        if not pressure < rules.least_pressure and (
            alone < pressure * (1 - rules.assign.tau) or books.free(device) < 0
        ):
            return True
    return False
