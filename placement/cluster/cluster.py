"""What placement knows: the loaders' catalogue and the groups' states, as they were last heard. Nothing here decides.

All of it is rebuilt from the streams after a restart: there is no other state.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

from balloond.client import BalloondClient, booked
from gpu_scheduler.client import GpuSchedulerClient
from protos import balloond_pb2, common_pb2, gpu_scheduler_pb2, loader_pb2
from services.rpc.watch import Watched
from services.telemetry import log

_log = log.get(__name__)
Ledger = dict[str, balloond_pb2.DeviceState]
"""Of a node's devices, by name."""
TAKES_REQUESTS = (common_pb2.ACTIVE, common_pb2.WAKING)
_VANISHED = 1000
T = TypeVar("T")
_SELDOM_MS = 100
"""Up to which it makes no difference."""
_FIGURES_MS = 1
"""For each group of the cluster, between two reports of one that differ in figures alone, and between two of a ledger:
so that there are a thousand or two a second at most, which is a few tenths of a core."""
PRESENT = (common_pb2.ACTIVE, common_pb2.WAKING, common_pb2.HIBERNATING, common_pb2.DRAINING)
_EVERY_INTERFACE = ("0.0.0.0:", "[::]:")
"""Whoever listens so does not say where it is reached."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of all devices of a model, as an engine found them: the next one will as well, wherever it is."""

    weights: int = 0
    graphs: int = 0
    quota: int = 0


@dataclass(slots=True)
class ClusterNews:
    """What was heard or decided since this was asked for last."""

    groups: dict[str, HeardGroup] = field(default_factory=dict)
    """That spoke, are away, or have a model of which the catalogue says something else; by their clients' addresses."""
    models: set[str] = field(default_factory=set)
    """Of which something that routes tell may be another by now."""


class HeardGroup:
    """One gpu_scheduler. `state` is the last it said, `reachable` whether it is there now.

    Messages are slow to read, and placement asks of all groups at every turn: what it asks is kept as plain values.
    """

    def __init__(self, client: GpuSchedulerClient, ledgers: Mapping[str, Ledger]) -> None:
        """`ledgers`: of each node, as balloond last told; the cluster's, shared by all groups."""
        self.client = client
        self.reachable = False
        self.heard_at = 0.0
        """When it said that, seconds on the cluster's clock."""
        self._ledgers = ledgers
        self.hear(gpu_scheduler_pb2.GroupState())

    def hear(self, state: gpu_scheduler_pb2.GroupState) -> None:
        """It says so now."""
        self.state = state
        self.node = state.node
        self.name = state.group or self.client.address
        says_where = state.address and not state.address.startswith(_EVERY_INTERFACE)
        self.address = state.address if says_where else self.client.address
        """Where gateways reach it: where we do, unless it says another place."""
        self.residents = {resident.model: resident for resident in state.residents}
        self.hear_ledger()

    @property
    def drained(self) -> bool:
        """Models do not come up there."""
        return self.state.drained

    @property
    def size(self) -> Hashable:
        """What it has for models that come up there, and whether they do; None: it is away."""
        return (self.name, self.drained, *(each.capacity_bytes for each in self.memory)) if self.reachable else None

    def hear_ledger(self) -> None:
        """Its memory: from balloond's own stream where that is heard, else as the group last told."""
        told = {device.device: device for device in self.state.memory}
        heard = self._ledgers.get(self.node, {})
        self.memory = [heard.get(name, told[name]) for name in told]
        self.capacity_bytes = sum(device.capacity_bytes for device in self.memory)
        self.free_bytes = sum(device.free_bytes for device in self.memory)


