"""The nodes' loaders: merges their catalogues into one, and carries changes to each of them.

Changes that calls make have numbers that rise over all nodes, and loaders keep them (AddRequest.change). For each name
the highest number counts; a loader that knows a lower one, because it was away or has joined since, is sent the change.
What a node's catalogue file lists is its operator's own, and is never sent to another node.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from loader.client import LoaderClient
from placement.cluster.cluster import Cluster
from protos import common_pb2, loader_pb2
from services.errors import NotFound, PrismError, Unavailable
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
Entries = Mapping[str, loader_pb2.Entry]
"""Model name -> catalogue entry."""


@dataclass(frozen=True)
class CatalogueChange:
    """What a call did to one name of the catalogue: it added or removed the model."""

    number: int
    listing: common_pb2.ModelListing | None
    """The listing that was added; None: the model was removed."""


@dataclass(frozen=True)
class CatalogueRequest:
    """One loader's catalogue as it was last heard."""

    entries: Entries
    changes: Mapping[str, CatalogueChange]
    """Model name -> the last call's change that the loader knows."""

    @classmethod
    def of(cls, catalogue: loader_pb2.Catalogue) -> CatalogueRequest:
        known = {name: CatalogueChange(number, None) for name, number in catalogue.removed.items()}
        added = (entry for entry in catalogue.entries if entry.HasField("listing"))
        known |= {entry.model.name: CatalogueChange(entry.change, entry.listing) for entry in added}
        return cls({entry.model.name: entry for entry in catalogue.entries}, known)


def merged(entries: Iterable[loader_pb2.Entry]) -> loader_pb2.Entry | None:
    """One entry made of several nodes' entries of a model: the first whose checkpoint can be served, else the first
    whose fault may pass; with an image if any node has one. None if there are no entries."""
    best, has_image, on_disk = None, False, False
    for entry in entries:
        has_image, on_disk = has_image or entry.has_image, on_disk or entry.on_disk
        if best is None or (best.error and (not entry.error or (entry.retry_s and not best.retry_s))):
            best = entry
    if best is None or (best.has_image, best.on_disk) == (has_image, on_disk):
        return best
    found = loader_pb2.Entry()
    found.CopyFrom(best)
    found.has_image, found.on_disk = has_image, on_disk
    found.no_image = ""
    return found


def lasts(entry: loader_pb2.Entry, latest: Mapping[str, CatalogueChange]) -> bool:
    """Whether an entry counts: a model that a call added may have been removed since."""
    change = latest.get(entry.model.name)
    return not entry.HasField("listing") or change is None or change.listing is not None


