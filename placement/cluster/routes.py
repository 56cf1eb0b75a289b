"""Routes for gateways, made of what placement knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Hashable, Iterable, Mapping

from placement.cluster.cluster import TAKES_REQUESTS, Cluster, Measured
from protos import common_pb2, loader_pb2, placement_pb2
from services.rpc.watch import Watched

_REST_S, _LONGEST_REST_S = 5e-5, 0.1
"""Seconds between two messages of all routes: for each route, a tenth of which a gateway needs to read it, and at
most in all."""
_LEAVES = "its base is being removed"


class Routes:
    """All routes. Groups report ten times a second, and a fleet has many: a report has only those routes made again
    that it may have changed, and a message is sent only if one of them is different."""

    def __init__(
        self,
        cluster: Cluster,
        refusal: Callable[[loader_pb2.Entry], str],
        leaving: Mapping[str, str],
        removed: Container[str],
    ) -> None:
        """`refusal`: why a model fits nowhere. `leaving`: model -> group that it is leaving, which goes last among its
        places. `removed`: models that have no route any more."""
        self._cluster = cluster
        self._refusal = refusal
        self._leaving = leaving
        self._removed = removed
        self._routes: dict[str, placement_pb2.Route] = {}
        self._premises: Hashable = object()  # equals no premises, since none were given yet
        self._refusals: dict[str, tuple[loader_pb2.Entry, Measured, str]] = {}
        """Model without a place -> (entry, measured bytes, refusal made of them); cleared when the premises change."""
        self._changes: Watched[None] = Watched(None)
        self._message = placement_pb2.Routes()

    def renew(self, models: Iterable[str], premises: Hashable) -> None:
        """Makes the routes of these models again. `premises`: what refusals rest on; if it differs from the last time,
        all routes are made again."""
        if premises != self._premises:
            self._premises = premises
            self._refusals.clear()
            models = self._routes.keys() | self._cluster.catalogue.keys() | self._cluster.adapters.keys()
        changed = False
        for name in models:
            fresh = self._route(name)
            if fresh == self._routes.get(name):
                continue
            changed = True
            if fresh is None:
                del self._routes[name]
                self._refusals.pop(name, None)
            else:
                self._routes[name] = fresh
        if changed:
            self._changes.set(None)

    def message(self) -> placement_pb2.Routes:
        """All routes as they are now."""
        if self._message.revision != self._changes.revision:
            routes = [self._routes[name] for name in sorted(self._routes)]
            self._message = placement_pb2.Routes(revision=self._changes.revision, routes=routes)
        return self._message

    async def follow(self) -> AsyncIterator[placement_pb2.Routes]:
        """All routes now, and again after every change, for ever."""
        while True:
            message = self.message()
            yield message
            await asyncio.sleep(min(_LONGEST_REST_S, _REST_S * len(self._routes)))
            await self._changes.changed(message.revision)

    def _route(self, name: str) -> placement_pb2.Route | None:
        adapter = self._cluster.adapters.get(name)
        if adapter is not None:
            return self._adapter_route(adapter)
        entry = self._cluster.entry(name)
        if entry is None or name in self._removed:
            return None
        return route(self._cluster, entry, self._refused, self._leaving.get(name))

    def _adapter_route(self, entry: loader_pb2.Entry) -> placement_pb2.Route:
        """The route of an adapter: that of its base, as far as it can be served."""
        error = placement_pb2.Route(
            model=entry.model, residency=common_pb2.ERROR, error=entry.error or _LEAVES, retry_s=entry.retry_s
        )
        if entry.error:  # its base may be an adapter, even its own
            return error
        base = self._route(entry.model.adapter.base)
        if base is None:
            return error
        return placement_pb2.Route(
            model=entry.model, residency=base.residency, places=base.places, error=base.error, retry_s=base.retry_s
        )

    def _refused(self, entry: loader_pb2.Entry) -> str:
        name, measured = entry.model.name, self._cluster.measured(entry.model.name)
        known = self._refusals.get(name)
        if known is None or known[0] is not entry or known[1] != measured:
            known = self._refusals[name] = entry, measured, self._refusal(entry)
        return known[2]


def route(
    cluster: Cluster, entry: loader_pb2.Entry, refusal: Callable[[loader_pb2.Entry], str], avoided: str | None
) -> placement_pb2.Route:
    """The route of one model: the places where it takes requests. `refusal`: why it fits nowhere, called if it is on no
    group. `avoided`: name of the group that it is leaving. A doubtful place gets no requests while another group takes
    them: its group was found again with a model that has come up elsewhere meanwhile."""
    model = entry.model
    away = common_pb2.COLD if entry.has_image else common_pb2.ON_DISK
    found = placement_pb2.Route(model=model, residency=away, no_image=entry.no_image, image_pinned=entry.image_pinned)
    places, reason, retries = [], "", []
    residents = cluster.residents(model.name)
    sure = [pair for pair in residents if (pair[0].client.address, model.name) not in cluster.doubtful]
    if any(resident.residency == common_pb2.ACTIVE for _, resident in sure):
        residents = sure
    for group, resident in residents:
        found.measured_weights_bytes = max(found.measured_weights_bytes, resident.weights_bytes)
        found.measured_private_bytes = max(found.measured_private_bytes, resident.private_bytes)
        if resident.residency == common_pb2.ERROR:
            reason = reason or resident.reason
            retries.append(resident.retry_s)
        elif resident.residency in TAKES_REQUESTS:
            places.append(
                placement_pb2.Place(
                    group=group.name,
                    address=group.address,
                    residency=resident.residency,
                    compiling=resident.compiling,
                )
            )
        if resident.residency != common_pb2.ERROR and not places:
            found.residency = resident.residency
    if places:
        # A group that the model is leaving still serves its requests, but gets no new ones while another one can take
        # them: gateways do not go by the order of active places.
        places.sort(key=lambda place: (place.group == avoided, place.residency != common_pb2.ACTIVE))
        if places[0].group != avoided and places[0].residency == common_pb2.ACTIVE:
            places = [place for place in places if place.group != avoided]
        elif len(places) > 1 and avoided is not None:
            places = [place for place in places if place.group != avoided or place.residency == common_pb2.ACTIVE]
        found.residency = places[0].residency
        found.places.extend(places)
        found.model.CopyFrom(cluster.read_spec(model))
    elif entry.error:
        found.residency, found.error, found.retry_s = common_pb2.ERROR, entry.error, entry.retry_s
    elif error := refusal(entry) or ("" if found.residency == common_pb2.HIBERNATING else reason):
        found.residency, found.error = common_pb2.ERROR, error
        # It is in error for as long as it is on any group.
        found.retry_s = max(retries) if error == reason and all(retries) else 0.0
    return found
