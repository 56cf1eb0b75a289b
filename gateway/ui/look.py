"""One look at the system: asks placement, and the groups that have requests waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_scheduler.client import GpuSchedulerClient
from placement.client import PlacementClient
from protos import gpu_scheduler_pb2, placement_pb2
from services.errors import PrismError, Unavailable

ANSWER_S = 2.0
"""Seconds after which a look has failed; a group that takes longer is shown without its queue."""
_DECISIONS = 200
"""Number of placement's last decisions that are shown."""


@dataclass(frozen=True)
class ServiceReply:
    """The services' answers, heard at second `at` on the gateway's clock."""

    at: float
    cluster: placement_pb2.Cluster
    decisions: list[placement_pb2.Decision] = field(default_factory=list)
    """Decisions, newest first; their ages are as of `at`."""
    queues: dict[str, gpu_scheduler_pb2.QueueState] = field(default_factory=dict)
    """Group's name -> its queue, for groups in which requests wait; a group that did not answer is left out."""


class ServiceClients:
    """Connections for looking, apart from those that serve."""

    def __init__(
        self, placement: str, now: Callable[[], float] = time.monotonic, *, answer_s: float = ANSWER_S
    ) -> None:
        """`placement`: its gRPC address. `answer_s`: seconds after which a look has failed, and a group that has not
        answered is shown without its queue."""
        self._placement = PlacementClient(placement, "placement")
        self._groups: dict[str, GpuSchedulerClient] = {}
        self._now = now
        self._answer_s = answer_s

    async def look(self) -> ServiceReply:
        """One look at the system. Raises a PrismError if placement is away."""
        try:
            async with asyncio.timeout(self._answer_s):
                cluster, decisions = await asyncio.gather(
                    self._placement.cluster(), self._placement.explain(limit=_DECISIONS)
                )
        except TimeoutError:
            raise Unavailable(f"placement has not answered within {self._answer_s:g} s") from None
        at = self._now()
        for address in self._groups.keys() - {group.address for group in cluster.groups}:
            await self._groups.pop(address).close()
        asked = [group for group in cluster.groups if group.reachable and any(m.waiting for m in group.models)]
        answers = await asyncio.gather(*(self._queue(group.address) for group in asked))
        queues = {group.group: queue for group, queue in zip(asked, answers, strict=True) if queue is not None}
        return ServiceReply(at, cluster, decisions, queues)

    async def _queue(self, address: str) -> gpu_scheduler_pb2.QueueState | None:
        if address not in self._groups:
            self._groups[address] = GpuSchedulerClient(address)
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._groups[address].inspect()
        except (PrismError, TimeoutError):
            return None

    async def close(self) -> None:
        await asyncio.gather(self._placement.close(), *(client.close() for client in self._groups.values()))
