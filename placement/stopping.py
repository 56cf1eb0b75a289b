"""Groups that are stopped on purpose wait for what runs to be moved away, as long as they are held."""

from __future__ import annotations

import contextlib

from placement.cluster import Cluster, Group
from placement.drain import Drain
from services import log, tasks
from services.errors import PrismError

_log = log.get(__name__)


class Stopping:
    """Looks for them. `look` is called after every change of the cluster."""

    def __init__(self, cluster: Cluster, drain: Drain) -> None:
        self._cluster = cluster
        self._drain = drain
        self._seen: set[Group] = set()

    def look(self) -> None:
        """Begins to empty each group that says anew that it is stopping."""
        stopping = {group for group in self._cluster.groups.values() if group.reachable and group.state.stopping}
        for group in stopping - self._seen:
            tasks.spawn(self._empty(group), f"empty {group.name}, which is stopping")
        self._seen = stopping

    async def _empty(self, group: Group) -> None:
        _log.info("a group is stopping", group=group.name)
        try:
            async with contextlib.aclosing(group.client.hold()) as held:
                async for _ in held:
                    await self._drain.move_away(group)
                    return
        except PrismError as error:
            _log.warning("a group could not be held", group=group.name, why=str(error))
