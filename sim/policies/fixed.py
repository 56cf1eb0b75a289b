"""Fixed places: every model stays in its place, awake, from the beginning to the end.

Models are placed once, by the same Algorithm 1 as Prism's (`placement/policy/assignment/partition.py`), with the mean
token rate of the whole replay as demand: no planner could know more in advance.
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
from sim.system import World


class Fixed:
    """The groups, and the place of each model."""

    def __init__(
        self, world: World, finished: Callable[[SimulatedRequest], None], queue: Callable[[SimulatedGroup], Queue]
    ) -> None:
        """Raises FleetError if no group can hold a model even alone."""
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
            for name, part in partition([group_of(group) for group in groups.values()], wanted).items():
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


def _demand(spec: Spec, rates: Mapping[str, float]) -> float:
    return kvpr.demand(
        rates.get(spec.name, 0.0), spec.shape.kv_bytes_per_token, spec.tpot_s if spec.tpot_s < inf else None, 0.1
    )


def _never(requests: list[SimulatedRequest]) -> None:
    raise AssertionError(f"nothing moves here, and {requests} came back")
