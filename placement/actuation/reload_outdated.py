"""Reloads models whose engines are not what the catalogue says: its file was read again, and a model has other files by
now, has another context, or is not listed any more. Such models leave, one of a group at a time, and running requests
may finish; models that are listed come up afresh.

A model that left the catalogue while placement was not running is not known here, and stays as long as its group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from placement.actuation.actuator import Actuator
from placement.actuation.drain import Drain
from placement.cluster.cluster import Cluster, HeardGroup
from protos import common_pb2, gpu_scheduler_pb2
from services.errors import PrismError
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_LASTS = (common_pb2.ACTIVE, common_pb2.HIBERNATING)
_AGAIN_S = 2.0
"""Seconds before a model that could not leave is tried again."""


class OutdatedReloader:
    """Finds outdated models, and has them leave."""

    def __init__(self, cluster: Cluster, actuator: Actuator, drain: Drain, again_s: float = _AGAIN_S) -> None:
        self._again_s = again_s
        self._cluster = cluster
        self._actuator = actuator
        self._drain = drain
        self._leaving: dict[str, str] = {}
        """Model -> name of the group that it is leaving."""

    def look(self, groups: Iterable[HeardGroup]) -> None:
        """Has outdated models leave these groups, unless they are on their way already. `groups`: those that reported,
        or have a model whose catalogue entry changed. A model that cannot leave now is looked at when its group reports
        again."""
        for group, resident, why in list(self._found(groups)):
            model = resident.model
            on_its_way = model in self._actuator.moving | self._actuator.removing or model in self._actuator.activating
            # One by one: copied files look like changed ones, and if all models left at once none would serve.
            if not on_its_way and model not in self._leaving and group.name not in self._leaving.values():
                self._leaving[model] = group.name
                tasks.spawn(self._leave(group, resident, why), f"renew {model}")

    def _found(self, groups: Iterable[HeardGroup]) -> Iterator[tuple[HeardGroup, gpu_scheduler_pb2.Resident, str]]:
        for group in groups:
            for resident in group.residents.values() if group.reachable else ():
                if resident.residency not in _LASTS:
                    continue
                if resident.outdated:
                    yield group, resident, "the catalogue describes it differently now"
                elif resident.model in self._cluster.vanished:
                    yield group, resident, "the catalogue does not list it any more"

    async def _leave(self, group: HeardGroup, resident: gpu_scheduler_pb2.Resident, why: str) -> None:
        model = resident.model
        _log.info("a model leaves", model=model, group=group.name, why=why)
        try:
            await self._drain.renew(group, resident, why)
            # Until the group itself reports the change, the model would be found again.
            await self._cluster.until(lambda: model not in [r.model for _, r, _ in self._found([group])])
        except PrismError as error:
            _log.warning("a model stays as it was", model=model, group=group.name, why=str(error))
            await asyncio.sleep(self._again_s)
        finally:
            del self._leaving[model]
        self.look(self._cluster.reachable())
