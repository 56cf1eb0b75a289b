"""Keeps a model on no more groups than it may have, and a removed model on none. While a group was away its models may
have come up on another group, or may have been removed: when it is found again, such a model leaves a group that is one
too many, or its only one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from placement.actuation.actuator import Actuator
from placement.actuation.history import DecisionHistory
from placement.cluster.cluster import PRESENT, TAKES_REQUESTS, Cluster, HeardGroup
from protos import common_pb2, gpu_scheduler_pb2
from services.errors import PrismError
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_AGAIN_S = 2.0
"""Seconds before a group that refused to release a model is asked again; mostly the model is on its way up there."""


class Deduplicator:
    """Settles the doubtful places of the cluster (`Cluster.doubtful`)."""

    def __init__(
        self,
        cluster: Cluster,
        actuator: Actuator,
        history: DecisionHistory,
        drain_ms: int,
        on_change: Callable[[], None],
        most_replicas: int = 1,
    ) -> None:
        """`drain_ms`: milliseconds that running requests may take to finish on the group that is left. `on_change` is
        called when a model has left, or could not. `most_replicas`: the most groups that serve a model at once."""
        self._cluster = cluster
        self._actuator = actuator
        self._history = history
        self._drain_ms = drain_ms
        self._on_change = on_change
        self._most_replicas = most_replicas
        self._leaving: set[tuple[str, str]] = set()

    def settle(self) -> None:
        """Takes models off groups where they are one time too many, or where they are although they were removed. A
        model stays where it takes requests, and of such groups on those that were not away."""
        self._actuator.overdue &= self._cluster.doubtful
        for model in sorted({model for _, model in self._cluster.doubtful}):
            if model in self._actuator.moving | self._actuator.removing or model in self._actuator.activating:
                continue  # the operation under way settles its places
            places = [each for each in self._cluster.residents(model) if each[1].residency in PRESENT]
            places.sort(key=lambda each: self._rank(model, *each))
            if not any((group.client.address, model) in self._cluster.doubtful for group, _ in places):
                continue  # the group is away again, or the model is in error there
            was_removed = model in self._cluster.removed and self._cluster.entry(model) is None
            serving = [group for group, resident in places if resident.residency in TAKES_REQUESTS]
            lasting = [group for group in serving if not self._has_to_leave(group, model)]
            entry = self._cluster.entry(model)
            own = entry.model.most_replicas if entry is not None else 0
            most = min(self._most_replicas, own or self._most_replicas)
            kept = (lasting or [group for group, _ in places[:1]])[:most]
            for group, _ in places:
                place, best = (group.client.address, model), kept[0]
                if was_removed and place in self._cluster.doubtful:
                    self._let_go(place, group, f"{group.name} is back, and it was removed")
                elif not was_removed and group not in kept:
                    self._let_go(place, group, f"{best.name} has it as well")
                elif len(places) == len(kept):
                    self._cluster.trust(group, model)

    def _has_to_leave(self, group: HeardGroup, model: str) -> bool:
        overdue = (group.client.address, model) in self._actuator.overdue
        return overdue or group.drained or group.state.stopping

    def _let_go(self, place: tuple[str, str], group: HeardGroup, why: str) -> None:
        if place not in self._leaving:
            self._leaving.add(place)
            tasks.spawn(self._leave(place, group, why), f"{place[1]} leaves {group.name}")

    def _rank(self, model: str, group: HeardGroup, resident: gpu_scheduler_pb2.Resident) -> tuple[bool, bool, int]:
        doubtful = (group.client.address, model) in self._cluster.doubtful
        return resident.residency not in TAKES_REQUESTS, doubtful, -(resident.running + resident.waiting)

    async def _leave(self, place: tuple[str, str], group: HeardGroup, why: str) -> None:
        model = place[1]
        try:
            entry = self._cluster.entry(model)
            spec = common_pb2.ModelSpec(name=model) if entry is None else entry.model
            record = self._history.add(model, "go cold", group.name, why)
            successor = self._actuator.successor(group, self._actuator.beside(group, model))
            await self._actuator.bring_down(spec, group, common_pb2.COLD, record, self._drain_ms, successor)
            # Until the group itself reports that the model has left, routes would lead there.
            await self._cluster.until(lambda: model not in group.residents or not group.reachable)
            self._actuator.overdue.discard(place)
        except PrismError as error:
            _log.warning("a model stays on a group that it should leave", model=model, group=group.name, why=str(error))
            await asyncio.sleep(_AGAIN_S)
        finally:
            self._leaving.discard(place)
            self._on_change()
