"""Fixed places: every model stays in its place, awake, from the beginning to the end.

Models are placed once. Planned places come of the same Algorithm 1 as Prism's
(`placement/policy/assignment/partition.py`), with the rates that the world tells as demand: those of the whole replay,
unless the replay was given others, such as those of the hour before. Blind ones (the setting `blind=SEED`) are those of
an operator who knows sizes and no rates (`blind.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from placement.policy import kvpr
from placement.policy.assignment.partition import partition
from sim.cluster.terms import group_of, model_of, suitable
from sim.engines.cost import Cost
from sim.engines.engine import SimulatedEngine
from sim.group.node import Queue, SimulatedGroup, SimulatedResidency, SimulatedResident
from sim.inputs.catalogue import Spec
from sim.inputs.request import SimulatedRequest
from sim.policies.blind import by_size
from sim.system import SettingError, World


class Fixed:
    """The groups, and the place of each model."""

    def __init__(
        self,
        world: World,
        finished: Callable[[SimulatedRequest], None],
        queue: Callable[[SimulatedGroup], Queue],
        blind: int | None = None,
    ) -> None:
        """`blind`: seed of a draw of blind places; None: planned ones. Raises FleetError if no group can hold a model
        even alone."""
        self.groups = [
            SimulatedGroup(world.clock, f"g{i}", size, world.hardware, queue, _never, finished)
            for i, size in enumerate(world.sizes)
        ]
        for spec in world.specs:
            suitable(spec, self.groups)
        self._finished = finished
        self._home: dict[str, SimulatedGroup] = {}
        self.shares: dict[str, int] = {}
        """Model -> bytes of KV on each device, if memory is divided."""
        for size in sorted({group.devices for group in self.groups}):
            groups = {group.name: group for group in self.groups if group.devices == size}
            specs = {spec.name: spec for spec in world.specs if spec.parts == size}
            some = next(iter(groups.values()))
            wanted = [model_of(spec, some, _demand(spec, world.rates)) for spec in specs.values()]
            places = [group_of(group) for group in groups.values()]
            parts = partition(places, wanted) if blind is None else by_size(places, wanted, blind)
            for name, part in parts.items():
                self._fill(groups[part.place.group], specs[name])
                self.shares[name] = part.kv_bytes
        self.homeless = [spec for spec in world.specs if spec.name not in self._home]
        """Models for which there is no room."""

    def _fill(self, group: SimulatedGroup, spec: Spec) -> None:
        """Places a model before the first request, in no time."""
        hardware, memory = group.hardware, group.memory
        memory.book(spec.name, hardware.quota_bytes, group.own_bytes(spec), group.floor(spec))
        resident = SimulatedResident(spec, Cost(spec.shape, hardware))
        resident.engine = SimulatedEngine(group.clock, spec.name, resident.cost, group.processor, memory, group.queue)
        memory.open(resident.engine)
        memory.fill(spec.name, group.own_bytes(spec))
        group.residents[spec.name] = group.active[spec.name] = resident
        resident.residency = SimulatedResidency.ACTIVE
        group.queue.residency_changed(resident)
        self._home[spec.name] = group

    def submit(self, request: SimulatedRequest) -> None:
        group = self._home.get(request.model)
        if group is None:
            request.failed = "its model has no place"
            self._finished(request)
            return
        group.queue.submit(request)

    @property
    def figures(self) -> Mapping[str, int]:
        return {"models without a place": len(self.homeless)}


def seed(system: str, settings: Mapping[str, str]) -> int | None:
    """The setting `blind`, a whole number; None where it is left out. Raises SettingError, also for other settings."""
    if unknown := settings.keys() - {"blind"}:
        raise SettingError(f"{system} has no setting {', '.join(sorted(unknown))}")
    text = settings.get("blind")
    if text is None:
        return None
    if not text.isdecimal():
        raise SettingError(f"{system}: blind has to be a whole number, the seed of its draw, not {text!r}")
    return int(text)


def _demand(spec: Spec, rates: Mapping[str, float]) -> float:
    return kvpr.demand(
        rates.get(spec.name, 0.0), spec.shape.kv.demand_bytes, spec.tpot_s if spec.tpot_s < inf else None, 0.1
    )


def _never(requests: list[SimulatedRequest]) -> None:
    raise AssertionError(f"nothing moves here, and {requests} came back")
