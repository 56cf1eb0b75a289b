"""Static partition: every model has its place and its memory from the beginning to the end.

Models are placed once, by the same Algorithm 1 as Prism's (`placement/policy/assign.py`), with the mean token rate of
the whole replay as demand: nobody who plans ahead could know more. What a device has left after weights is divided
among its models in proportion to that demand, not below a model's floor, and stays so. Requests go to their model's
engine in order of arrival, started when their prompt and the forecast of their output fit. Engines share their
devices' compute as they come: no turn, no pauses.

Better than the paper's: CUDA graphs, page-aware KV, and a division by demand that is known in advance. A model for
which there is no room is not served at all, and its requests miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import inf, isnan

from gpu_scheduler.policy.forecast import OutputForecast
from placement.policy import kvpr
from placement.policy.assign import Candidate, assign
from placement.policy.kvpr import Place
from sim.catalogue import Spec
from sim.cost import Cost
from sim.engine import Engine
from sim.node import Group, Residency, Resident
from sim.request import Request
from sim.system import FleetError, World
from sim.terms import group_of, model_of, suitable


class Fcfs:
    """One line for each model; the listener of its engine."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lines: dict[str, deque[Request]] = {}
        self._committed: dict[str, int] = {}
        self._forecasts: dict[str, OutputForecast] = {}

    def submit(self, request: Request) -> None:
        self._lines[request.model].append(request)
        self._start(request.model)

    def hand_back(self, name: str) -> list[Request]:
        gone, self._lines[name] = list(self._lines[name]), deque()
        return gone

    def forget(self, request: Request) -> None:
        self._committed[request.model] -= request.committed
        request.committed = 0

    def residency_changed(self, resident: Resident) -> None:
        name = resident.spec.name
        self._lines.setdefault(name, deque())
        self._committed.setdefault(name, 0)
        self._forecasts.setdefault(name, OutputForecast())

    def idle_s(self, name: str) -> float:
        return 0.0

    def _start(self, name: str) -> None:
        line, resident = self._lines[name], self._group.active[name]
        limit = self._group.memory.device.limits.get(name).bytes
        assert resident.engine is not None
        while line:
            request = line[0]
            forecast = min(request.most_new_tokens, self._forecasts[name].tokens)
            needed = (request.to_prefill + forecast) * resident.token_bytes
            if self._committed[name] and self._committed[name] + needed > limit:
                return
            line.popleft()
            request.committed = needed
            self._committed[name] += needed
            request.dispatched_at = self._group.clock.now
            resident.engine.generate(request)

    # --- engines

    def first_token(self, engine: Engine, request: Request) -> None:
        if isnan(request.first_at):
            request.first_at = self._group.clock.now

    def prefilled(self, engine: Engine, request: Request) -> None:
        pass

    def stepped(self, engine: Engine, steps: int, tokens: int) -> None:
        pass

    def finished(self, engine: Engine, request: Request) -> None:
        self._forecasts[request.model].observe(request.output_tokens)
        self.forget(request)
        self._group.finished(request)
        self._group.clock.after(0.0, self._start, request.model)

    def parked(self, engine: Engine, request: Request) -> None:
        """First in line again, when another has ended."""
        self.forget(request)
        self._lines[request.model].appendleft(request)
        if not self._committed[request.model]:
            self._group.clock.after(0.0, self._start, request.model)


class Static:
    """The groups, and where each model is."""

    def __init__(self, world: World, finished: Callable[[Request], None]) -> None:
        self.groups = [
            Group(world.clock, f"g{i}", size, world.hardware, Fcfs, _never, finished)
            for i, size in enumerate(world.sizes)
        ]
        self._finished = finished
        self._home: dict[str, Group] = {}
        for spec in world.specs:
            suitable(spec, self.groups)
        demands = {spec.name: _demand(spec, world.rates) for spec in world.specs}
        for size in sorted({group.devices for group in self.groups}):
            groups = [group for group in self.groups if group.devices == size]
            specs = {spec.name: spec for spec in world.specs if spec.parts == size}
            places = _places(groups, specs, demands)
            for group in groups:
                self._fill(group, [specs[name] for name, place in places.items() if place.group == group.name], demands)

        self.homeless = [spec.name for spec in world.specs if spec.name not in self._home]

    @property
    def figures(self) -> Mapping[str, int]:
        return {"models without a place": len(self.homeless)}

    def _fill(self, group: Group, specs: list[Spec], demands: Mapping[str, float]) -> None:
        """All at once, before the first request; every model then has its limit for good."""
        hardware, memory = group.hardware, group.memory
        for spec in specs:
            memory.book(spec.name, hardware.quota_bytes, group.own_room(spec), group.floor(spec))
            resident = Resident(spec, Cost(spec.shape, hardware))
            resident.engine = Engine(group.clock, spec.name, resident.cost, group.processor, memory, group.queue)
            memory.open(resident.engine)
            memory.fill(spec.name, group.own_room(spec))
            group.residents[spec.name] = group.active[spec.name] = resident
            resident.residency = Residency.ACTIVE
            group.queue.residency_changed(resident)
            self._home[spec.name] = group
        left = memory.device.ledger.free
        for name, nbytes in _divided(left, {s.name: (group.floor(s), demands[s.name]) for s in specs}).items():
            memory.limit(name, nbytes // hardware.kv_extent_bytes * hardware.kv_extent_bytes)

    def submit(self, request: Request) -> None:
        group = self._home.get(request.model)
        if group is None:
            request.failed = "its model has no place"
            self._finished(request)
            return
        group.queue.submit(request)


def _places(groups: list[Group], specs: Mapping[str, Spec], demands: Mapping[str, float]) -> dict[str, Place]:
    models = [model_of(spec, groups[0], demands[name]) for name, spec in specs.items()]
    there = [group_of(group) for group in groups]
    return assign(there, [Candidate(model) for model in models], 0.0).places


def _demand(spec: Spec, rates: Mapping[str, float]) -> float:
    return kvpr.demand(
        rates.get(spec.name, 0.0), spec.shape.kv_bytes_per_token, spec.tpot_s if spec.tpot_s < inf else None, 0.1
    )


def _divided(total: int, wants: Mapping[str, tuple[int, float]]) -> dict[str, int]:
    """By demand, where that is more than the floor: name -> (floor, demand) -> bytes."""
    shares: dict[str, int] = {}
    open_ = dict(wants)
    while open_:
        weight = sum(demand for _, demand in open_.values())
        below = [name for name, (floor, demand) in open_.items() if total * demand / weight < floor]
        if not below:
            return shares | {name: int(total * demand / weight) for name, (_, demand) in open_.items()}
        for name in below:
            shares[name] = open_.pop(name)[0]
            total -= shares[name]
    return shares


def _never(requests: list[Request]) -> None:
    raise AssertionError(f"nothing moves here, and {requests} came back")


def build(world: World, finished: Callable[[Request], None], settings: dict[str, str]) -> Static:
    if settings:
        raise FleetError(f"static has no settings, and {', '.join(sorted(settings))} was given")
    return Static(world, finished)
