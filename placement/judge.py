"""Puts the cluster, as last heard, before the policy, and turns the answers into verdicts that can be carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from placement.cluster import PRESENT, Cluster, Group
from placement.config import PlacementConfig
from placement.policy import kvpr, lifecycle
from placement.policy.assign import AssignRules
from placement.policy.decisions import Activate, Hibernate, Resident
from placement.policy.moves import MoveRules
from placement.policy.rebalance import RebalanceRules, rebalance
from placement.policy.refusal import refusal
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
    """Keeps the token rates; everything else is asked afresh."""

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
        self._lifecycle = config.lifecycle
        self._windows: dict[str, RateWindow] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._tpot_ms: dict[str, float] = {}
        self._moved_at: dict[str, float] = {}

    # --- demand

    def observe(self) -> None:
        """Takes the groups' token counters into the windows. A counter that fell is of a model that came anew."""
        now = self._now()
        for group in self._cluster.reachable():
            for resident in group.state.residents:
                total = resident.prefill_tokens + resident.decode_tokens
                key = (group.name, resident.model)
                before = self._seen.get(key, 0)
                self._seen[key] = total
                if total != before:
                    self._window(resident.model).observe(total - before if total > before else total, now)
                if resident.tpot_target_ms:
                    self._tpot_ms[resident.model] = resident.tpot_target_ms

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
        # As gpu_schedulers book them: whole extents.
        extent = max((group.state.weights_extent_bytes for group in self._cluster.groups.values()), default=0) or 1
        parts = max(1, spec.devices)
        weights = parts * extent * -(-kvpr.share(weights, parts) // extent)
        quota, graphs, kept = spec.quota_bytes, 0, 0
        if resident is not None:
            quota, graphs, kept = resident.quota_bytes or quota, resident.graph_bytes, resident.kept_bytes
        return kvpr.Model(
            name=spec.name,
            demand=self._demand(spec),
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
        if not self._cluster.reachable():
            return ""
        groups = self._suitable(spec)
        if not groups:
            return self._unsuitable(spec)
        answer = refusal(self._model(spec), [self._group(group) for group in groups])
        return answer.reason if answer is not None else ""

    def _suitable(self, spec: common_pb2.ModelSpec) -> list[Group]:
        """A group's engines have a process on each of its devices: it serves models on exactly so many. A model that
        has its place is for that one alone."""
        place = self._config.places.get(spec.name)
        groups = [group for group in self._cluster.reachable() if len(group.memory) == max(1, spec.devices)]
        return groups if place is None else [group for group in groups if group.name == place]

    def _unsuitable(self, spec: common_pb2.ModelSpec) -> str:
        have = ", ".join(f"{group.name} has {len(group.memory)}" for group in self._cluster.reachable())
        place = self._config.places.get(spec.name)
        on = "a group" if place is None else f"{place}, a group"
        return f"{spec.name} is for {on} of {max(1, spec.devices)} devices: {have}"

    def _residents(self, groups: list[Group]) -> list[Resident]:
        """What holds memory on the groups, in the policy's terms: their residents, and what balloond's ledger has
        booked beside them (an engine that is being buried)."""
        found = []
        for group in groups:
            place = self._place(group)
            for resident in group.state.residents:
                entry = self._cluster.entry(resident.model)
                if entry is None or resident.residency not in PRESENT:
                    continue
                cold_s = resident.cold_s or _COLD_S
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
                    )
                )
            present = {resident.model.name for resident in found if resident.place == place}
            for name, where in self._on_their_way().items():
                entry = self._cluster.entry(name)
                if where is group and name not in present and entry is not None:
                    found.append(Resident(self._model(entry.model), place))
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
                        found.append(Resident(left, kvpr.Place(group.name, (device.device,))))
        return found

    @staticmethod
    def _place(group: Group) -> kvpr.Place:
        """What a model has there: a part on each device."""
        return kvpr.Place(group.name, tuple(device.device for device in group.memory))

    def activation(self, spec: common_pb2.ModelSpec) -> Verdict:
        """Where a model that is nowhere comes up, and who makes way."""
        groups = self._suitable(spec)
        if not groups:
            return Verdict(spec.name, None, self._unsuitable(spec))
        answer = lifecycle.activate(
            self._model(spec), [self._group(group) for group in groups], self._residents(groups), self._lifecycle
        )
        candidates = [
            placement_pb2.Candidate(group=option.place.group, pressure=option.pressure) for option in answer.options
        ]
        if not isinstance(answer.outcome, Activate):
            return Verdict(spec.name, None, answer.outcome.reason, candidates)
        yields = [
            Yielding(
                eviction.model,
                common_pb2.HIBERNATING if isinstance(eviction, Hibernate) else common_pb2.COLD,
                eviction.reason,
            )
            for eviction in answer.evictions
        ]
        group = self._cluster.group(answer.outcome.place.group)
        return Verdict(spec.name, group, answer.outcome.reason, candidates, yields)

    def moves(self) -> list[Verdict]:
        """Migrations that Algorithm 1 wants and that can begin now: among groups of one size at a time, since no model
        moves to one of another."""
        groups = self._cluster.reachable()
        sizes = {len(group.memory) for group in groups}
        return [move for size in sorted(sizes) for move in self._moves([g for g in groups if len(g.memory) == size])]

    def _moves(self, groups: list[Group]) -> list[Verdict]:
        wanted = rebalance(
            [self._group(group) for group in groups],
            self._residents(groups),
            self._moved_at,
            self._now(),
            RebalanceRules(
                AssignRules(tau=self._config.tau, cool_down_s=self._config.cool_down_s),
                MoveRules(at_once=self._config.migrations_at_once, cool_down_s=self._config.cool_down_s),
                self._config.least_pressure,
            ),
        )
        return [
            Verdict(
                move.model,
                self._cluster.group(move.target.group),
                reason.text,
                [placement_pb2.Candidate(group=o.place.group, pressure=o.pressure) for o in reason.options],
                source=self._cluster.group(move.source.group),
            )
            for move, reason in ((each.move, each.reason) for each in wanted)
        ]

    def moved(self, model: str) -> None:
        """A migration is through: the cool-down begins."""
        self._moved_at[model] = self._now()
