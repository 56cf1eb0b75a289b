"""Evacuates groups that are stopped on purpose: such a group waits for its running requests to be moved away, as long
as placement holds it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from placement.actuation.drain import Drain
from placement.cluster.cluster import HeardGroup
from services.errors import PrismError
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)


class Evacuation:
    """Finds groups that are stopping, and begins to empty each once."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._seen: set[HeardGroup] = set()

    def look(self, groups: Iterable[HeardGroup]) -> None:
        """Begins to empty each of `groups` that newly reports that it is stopping. `groups`: those that reported, or
        are away."""
        for group in groups:
            if not (group.reachable and group.state.stopping):
                self._seen.discard(group)
            elif group not in self._seen:
                self._seen.add(group)
                tasks.spawn(self._empty(group), f"empty {group.name}, which is stopping")

    async def _empty(self, group: HeardGroup) -> None:
        _log.info("a group is stopping", group=group.name)
        try:
            async with contextlib.aclosing(group.client.hold()) as held:
                async for _ in held:
                    await self._drain.move_away(group)
                    return
        except PrismError as error:
            _log.warning("a group could not be held", group=group.name, why=str(error))
