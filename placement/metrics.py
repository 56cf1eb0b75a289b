"""Placement's metrics for Prometheus, brought up to date once a second."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

from placement.cluster.cluster import Cluster
from placement.view import cluster_view
from protos import common_pb2, placement_pb2
from services.telemetry.metrics import Published, gauge

_EVERY_S = 1.0


async def keep(cluster: Cluster, demands: Callable[[], dict[str, float]], load_weight: float) -> None:
    """Publishes the metrics once a second, for ever."""
    published = Published()
    while True:
        now = demands()
        groups = cluster_view(cluster, now, load_weight=load_weight).groups
        published.publish(
            (
                gauge(
                    "prism_pressure",
                    "Pressure of a group: KVPR and the part for demand",
                    ["group"],
                    (((g.group,), g.pressure) for g in groups),
                ),
                gauge(
                    "prism_group_reachable",
                    "Whether a gpu_scheduler is there",
                    ["group"],
                    (((g.group,), float(g.reachable)) for g in groups),
                ),
                gauge(
                    "prism_serving_groups",
                    "Groups that serve a model; more than one where its load exceeds a group",
                    ["model"],
                    (((model,), float(count)) for model, count in _serving(groups).items()),
                ),
                gauge(
                    "prism_demand",
                    "w of a model, bytes of KV per second per second of TPOT",
                    ["model"],
                    (((model,), demand) for model, demand in now.items()),
                ),
            )
        )
        await asyncio.sleep(_EVERY_S)


def _serving(groups: Iterable[placement_pb2.Group]) -> Counter[str]:
    return Counter(
        each.model
        for group in groups
        if group.reachable
        for each in group.models
        if each.residency == common_pb2.ACTIVE
    )
