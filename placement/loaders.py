"""The nodes' loaders: their catalogues as one, and what changes it, told to each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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
    """All of a cluster, in the order in which they joined."""

    def __init__(self, cluster: Cluster) -> None:
        self.clients: dict[str, LoaderClient] = {}
        """By address."""
        self._cluster = cluster
        self._heard: dict[str, Entries] = {}
        """Of one that is away what it said last is kept, and counts after the others'."""
        self._there: set[str] = set()

    def join(self, address: str, client: LoaderClient) -> None:
        """There is one, of which nothing was heard yet."""
        self.clients[address] = client

    def is_there(self, address: str) -> bool:
        """Whether it can be reached."""
        return address in self._there

    def forget(self, address: str) -> None:
        """There is none any more."""
        del self.clients[address]
        self._there.discard(address)
        self._heard.pop(address, None)
        self._tell()

    async def follow(self, address: str) -> None:
        """Keeps what one says fresh, for ever."""
        async for catalogue in self.clients[address].watch():
            if catalogue is None:
                self._there.discard(address)
            else:
                self._there.add(address)
                self._heard[address] = {entry.model.name: entry for entry in catalogue.entries}
                self._tell()
            self._cluster.changed()

    def _tell(self) -> None:
        """What they say together; as long as none is there, what they said last."""
        if self._there:
            order = sorted((each for each in self.clients if each in self._heard), key=self._is_away)
            self._cluster.heard_catalogue(merged(self._heard[each] for each in order))

    def _is_away(self, address: str) -> bool:
        return address not in self._there

    def _first(self) -> LoaderClient:
        """One that is there; else the first, for which its client waits a while. Raises Unavailable."""
        if not self.clients:
            raise Unavailable("no loader has been found yet")
        return self.clients[min(self.clients, key=self._is_away)]

    async def inspect(self, listing: common_pb2.ModelListing) -> common_pb2.ModelSpec:
        """What adding it would give. Raises as LoaderClient does."""
        return await self._first().inspect(listing)

    async def add(self, listing: common_pb2.ModelListing) -> common_pb2.ModelSpec:
        """At all that are there. One that is away, or cannot, has no images of the model until it is added again.
        Raises what the first refused it with."""
        first = self._first()
        spec = await first.add(listing)
        for address, other in list(self.clients.items()):
            if other is first:
                continue
            try:
                if address not in self._there:
                    raise Unavailable("it is away")
                await other.add(listing)
            except PrismError as error:
                _log.warning(
                    "a node's loader has not added the model", model=listing.name, loader=address, why=str(error)
                )
        return spec

    async def remove(self, name: str) -> None:
        """At all. Raises Unavailable when one is away: the model would come back with it; NotFound when none has it."""
        missing = [address for address in self.clients if address not in self._there]
        if self._there and missing:
            raise Unavailable(f"the loader at {missing[0]} is away: the model would come back with it")
        found = False
        for client in list(self.clients.values()):
            try:
                await client.remove(name)
                found = True
            except NotFound:
                continue
        if not found:
            raise NotFound(f"no model {name!r} in the catalogue")
