"""The least largest pressure that any placement has, exactly; and the small clusters that it is asked for.

    minimise P   over all placements   with   W(d) <= P * (S(d) - fixed(d))   and   needed(d) <= S(d)   on each device d

`optimum` searches in whole numbers and cuts off what cannot be better than the best known. What it says is proved from
outside: `exists_below` asks HiGHS, a mixed-integer solver, for any placement with a lower pressure, which for a given
P is linear in who goes where. HiGHS alone takes a hundred times as long, so it proves samples; tests compare both with
all placements of smaller clusters.

OR-tools' CP-SAT would be the other solver to ask: its newest wheel (9.15) wants protobuf < 6.34, the services 7.36.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product

import highspy

from placement.policy.kvpr import Device, Group, Model, Place

TIME_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Instance:
    """Models that want a place, and what there is. Demands are whole multiples of the parts."""

    groups: tuple[Group, ...]
    models: tuple[Model, ...]


# --- pressure, exactly ------------------------------------------------------------------------------------------------


def largest_pressure(instance: Instance, places: Mapping[str, Place]) -> Fraction | None:
    """Of all devices; None if a model is nowhere, two parts of one are on the same device, a place is not of one
    group, or a device has too little room."""
    demand: dict[str, int] = {}
    left = {device.name: device.capacity for group in instance.groups for device in group.devices}
    load = {device.name: Fraction(device.load) for group in instance.groups for device in group.devices}
    room = dict(left)
    group_of = {device.name: group.name for group in instance.groups for device in group.devices}
    for model in instance.models:
        place = places.get(model.name)
        if place is None or len(set(place.devices)) != model.parts or len(place.devices) != model.parts:
            return None
        for device in place.devices:
            if group_of[device] != place.group:
                return None
            demand[device] = demand.get(device, 0) + int(model.demand) // model.parts
            left[device] -= model.fixed
            room[device] -= model.needed
    if any(room[device] < 0 or left[device] <= 0 for device in demand):
        return None
    return max((demand[device] * (Fraction(1, left[device]) + load[device]) for device in demand), default=Fraction(0))


def by_all_placements(instance: Instance) -> Fraction | None:
    """The optimum by trying all of them; None if there is none."""
    options = [
        [
            Place(group.name, tuple(device.name for device in devices))
            for group in instance.groups
            for devices in combinations(group.devices, model.parts)
        ]
        for model in instance.models
    ]
    names = [model.name for model in instance.models]
    found = (largest_pressure(instance, dict(zip(names, places, strict=True))) for places in product(*options))
    return min((pressure for pressure in found if pressure is not None), default=None)


# --- the optimum ------------------------------------------------------------------------------------------------------


class Undecided(Exception):
    """Not finished within the limit."""


def optimum(instance: Instance, known: Fraction | None = None, most_nodes: int = 1_000_000) -> Fraction | None:
    """The least largest pressure of any placement; None if there is no placement. `known`: of one that exists.
    Raises Undecided after `most_nodes` partial placements."""
    return _Search(instance, known, most_nodes).run()


class _Search:
    """Depth first: model after model, the hardest first, onto each device that keeps it below the best known.

    Pressure only rises as models come, so a device at or above the best is out. With P = a / b to beat, a device has
    a * left - b * demand to give, and a model takes b * demand + a * fixed of that: what has too little for the least
    of those that are still to come gives nothing, and if the others do not suffice for all of them nobody looks on.
    Of devices in the same state only the first is tried.
    """

    def __init__(self, instance: Instance, known: Fraction | None, most_nodes: int) -> None:
        devices = [device for group in instance.groups for device in group.devices]
        self._groups: list[list[int]] = []
        for group in instance.groups:
            first = sum(map(len, self._groups))
            self._groups.append(list(range(first, first + len(group.devices))))
        self._demand = [0] * len(devices)
        self._left = [device.capacity for device in devices]
        self._room = list(self._left)
        whole, memory = sum(m.demand for m in instance.models) or 1, sum(self._room)
        hardest = sorted(instance.models, key=lambda m: -(m.part_demand / whole + m.needed / memory) * m.parts**0.5)
        self._models = [(m.parts, int(m.demand) // m.parts, m.fixed, m.needed) for m in hardest]
        self._best = known
        self._nodes = most_nodes

    def run(self) -> Fraction | None:
        self._place(0)
        return self._best

    def _place(self, i: int) -> None:
        self._nodes -= 1
        if self._nodes < 0:
            raise Undecided
        if i == len(self._models):
            used = [Fraction(w, left) for w, left in zip(self._demand, self._left, strict=True) if w]
            self._best = max(used, default=Fraction(0))
            return
        if self._hopeless(i):
            return
        parts, demand, fixed, needed = self._models[i]
        for devices in self._options(parts):
            if not all(self._better(d, demand, fixed, needed) for d in devices):
                continue
            self._add(devices, demand, fixed, needed)
            self._place(i + 1)
            self._add(devices, -demand, -fixed, -needed)

    def _options(self, parts: int) -> list[tuple[int, ...]]:
        found: dict[object, tuple[int, ...]] = {}
        for group in self._groups:
            states = sorted(map(self._state, group))
            for devices in combinations(group, parts):
                found.setdefault((tuple(sorted(map(self._state, devices))), tuple(states)), devices)
        return sorted(found.values(), key=lambda devices: max(self._demand[d] / self._left[d] for d in devices))

    def _state(self, d: int) -> tuple[int, int, int]:
        return self._demand[d], self._left[d], self._room[d]

    def _better(self, d: int, demand: int, fixed: int, needed: int) -> bool:
        left = self._left[d] - fixed
        if self._room[d] < needed or left <= 0:
            return False
        best = self._best
        return best is None or (self._demand[d] + demand) * best.denominator < best.numerator * left

    def _hopeless(self, i: int) -> bool:
        rest = [(w * n, f * n, need * n, w, f, need) for n, w, f, need in self._models[i:]]
        a, b = (self._best.numerator, self._best.denominator) if self._best is not None else (1, 0)
        least, least_needed = min(b * w + a * f for *_, w, f, _ in rest), min(need for *_, need in rest)
        give = room = 0
        for demand, left, free in zip(self._demand, self._left, self._room, strict=True):
            if a * left - b * demand > least and free >= least_needed:
                give += a * left - b * demand
                room += free
        takes = sum(b * w + a * f for w, f, *_ in rest)
        return give <= takes or room < sum(need for _, _, need, *_ in rest)

    def _add(self, devices: tuple[int, ...], demand: int, fixed: int, needed: int) -> None:
        for d in devices:
            self._demand[d] += demand
            self._left[d] -= fixed
            self._room[d] -= needed


def exists_below(instance: Instance, pressure: Fraction | None) -> bool:
    """Whether HiGHS finds a placement whose largest pressure is below `pressure` (None: any). Its answer is checked in
    whole numbers. Raises Undecided."""
    solver = highspy.Highs()
    solver.silent()
    solver.setOptionValue("time_limit", TIME_LIMIT_S)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("mip_feasibility_tolerance", 1e-9)
    solver.setOptionValue("primal_feasibility_tolerance", 1e-9)
    on = {
        (model.name, device.name): solver.addBinary()
        for model in instance.models
        for group in instance.groups
        if len(group.devices) >= model.parts
        for device in group.devices
    }
    for model in instance.models:
        fitting = [group for group in instance.groups if len(group.devices) >= model.parts]
        if not fitting:
            return False
        there = [solver.addBinary() for _ in fitting]
        solver.addConstr(sum(there) == 1)
        for group, chosen in zip(fitting, there, strict=True):
            solver.addConstr(sum(on[model.name, device.name] for device in group.devices) == model.parts * chosen)
    for device in (device for group in instance.groups for device in group.devices):
        here = [(m, on[m.name, device.name]) for m in instance.models if (m.name, device.name) in on]
        if not here:
            continue
        solver.addConstr(sum(m.needed * x for m, x in here) <= device.capacity)
        solver.addConstr(sum(m.fixed * x for m, x in here) <= device.capacity - 1)
        if pressure is not None:
            a, b = pressure.numerator, pressure.denominator
            scale = max(a, b)
            taken = sum((b * (int(m.demand) // m.parts) + a * m.fixed) / scale * x for m, x in here)
            solver.addConstr(taken <= (a * device.capacity - 1) / scale)
    solver.minimize()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return False
    if status != highspy.HighsModelStatus.kOptimal:
        raise Undecided(solver.modelStatusToString(status))
    values = solver.getSolution().col_value
    places: dict[str, Place] = {}
    for model in instance.models:
        for group in instance.groups:
            names = [d.name for d in group.devices if (model.name, d.name) in on]
            devices = tuple(name for name in names if values[on[model.name, name].index] > 0.5)
            if devices:
                places[model.name] = Place(group.name, devices)
    found = largest_pressure(instance, places)
    assert found is not None, "the solver's answer breaks a constraint"
    assert pressure is None or found < pressure, (found, pressure)
    return True


# --- instances --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """How a kind of instances is drawn. Memory in GiB."""

    name: str
    groups: tuple[int, int]
    """How many."""
    size: int
    """Devices of a group."""
    models: tuple[int, int]
    """How many on a device, in the mean."""
    fill: tuple[float, float]
    """Share of the memory that weights, quotas and floors take."""
    spread: float
    """Of demands: sigma of a lognormal; 0: all alike but for a third."""
    capacities: tuple[int, ...] = (141,)
    parts: tuple[int, ...] = (1,)


FAMILIES = (
    Family("loose", (2, 4), 1, (2, 3), (0.3, 0.7), 1.5),
    Family("loose, demands alike", (2, 4), 1, (2, 3), (0.3, 0.7), 0.0),
    Family("loose, devices differ", (2, 4), 1, (2, 3), (0.3, 0.7), 1.5, (48, 80, 141)),
    Family("tight", (2, 4), 1, (2, 3), (0.85, 0.97), 1.5),
    Family("tight, devices differ", (2, 4), 1, (2, 3), (0.85, 0.97), 1.5, (48, 80, 141)),
    Family("full", (2, 4), 1, (2, 3), (0.97, 1.0), 1.5),
    Family("parts, loose", (1, 2), 2, (1, 2), (0.3, 0.7), 1.5, (141,), (1, 1, 2)),
    Family("parts, tight", (1, 2), 2, (1, 2), (0.8, 0.97), 1.5, (141,), (1, 1, 2)),
    Family("four devices, tight", (1, 1), 4, (1, 2), (0.8, 0.97), 1.5, (141,), (1, 1, 2, 4)),
)


def draw_instance(family: Family, draw: random.Random) -> Instance:
    """One that has a placement: each device's memory is cut into the parts of the models that could lie there."""
    groups = tuple(
        Group(f"g{g}", tuple(Device(f"g{g}d{d}", draw.choice(family.capacities)) for d in range(family.size)))
        for g in range(draw.randint(*family.groups))
    )
    models: list[Model] = []
    for group in groups:
        room = {device.name: device.capacity for device in group.devices}
        spare = {name: round(size * (1 - draw.uniform(*family.fill))) for name, size in room.items()}
        for _ in range(sum(draw.randint(*family.models) for _ in group.devices)):
            n = draw.choice(family.parts)
            devices = sorted(room, key=lambda name: spare[name] - room[name])[: min(n, len(room))]
            n = len(devices)
            least = min(room[name] - spare[name] for name in devices)
            if least < 3:
                continue
            models.append(_model(f"m{len(models)}", n, draw.randint(3, max(3, round(least * 0.75))), family, draw))
            for name in devices:
                room[name] -= models[-1].needed
        for device in group.devices:  # what is left of the share goes to one more
            if (rest := room[device.name] - spare[device.name]) >= 3:
                models.append(_model(f"m{len(models)}", 1, rest, family, draw))
    draw.shuffle(models)
    return Instance(groups, tuple(models))


def _model(name: str, parts: int, needed: int, family: Family, draw: random.Random) -> Model:
    """A model with so many bytes on each of its devices, a gigabyte of each a floor and a quota."""
    demand = draw.lognormvariate(4.0, family.spread) if family.spread else draw.uniform(40, 80)
    whole = parts * min(5_000, max(1, round(demand)))
    return Model(name, float(whole), parts * (needed - 2), parts, parts, parts)


def instances(number: int, seed: int, families: Sequence[Family] = FAMILIES) -> list[tuple[Family, Instance]]:
    """`number` of each family."""
    draw = random.Random(seed)
    return [(family, draw_instance(family, draw)) for family in families for _ in range(number)]
