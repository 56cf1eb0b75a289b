"""Placement's gauges, brought up to date once a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import prometheus_client

from placement.cluster import Cluster
from placement.view import cluster_view

_EVERY_S = 1.0
_PRESSURE = prometheus_client.Gauge("prism_pressure", "KVPR of a group", ["group"])
_REACHABLE = prometheus_client.Gauge("prism_group_reachable", "whether a gpu_scheduler is there", ["group"])
_DEMAND = prometheus_client.Gauge("prism_demand", "w of a model, bytes of KV per second per second of TPOT", ["model"])


async def keep(cluster: Cluster, demands: Callable[[], dict[str, float]]) -> None:
    """For ever."""
    while True:
        now = demands()
        for group in cluster_view(cluster, now).groups:
            _PRESSURE.labels(group.group).set(group.pressure)
            _REACHABLE.labels(group.group).set(group.reachable)
        for model, demand in now.items():
            _DEMAND.labels(model).set(demand)
        await asyncio.sleep(_EVERY_S)
