"""Puts the cluster, as last heard, before the policy, and turns the answers into verdicts that can be carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from placement.cluster import PRESENT, Cluster, Group
from placement.config import PlacementConfig
from placement.policy import kvpr
from placement.policy.assign import AssignRules
from placement.policy.decisions import Activate, Hibernate, Resident
from placement.policy.lifecycle import Activation
from placement.policy.moves import MoveRules
from placement.policy.promises import Promises
from placement.policy.rebalance import RebalanceRules, Wanted, rebalance
from placement.policy.standing import Standing
from placement.policy.window import RateWindow
from protos import common_pb2, gpu_scheduler_pb2, placement_pb2

_WAKE_S, _COLD_S = 1.0, 30.0
"""What waking up and starting cold are thought to take until a group has measured it."""


@dataclass(frozen=True)
class Yielding:
    """A model of the group that makes way."""

    model: str
    target: common_pb2.Residency
    reason: str


@dataclass(frozen=True)
class Verdict:
    """What is to happen to a model; `group` None: nothing can."""

    model: str
    group: Group | None
    reason: str
    candidates: list[placement_pb2.Candidate] = field(default_factory=list)
    yields: list[Yielding] = field(default_factory=list)
    source: Group | None = None


class Judge:
    """Keeps the token rates, and the groups in the policy's terms: these are made anew of what something was heard of,
    demands each time that it observes."""

    def __init__(
        self,
        config: PlacementConfig,
        cluster: Cluster,
        now: Callable[[], float],
        on_their_way: Callable[[], Mapping[str, Group]],
    ) -> None:
        """`on_their_way`: models whose activation was ordered, with the group: its reports may not show them yet."""
        self._config = config
        self._cluster = cluster
        self._now = now
        self._on_their_way = on_their_way
        self._standings: dict[int, Standing] = {}
        """By the number of devices of a group."""
        self._standing_of: dict[str, tuple[int, str]] = {}
        """Which of these a group is in, and under what name, by the address of its client."""
        self._expected: set[Group] = set()
        """Groups on which a model was on its way when they were last heard."""
        self._demands: dict[str, float] = {}
        self._windows: dict[str, RateWindow] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._tpot_ms: dict[str, float] = {}
        self._moved_at: dict[str, float] = {}
        self._promises: dict[int, Promises] = {}
        """By the number of devices of a group."""
        self._to_relieve: dict[str, Group] = {}
        """Groups that were heard since it was last looked whether they lack KV memory, by address."""

    # --- demand

    def observe(self) -> None:
        """Takes in what was heard of the groups, and the demands that follow from it and from the time."""
        self._listen()
        entries = ((name, self._cluster.entry(name)) for name in self._windows)
        fresh = {name: self._demand(entry.model) for name, entry in entries if entry is not None}
        changed = [name for name, demand in fresh.items() if demand != self._demands.get(name)]
        self._demands = fresh
        for group in dict.fromkeys(group for name in changed for group, _ in self._cluster.residents(name)):
            self._stand(group)

    def _listen(self) -> None:
        """Takes in the groups of which something was heard."""
        now, expected = self._now(), set(self._on_their_way().values())
        fresh = self._cluster.fresh()
        for group in fresh:
            if group.reachable:
                self._count(group, now)
        for group in dict.fromkeys([*fresh, *expected, *self._expected]):
            self._stand(group)
        self._expected = expected

    def _count(self, group: Group, now: float) -> None:
        """Takes a group's token counters into the windows. A counter that fell is of a model that came anew."""
        for name, resident in group.residents.items():
            total = resident.prefill_tokens + resident.decode_tokens
            before = self._seen.get((group.name, name), 0)
            self._seen[group.name, name] = total
            if total != before:
                self._window(name).observe(total - before if total > before else total, now)
            if resident.tpot_target_ms:
                self._tpot_ms[name] = resident.tpot_target_ms

    def _stand(self, group: Group) -> None:
        """Brings the group up to date in its standing."""
        address, size = group.client.address, len(group.memory)
        there = (size, group.name) if group.reachable and group.capacity_bytes else None
        before = self._standing_of.pop(address, None)
        if before is not None and before != there:
            self._standings[before[0]].lose(before[1])
        if there is not None:
            self._standing_of[address] = there
            standing = self._standings.setdefault(size, Standing(self._config.lifecycle))
            standing.hear(self._group(group), self._residents(group))
            self._to_relieve[address] = group

    def _window(self, model: str) -> RateWindow:
        if model not in self._windows:
            self._windows[model] = RateWindow(window_s=self._config.window_s, short_s=self._config.short_window_s)
        return self._windows[model]

    def _demand(self, spec: common_pb2.ModelSpec) -> float:
        target = self._tpot_ms.get(spec.name) or spec.default_slo.tpot_ms
        return kvpr.demand(
            self._window(spec.name).rate(self._now()),
            spec.kv_bytes_per_token,
            target / 1e3 if target else None,
            self._config.default_tpot_ms / 1e3,
        )

    def rates(self) -> dict[str, float]:
        """Tokens per second of every model that has had any."""
        now = self._now()
        return {name: window.rate(now) for name, window in self._windows.items()}

    def demands(self) -> dict[str, float]:
        """w of every model."""
        return {name: self._demand(entry.model) for name, entry in self._cluster.catalogue.items()}

    # --- the policy's terms

    @staticmethod
    def _group(group: Group) -> kvpr.Group:
        devices = (kvpr.Device(d.device, d.capacity_bytes) for d in group.memory)
        return kvpr.Group(group.name, tuple(devices))

    def _model(self, spec: common_pb2.ModelSpec, resident: gpu_scheduler_pb2.Resident | None = None) -> kvpr.Model:
        weights = max(spec.weights_bytes, resident.weights_bytes if resident is not None else 0)
        extent = self._cluster.weights_extent_bytes  # as gpu_schedulers book them: whole extents
        parts = max(1, spec.devices)
        weights = parts * extent * -(-kvpr.share(weights, parts) // extent)
        quota, graphs, kept = spec.quota_bytes, 0, 0
        if resident is not None:
            quota, graphs, kept = resident.quota_bytes or quota, resident.graph_bytes, resident.kept_bytes
        return kvpr.Model(
            name=spec.name,
            demand=self._demands.get(spec.name, kvpr.LEAST_DEMAND),
            weights=weights + graphs,
            floor=spec.floor_bytes,
            quota=quota,
            kept=kept,
            parts=parts,
            pinned=spec.pinned,
        )

    # --- verdicts

    def refused(self, spec: common_pb2.ModelSpec) -> str:
        """Why no group could hold the model even alone; empty if one could."""
        self._listen()
        if not self._standing_of:
            return ""
        there = self._suitable(spec)
        if there is None:
            return self._unsuitable(spec)
        answer = there.refused(self._model(spec), self._config.places.get(spec.name))
        return answer.reason if answer is not None else ""

    def _suitable(self, spec: common_pb2.ModelSpec) -> Standing | None:
        """A group's engines have a process on each of its devices: it serves models on exactly so many. A model that
        has its place is for that one alone. None: no such group is here."""
        there = self._standings.get(max(1, spec.devices))
        place = self._config.places.get(spec.name)
        if there is None or not (len(there) if place is None else place in there):
            return None
        return there

    def _unsuitable(self, spec: common_pb2.ModelSpec) -> str:
        have = ", ".join(f"{group.name} has {len(group.memory)}" for group in self._cluster.reachable())
        place = self._config.places.get(spec.name)
        on = "a group" if place is None else f"{place}, a group"
        return f"{spec.name} is for {on} of {max(1, spec.devices)} devices: {have}"

    def _residents(self, group: Group) -> list[Resident]:
        """What holds memory on the group, in the policy's terms: its residents, and what balloond's ledger has booked
        beside them (an engine that is being buried)."""
        found = []
        place = self._place(group)
        for resident in group.residents.values():
            entry = self._cluster.entry(resident.model)
            if entry is None or resident.residency not in PRESENT:
                continue
            cold_s = resident.cold_s or _COLD_S
            parts = max(1, entry.model.devices)
            steady = resident.residency in (common_pb2.ACTIVE, common_pb2.HIBERNATING)
            asleep = resident.residency == common_pb2.HIBERNATING
            found.append(
                Resident(
                    self._model(entry.model, resident),
                    place,
                    hibernating=asleep,
                    idle_s=resident.idle_s if steady else 0.0,
                    wake_s=resident.wake_s or min(_WAKE_S, cold_s),
                    cold_s=cold_s,
                    host_bytes=resident.private_bytes,
                    stay_s=(resident.active_s or inf) if resident.residency == common_pb2.ACTIVE else 0.0,
                    claims=resident.waiting - resident.late,
                    kv_used=kvpr.share(resident.kv_used_bytes, parts),
                    kv_lacking=kvpr.share(resident.kv_lacking_bytes, parts),
                )
            )
        present = {resident.model.name for resident in found}
        for name, where in self._on_their_way().items():
            entry = self._cluster.entry(name)
            if where is group and name not in present and entry is not None:
                found.append(Resident(self._model(entry.model), place, stay_s=0.0))
                present.add(name)
        for device in group.memory:
            for booking in device.bookings:
                if booking.model not in present:
                    left = kvpr.Model(
                        booking.model,
                        weights=booking.weights_bytes,
                        floor=booking.floor_bytes,
                        quota=booking.quota_bytes,
                    )
                    found.append(Resident(left, kvpr.Place(group.name, (device.device,)), stay_s=0.0))
        return found

    @staticmethod
    def _place(group: Group) -> kvpr.Place:
        """What a model has there: a part on each device."""
        return kvpr.Place(group.name, tuple(device.device for device in group.memory))

    def activation(self, spec: common_pb2.ModelSpec) -> Verdict:
        """Where a model that is nowhere comes up, and who makes way."""
        self._listen()
        there = self._suitable(spec)
        if there is None:
            return Verdict(spec.name, None, self._unsuitable(spec))
        model = replace(self._model(spec), demand=self._demand(spec))
        promises = self._promises.setdefault(max(1, spec.devices), Promises(self._config.patience_s))
        answer = promises.ask(model, there, self._now(), self._config.places.get(spec.name))
        candidates = [
            placement_pb2.Candidate(group=option.place.group, pressure=option.pressure) for option in answer.options
        ]
        if not isinstance(answer.outcome, Activate):
            return Verdict(spec.name, None, answer.outcome.reason, candidates)
        group = self._cluster.group(answer.outcome.place.group)
        return Verdict(spec.name, group, answer.outcome.reason, candidates, _yielding(answer))

    def served(self, spec: common_pb2.ModelSpec) -> None:
        """It is where it was to be. Until then it keeps its place among those who wait: its group may refuse it."""
        if (promises := self._promises.get(max(1, spec.devices))) is not None:
            promises.served(spec.name)

    def waits(self) -> bool:
        """Whether a model waits for a place."""
        return any(promises.any(self._now()) for promises in self._promises.values())

    def reliefs(self) -> list[tuple[Group, list[Yielding]]]:
        """Groups that lack memory for KV, of those heard since this was asked last, and the idle models that are to
        make way for it."""
        self._listen()
        heard, self._to_relieve = self._to_relieve, {}
        found = []
        for address, group in heard.items():
            if address in self._standing_of:
                size, name = self._standing_of[address]
                decisions = self._standings[size].relieve(name).decisions
                yields = [Yielding(d.model, common_pb2.HIBERNATING, d.reason) for d in decisions]
                if yields:
                    found.append((group, yields))
        return found

    def moves(self) -> list[Verdict]:
        """Migrations that Algorithm 1 wants and that can begin now: among groups of one size at a time, since no model
        moves to one of another."""
        self._listen()
        return [move for _, there in sorted(self._standings.items()) for move in self._moves(there)]

    def _moves(self, there: Standing) -> list[Verdict]:
        wanted = rebalance(
            there.groups,
            there.residents,
            self._moved_at,
            self._now(),
            RebalanceRules(
                AssignRules(tau=self._config.tau, cool_down_s=self._config.cool_down_s),
                MoveRules(at_once=self._config.migrations_at_once, cool_down_s=self._config.cool_down_s),
                self._config.least_pressure,
                self._config.least_share,
            ),
        )
        return [verdict for each in wanted if (verdict := self._move(there, each)) is not None]

    def _move(self, there: Standing, wanted: Wanted) -> Verdict | None:
        """With those who make way at the target; None: there is no room after all."""
        move, reason = wanted.move, wanted.reason
        entry = self._cluster.entry(move.model)
        if entry is None:
            return None
        answer = there.activate(self._model(entry.model), move.target.group)
        if not isinstance(answer.outcome, Activate):
            return None
        return Verdict(
            move.model,
            self._cluster.group(move.target.group),
            reason.text,
            [placement_pb2.Candidate(group=o.place.group, pressure=o.pressure) for o in reason.options],
            _yielding(answer),
            self._cluster.group(move.source.group),
        )

    def moved(self, model: str) -> None:
        """A migration is through: the cool-down begins."""
        self._moved_at[model] = self._now()


def _yielding(answer: Activation) -> list[Yielding]:
    return [
        Yielding(e.model, common_pb2.HIBERNATING if isinstance(e, Hibernate) else common_pb2.COLD, e.reason)
        for e in answer.evictions
    ]
