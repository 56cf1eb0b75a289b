"""The nodes' loaders: their catalogues as one, and what changes it, told to each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from loader.client import LoaderClient
from placement.cluster import Cluster
from protos import common_pb2, loader_pb2
from services import log
from services.errors import NotFound, PrismError, Unavailable

_log = log.get(__name__)
Entries = Mapping[str, loader_pb2.Entry]
"""By name of the model."""


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


class Loaders:
    """All of a cluster, in the order of placement's configuration."""

    def __init__(self, clients: Sequence[LoaderClient], cluster: Cluster) -> None:
        self.clients = clients
        self._cluster = cluster
        self._heard: dict[int, Entries] = {}
        """By number. Of one that is away what it said last is kept, and counts after the others'."""
        self._there: set[int] = set()

    async def follow(self, number: int) -> None:
        """Keeps what one says fresh, for ever."""
        async for catalogue in self.clients[number].watch():
            if catalogue is None:
                self._there.discard(number)
                continue
            self._there.add(number)
            self._heard[number] = {entry.model.name: entry for entry in catalogue.entries}
            order = sorted(self._heard, key=lambda each: (each not in self._there, each))
            self._cluster.heard_catalogue(merged(self._heard[each] for each in order))
            self._cluster.changed()

    def _first(self) -> LoaderClient:
        """One that is there; else the first, for which its client waits a while."""
        return self.clients[min(self._there, default=0)]

    async def inspect(self, listing: common_pb2.ModelListing) -> common_pb2.ModelSpec:
        """What adding it would give. Raises as LoaderClient does."""
        return await self._first().inspect(listing)

    async def add(self, listing: common_pb2.ModelListing) -> common_pb2.ModelSpec:
        """At all that are there. One that is away, or cannot, has no images of the model until it is added again.
        Raises what the first refused it with."""
        first = self._first()
        spec = await first.add(listing)
        for number, other in enumerate(self.clients):
            if other is first:
                continue
            try:
                if number not in self._there:
                    raise Unavailable("it is away")
                await other.add(listing)
            except PrismError as error:
                _log.warning(
                    "a node's loader has not added the model", model=listing.name, loader=number, why=str(error)
                )
        return spec

    async def remove(self, name: str) -> None:
        """At all. Raises Unavailable when one is away: the model would come back with it; NotFound when none has it."""
        missing = [number for number in range(len(self.clients)) if number not in self._there]
        if self._there and missing:
            raise Unavailable(f"loader {missing[0]} of {len(self.clients)} is away: the model would come back with it")
        found = False
        for client in self.clients:
            try:
                await client.remove(name)
                found = True
            except NotFound:
                continue
        if not found:
            raise NotFound(f"no model {name!r} in the catalogue")