class Loaders:
    """All loaders of a cluster, in the order in which they joined."""

    def __init__(self, cluster: Cluster) -> None:
        self.clients: dict[str, LoaderClient] = {}
        """Clients by address."""
        self._cluster = cluster
        self._heard: dict[str, CatalogueRequest] = {}
        """Address -> the loader's last catalogue. That of a loader that is away is kept, and counts after the
        others'."""
        self._merged: dict[str, loader_pb2.Entry] = {}
        """Model name -> merged entry of all loaders. A fleet's catalogues are long, so a message has only its new
        entries merged."""
        self._in_order = False
        """Whether no loader has come or gone since `_merged` was last made of all of them."""
        self._there: set[str] = set()
        self._latest: dict[str, CatalogueChange] = {}
        """Model name -> the change with the highest number that any loader knows."""
        self._numbers = 0
        """Highest number of a change so far."""
        self._told: set[tuple[str, str, int]] = set()
        """(address, name, number) of changes that a loader was sent since it was found, whether it took them or not."""
        self._changing = asyncio.Lock()
        self._bringing: asyncio.Task[None] | None = None

    def join(self, address: str, client: LoaderClient) -> None:
        """Adds a loader; nothing was heard of it yet."""
        self.clients[address] = client

    def is_there(self, address: str) -> bool:
        """Whether the loader at the address can be reached."""
        return address in self._there

    def forget(self, address: str) -> None:
        """Removes the loader at the address."""
        del self.clients[address]
        self._lose(address)
        self._heard.pop(address, None)
        self._tell(())

    async def follow(self, address: str) -> None:
        """Keeps one loader's catalogue fresh, for ever."""
        async for catalogue in self.clients[address].watch():
            if catalogue is None:
                self._lose(address)
            else:
                self._hear(address, CatalogueRequest.of(catalogue))
                if any(self._lacking()) and (self._bringing is None or self._bringing.done()):
                    self._bringing = tasks.spawn(self._bring_together(), "bring catalogues together")
            self._cluster.changed()

    def _hear(self, address: str, said: CatalogueRequest) -> None:
        # A loader that was never heard before goes between others, which keep their order.
        self._in_order = self._in_order and (address in self._there or address not in self._heard)
        self._there.add(address)
        before, now = self._heard.get(address, CatalogueRequest({}, {})).entries, said.entries
        self._heard[address] = said
        names = [name for name in before.keys() | now.keys() if before.get(name) != now.get(name)]
        # An entry that equals the merged one changes nothing; in a fleet nearly all do.
        self._tell(name for name in names if name in before or now[name] != self._merged.get(name))

    def _lose(self, address: str) -> None:
        self._in_order = False
        self._there.discard(address)
        self._told = {each for each in self._told if each[0] != address}

    def _tell(self, names: Iterable[str]) -> None:
        """Updates the cluster's catalogue, for `names` and for names whose changes are new. While no loader is
        reachable the last catalogue stays."""
        if not self._there:
            return
        before, self._latest = self._latest, {}
        for said in self._heard.values():
            for name, change in said.changes.items():
                if name not in self._latest or self._latest[name].number < change.number:
                    self._latest[name] = change
        for name, change in self._latest.items():
            # Loaders forget old removals, and a loader that is away may list such a model.
            if name in before and before[name].number > change.number:
                self._latest[name] = before[name]
        self._told = {each for each in self._told if each[1] in self._latest}
        self._numbers = max([self._numbers, *(change.number for change in self._latest.values())])
        new = {*names, *(each for each in before.keys() | self._latest if before.get(each) != self._latest.get(each))}
        self._merge(new if self._in_order else {*self._merged, *(n for s in self._heard.values() for n in s.entries)})
        self._in_order = True
        removed = {name for name, change in self._latest.items() if change.listing is None}
        self._cluster.heard_catalogue(self._merged.values(), removed)

    def _merge(self, names: Iterable[str]) -> None:
        order = sorted((each for each in self.clients if each in self._heard), key=self._is_away)
        catalogues = [self._heard[each].entries for each in order]
        for name in names:
            told = (entry for each in catalogues if (entry := each.get(name)) is not None)
            entry = merged(each for each in told if lasts(each, self._latest))
            if entry is None:
                self._merged.pop(name, None)
            else:
                self._merged[name] = entry

    def _is_away(self, address: str) -> bool:
        return address not in self._there

    def _first(self) -> str:
        """Address of a loader that is reachable; else of the first one, whose client waits a while for it. Raises
        Unavailable if there is none."""
        if not self.clients:
            raise Unavailable("no loader has been found yet")
        return min(self.clients, key=self._is_away)

    # --- changes

    def _lacking(self) -> Iterator[tuple[str, str, CatalogueChange]]:
        """(address, name, change that it has to be sent) for loaders that are reachable."""
        for address in self.clients:
            if address not in self._there:
                continue
            said = self._heard[address]
            for name, change in self._latest.items():
                known = said.changes.get(name)
                if known is None:
                    behind = name not in said.entries  # otherwise the loader's own file lists it
                else:
                    behind = known.number < change.number
                if behind and (address, name, change.number) not in self._told:
                    yield address, name, change

    async def _bring_together(self) -> None:
        async with self._changing:
            while lacking := list(self._lacking()):
                for address, name, change in lacking:
                    await self._carry(address, name, change)

    async def _carry(self, address: str, name: str, change: CatalogueChange) -> None:
        """Sends a change to one loader. A failure is logged once, and tried again after the loader has been away."""
        if address not in self._there:
            return
        self._told.add((address, name, change.number))
        client = self.clients[address]
        try:
            if change.listing is None:
                await client.remove(name, change.number)
            else:
                await client.add(change.listing, change.number)
        except NotFound:
            pass
        except PrismError as error:
            _log.warning("a node's loader has not added the model", model=name, loader=address, why=str(error))

    async def inspect(self, listing: common_pb2.ModelListing) -> common_pb2.ModelSpec:
        """The spec that adding the listing would give. Raises as LoaderClient does."""
        return await self.clients[self._first()].inspect(listing)

    async def add(self, listing: common_pb2.ModelListing) -> common_pb2.ModelSpec:
        """Adds a model at all loaders that are reachable, and at others once they are; returns its spec. A node whose
        loader cannot add it serves the model without images of it. Raises the first loader's error if that one
        refuses."""
        async with self._changing:
            first = self._first()
            change = self._next(listing)
            spec = await self.clients[first].add(listing, change.number)
            self._told.add((first, listing.name, change.number))
            await self._carry_to_all_but(first, listing.name, change)
        return spec

    async def drop_image(self, name: str) -> None:
        """Drops a model's image from the host memory of all nodes whose loaders are reachable."""
        for address in [each for each in self.clients if each in self._there]:
            await self.clients[address].drop_image(name)

    async def pin_image(self, name: str, pinned: bool) -> None:
        """Pins a model's image, or takes that back, at all loaders that are reachable and have the model. Raises
        NotFound if none has it, and as LoaderClient does."""
        first, known = self._first(), False
        for address in {first: None, **dict.fromkeys(each for each in self.clients if each in self._there)}:
            client = self.clients[address]
            with contextlib.suppress(NotFound):
                await (client.pin(name) if pinned else client.unpin(name))
                known = True
        if not known:
            raise NotFound(f"no model {name!r} in the catalogue")

    async def remove(self, name: str) -> None:
        """Removes a model at all loaders that are reachable, and at others once they are. Raises Unavailable if a
        loader is away whose catalogue file lists the model, since the model would come back with it; NotFound if no
        loader has it."""
        async with self._changing:
            having = {
                address: entry for address, said in self._heard.items() if (entry := said.entries.get(name)) is not None
            }
            for address, entry in having.items():
                if self._there and address not in self._there and not entry.HasField("listing"):
                    raise Unavailable(f"the loader at {address} is away, and its catalogue file lists the model")
            first = self._first()
            change = self._next(None)
            self._told.add((first, name, change.number))
            try:
                await self.clients[first].remove(name, change.number)
            except NotFound:
                if not having:
                    raise
            await self._carry_to_all_but(first, name, change)

    def _next(self, listing: common_pb2.ModelListing | None) -> CatalogueChange:
        self._numbers += 1
        return CatalogueChange(self._numbers, listing)

    async def _carry_to_all_but(self, first: str, name: str, change: CatalogueChange) -> None:
        for address in [each for each in self.clients if each != first and each in self._there]:
            await self._carry(address, name, change)
