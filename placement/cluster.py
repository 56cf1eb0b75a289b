"""What placement knows: the loaders' catalogue and the groups' states, as they were last heard. Nothing here decides.

All of it is rebuilt from the streams after a restart: there is no other state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from balloond.client import BalloondClient
from gpu_scheduler.client import GpuSchedulerClient
from protos import balloond_pb2, common_pb2, gpu_scheduler_pb2, loader_pb2
from services import log
from services.watch import Watched

_log = log.get(__name__)
PRESENT = (common_pb2.ACTIVE, common_pb2.WAKING, common_pb2.HIBERNATING, common_pb2.DRAINING)


@dataclass(eq=False)
class Group:
    """One gpu_scheduler. `state` is the last it said, `reachable` whether it is there now."""

    client: GpuSchedulerClient
    state: gpu_scheduler_pb2.GroupState = field(default_factory=gpu_scheduler_pb2.GroupState)
    reachable: bool = False
    ledgers: dict[str, dict[str, balloond_pb2.DeviceState]] = field(default_factory=dict)
    """Node -> device -> state: the cluster's, shared by all groups."""

    @property
    def name(self) -> str:
        return self.state.group or self.client.address

    @property
    def address(self) -> str:
        return self.state.address or self.client.address

    @property
    def capacity_bytes(self) -> int:
        return sum(device.capacity_bytes for device in self.memory)

    @property
    def free_bytes(self) -> int:
        return sum(device.free_bytes for device in self.memory)

    @property
    def memory(self) -> list[balloond_pb2.DeviceState]:
        """Of its devices: from balloond's own stream where it is heard, else as the group last told."""
        told = {device.device: device for device in self.state.memory}
        heard = self.ledgers.get(self.state.node, {})
        return [heard.get(name, told[name]) for name in told]

    def resident(self, model: str) -> gpu_scheduler_pb2.Resident | None:
        return next((resident for resident in self.state.residents if resident.model == model), None)


class Cluster:
    """Groups by address and the catalogue. `on_change` is called after every message."""

    def __init__(self, clients: list[GpuSchedulerClient], on_change: Callable[[], None]) -> None:
        self.ledgers: dict[str, dict[str, balloond_pb2.DeviceState]] = {}
        self.groups = {client.address: Group(client, ledgers=self.ledgers) for client in clients}
        self.catalogue: dict[str, loader_pb2.Entry] = {}
        self.catalogue_known = False
        self._on_change = on_change
        self._heard: Watched[None] = Watched(None)

    def changed(self) -> None:
        """Something that others are told of is new."""
        self._on_change()
        self._heard.set(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once what was heard, and told on, meets `condition`."""
        while not condition():
            await self._heard.changed(self._heard.revision)

    def entry(self, model: str) -> loader_pb2.Entry | None:
        return self.catalogue.get(model)

    def group(self, name: str) -> Group | None:
        """By the group's name or its address."""
        return next((group for group in self.groups.values() if name in (group.name, group.address)), None)

    def reachable(self) -> list[Group]:
        """Groups that are there and have told their memory."""
        return [group for group in self.groups.values() if group.reachable and group.capacity_bytes]

    def residents(self, model: str) -> Iterator[tuple[Group, gpu_scheduler_pb2.Resident]]:
        """Where the model is, on reachable groups, active ones first."""
        found = []
        for group in self.groups.values():
            resident = group.resident(model) if group.reachable else None
            if resident is not None:
                found.append((group, resident))
        yield from sorted(found, key=lambda pair: pair[1].residency != common_pb2.ACTIVE)

    async def follow_group(self, client: GpuSchedulerClient) -> None:
        """Keeps one group's state fresh, for ever."""
        group = self.groups[client.address]
        async for state in client.watch():
            if state is None:
                group.reachable = False
                _log.warning("group lost", group=group.name)
            else:
                if not group.reachable:
                    _log.info("group found", group=state.group, residents=len(state.residents))
                group.state, group.reachable = state, True
            self.changed()

    async def follow_balloond(self, balloond: BalloondClient) -> None:
        """Keeps a node's ledger fresh, for ever; while balloond is away what its groups told last counts."""
        node = ""
        async for state in balloond.watch():
            if state is None:
                self.ledgers.pop(node, None)
            else:
                node = state.node
                self.ledgers[node] = {device.device: device for device in state.devices}
            self.changed()

    async def follow_loader(self, loader) -> None:  # type: ignore[no-untyped-def]
        """Keeps the catalogue fresh, for ever; while the loader is away the last one is kept."""
        async for catalogue in loader.watch():
            if catalogue is not None:
                self.catalogue = {entry.model.name: entry for entry in catalogue.entries}
                self.catalogue_known = True
                self.changed()
