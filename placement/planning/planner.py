"""Puts the cluster, as last heard, before the policy, and turns the answers into plans that can be carried out."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace

from kv_kinds import messages
from placement.cluster.cluster import Cluster, HeardGroup
from placement.config import PlacementConfig
from placement.planning.group_indexes import GroupIndexes
from placement.planning.traffic_record import TrafficRecord
from placement.policy.assignment.cool_down import CoolDowns
from placement.policy.assignment.rebalance import NONE, Round, WantedMove, rebalance
from placement.policy.assignment.worth import is_worth
from placement.policy.kvpr import Model
from placement.policy.lifecycle.activation_plan import ActivationPlan
from placement.policy.lifecycle.decisions import Activate, Hibernate
from placement.policy.lifecycle.group_index import GroupIndex
from placement.policy.lifecycle.refusal import LongestRequest
from placement.policy.lifecycle.reservations import Reservations
from protos import common_pb2, placement_pb2
from services.wording.plurals import counted


@dataclass(frozen=True)
class DepartingModel:
    """A model that leaves its group to make way for another, with the residency that it goes to."""

    model: str
    target: common_pb2.Residency
    reason: str


@dataclass(frozen=True)
class PlacementPlan:
    """What is to happen to a model; if `group` is None, it cannot come up now, for `reason`. `source`: the group that
    it moves from; None for an activation."""

    model: str
    group: HeardGroup | None
    reason: str
    candidates: list[placement_pb2.Candidate] = field(default_factory=list)
    yields: list[DepartingModel] = field(default_factory=list)
    source: HeardGroup | None = None


class Planner:
    """Asks the policy for plans, and keeps what it needs between decisions: indexes of groups, cool-downs, rounds,
    reservations."""

    def __init__(
        self,
        config: PlacementConfig,
        cluster: Cluster,
        now: Callable[[], float],
        on_their_way: Callable[[], Mapping[str, HeardGroup]],
        traffic: TrafficRecord | None = None,
    ) -> None:
        """`on_their_way`: models whose activation was ordered, with the group; its reports may not show them yet.
        `traffic`: of earlier hours, and where it is recorded; None: nowhere."""
        self._config = config
        self._cluster = cluster
        self._now = now
        self._group_indexes = GroupIndexes(config, cluster, now, on_their_way, traffic)
        self._cool_downs = CoolDowns(config.cool_down_s)
        self._rounds: dict[int, Round] = {}
        """Number of devices of a group -> the last round of moves that was wanted among groups of that size."""
        self._reservations: dict[int, Reservations] = {}
        """Number of devices of a group -> reservations of groups of that size."""
        if traffic is not None:
            traffic.follow(self._settled_here)

    def observe(self) -> None:
        """Takes in what was heard of the groups, and what follows from it and from the time."""
        self._group_indexes.observe()
        if self._cluster.catalogue_known:
            self._cool_downs.keep(self._cluster.catalogue)
        for reservations in self._reservations.values():
            reservations.look(self._now())

    @property
    def changes(self) -> int:
        """Rises when the plan for a model that waits for room may have changed."""
        return self._group_indexes.changes + sum(reservations.changes for reservations in self._reservations.values())

    def rest_s(self) -> float:
        """Seconds until `changes` may rise without a new report, because a model has been idle or awake, or has waited,
        for long enough; +inf if it never may."""
        now = self._now()
        waits = (reservations.next_at(now) - now for reservations in self._reservations.values())
        return max(0.0, min([self._group_indexes.rest_s(), *waits]))

    def rates(self) -> dict[str, float]:
        """Tokens per second of every model that has had any."""
        return self._group_indexes.rates()

    def demands(self) -> dict[str, float]:
        """Demand w of every model of the catalogue, in bytes per second per second of TPOT."""
        return {name: self._group_indexes.demand(entry.model) for name, entry in self._cluster.catalogue.items()}

    # --- plans

    def refused(self, spec: common_pb2.ModelSpec) -> str:
        """Why no group could hold the model even alone; empty if one could."""
        self._group_indexes.listen()
        if not self._group_indexes.any:
            return ""
        there = self._suitable(spec)
        if there is None:
            return self._unsuitable(spec)
        parts = max(1, spec.devices)
        longest = LongestRequest(spec.context_tokens, messages.layout(spec).share(parts), spec.position_bytes // parts)
        answer = there.refused(self._group_indexes.model(spec), self._config.places.get(spec.name), longest)
        return answer.reason if answer is not None else ""

    def _suitable(self, spec: common_pb2.ModelSpec) -> GroupIndex | None:
        """The index of the groups that have exactly as many devices as the model needs: a group's engines have a
        process on each of its devices. None if there is no such group, or the configuration gives the model one place
        and that is not there."""
        there = self._group_indexes.by_size.get(max(1, spec.devices))
        place = self._config.places.get(spec.name)
        if there is None or not (len(there) if place is None else place in there):
            return None
        return there

    def _unsuitable(self, spec: common_pb2.ModelSpec) -> str:
        have = ", ".join(
            f"{group.name} has {len(group.memory)}{', but is drained' if group.drained else ''}"
            for group in self._cluster.reachable()
        )
        place = self._config.places.get(spec.name)
        on = "a group" if place is None else f"{place}, a group"
        return f"it is for {on} of {counted(max(1, spec.devices), 'device')}: {have}"

    def activation(self, spec: common_pb2.ModelSpec, holds_s: float = 0.0) -> PlacementPlan:
        """Where a model that is on no group comes up, and which models make way. `holds_s`: seconds that the caller
        waits for another answer than that there is no room."""
        self._group_indexes.listen()
        there = self._suitable(spec)
        if there is None:
            return PlacementPlan(spec.name, None, self._unsuitable(spec))
        reservations = self._reservations.setdefault(max(1, spec.devices), Reservations(self._config.patience_s))
        place = self._config.places.get(spec.name)
        first = self._group_indexes.foreseen(spec)
        answer = reservations.ask(self._wanted(spec), there, self._now(), place, holds_s, first)
        return self._verdict(spec, answer)

    def prospect(self, spec: common_pb2.ModelSpec) -> PlacementPlan:
        """Where the model would come up if it were activated now, and which models would make way. Nothing is reserved
        for it."""
        self._group_indexes.listen()
        there = self._suitable(spec)
        if there is None:
            return PlacementPlan(spec.name, None, self._unsuitable(spec))
        place, first = self._config.places.get(spec.name), self._group_indexes.foreseen(spec)
        return self._verdict(spec, there.activate(self._wanted(spec), place, first=first))

    def _wanted(self, spec: common_pb2.ModelSpec) -> Model:
        return replace(self._group_indexes.model(spec), demand=self._group_indexes.demand(spec))

    def _verdict(self, spec: common_pb2.ModelSpec, answer: ActivationPlan) -> PlacementPlan:
        candidates = [
            placement_pb2.Candidate(group=option.place.group, pressure=option.pressure) for option in answer.options
        ]
        if not isinstance(answer.outcome, Activate):
            return PlacementPlan(spec.name, None, answer.outcome.reason, candidates)
        group = self._cluster.group(answer.outcome.place.group)
        return PlacementPlan(spec.name, group, answer.outcome.reason, candidates, _yielding(answer))

    def served(self, spec: common_pb2.ModelSpec) -> None:
        """Notes that the model is up in its place. Until then it keeps its rank among models that wait, since its group
        may refuse it."""
        if (reservations := self._reservations.get(max(1, spec.devices))) is not None:
            reservations.served(spec.name)

    def waits(self) -> bool:
        """Whether a model waits for a place."""
        return any(reservations.any(self._now()) for reservations in self._reservations.values())

    def reliefs(self) -> list[tuple[HeardGroup, list[DepartingModel]]]:
        """Groups that lack memory for KV, of those made anew since the last call, with the idle models that are to make
        way."""
        self._group_indexes.listen()
        found = []
        for group in self._group_indexes.news():
            there = self._group_indexes.of(group)
            if there is not None:
                decisions = there.relieve(group.name).decisions
                yields = [DepartingModel(d.model, common_pb2.HIBERNATING, d.reason) for d in decisions]
                if yields:
                    found.append((group, yields))
        return found

    def moves(self) -> list[PlacementPlan]:
        """Migrations that Algorithm 1 wants and that can begin now. It runs for groups of one size at a time, since no
        model moves to a group of another size."""
        self._group_indexes.listen()
        return [
            move for size, there in sorted(self._group_indexes.by_size.items()) for move in self._moves(size, there)
        ]

    def _moves(self, size: int, there: GroupIndex) -> list[PlacementPlan]:
        wanted = self._rounds[size] = rebalance(
            there.groups,
            there.residents,
            self._cool_downs.moved_at(),
            self._now(),
            self._config.moves,
            self._rounds.get(size, NONE),
            self._group_indexes.outcomes,
            self._settled(),
        )
        moves = [verdict for each in wanted.begin if (verdict := self._move(there, each)) is not None]
        return moves

    def _settled(self) -> frozenset[str]:
        """Models whose place was chosen by what they are asked for, or has been corrected since."""
        return self._group_indexes.expected | self._cool_downs.moved_once

    def _settled_here(self) -> list[str]:
        """Settled models (`_settled`) that are on a group now."""
        return [name for name in self._settled() if self._cluster.residents(name)]

    def _move(self, there: GroupIndex, wanted: WantedMove) -> PlacementPlan | None:
        """The plan of a move, with the models that make way at the target; None if there is no room after all, or what
        leaves is worth more."""
        move, reason = wanted.move, wanted.reason
        entry = self._cluster.entry(move.model)
        if entry is None:
            return None
        answer = there.activate(self._group_indexes.model(entry.model), move.target.group)
        if not isinstance(answer.outcome, Activate):
            return None
        leaving, outcomes = [each.model for each in answer.evictions], self._group_indexes.outcomes
        if self._config.first_do_no_harm and not is_worth(move, leaving, there.residents, outcomes, self._now()):
            return None
        return PlacementPlan(
            move.model,
            self._cluster.group(move.target.group),
            reason.text,
            [placement_pb2.Candidate(group=o.place.group, pressure=o.pressure) for o in reason.options],
            _yielding(answer),
            self._cluster.group(move.source.group),
        )

    # --- replicas

    def replica(self, on_their_way: Container[str]) -> PlacementPlan | None:
        """The plan to bring a model that is short of groups up on one more; None if no model is, or no group has so
        much to spare. A plan that is returned is taken to be carried out. `on_their_way`: models that are not looked
        at."""
        self._group_indexes.listen()
        replication = self._group_indexes.replication
        for name in replication.short(self._now()):
            entry = self._cluster.entry(name)
            there = self._suitable(entry.model) if entry is not None else None
            if entry is None or there is None or name in on_their_way:
                continue
            residents = self._cluster.residents(name)
            here = [group.name for group, each in residents if each.residency == common_pb2.ACTIVE]
            if len(here) >= self.most_replicas(entry.model):
                continue
            closed = {group.name for group, each in residents if each.residency != common_pb2.HIBERNATING}
            crowded = replication.crowded(self._now())
            closed |= {group.name for address, group in self._cluster.groups.items() if address in crowded}
            wanted = self._wanted(entry.model)
            answer = there.replica(wanted.wanted(wanted.demand / (len(here) + 1)), here, closed)
            plan = self._verdict(entry.model, answer) if answer is not None else None
            if plan is not None and plan.group is not None:
                replication.granted(name, self._group_indexes.rate(name), self._now())
                where = " and ".join(here)
                return replace(
                    plan, reason=f"its requests are late on {where}, where most of the demand is its own: {plan.reason}"
                )
        return None

    def most_replicas(self, spec: common_pb2.ModelSpec) -> int:
        """Most groups that serve the model at once."""
        most = self._config.replication.most
        return min(most, spec.most_replicas) if spec.most_replicas else most

    def beside(self, spec: common_pb2.ModelSpec, only: str | None = None) -> PlacementPlan:
        """The plan to bring an active model up on one group more, because an operator asked for it. `only`: name of the
        group; None: any."""
        self._group_indexes.listen()
        there = self._suitable(spec)
        if there is None:
            return PlacementPlan(spec.name, None, self._unsuitable(spec))
        residents = self._cluster.residents(spec.name)
        closed = {group.name for group, each in residents if each.residency != common_pb2.HIBERNATING}
        if only is None and closed.issuperset(group.name for group in there.groups):
            return PlacementPlan(spec.name, None, f"no group is left: it is on {' and '.join(sorted(closed))}")
        wanted = self._wanted(spec)
        answer = there.activate(wanted.wanted(wanted.demand / (len(closed) + 1)), only, closed=closed)
        return self._verdict(spec, answer)

    def hold(self, model: str, held: bool) -> None:
        """Has the model leave none of its groups as not needed, or lets it again."""
        self._group_indexes.replication.hold(model, held)

    def holds(self, model: str) -> bool:
        """Whether the model leaves none of its groups as not needed."""
        return self._group_indexes.replication.holds(model)

    def surplus(self) -> list[tuple[str, HeardGroup, str]]:
        """Models that have more groups than they need or may have, each with the group that it can do without, and the
        reason."""
        self._group_indexes.listen()
        groups, entry = self._cluster.groups, self._cluster.entry
        going = {address for address, group in groups.items() if group.drained or group.state.stopping}

        def most(model: str) -> int:
            known = entry(model)
            return self._config.replication.most if known is None else self.most_replicas(known.model)

        def reason(model: str) -> str:
            if len(replication.groups(model)) > most(model):
                return f"its most_replicas is {most(model)}"
            return "its other groups can serve its requests"

        replication = self._group_indexes.replication
        found = replication.surplus(self._now(), self._group_indexes.rate, going, most)
        # A model that was found again on a group is settled by `Deduplicator`, or it would leave two groups at once.
        doubtful = {model for _, model in self._cluster.doubtful}
        found = [(name, where) for name, where in found if where in groups and name not in doubtful]
        return [(name, groups[where], reason(name)) for name, where in found]

    def moved(self, model: str) -> None:
        """Notes that a migration has ended: the model's cool-down begins."""
        self._cool_downs.moved(model, self._now())

    def not_moved(self, model: str) -> None:
        """Notes that a migration has failed."""
        self._cool_downs.not_moved(model, self._now())


def _yielding(answer: ActivationPlan) -> list[DepartingModel]:
    return [
        DepartingModel(e.model, common_pb2.HIBERNATING if isinstance(e, Hibernate) else common_pb2.COLD, e.reason)
        for e in answer.evictions
    ]
