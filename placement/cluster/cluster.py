"""The cluster as placement knows it: the loaders' catalogue and the groups' states, as they were last heard. Nothing is
decided here.

All of it is rebuilt from the streams after a restart: there is no other state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from balloond.client import booked
from gpu_scheduler.client import GpuSchedulerClient
from placement.cluster.refusals import Refusals
from protos import balloond_pb2, common_pb2, gpu_scheduler_pb2, loader_pb2
from services.errors import NotFound
from services.rpc.watch import Watched

Ledger = dict[str, balloond_pb2.DeviceState]
"""Device name -> state, for the devices of one node."""
TAKES_REQUESTS = (common_pb2.ACTIVE, common_pb2.WAKING)
_VANISHED = 1000
PRESENT = (common_pb2.ACTIVE, common_pb2.WAKING, common_pb2.HIBERNATING, common_pb2.DRAINING)
_EVERY_INTERFACE = ("0.0.0.0:", "[::]:")
"""Listening addresses that do not say where a group is reached."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes on all devices of a model together, as an engine measured them; the model's next engine will measure the
    same, on any group."""

    weights: int = 0
    graphs: int = 0
    quota: int = 0


@dataclass(slots=True)
class ClusterNews:
    """What was heard or decided since the last call of `Cluster.news`."""

    groups: dict[str, HeardGroup] = field(default_factory=dict)
    """Groups that reported, are away, or have a model whose catalogue entry changed; by their clients' addresses."""
    models: set[str] = field(default_factory=set)
    """Models whose routes may have changed."""


class HeardGroup:
    """One gpu_scheduler as it was last heard. `state` is its last report, `reachable` whether its stream is up now.

    Reading protobuf messages is slow, and each pass of placement reads all groups: the fields that it needs are kept as
    plain values.
    """

    def __init__(self, client: GpuSchedulerClient, ledgers: Mapping[str, Ledger]) -> None:
        """`ledgers`: each node's ledger as its balloond last reported it; the cluster's own mapping, shared by all
        groups."""
        self.client = client
        self.reachable = False
        self.heard_at = 0.0
        """Second on the cluster's clock at which `state` was heard."""
        self._ledgers = ledgers
        self.hear(gpu_scheduler_pb2.GroupState())

    def hear(self, state: gpu_scheduler_pb2.GroupState) -> None:
        """Takes in the group's report."""
        self.state = state
        self.node = state.node
        self.name = state.group or self.client.address
        says_where = state.address and not state.address.startswith(_EVERY_INTERFACE)
        self.address = state.address if says_where else self.client.address
        """Where gateways reach the group: the address that it reports, or else the one where placement reaches it."""
        self.residents = {resident.model: resident for resident in state.residents}
        self.hear_ledger()

    @property
    def drained(self) -> bool:
        """Whether the group is drained: models do not come up there."""
        return self.state.drained

    @property
    def size(self) -> Hashable:
        """Name, drained flag and bytes of each device, which decide what fits on the group; None if it is away."""
        return (self.name, self.drained, *(each.capacity_bytes for each in self.memory)) if self.reachable else None

    def hear_ledger(self) -> None:
        """Sets the group's memory: from its node's balloond if that is heard, else from the group's own last report."""
        told = {device.device: device for device in self.state.memory}
        heard = self._ledgers.get(self.node, {})
        self.memory = [heard.get(name, told[name]) for name in told]
        self.capacity_bytes = sum(device.capacity_bytes for device in self.memory)
        self.free_bytes = sum(device.free_bytes for device in self.memory)


