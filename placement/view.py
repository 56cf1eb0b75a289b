"""The cluster as operators see it, as protobuf messages; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from placement.actuation.drain import DrainedModel
from placement.cluster.cluster import PRESENT, Cluster, HeardGroup
from placement.planning.planner import PlacementPlan
from placement.policy import kvpr
from protos import common_pb2, placement_pb2


def cluster_view(
    cluster: Cluster, demands: Mapping[str, float], rates: Mapping[str, float] | None = None, load_weight: float = 0.0
) -> placement_pb2.Cluster:
    """Every group with its models. `demands`: model -> w; `rates`: model -> tokens per second. Of a model that is
    active on several groups each has an equal part."""
    at = [
        r.model for group in cluster.reachable() for r in group.residents.values() if r.residency == common_pb2.ACTIVE
    ]
    places = Counter(at)
    demands = {model: demand / max(1, places[model]) for model, demand in demands.items()}
    rates = {model: rate / max(1, places[model]) for model, rate in (rates or {}).items()}
    groups = [_group(group, demands, rates, places, load_weight) for group in cluster.groups.values()]
    return placement_pb2.Cluster(groups=groups)


def prospect_view(verdict: PlacementPlan, waiting_s: float) -> placement_pb2.Prospect:
    """What a request for a model would meet. `waiting_s`: seconds for which room has been looked for."""
    return placement_pb2.Prospect(
        group="" if verdict.group is None else verdict.group.name,
        reason=verdict.reason,
        candidates=verdict.candidates,
        leaving=[placement_pb2.Leaving(model=y.model, target=y.target, reason=y.reason) for y in verdict.yields],
        waiting_s=waiting_s,
    )


def drained_view(left: DrainedModel) -> placement_pb2.Drained:
    return placement_pb2.Drained(model=left.model, to_group=left.to_group, error=left.error)


def _group(
    group: HeardGroup,
    demands: Mapping[str, float],
    rates: Mapping[str, float],
    places: Mapping[str, int],
    load_weight: float,
) -> placement_pb2.Group:
    view = placement_pb2.Group(
        group=group.name,
        address=group.address,
        reachable=group.reachable,
        capacity_bytes=group.capacity_bytes,
        free_bytes=group.free_bytes,
        drained=group.drained,
        memory=group.memory,
    )
    demand, fixed = 0.0, sum(device.booked_bytes for device in group.memory)
    for resident in group.state.residents:
        serves = resident.residency == common_pb2.ACTIVE or not places[resident.model]
        w = demands.get(resident.model, 0.0) if serves else 0.0
        if resident.residency in PRESENT and resident.residency != common_pb2.HIBERNATING:
            demand += w
            fixed += resident.weights_bytes
        view.models.add(
            model=resident.model,
            residency=resident.residency,
            demand=w,
            waiting=resident.waiting,
            running=resident.running,
            idle_s=resident.idle_s,
            kv_held_bytes=resident.kv_held_bytes,
            kv_limit_bytes=resident.kv_limit_bytes,
            weights_bytes=resident.weights_bytes,
            tokens_per_s=rates.get(resident.model, 0.0) if serves else 0.0,
            progress=resident.progress if resident.HasField("progress") else None,
            waking_s=resident.waking_s,
            kernels_compiled=resident.kernels_compiled,
        )
    load = kvpr.load(load_weight, group.capacity_bytes)
    view.pressure = kvpr.pressure(demand, group.capacity_bytes, fixed, load) if demand else 0.0
    return view
