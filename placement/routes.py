"""Routes for gateways, from what placement knows: pure."""

from __future__ import annotations

from collections.abc import Container, Mapping

from placement.cluster import TAKES_REQUESTS, Cluster
from protos import common_pb2, loader_pb2, placement_pb2


def build(
    cluster: Cluster, refused: Mapping[str, str], avoided: Mapping[str, str], removed: Container[str] = ()
) -> placement_pb2.Routes:
    """All routes. `refused`: model -> why it fits nowhere. `avoided`: model -> group that it is leaving: last among
    its places. `removed`: models that have none any more. Where a group was found with a model that has come up
    elsewhere meanwhile, it gets nothing."""
    return placement_pb2.Routes(
        routes=[
            _route(cluster, entry, refused.get(name, ""), avoided.get(name))
            for name, entry in sorted(cluster.catalogue.items())
            if name not in removed
        ]
    )


def _route(cluster: Cluster, entry: loader_pb2.Entry, refused: str, avoided: str | None) -> placement_pb2.Route:
    model = entry.model
    route = placement_pb2.Route(model=model, residency=common_pb2.COLD if entry.has_image else common_pb2.ON_DISK)
    error = entry.error or refused
    places = []
    residents = cluster.residents(model.name)
    sure = [pair for pair in residents if (pair[0].client.address, model.name) not in cluster.doubtful]
    if any(resident.residency in TAKES_REQUESTS for _, resident in sure):
        residents = sure
    for group, resident in residents:
        route.measured_weights_bytes = max(route.measured_weights_bytes, resident.weights_bytes)
        route.measured_private_bytes = max(route.measured_private_bytes, resident.private_bytes)
        if resident.residency == common_pb2.ERROR:
            error = error or resident.reason
        elif resident.residency in TAKES_REQUESTS:
            places.append(placement_pb2.Place(group=group.name, address=group.address, residency=resident.residency))
        if resident.residency != common_pb2.ERROR and not places:
            route.residency = resident.residency
    if places:
        # A group that the model is leaving still serves what it has, but gets nothing new while there is another.
        places.sort(key=lambda place: (place.group == avoided, place.residency != common_pb2.ACTIVE))
        if len(places) > 1 and avoided is not None:
            places = [place for place in places if place.group != avoided or place.residency == common_pb2.ACTIVE]
        route.residency = places[0].residency
        route.places.extend(places)
    elif error:
        route.residency, route.error = common_pb2.ERROR, error
    return route