class Cluster:
    """Groups by address and the catalogue. `on_change` is called after every message."""

    def __init__(
        self,
        clients: Iterable[GpuSchedulerClient],
        on_change: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledgers: dict[str, Ledger] = {}
        self.groups: dict[str, HeardGroup] = {}
        self.searching = False
        """Whether there may be groups whose addresses are not known yet: names are still to be looked up."""
        self.catalogue: dict[str, loader_pb2.Entry] = {}
        self.catalogue_known = False
        self.vanished: dict[str, None] = {}
        """Names that were in the catalogue and are not any more: those that a group has, and the last `_VANISHED`."""
        self.removed: frozenset[str] = frozenset()
        """Names that a call took out of the catalogue."""
        self._measured: dict[str, Measured] = {}
        """Of models of the catalogue, as it is."""
        self.weights_extent_bytes = 1
        """The largest in which a group was heard to hold weights."""
        self._names: dict[str, HeardGroup] = {}
        """Groups by name and by address."""
        self._of_node: dict[str, dict[str, HeardGroup]] = {}
        """Groups of a node, by the address of their client."""
        self._with: dict[str, dict[str, HeardGroup]] = {}
        """Model -> groups that have it, by the address of their client."""
        self.doubtful: set[tuple[str, str]] = set()
        """(address of a group's client, model): what a group had when it was found. While it was away the model may
        have come up elsewhere."""
        self._refused: dict[str, str] = {}
        """Why a group that speaks is not taken in, by address."""
        self._told_ledgers: dict[str, str] = {}
        """Which balloond told a node's ledger, by the node's name."""
        self.sizes = 0
        """Rises when a group has come or gone or has another size, or weights count in larger extents: what fits
        nowhere may be other models."""
        self._fresh: dict[str, HeardGroup] = {}
        self._news = ClusterNews()
        self._on_change = on_change
        self._now = now
        self._heard: Watched[None] = Watched(None)
        for client in clients:
            self.add_group(client)

    def add_group(self, client: GpuSchedulerClient) -> None:
        """There is one at its address, of which nothing was heard yet."""
        self.groups[client.address] = self._names[client.address] = HeardGroup(client, self.ledgers)

    def has_group(self, address: str) -> bool:
        """Whether the group at that address is there now."""
        return self.groups[address].reachable

    def forget_group(self, address: str) -> None:
        """There is none any more."""
        self.heard_group(address, None)
        group = self.groups.pop(address)
        self._leave_node(address, group)
        self._leave(address, group)
        self._names = {name: each for name, each in self._names.items() if each is not group}
        self.doubtful = {each for each in self.doubtful if each[0] != address}
        self._refused.pop(address, None)

    def has_ledger(self, address: str) -> bool:
        """Whether a node's ledger is told by the balloond at that address."""
        return address in self._told_ledgers.values()

    def changed(self, *models: str) -> None:
        """Something that others are told of is new; what was decided of `models` too, not only what was heard."""
        self._news.models.update(models)
        self._on_change()
        self._heard.set(None)

    def doubt(self, group: HeardGroup, model: str) -> None:
        """It may be there, and elsewhere."""
        self.doubtful.add((group.client.address, model))
        self._news.models.add(model)

    def trust(self, group: HeardGroup, model: str) -> None:
        """It is there, and nowhere else."""
        self.doubtful.discard((group.client.address, model))
        self._news.models.add(model)

    def news(self) -> ClusterNews:
        """What is new; nothing the next time."""
        news, self._news = self._news, ClusterNews()
        return news

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once what was heard, and told on, meets `condition`."""
        while not condition():
            await self._heard.changed(self._heard.revision)

    def entry(self, model: str) -> loader_pb2.Entry | None:
        return self.catalogue.get(model)

    def group(self, name: str) -> HeardGroup | None:
        """By the group's name or its address."""
        return self._names.get(name)

    def measured(self, model: str) -> Measured:
        """What the last engine that had the model found; zeros where none has told."""
        return self._measured.get(model, Measured())

    def reachable(self) -> list[HeardGroup]:
        """Groups that are there and have told their memory."""
        return [group for group in self.groups.values() if group.reachable and group.capacity_bytes]

    def residents(self, model: str) -> list[tuple[HeardGroup, gpu_scheduler_pb2.Resident]]:
        """Where the model is, on reachable groups, active ones first."""
        groups = self._with.get(model, {}).values()
        found = [(group, group.residents[model]) for group in groups if group.reachable]
        return sorted(found, key=lambda pair: pair[1].residency != common_pb2.ACTIVE)

    def fresh(self) -> list[HeardGroup]:
        """Groups of which something was heard since this was asked last."""
        fresh, self._fresh = self._fresh, {}
        return list(fresh.values())

    # --- messages

    def heard_group(self, address: str, state: gpu_scheduler_pb2.GroupState | None) -> None:
        """A group said this; None: it is away."""
        before = self.groups[address].size
        self._hear_group(address, state)
        if self.groups[address].size != before:
            self.sizes += 1

    def _hear_group(self, address: str, state: gpu_scheduler_pb2.GroupState | None) -> None:
        group = self._fresh[address] = self._news.groups[address] = self.groups[address]
        self._news.models.update(group.residents)
        was_reachable = group.reachable
        if state is not None and self._is_refused(address, state):
            state = None
        group.reachable = state is not None
        if state is None:
            return
        self._leave(address, group)
        for name in (group.name, group.address):
            if self._names.get(name) is group:
                del self._names[name]
        self._leave_node(address, group)
        group.hear(state)
        self._of_node.setdefault(group.node, {})[address] = group
        group.heard_at = self._now()
        self._news.models.update(group.residents)
        for model, resident in group.residents.items():
            self._with.setdefault(model, {})[address] = group
            listed = model in self.catalogue or not self.catalogue_known
            if (resident.weights_bytes or resident.graph_bytes) and listed and not resident.outdated:
                self._measured[model] = Measured(resident.weights_bytes, resident.graph_bytes, resident.quota_bytes)
        if not was_reachable:
            self.doubtful |= {(address, model) for model in group.residents}
        if self.doubtful:
            self.doubtful = {each for each in self.doubtful if each[0] != address or each[1] in group.residents}
        self._names |= {address: group, group.address: group, group.name: group}
        if state.weights_extent_bytes > self.weights_extent_bytes:
            self.weights_extent_bytes = state.weights_extent_bytes
            self.sizes += 1
            self._fresh |= self.groups  # all weights count in larger extents now

    def _leave(self, address: str, group: HeardGroup) -> None:
        for model in group.residents:
            self._with[model].pop(address, None)
            if not self._with[model]:
                del self._with[model]

    def _leave_node(self, address: str, group: HeardGroup) -> None:
        groups = self._of_node.get(group.node, {})
        groups.pop(address, None)
        if not groups:
            self._of_node.pop(group.node, None)

    def _is_refused(self, address: str, state: gpu_scheduler_pb2.GroupState) -> bool:
        """Whether another group has its name: groups are told apart by name, also in what operators ask for."""
        other = self._names.get(state.group)
        taken = other is not None and other.client.address != address and other.reachable
        reason = f"the group at {other.client.address} is called {state.group} as well" if other and taken else ""
        if reason and reason != self._refused.get(address):
            _log.error("group refused", address=address, why=reason)
        self._refused[address] = reason
        return bool(reason)

    def heard_ledger(self, node: str, state: balloond_pb2.NodeState | None) -> None:
        """A node's balloond said this; while it is away what its groups told last counts."""
        if state is None:
            self.ledgers.pop(node, None)
        else:
            self.ledgers[node] = {device.device: device for device in state.devices}
        for address, group in self._of_node.get(node, {}).items():
            size, before = group.size, booked(group.memory)
            group.hear_ledger()
            self.sizes += group.size != size
            if booked(group.memory) != before:
                self._fresh[address] = group

    def heard_catalogue(self, entries: Iterable[loader_pb2.Entry], removed: Iterable[str] = ()) -> None:
        """The loaders have exactly these, and know that those were removed."""
        self.removed = frozenset(removed)
        before, self.catalogue = self.catalogue, {entry.model.name: entry for entry in entries}
        self.catalogue_known = True
        gone = [name for name in dict.fromkeys([*self.vanished, *before]) if name not in self.catalogue]
        with_group = [name for name in gone[:-_VANISHED] if name in self._with]
        self.vanished = dict.fromkeys([*with_group, *gone[-_VANISHED:]])
        for model in before.keys() | self.catalogue.keys():
            was, entry = before.get(model), self.catalogue.get(model)
            if was != entry:
                self._news.models.add(model)
                self._news.groups |= self._with.get(model, {})
                self._fresh |= self._with.get(model, {})
            if was is not None and (entry is None or was.model != entry.model):
                self._measured.pop(model, None)

    def _apart_ms(self) -> int:
        return _FIGURES_MS * len(self.groups)

    async def _told(self, watch: Callable[[Callable[[], int], bool], AsyncIterator[T]]) -> AsyncIterator[T]:
        """Messages of a stream, which is opened again when the cluster has become another, twice as large say."""
        heard = False
        while True:
            asked = self._apart_ms()
            # It may be lost just when it is closed and opened again.
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

    async def follow_group(self, client: GpuSchedulerClient) -> None:
        """Keeps one group's state fresh, for ever."""
        group = self.groups[client.address]
        async for state in self._told(client.watch):
            was_reachable = group.reachable
            self.heard_group(client.address, state)
            if was_reachable and not group.reachable:
                _log.warning("group lost", group=group.name)
            elif group.reachable and not was_reachable:
                _log.info("group found", group=group.name, residents=len(group.residents))
            self.changed()

    async def follow_balloond(self, balloond: BalloondClient, address: str) -> None:
        """Keeps a node's ledger fresh, for ever."""
        node = refused = ""
        async for state in self._told(balloond.watch):
            node = node if state is None else state.node
            if (other := self._told_ledgers.setdefault(node, address)) != address:
                why = f"{other} is of a node {node!r} as well"
                if state is not None and why != refused:
                    _log.error("ledger refused", address=address, why=why)
                    refused = why
                continue
            refused = ""
            if state is None:
                del self._told_ledgers[node]
            self.heard_ledger(node, state)
            self.changed()
