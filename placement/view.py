"""The cluster as operators see it: pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from placement.cluster import PRESENT, Cluster, Group
from placement.drain import Left
from placement.judge import Verdict
from protos import placement_pb2


def cluster_view(
    cluster: Cluster, demands: Mapping[str, float], rates: Mapping[str, float] | None = None
) -> placement_pb2.Cluster:
    """Every group with its models; `demands`: model -> w, `rates`: model -> tokens per second."""
    return placement_pb2.Cluster(groups=[_group(group, demands, rates or {}) for group in cluster.groups.values()])


def prospect_view(verdict: Verdict, waiting_s: float) -> placement_pb2.Prospect:
    """What a request for a model would meet; `waiting_s`: how long room has been looked for."""
    return placement_pb2.Prospect(
        group="" if verdict.group is None else verdict.group.name,
        reason=verdict.reason,
        candidates=verdict.candidates,
        leaving=[placement_pb2.Leaving(model=y.model, target=y.target, reason=y.reason) for y in verdict.yields],
        waiting_s=waiting_s,
    )


def drained_view(left: Left) -> placement_pb2.Drained:
    return placement_pb2.Drained(model=left.model, to_group=left.to_group, error=left.error)


def _group(group: Group, demands: Mapping[str, float], rates: Mapping[str, float]) -> placement_pb2.Group:
    view = placement_pb2.Group(
        group=group.name,
        address=group.address,
        reachable=group.reachable,
        capacity_bytes=group.capacity_bytes,
        free_bytes=group.free_bytes,
        drained=group.drained,
        memory=group.memory,
    )
    demand = left = 0.0
    left = float(group.capacity_bytes - sum(device.booked_bytes for device in group.memory))
    for resident in group.state.residents:
        w = demands.get(resident.model, 0.0)
        if resident.residency in PRESENT:
            demand += w
            left -= resident.weights_bytes
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
            tokens_per_s=rates.get(resident.model, 0.0),
        )
    view.pressure = demand / left if left > 0 else (inf if demand else 0.0)
    return view
