"""Placement on a fleet, by placement's policy: what `reconcile.py`, `judge.py` and `actuate.py` do, without their I/O.

A request for a model that has no place brings it up at once where `Standing.activate` says; where that says that there
is no room now, its requests wait at the gateway, which asks again with growing pauses. Every `period_s` the token rates
are taken and `rebalance` is asked which models should move. The source of a move serves until the target is up, and
then finishes what it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from gpu_scheduler.config import Arbitration
from placement.config import PlacementConfig
from placement.policy.assign import AssignRules
from placement.policy.decisions import Activate, GoCold
from placement.policy.moves import MoveRules
from placement.policy.rebalance import RebalanceRules, Wanted, rebalance
from sim.arbiter import Arbiter
from sim.catalogue import Spec
from sim.clock import Clock
from sim.cost import Hardware
from sim.node import Group, Residency
from sim.request import Request
from sim.standings import Standings

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
"""Of a gateway that was told that there is no room now (`gateway/relay.py`)."""


class Fleet:
    """The groups of a cluster under placement's policy."""

    def __init__(
        self,
        clock: Clock,
        specs: Sequence[Spec],
        sizes: Sequence[int],
        hardware: Hardware,
        config: PlacementConfig,
        rules: Arbitration,
        finished: Callable[[Request], None],
    ) -> None:
        """`sizes`: devices of each group. Raises FleetError for a model that no group can hold."""
        self._clock = clock
        self._config = config
        self.specs = {spec.name: spec for spec in specs}
        self.groups: list[Group] = []
        arbiters: dict[str, tuple[Group, Arbiter]] = {}
        for i, size in enumerate(sizes):
            group = Group(clock, f"g{i}", size, hardware, lambda group: Arbiter(group, rules), self._again, finished)
            assert isinstance(group.queue, Arbiter)
            self.groups.append(group)
            arbiters[group.name] = group, group.queue
        self._by_name = {group.name: group for group in self.groups}
        self._standings = Standings(clock, specs, arbiters, config)
        self._rebalance = RebalanceRules(
            AssignRules(tau=config.tau, cool_down_s=config.cool_down_s),
            MoveRules(at_once=config.migrations_at_once, cool_down_s=config.cool_down_s),
            config.least_pressure,
        )
        self._home: dict[str, Group] = {}
        """Where a model's requests go."""
        self._moved_at: dict[str, float] = {}
        self._moving: set[str] = set()
        self._activating: set[str] = set()
        self._parked: dict[str, deque[Request]] = {}
        self._tries: dict[str, int] = {}
        self.migrations = 0
        self.refused_for_now = 0
        clock.after(config.period_s, self._period)

    # --- requests

    def submit(self, request: Request) -> None:
        home = self._home.get(request.model)
        if home is not None:
            home.queue.submit(request)
            return
        waiting = self._parked.get(request.model)
        if waiting is not None:
            waiting.append(request)
            return
        self._parked[request.model] = deque([request])
        self._tries[request.model] = 0
        self._activate(request.model)

    def _again(self, requests: Sequence[Request]) -> None:
        """A group gave these back."""
        for request in requests:
            self._clock.after(0.0, self.submit, request)

    # --- activation

    def _activate(self, name: str) -> None:
        """For those that are parked."""
        spec = self.specs[name]
        there = self._standings.of(spec.parts)
        answer = there.activate(self._standings.models[name], self._config.places.get(name))
        if not isinstance(answer.outcome, Activate):
            self.refused_for_now += 1
            self._ask_again(name)
            return
        group = self._by_name[answer.outcome.place.group]
        present = group.residents.get(name)
        if present is not None and present.residency is not Residency.HIBERNATING:
            self._ask_again(name)  # it is on its way down there: a Conflict
            return
        for eviction in answer.evictions:
            if self._home.get(eviction.model) is group:
                del self._home[eviction.model]
        self._home[name] = group
        self._activating.add(name)
        group.activate(
            spec,
            lambda up: self._activated(name, group, up),
            [(eviction.model, isinstance(eviction, GoCold)) for eviction in answer.evictions],
        )
        for request in self._parked.pop(name):
            group.queue.submit(request)

    def _ask_again(self, name: str) -> None:
        tries = self._tries[name] = self._tries[name] + 1
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** (tries - 2), _LONGEST_PAUSE_S) if tries > 1 else 0.0
        self._clock.after(pause_s, self._activate, name)

    def _activated(self, name: str, group: Group, up: bool) -> None:
        self._activating.discard(name)
        if not up and self._home.get(name) is group:
            del self._home[name]

    # --- by itself

    def _period(self) -> None:
        self._clock.after(self._config.period_s, self._period)
        if self._standings.observe() and self._config.rebalance:
            self._move()

    def _move(self) -> None:
        at_once = self._config.migrations_at_once
        if self._activating or len(self._moving) >= at_once:
            return
        wanted: list[Wanted] = []
        for size in self._standings.sizes:
            there = self._standings.of(size)
            wanted += rebalance(there.groups, there.residents, self._moved_at, self._clock.now, self._rebalance)
        for each in wanted[:at_once]:
            self._migrate(each.move.model, self._by_name[each.move.source.group], self._by_name[each.move.target.group])

    def _migrate(self, name: str, source: Group, target: Group) -> None:
        if name in self._moving:
            return
        self._moving.add(name)

        def prepared(up: bool) -> None:
            here = source.residents.get(name)
            if not up:
                self._moving.discard(name)
                return
            self._home[name] = target
            if here is None or not here.active:  # it left meanwhile
                self._moving.discard(name)
                return
            source.bring_down(name, True, lambda: self._moved(name), self._config.drain_ms / 1e3)

        target.activate(self.specs[name], prepared)

    def _moved(self, name: str) -> None:
        self._moving.discard(name)
        self._moved_at[name] = self._clock.now
        self.migrations += 1

    @property
    def figures(self) -> Mapping[str, int]:
        return {"migrations": self.migrations, "no room for now": self.refused_for_now}
