"""A model lives on one group, and one that was removed on none. While a group was away its models may have come up
elsewhere, or been removed: when it is found again, they leave one of the two, or it."""

from __future__ import annotations

from collections.abc import Callable

from placement.actuate import Actuator
from placement.cluster import PRESENT, TAKES_REQUESTS, Cluster, Group
from placement.history import History
from protos import common_pb2, gpu_scheduler_pb2
from services import log, tasks
from services.errors import PrismError

_log = log.get(__name__)


class Settler:
    """Looks at what is doubtful of the cluster (`Cluster.doubtful`)."""

    def __init__(
        self, cluster: Cluster, actuator: Actuator, history: History, drain_ms: int, on_change: Callable[[], None]
    ) -> None:
        """`drain_ms`: how long what runs on the group that is left may finish; `on_change` is called when a model has
        left, or could not."""
        self._cluster = cluster
        self._actuator = actuator
        self._history = history
        self._drain_ms = drain_ms
        self._on_change = on_change
        self._leaving: set[tuple[str, str]] = set()

    def settle(self) -> None:
        """Has models leave where they are twice, or are nobody's any more. One that is twice stays where it takes
        requests, and where it was while the other group was away."""
        for doubt in sorted(self._cluster.doubtful - self._leaving):
            address, model = doubt
            if model in self._actuator.moving | self._actuator.removing or model in self._actuator.activating:
                continue  # who carries that out leaves it on one
            places = [each for each in self._cluster.residents(model) if each[1].residency in PRESENT]
            places.sort(key=lambda each: self._rank(model, *each))
            group = self._cluster.groups[address]
            if all(each is not group for each, _ in places):
                continue  # away again, or it is in error there
            best = places[0][0]
            was_removed = model in self._cluster.removed and self._cluster.entry(model) is None
            if was_removed or best is not group:
                why = "it was removed" if was_removed else f"{best.name} has it"
                self._leaving.add(doubt)
                tasks.spawn(self._leave(doubt, group, why), f"{model} leaves {group.name}")
            elif len(places) == 1:
                self._cluster.doubtful.discard(doubt)

    def _rank(self, model: str, group: Group, resident: gpu_scheduler_pb2.Resident) -> tuple[bool, bool, int]:
        doubtful = (group.client.address, model) in self._cluster.doubtful
        return resident.residency not in TAKES_REQUESTS, doubtful, -(resident.running + resident.waiting)

    async def _leave(self, doubt: tuple[str, str], group: Group, why: str) -> None:
        model = doubt[1]
        try:
            entry = self._cluster.entry(model)
            spec = common_pb2.ModelSpec(name=model) if entry is None else entry.model
            record = self._history.add(model, "go cold", group.name, f"{group.name} is back, and {why}")
            await self._actuator.bring_down(spec, group, common_pb2.COLD, record, self._drain_ms)
            # Until the group itself says that it has left, it would be routed.
            await self._cluster.until(lambda: doubt not in self._cluster.doubtful or not group.reachable)
        except PrismError as error:  # looked at again when something was heard
            _log.warning("a model stays on two groups", model=model, group=group.name, why=str(error))
        finally:
            self._leaving.discard(doubt)
            self._on_change()
