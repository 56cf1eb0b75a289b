"""Placement on a fleet, by placement's policy: what `reconcile.py`, `planner.py` and `actuator.py` do, without their
I/O.

A request for a model that has no place brings it up at once where `GroupIndex.activate` says. If there is no room now
it waits, and is looked at again every 0.03 s, until idle models make way or busy ones have to, on the group that is
reserved for it (`reservations`). Where KV lacks memory idle models leave (`kv_pressure`). Every `period_s` seconds the
token rates are taken, and `rebalance` decides which models should move. The source of a move serves until the target is
up, and then finishes what it runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf, isnan

from gateway.policy.replica_choice import choose
from gpu_scheduler.config import Arbitration
from placement.config import PlacementConfig
from placement.policy.assignment.cool_down import CoolDowns
from placement.policy.assignment.moves import Move
from placement.policy.assignment.rebalance import NONE, Round, rebalance
from placement.policy.assignment.worth import is_worth
from placement.policy.lifecycle.activation_plan import ActivationPlan
from placement.policy.lifecycle.decisions import Activate, GoCold
from placement.policy.lifecycle.reservations import Reservations
from sim.cluster.group_indexes import SimulatedIndexes
from sim.group.arbiter import SimulatedQueue
from sim.group.node import SimulatedGroup, SimulatedResidency
from sim.inputs.catalogue import Spec
from sim.inputs.request import SimulatedRequest
from sim.system import FleetError, World

_LOOK_S = 0.03
"""Seconds after a change on a group until placement looks again; `placement/actuation/reconcile.py` waits 0.01 to
0.1 s, by how long its looks take."""
_REST_S = 0.1
"""Seconds that requests pause before they ask again after a failed activation, at first
(`gateway/routing/relay.py`)."""


class Fleet:
    """The groups of a cluster under placement's policy."""

    def __init__(
        self,
        world: World,
        config: PlacementConfig,
        rules: Arbitration,
        finished: Callable[[SimulatedRequest], None],
    ) -> None:
        """Raises FleetError if no group can hold a model, or if a model's place is on none."""
        self._clock = clock = world.clock
        self._config = config
        self.specs = {spec.name: spec for spec in world.specs}
        self.groups: list[SimulatedGroup] = []
        arbiters: dict[str, tuple[SimulatedGroup, SimulatedQueue]] = {}
        for i, size in enumerate(world.sizes):
            group = SimulatedGroup(
                clock, f"g{i}", size, world.hardware, lambda group: SimulatedQueue(group, rules), self._again, finished
            )
            assert isinstance(group.queue, SimulatedQueue)
            self.groups.append(group)
            arbiters[group.name] = group, group.queue
        self._queues = {name: queue for name, (_, queue) in arbiters.items()}
        self._by_name = {group.name: group for group in self.groups}
        if lost := next((each for each in config.places.items() if each[1] not in self._by_name), None):
            raise FleetError(f"places: {lost[0]} is to be on {lost[1]}; there are {', '.join(self._by_name)}")
        self._group_indexes = SimulatedIndexes(world, arbiters, config)
        self._home: dict[str, list[SimulatedGroup]] = {}
        """Model -> groups to which its requests go; there is one at least."""
        self._cool_downs = CoolDowns(config.cool_down_s)
        self._rounds: dict[int, Round] = {}
        """Number of devices of a group -> the last round of moves that was wanted among groups of that size."""
        self._began: set[str] = set()
        """Names of models that have come up once."""
        self._moving: set[str] = set()
        self._activating: set[str] = set()
        self._rests_until: dict[str, float] = {}
        """Model whose activation failed a moment ago -> second until which it is not tried again."""
        self._parked: dict[str, deque[SimulatedRequest]] = {}
        self._reservations = {size: Reservations(config.patience_s) for size in self._group_indexes.sizes}
        self.migrations = 0
        self.reliefs = 0
        self.replicas = 0
        """Times that a model came up on a further group."""
        self.replicas_let_go = 0
        self.refused_for_now = 0
        clock.after(config.period_s, self._period)
        if config.relieve:
            clock.after(_LOOK_S, self._relieve)

    # --- requests

    def submit(self, request: SimulatedRequest) -> None:
        homes = self._home.get(request.model)
        if homes is not None:
            self._best(request, homes).queue.submit(request)
            return
        waiting = self._parked.get(request.model)
        if waiting is not None:
            waiting.append(request)
            return
        self._parked[request.model] = deque([request])
        self._activate(request.model)

    def _best(self, request: SimulatedRequest, homes: Sequence[SimulatedGroup]) -> SimulatedGroup:
        """Of the groups of the request's model the one that a gateway would choose, which has all groups' outlooks as
        they are at this moment; those where the model is active go first. Simulated engines have no prefixes."""
        if len(homes) == 1:
            return homes[0]
        found = [group for group in homes if request.model in group.active] or homes
        outlooks = [self._queues[group.name].outlook(request) for group in found]
        left_s = request.deadline - self._clock.now if isnan(request.first_at) else inf
        return found[choose(outlooks, request.to_prefill, left_s)]

    def _leave(self, name: str, group: SimulatedGroup) -> None:
        """Has no further requests of the model go to the group."""
        homes = self._home.get(name, [])
        if group in homes:
            homes.remove(group)
            if not homes:
                del self._home[name]

    def _again(self, requests: Sequence[SimulatedRequest]) -> None:
        """Takes back requests that a group has returned."""
        for request in requests:
            self._clock.after(0.0, self.submit, request)

    # --- activation

    def _activate(self, name: str) -> None:
        """Brings the model up for its parked requests, or tries again later."""
        now, until = self._clock.now, self._rests_until.get(name, 0.0)
        if now < until:
            self._clock.after(until - now, self._activate, name)
            return
        spec = self.specs[name]
        only, there = self._only(spec), self._group_indexes.of(spec.parts)
        answer = self._reservations[spec.parts].ask(
            self._group_indexes.models[name], there, now, only, first=self._group_indexes.foreseen(spec)
        )
        if not isinstance(answer.outcome, Activate):
            self.refused_for_now += 1
            self._clock.after(_LOOK_S, self._activate, name)
            return
        group = self._by_name[answer.outcome.place.group]
        present = group.residents.get(name)
        if present is not None and present.residency is not SimulatedResidency.HIBERNATING:
            self._clock.after(_LOOK_S, self._activate, name)  # it is on its way down there: a Conflict
            return
        self._reservations[spec.parts].served(name)
        yields = self._yields(group, answer)
        self._home[name] = [group]
        self._began.add(name)
        self._activating.add(name)
        group.activate(spec, lambda up: self._activated(name, group, up), yields)
        for request in self._parked.pop(name):
            group.queue.submit(request)

    def _only(self, spec: Spec) -> str | None:
        """Name of the group that the model has to come up on; None: any."""
        first = None if spec.name in self._began else spec.begins_on or None
        return self._config.places.get(spec.name, first)

    def _yields(self, group: SimulatedGroup, answer: ActivationPlan) -> list[tuple[str, bool]]:
        """(model, whether it goes cold) of the models that make way on the group; their requests go there no more."""
        for eviction in answer.evictions:
            self._leave(eviction.model, group)
        return [(eviction.model, isinstance(eviction, GoCold)) for eviction in answer.evictions]

    def _activated(self, name: str, group: SimulatedGroup, up: bool) -> None:
        self._activating.discard(name)
        if not up:
            self._rests_until[name] = self._clock.now + _REST_S
        if not up:
            self._leave(name, group)

    # --- the loop

    def _relieve(self) -> None:
        self._clock.after(_LOOK_S, self._relieve)
        for group in self.groups:
            if not self._group_indexes.tight(group.name):
                continue
            for eviction in self._group_indexes.heard_now(group.name).relieve(group.name).decisions:
                self.reliefs += 1
                self._leave(eviction.model, group)
                group.bring_down(eviction.model, False, lambda: None)

    def _period(self) -> None:
        self._clock.after(self._config.period_s, self._period)
        news = self._group_indexes.observe()
        if self._config.rebalance and self._config.most_replicas > 1:
            self._replicate()
        if news and self._config.rebalance:
            self._move()

    def _replicate(self) -> None:
        """Takes a model off a group that it can do without, or brings one that is short of groups up on one more."""
        self._group_indexes.hear_replicas()
        if self._activating or self._moving or self._wait():
            return
        replication, now = self._group_indexes.replication, self._clock.now
        if surplus := replication.surplus(now, self._group_indexes.rate):
            name, where = surplus[0]
            self._leave(name, self._by_name[where])
            self._moving.add(name)
            self._by_name[where].bring_down(name, False, lambda: self._let_go(name), self._config.drain_ms / 1e3)
            return
        for name in replication.short(now):
            here, model = replication.groups(name), self._group_indexes.models[name]
            there = self._group_indexes.of(self.specs[name].parts)
            closed = {group.name for group in self.groups if self._passes(name, group)}
            wanted = model.wanted(model.demand / (len(here) + 1))
            answer = there.replica(wanted, here, {*closed, *here, *replication.crowded(now)})
            if answer is not None and isinstance(answer.outcome, Activate):
                self._bring_replica(name, self._by_name[answer.outcome.place.group])
                return

    @staticmethod
    def _passes(name: str, group: SimulatedGroup) -> bool:
        """Whether the model is passing from one residency to another there."""
        resident = group.residents.get(name)
        return resident is not None and resident.residency is SimulatedResidency.DRAINING

    def _bring_replica(self, name: str, group: SimulatedGroup) -> None:
        rate = self._group_indexes.rate(name)
        self._group_indexes.replication.granted(name, rate, self._clock.now)
        self._activating.add(name)

        def done(up: bool) -> None:
            self._activating.discard(name)
            if up:
                self.replicas += 1
                self._home.setdefault(name, []).append(group)

        group.activate(self.specs[name], done)

    def _let_go(self, name: str) -> None:
        self._moving.discard(name)
        self.replicas_let_go += 1

    def _move(self) -> None:
        if self._activating or self._moving or self._wait():
            return
        moves: list[Move] = []
        moved_at, now = self._cool_downs.moved_at(), self._clock.now
        for size in self._group_indexes.sizes:
            there, last = self._group_indexes.of(size), self._rounds.get(size, NONE)
            rules, outcomes = self._config.moves, self._group_indexes.outcomes
            settled = self._group_indexes.expected | self._cool_downs.moved_once
            wanted = rebalance(there.groups, there.residents, moved_at, now, rules, last, outcomes, settled)
            self._rounds[size] = wanted
            moves += [each.move for each in wanted.begin]
        for move in moves[:1]:
            self._migrate(move)

    def _wait(self) -> bool:
        """Whether a model waits for a place: moves would be in its way then."""
        return any(reservations.any(self._clock.now) for reservations in self._reservations.values())

    def _migrate(self, move: Move) -> None:
        name, source, target = move.model, self._by_name[move.source.group], self._by_name[move.target.group]
        if name in self._moving:
            return
        spec = self.specs[name]
        there = self._group_indexes.of(spec.parts)
        answer = there.activate(self._group_indexes.models[name], target.name)
        if not isinstance(answer.outcome, Activate):
            return
        leaving, outcomes = [each.model for each in answer.evictions], self._group_indexes.outcomes
        if self._config.first_do_no_harm and not is_worth(move, leaving, there.residents, outcomes, self._clock.now):
            return
        self._moving.add(name)
        yields = self._yields(target, answer)

        def prepared(up: bool) -> None:
            here = source.residents.get(name)
            if not up:
                self._moving.discard(name)
                self._cool_downs.not_moved(name, self._clock.now)
                return
            self._home[name] = [target]
            if here is None or not here.active:  # it has left meanwhile
                self._moving.discard(name)
                return
            source.bring_down(name, True, lambda: self._moved(name), self._config.drain_ms / 1e3)

        target.activate(spec, prepared, yields)

    def _moved(self, name: str) -> None:
        self._moving.discard(name)
        self._cool_downs.moved(name, self._clock.now)
        self.migrations += 1

    @property
    def figures(self) -> Mapping[str, int]:
        return {
            "migrations": self.migrations,
            "no room for now": self.refused_for_now,
            "reliefs": self.reliefs,
            "replicas": self.replicas,
            "replicas let go": self.replicas_let_go,
        }
