"""The nodes' loaders: their catalogues as one, and what changes it, told to each of them.

What calls change has numbers that rise over all nodes, and loaders keep them (AddRequest.change). Of each name the
highest counts; a loader that knows a lower one, because it was away or has joined since, is told. What a node's
catalogue file lists is its operator's, and never told to another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from loader.client import LoaderClient
from placement.cluster import Cluster
from protos import common_pb2, loader_pb2
from services import log, tasks
from services.errors import NotFound, PrismError, Unavailable

_log = log.get(__name__)
Entries = Mapping[str, loader_pb2.Entry]
"""By name of the model."""


@dataclass(frozen=True)
class Change:
    """What a call made of a name."""

    number: int
    listing: common_pb2.ModelListing | None
    """None: it was removed."""


def merged(catalogues: Iterable[Entries]) -> list[loader_pb2.Entry]:
    """One catalogue of several nodes': a model is as the first says whose checkpoint can be served, and has an image
    where any has one."""
    found: dict[str, loader_pb2.Entry] = {}
    for catalogue in catalogues:
        for name, entry in catalogue.items():
            before = found.get(name)
            if before is None:
                found[name] = loader_pb2.Entry()
                found[name].CopyFrom(entry)
                continue
            has_image, on_disk = before.has_image or entry.has_image, before.on_disk or entry.on_disk
            if before.error and not entry.error:
                before.CopyFrom(entry)
            before.has_image, before.on_disk = has_image, on_disk
    return list(found.values())


def changes(catalogue: loader_pb2.Catalogue) -> dict[str, Change]:
    """The calls that a loader knows of, by name."""
    known = {name: Change(number, None) for name, number in catalogue.removed.items()}
    added = (entry for entry in catalogue.entries if entry.HasField("listing"))
    return known | {entry.model.name: Change(entry.change, entry.listing) for entry in added}


def lasting(catalogue: loader_pb2.Catalogue, latest: Mapping[str, Change]) -> Entries:
    """What a loader lists, less what was added there by a call and has been removed since."""
    found = {}
    for entry in catalogue.entries:
        change = latest.get(entry.model.name)
        if not entry.HasField("listing") or change is None or change.listing is not None:
            found[entry.model.name] = entry
    return found


class Loaders:
    """All of a cluster, in the order in which they joined."""

    def __init__(self, cluster: Cluster) -> None:
        self.clients: dict[str, LoaderClient] = {}
        """By address."""
        self._cluster = cluster
        self._heard: dict[str, loader_pb2.Catalogue] = {}
        """Of one that is away what it said last is kept, and counts after the others'."""
        self._there: set[str] = set()
        self._latest: dict[str, Change] = {}
        """By name, of what all have said."""
        self._numbers = 0
        """The highest of a change."""
        self._told: set[tuple[str, str, int]] = set()
        """(address, name, number) of changes that were told to one since it was found: it took them, or could not."""
        self._changing = asyncio.Lock()
        self._bringing: asyncio.Task[None] | None = None

    def join(self, address: str, client: LoaderClient) -> None:
        """There is one, of which nothing was heard yet."""
        self.clients[address] = client

    def is_there(self, address: str) -> bool:
        """Whether it can be reached."""
        return address in self._there

    def forget(self, address: str) -> None:
        """There is none any more."""
        del self.clients[address]
        self._lose(address)
        self._heard.pop(address, None)
        self._tell()

    async def follow(self, address: str) -> None:
        """Keeps what one says fresh, for ever."""
        async for catalogue in self.clients[address].watch():
            if catalogue is None:
                self._lose(address)
            else:
                self._there.add(address)
                self._heard[address] = catalogue
                self._tell()
                if any(self._lacking()) and (self._bringing is None or self._bringing.done()):
                    self._bringing = tasks.spawn(self._bring_together(), "bring catalogues together")
            self._cluster.changed()

    def _lose(self, address: str) -> None:
        self._there.discard(address)
        self._told = {each for each in self._told if each[0] != address}

    def _tell(self) -> None:
        """What they say together; as long as none is there, what they said last."""
        if not self._there:
            return
        before, self._latest = self._latest, {}
        for catalogue in self._heard.values():
            for name, change in changes(catalogue).items():
                if name not in self._latest or self._latest[name].number < change.number:
                    self._latest[name] = change
        for name, change in self._latest.items():
            # Loaders forget old removals; one that is away may list what they were of.
            if name in before and before[name].number > change.number:
                self._latest[name] = before[name]
        self._told = {each for each in self._told if each[1] in self._latest}
        self._numbers = max([self._numbers, *(change.number for change in self._latest.values())])
        order = sorted((each for each in self.clients if each in self._heard), key=self._is_away)
        removed = {name for name, change in self._latest.items() if change.listing is None}
        self._cluster.heard_catalogue(merged(lasting(self._heard[each], self._latest) for each in order), removed)

    def _is_away(self, address: str) -> bool:
        return address not in self._there

    def _first(self) -> str:
        """One that is there; else the first, for which its client waits a while. Raises Unavailable."""
        if not self.clients:
            raise Unavailable("no loader has been found yet")
        return min(self.clients, key=self._is_away)

    # --- changes

    def _lacking(self) -> Iterator[tuple[str, str, Change]]:
        """(address, name, what it has to be told) of loaders that are there."""
        for address in self.clients:
            if address not in self._there:
                continue
            known = changes(self._heard[address])
            listed = {entry.model.name for entry in self._heard[address].entries} - known.keys()
            for name, change in self._latest.items():
                behind = name not in known or known[name].number < change.number
                if behind and name not in listed and (address, name, change.number) not in self._told:
                    yield address, name, change

    async def _bring_together(self) -> None:
        async with self._changing:
            while lacking := list(self._lacking()):
                for address, name, change in lacking:
                    await self._carry(address, name, change)

    async def _carry(self, address: str, name: str, change: Change) -> None:
        """Tells one. What it cannot do is named once, and tried again when it has been away."""
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
        """What adding it would give. Raises as LoaderClient does."""
        return await self.clients[self._first()].inspect(listing)

    async def add(self, listing: common_pb2.ModelListing) -> common_pb2.ModelSpec:
        """At all that are there, and at others once they are. One that cannot serves the model without images of it.
        Raises what the first refused it with."""
        async with self._changing:
            first = self._first()
            change = self._next(listing)
            spec = await self.clients[first].add(listing, change.number)
            self._told.add((first, listing.name, change.number))
            await self._carry_to_all_but(first, listing.name, change)
        return spec

    async def drop_image(self, name: str) -> None:
        """Of a model, out of the host memory of all nodes that are there."""
        for address in [each for each in self.clients if each in self._there]:
            await self.clients[address].drop_image(name)

    async def remove(self, name: str) -> None:
        """At all that are there, and at others once they are. Raises Unavailable when one is away whose catalogue file
        lists it, since it would come back with that; NotFound when none has it."""
        async with self._changing:
            having = {
                address: entry
                for address, catalogue in self._heard.items()
                for entry in catalogue.entries
                if entry.model.name == name
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

    def _next(self, listing: common_pb2.ModelListing | None) -> Change:
        self._numbers += 1
        return Change(self._numbers, listing)

    async def _carry_to_all_but(self, first: str, name: str, change: Change) -> None:
        for address in [each for each in self.clients if each != first and each in self._there]:
            await self._carry(address, name, change)
