"""What placement knows of the groups, in its own terms and kept between decisions: what
`placement/planning/group_indexes.py` does.

Demands are computed anew once a period, as there. The residents of a group are taken anew when one of them has changed,
or when one has been idle, or awake, for long enough to be evicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from placement.config import PlacementConfig
from placement.policy import kvpr
from placement.policy.assignment.foreseen import foreseen
from placement.policy.expectations import Expectations
from placement.policy.lifecycle.decisions import PlacedModel, durations
from placement.policy.lifecycle.eligibility import holds_s
from placement.policy.lifecycle.group_index import GroupIndex
from placement.policy.outcomes import Outcomes, will_return
from placement.policy.replication import Replica, Replication
from placement.policy.window import RateWindow
from sim.cluster.terms import group_of, model_of, suitable
from sim.group.arbiter import SimulatedQueue
from sim.group.node import SimulatedGroup, SimulatedResidency
from sim.inputs.catalogue import Spec
from sim.system import World

_PRESENT = (
    SimulatedResidency.ACTIVE,
    SimulatedResidency.WAKING,
    SimulatedResidency.HIBERNATING,
    SimulatedResidency.DRAINING,
)
_STEADY = (SimulatedResidency.ACTIVE, SimulatedResidency.HIBERNATING)


class SimulatedIndexes:
    """One GroupIndex for each size of group."""

    def __init__(
        self,
        world: World,
        groups: Mapping[str, tuple[SimulatedGroup, SimulatedQueue]],
        config: PlacementConfig,
    ) -> None:
        """Raises FleetError if no group can hold a model."""
        self._clock, specs = world.clock, world.specs
        self._config = config
        self._specs = {spec.name: spec for spec in specs}
        self._groups = groups
        everywhere = [group for group, _ in groups.values()]
        self.models = {spec.name: model_of(spec, suitable(spec, everywhere)[0], kvpr.LEAST_DEMAND) for spec in specs}
        """Models by name, with their present demand."""
        self._expectations = Expectations(world.expected if config.remembers else None, world.clock.now)
        self._foreseen: dict[int, dict[str, str]] = {}
        """Number of devices of a group -> model -> name of the group of that size where it belongs."""
        self._windows: dict[str, RateWindow] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self.outcomes = Outcomes()
        self._expectations.tell(self.outcomes)
        self.expected = frozenset(self._expectations)
        """Models whose first places follow from traffic of before the start."""
        self._counted: dict[tuple[str, str], tuple[int, int]] = {}
        """(group, model) -> targets missed there and returns of the model, as last counted."""
        self._by_size = {group.devices: GroupIndex(config.lifecycle) for group in everywhere}
        self._plain = {group.name: group_of(group, config.load_weight) for group in everywhere}
        self._heard: dict[str, tuple[int, float]] = {}
        """Group -> (its arbiter's count of changes when it was last read, second until which that reading holds)."""
        self.replication = Replication(config.replication)

    def rate(self, name: str) -> float:
        """Tokens per second of a model on all its groups."""
        window = self._windows.get(name)
        return window.rate(self._clock.now) if window is not None else 0.0

    def hear_replicas(self) -> None:
        """Takes in which models are active where, and how late they are."""
        for group, arbiter in self._groups.values():
            demands = {name: self._demand_at(name) for name in group.active}
            total = sum(demands.values())
            counts = {name: arbiter.count(name) for name in group.active}
            there = {
                name: Replica(
                    demands[name] / total if total else 0.0,
                    late,
                    arbiter.targets[name, True],
                    arbiter.targets[name, False],
                    waiting + running,
                )
                for name, (waiting, running, late) in counts.items()
            }
            self.replication.heard(group.name, there, self._clock.now)

    def _demand_at(self, name: str, idle: bool = False) -> float:
        """Demand of a model on each of its groups. `idle`: whether it has no requests."""
        if idle and not self.rate(name) and not will_return(self.outcomes, name, self._clock.now):
            return kvpr.LEAST_DEMAND
        return self.models[name].demand / max(1, self._places(name))

    def _places(self, name: str) -> int:
        return sum(name in group.active for group, _ in self._groups.values())

    @property
    def sizes(self) -> list[int]:
        return sorted(self._by_size)

    def of(self, size: int) -> GroupIndex:
        """The index of the groups with so many devices, brought up to date."""
        now, index = self._clock.now, self._by_size[size]
        for name, (group, arbiter) in self._groups.items():
            changes, until = self._heard.get(name, (-1, inf))
            if group.devices == size and (changes != arbiter.changes or now >= until):
                self._hear(group, arbiter)
        return index

    def foreseen(self, spec: Spec) -> str | None:
        """Name of the group where the model belongs by what was expected at the start; None if nothing was."""
        if not self._expectations.any(self._clock.now):
            return None
        if spec.parts not in self._foreseen:
            for name in self._specs:
                self._demands(name, self._expectations.rate(name, 0.0, self._clock.now))
            there = self.of(spec.parts)
            models = [self.models[each.name] for each in self._specs.values() if each.parts == spec.parts]
            self._foreseen[spec.parts] = foreseen(there.groups, there.residents, models, self._config.moves.assign)
        return self._foreseen[spec.parts].get(spec.name)

    def tight(self, name: str) -> bool:
        """Whether the group could lack KV memory."""
        group, arbiter = self._groups[name]
        if arbiter.shortages:
            return True
        if arbiter.empty:
            return False
        used = 0
        for resident in group.active.values():
            if resident.engine is not None:
                used += resident.engine.used_bytes
        return used > (1 - self._config.headroom) * (group.hardware.capacity_bytes - group.memory.fixed_bytes)

    def heard_now(self, name: str) -> GroupIndex:
        """The group's index, brought up to date with what the group's models use and lack."""
        group, arbiter = self._groups[name]
        self._hear(group, arbiter)
        return self._by_size[group.devices]

    def observe(self) -> bool:
        """Adds the groups' token counters to the windows, and computes demands from those. Returns whether any counter
        had changed."""
        now = self._clock.now
        news = False
        for group, arbiter in self._groups.values():
            for name, resident in group.residents.items():
                self._count(group, arbiter, name)
                total = resident.tokens
                before = self._seen.get((group.name, name), 0)
                if total != before:
                    self._seen[group.name, name] = total
                    window = self._windows.get(name)
                    if window is None:
                        window = self._windows[name] = self._config.window()
                    window.counted(total, before, now)
                    news = True
        rates = {name: window.rate(now) for name, window in self._windows.items()}
        if self._expectations.any(now):
            rates = {name: self._expectations.rate(name, rates.get(name, 0.0), now) for name in self._specs}
        changed = {name for name, rate in rates.items() if self._demands(name, rate)}
        for name, rate in rates.items():
            if not rate and name in self._windows:
                del self._windows[name]  # a rate of zero is as good as none
        for group, arbiter in self._groups.values():
            if not changed.isdisjoint(group.residents):
                self._hear(group, arbiter)
        return news

    def _count(self, group: SimulatedGroup, arbiter: SimulatedQueue, name: str) -> None:
        """Takes in what became of the model's requests on the group since the last call."""
        late, missed, returns = arbiter.outcomes(name)
        before = self._counted.get((group.name, name), (0, 0))
        self._counted[group.name, name] = missed, returns
        self.outcomes.observe(
            name,
            self._clock.now,
            late=late > 0,
            missed=max(0, missed - before[0]),
            returns=max(0, returns - before[1]),
            group=group.name,
        )

    def _demands(self, name: str, rate: float) -> bool:
        """Computes the model's demand anew. Returns whether it changed."""
        spec = self._specs[name]
        demand = kvpr.demand(
            rate,
            spec.shape.kv.demand_bytes,
            spec.tpot_s if spec.tpot_s < inf else None,
            self._config.default_tpot_ms / 1e3,
        )
        if demand == self.models[name].demand:
            return False
        self.models[name] = self.models[name].wanted(demand)
        return True

    def _hear(self, group: SimulatedGroup, arbiter: SimulatedQueue) -> None:
        now, rules = self._clock.now, self._config.lifecycle
        claims = arbiter.claims()
        plain = self._plain[group.name]
        place = kvpr.Place(group.name, tuple(device.name for device in plain.devices))
        residents: list[PlacedModel] = []
        for name, resident in group.residents.items():
            if resident.residency not in _PRESENT:
                continue
            wake_s, cold_s = durations(resident.wake_s, resident.cold_s)
            idle = arbiter.idle_s(name) if resident.residency in _STEADY else 0.0
            stay_s = now - resident.active_at if resident.active else 0.0
            engine = resident.engine
            residents.append(
                PlacedModel(
                    self.models[name].wanted(self._demand_at(name, idle > 0.0)),
                    place,
                    elsewhere=self._places(name) > resident.active,
                    hibernating=resident.residency is SimulatedResidency.HIBERNATING,
                    idle_s=idle,
                    returns_s=self._expectations.returns_s(name, now),
                    wake_s=wake_s,
                    cold_s=cold_s,
                    stay_s=stay_s,
                    claims=claims[name],
                    kv_used=engine.used_bytes if engine is not None else 0,
                    kv_lacking=arbiter.shortages.of(name, now),
                    ttft_s=self._specs[name].ttft_s if self._specs[name].ttft_s < inf else 0.0,
                )
            )
        self._by_size[group.devices].hear(plain, residents)
        self._heard[group.name] = arbiter.changes, now + holds_s(residents, rules)
