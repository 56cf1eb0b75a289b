"""Puts the cluster, as last heard, before the policy, and turns the answers into verdicts that can be carried out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from placement.cluster import PRESENT, Cluster, Group
from placement.config import PlacementConfig
from placement.policy import kvpr
from placement.policy.window import RateWindow
from protos import common_pb2, gpu_scheduler_pb2, placement_pb2


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

    def __init__(self, config: PlacementConfig, cluster: Cluster, now: Callable[[], float]) -> None:
        self._config = config
        self._cluster = cluster
        self._now = now
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
            self._windows[model] = RateWindow(
                window_s=self._config.window_s, short_s=self._config.short_window_s
            )
        return self._windows[model]

    def _demand(self, spec: common_pb2.ModelSpec) -> float:
        target = self._tpot_ms.get(spec.name) or spec.default_slo.tpot_ms
        return kvpr.demand(
            self._window(spec.name).rate(self._now()),
            spec.kv_bytes_per_token,
            target / 1e3 if target else None,
            self._config.default_tpot_ms / 1e3,
        )

    def demands(self) -> dict[str, float]:
        """w of every model."""
        return {name: self._demand(entry.model) for name, entry in self._cluster.catalogue.items()}

    # --- the policy's terms

    @staticmethod
    def _group(group: Group) -> kvpr.Group:
        devices = (kvpr.Device(d.device, d.capacity_bytes) for d in group.state.memory)
        return kvpr.Group(group.name, tuple(devices))

    def _model(self, spec: common_pb2.ModelSpec, resident: gpu_scheduler_pb2.Resident | None = None) -> kvpr.Model:
        weights = max(spec.weights_bytes, resident.weights_bytes if resident is not None else 0)
        model = kvpr.Model(
            name=spec.name,
            demand=self._demand(spec),
            weights=weights,
            floor=spec.floor_bytes,
            quota=spec.quota_bytes,
            parts=max(1, spec.devices),
            pinned=spec.pinned,
        )
        asleep = resident is not None and resident.residency == common_pb2.HIBERNATING
        return model.asleep() if asleep else model

    def _books(self, groups: list[Group]) -> kvpr.Books:
        books = kvpr.Books(self._group(group) for group in groups)
        for group in groups:
            devices = [device.device for device in group.state.memory]
            for resident in group.state.residents:
                entry = self._cluster.entry(resident.model)
                if entry is not None and resident.residency in PRESENT:
                    books.book(self._model(entry.model, resident), devices)
        return books

    # --- verdicts

    def refused(self, spec: common_pb2.ModelSpec) -> str:
        """Why no group could hold the model even alone; empty if one could."""
        groups = self._cluster.reachable()
        model = self._model(spec)
        empty = kvpr.Books(self._group(group) for group in groups)
        if not groups or any(empty.best(model, self._group(group))[1] for group in groups):
            return ""
        capacities = ", ".join(f"{group.name} has {group.capacity_bytes}" for group in groups)
        return (
            f"fits no device: weights {model.weights} + floor {model.floor} + engine quota {model.quota} = "
            f"{model.weights + model.floor + model.quota} bytes, {capacities}"
        )
