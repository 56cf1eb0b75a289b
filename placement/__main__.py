"""`python -m placement --config FILE`: the wiring of placement."""

from __future__ import annotations

import time

from balloond.client import BalloondClient
from gpu_scheduler.client import GpuSchedulerClient
from loader.client import LoaderClient
from placement import metrics
from placement import routes as routes_module
from placement.actuate import Actuator
from placement.cluster import Cluster
from placement.config import PlacementConfig
from placement.drain import Drain
from placement.history import History
from placement.judge import Judge
from placement.loaders import Loaders
from placement.reconcile import Reconciler
from placement.server import NAME, PlacementServicer
from protos import placement_pb2, placement_pb2_grpc
from services.service import Service, read_arguments, run
from services.watch import Watched

_HEAR_S = 1.5
"""How long a start waits for what every node has to say: a group that is there says it at once. What one that is heard
later has as well, one of the two lets go."""


async def build(service: Service) -> None:
    config = service.config
    assert isinstance(config, PlacementConfig)
    routes: Watched[placement_pb2.Routes] = Watched(placement_pb2.Routes())

    def changed() -> None:
        fresh = routes_module.build(cluster, reconciler.refused, actuator.leaving, actuator.removing)
        if fresh.routes != routes.value.routes:
            fresh.revision = routes.revision + 1
            routes.set(fresh)
        reconciler.changed()

    clients = [GpuSchedulerClient(address) for address in config.groups]
    cluster = Cluster(clients, changed)
    loaders = Loaders([LoaderClient(address) for address in config.loaders], cluster)
    history = History()
    actuator = Actuator(cluster, config.drain_ms, changed, move_kv=config.move_kv)
    judge = Judge(config, cluster, time.monotonic, actuator.on_their_way)
    reconciler = Reconciler(config, cluster, actuator, judge, history)
    drain = Drain(cluster, reconciler, actuator, judge, history, config.drain_ms)
    service.add(
        placement_pb2_grpc.add_PlacementServicer_to_server,
        PlacementServicer(cluster, reconciler, history, routes, loaders, drain),
        NAME,
    )
    for number, address in enumerate(config.loaders):
        service.spawn(loaders.follow(number), f"follow {address}")
    for client in clients:
        service.spawn(cluster.follow_group(client), f"follow {client.address}")
    for address in config.balloond:
        service.spawn(cluster.follow_balloond(BalloondClient(address), address), f"follow {address}")
    service.spawn(reconciler.run(), "reconcile")
    service.spawn(metrics.keep(cluster, reconciler.demands), "metrics")
    # A gateway that asked before the catalogue is here would be told that no model exists.
    await reconciler.informed(_HEAR_S)
    await service.ready()


def main() -> None:
    run(read_arguments(PlacementConfig, "Which model lives on which group."), build)


if __name__ == "__main__":
    main()
