"""Follows the streams of groups and balloonds, and tells the cluster what they report."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar, cast

from balloond.client import BalloondClient
from gpu_scheduler.client import GpuSchedulerClient
from placement.cluster.cluster import Cluster
from services.telemetry import log

_log = log.get(__name__)
T = TypeVar("T")
_SELDOM_MS = 100
"""An open stream keeps its rate while reports need be no further apart than that, in milliseconds, whatever the
cluster's size."""
_FIGURES_MS = 1
"""Milliseconds for each group of the cluster between two reports of one group that differ in counters alone, and
between two reports of one ledger. So placement gets a thousand or two a second, up to a thousand groups, which takes a
few tenths of a core."""


class StreamFollower:
    """Follows streams for one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def group(self, client: GpuSchedulerClient) -> None:
        """Keeps one group's state fresh, for ever."""
        group = self._cluster.groups[client.address]
        async for state in self._told(client.watch):
            was_reachable = group.reachable
            self._cluster.heard_group(client.address, state)
            if was_reachable and not group.reachable:
                _log.warning("group lost", group=group.name)
            elif group.reachable and not was_reachable:
                _log.info("group found", group=group.name, residents=len(group.residents))
            self._cluster.changed()

    async def balloond(self, balloond: BalloondClient, address: str) -> None:
        """Keeps one node's ledger fresh, for ever."""
        node = ""
        async for state in self._told(balloond.watch):
            node = node if state is None else state.node
            if not self._cluster.refusals.refuses_ledger(address, node, is_away=state is None):
                self._cluster.heard_ledger(node, state)
                self._cluster.changed()

    async def _told(self, watch: Callable[[Callable[[], int], bool], AsyncIterator[T]]) -> AsyncIterator[T]:
        """Messages of a stream. It is opened again when the cluster has changed so much, to twice its size say, that
        reports should come at another rate."""
        heard = False
        while True:
            asked = self._apart_ms()
            # The peer may be lost just when the stream is closed and opened again.
            stream = watch(self._apart_ms, heard)
            async for state in stream:
                yield state
                heard = state is not None
                least, most = sorted((asked, self._apart_ms()))
                if most > max(_SELDOM_MS, 2 * least):
                    break
            else:
                return
            await cast(AsyncGenerator[T, None], stream).aclose()

    def _apart_ms(self) -> int:
        return _FIGURES_MS * len(self._cluster.groups)