class Cluster:
    """The groups by address, and the catalogue. `on_change` is called after every message."""

    def __init__(
        self,
        clients: Iterable[GpuSchedulerClient],
        on_change: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
        most_vanished: int = _VANISHED,
    ) -> None:
        self._most_vanished = most_vanished
        self.ledgers: dict[str, Ledger] = {}
        self.groups: dict[str, HeardGroup] = {}
        self.searching = False
        """Whether there may be groups whose addresses are not known yet, because names are still being looked up."""
        self.catalogue: dict[str, loader_pb2.Entry] = {}
        """Entries of models by name; those of their adapters are apart, as groups know nothing of them."""
        self.adapters: dict[str, loader_pb2.Entry] = {}
        """Entries of adapters by name."""
        self.catalogue_known = False
        self._read: dict[str, common_pb2.ModelSpec] = {}
        """Models as their files were read last; the entry of one whose files cannot be read now has no sizes."""
        self.vanished: dict[str, None] = {}
        """Names that were in the catalogue and are not any more: all that a group still has, and the last
        `most_vanished` others."""
        self.removed: frozenset[str] = frozenset()
        """Names that a call removed from the catalogue."""
        self._measured: dict[str, Measured] = {}
        """Model of the present catalogue -> what its last engine measured."""
        self.weights_extent_bytes = 1
        """Bytes of the largest extents in which any group was heard to hold weights."""
        self._names: dict[str, HeardGroup] = {}
        """Groups by their names and by their addresses."""
        self._of_node: dict[str, dict[str, HeardGroup]] = {}
        """Node -> its groups, by the addresses of their clients."""
        self._with: dict[str, dict[str, HeardGroup]] = {}
        """Model -> groups that have it, by the addresses of their clients."""
        self.doubtful: set[tuple[str, str]] = set()
        """(address of a group's client, model) of models that a group had when it was found: while it was away the
        model may have come up elsewhere."""
        self.refusals = Refusals()
        self.sizes = 0
        """Rises when a group comes, goes or changes size, or weights count in larger extents: other models may fit
        nowhere then."""
        self._fresh: dict[str, HeardGroup] = {}
        self._news = ClusterNews()
        self._on_change = on_change
        self._now = now
        self._heard: Watched[None] = Watched(None)
        for client in clients:
            self.add_group(client)

    def add_group(self, client: GpuSchedulerClient) -> None:
        """Adds a group at the client's address; nothing was heard of it yet."""
        self.groups[client.address] = self._names[client.address] = HeardGroup(client, self.ledgers)

    def has_group(self, address: str) -> bool:
        """Whether the group at the address is reachable now."""
        return self.groups[address].reachable

    def forget_group(self, address: str) -> None:
        """Removes the group at the address."""
        self.heard_group(address, None)
        group = self.groups.pop(address)
        self._leave_node(address, group)
        self._leave(address, group)
        self._names = {name: each for name, each in self._names.items() if each is not group}
        self.doubtful = {each for each in self.doubtful if each[0] != address}
        self.refusals.forget_group(address)

    def changed(self, *models: str) -> None:
        """Notes that something has changed that routes and waiting tasks depend on. `models`: those of which something
        was decided, beside what was heard."""
        self._news.models.update(models)
        self._on_change()
        self._heard.set(None)

    def doubt(self, group: HeardGroup, model: str) -> None:
        """Notes that the model may be on this group and on another one too."""
        self.doubtful.add((group.client.address, model))
        self._news.models.add(model)

    def trust(self, group: HeardGroup, model: str) -> None:
        """Notes that the model is on this group and on no other."""
        self.doubtful.discard((group.client.address, model))
        self._news.models.add(model)

    def news(self) -> ClusterNews:
        """What was heard or decided since the last call; a second call right away returns nothing. An adapter's route
        changes with its base's."""
        news, self._news = self._news, ClusterNews()
        news.models |= {name for name, entry in self.adapters.items() if entry.model.adapter.base in news.models}
        return news

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once the cluster, as others were notified of it, meets `condition`."""
        while not condition():
            await self._heard.changed(self._heard.revision)

    def entry(self, model: str) -> loader_pb2.Entry | None:
        return self.catalogue.get(model)

    def listed(self, name: str) -> loader_pb2.Entry | None:
        """The entry of a model or of an adapter."""
        return self.catalogue.get(name) or self.adapters.get(name)

    def adapters_of(self, model: str) -> list[str]:
        """Names of the model's adapters."""
        return sorted(name for name, entry in self.adapters.items() if entry.model.adapter.base == model)

    def read_spec(self, model: common_pb2.ModelSpec) -> common_pb2.ModelSpec:
        """The model with its sizes, also while the loader cannot read its files: an engine that has the model serves it
        as it was read last. The same model without sizes if it was never read, or lay at another path."""
        read = self._read.get(model.name)
        return model if model.context_tokens or read is None or read.path != model.path else read

    def group(self, name: str) -> HeardGroup | None:
        """The group with this name or address; None if there is none."""
        return self._names.get(name)

    def known_group(self, name: str) -> HeardGroup:
        """The group with this name or address. Raises NotFound."""
        group = self.group(name)
        if group is None:
            raise NotFound(f"no group {name!r}; there are {', '.join(each.name for each in self.groups.values())}")
        return group

    def measured(self, model: str) -> Measured:
        """What the model's last engine measured; zeros if none has reported it."""
        return self._measured.get(model, Measured())

    def reachable(self) -> list[HeardGroup]:
        """Groups that are reachable and have reported their memory."""
        return [group for group in self.groups.values() if group.reachable and group.capacity_bytes]

    def residents(self, model: str) -> list[tuple[HeardGroup, gpu_scheduler_pb2.Resident]]:
        """The model's residents on reachable groups, active ones first."""
        groups = self._with.get(model, {}).values()
        found = [(group, group.residents[model]) for group in groups if group.reachable]
        return sorted(found, key=lambda pair: pair[1].residency != common_pb2.ACTIVE)

    def fresh(self) -> list[HeardGroup]:
        """Groups of which something was heard since the last call."""
        fresh, self._fresh = self._fresh, {}
        return list(fresh.values())

    # --- messages

    def heard_group(self, address: str, state: gpu_scheduler_pb2.GroupState | None) -> None:
        """Takes in a group's report; None: the group is away."""
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
            self._fresh |= self.groups  # all weights count in larger extents from now on

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
        """Whether another group has the same name."""
        other = self._names.get(state.group)
        holder = other.client.address if other is not None and other.reachable else ""
        return self.refusals.refuses_group(address, state.group, holder)

    def heard_ledger(self, node: str, state: balloond_pb2.NodeState | None) -> None:
        """Takes in a node's ledger from its balloond; None: balloond is away, and the last reports of the node's groups
        count."""
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
        """Takes in the loaders' catalogue, which has exactly these entries, and the names that calls have removed."""
        self.removed = frozenset(removed)
        listed = {entry.model.name: entry for entry in entries}
        adapters = {name: entry for name, entry in listed.items() if entry.model.HasField("adapter")}
        self._news.models |= adapters.keys() | self.adapters.keys()
        self.adapters = adapters
        before, self.catalogue = self.catalogue, {n: entry for n, entry in listed.items() if n not in adapters}
        self.catalogue_known = True
        read = {name: entry.model for name, entry in self.catalogue.items() if entry.model.context_tokens}
        self._read = {name: spec for name, spec in {**self._read, **read}.items() if name in self.catalogue}
        gone = [name for name in dict.fromkeys([*self.vanished, *before]) if name not in self.catalogue]
        with_group = [name for name in gone[: -self._most_vanished] if name in self._with]
        self.vanished = dict.fromkeys([*with_group, *gone[-self._most_vanished :]])
        for model in before.keys() | self.catalogue.keys():
            was, entry = before.get(model), self.catalogue.get(model)
            if was != entry:
                self._news.models.add(model)
                self._news.groups |= self._with.get(model, {})
                self._fresh |= self._with.get(model, {})
            if was is not None and (entry is None or was.model != entry.model):
                self._measured.pop(model, None)
