"""`python -m placement --config FILE`: the wiring of placement."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from balloond.client import BalloondClient
from gpu_scheduler.client import GpuSchedulerClient
from loader.client import LoaderClient
from placement import metrics
from placement.actuation.actuator import Actuator
from placement.actuation.drain import Drain
from placement.actuation.evacuation import Evacuation
from placement.actuation.history import DecisionHistory
from placement.actuation.reconcile import Reconciler
from placement.actuation.reload_outdated import OutdatedReloader
from placement.cluster.cluster import Cluster
from placement.cluster.follower import StreamFollower
from placement.cluster.loaders import Loaders
from placement.cluster.members import MemberKind, Members
from placement.cluster.names import Names
from placement.cluster.routes import Routes
from placement.config import MEMBERS, PlacementConfig
from placement.planning.planner import Planner
from placement.planning.traffic_record import TrafficRecord
from placement.server import NAME, PlacementServicer
from protos import placement_pb2_grpc
from services.runtime import tasks
from services.runtime.config import load, read
from services.runtime.watched_files import Followed
from services.service import Service, config_path, run
from services.telemetry import log

_log = log.get(__name__)
_HEAR_S = 1.5
"""Seconds that a start waits for the first report of every node. A group that is up reports at once; a model that a
group heard later has as well is taken off one of the two."""


async def build(path: str, service: Service) -> None:
    config = service.config
    assert isinstance(config, PlacementConfig)

    def changed() -> None:
        members.look()
        reconciler.changed()
        news = cluster.news()
        routes.renew(news.models, reconciler.premises)
        stopping.look(news.groups.values())
        reloader.look(news.groups.values())

    cluster = Cluster([], changed)
    follower = StreamFollower(cluster)
    loaders = Loaders(cluster)
    history = DecisionHistory()
    actuator = Actuator(cluster, config.drain_ms, move_kv=config.move_kv)
    traffic = TrafficRecord(config.traffic_file)
    planner = Planner(config, cluster, time.monotonic, actuator.on_their_way, traffic)
    reconciler = Reconciler(config, cluster, actuator, planner, history)
    routes = Routes(cluster, reconciler.refusal, actuator.leaving, actuator.removing)
    drain = Drain(cluster, reconciler, actuator, planner, history, config.drain_ms)
    stopping = Evacuation(drain)
    reloader = OutdatedReloader(cluster, actuator, drain)
    service.add(
        placement_pb2_grpc.add_PlacementServicer_to_server,
        PlacementServicer(cluster, reconciler, history, routes, loaders, drain),
        NAME,
    )

    def follow_group(address: str) -> Coroutine[Any, Any, None]:
        client = GpuSchedulerClient(address)
        cluster.add_group(client)
        return follower.group(client)

    def follow_loader(address: str) -> Coroutine[Any, Any, None]:
        loaders.join(address, LoaderClient(address))
        return loaders.follow(address)

    def follow_balloond(address: str) -> Coroutine[Any, Any, None]:
        return follower.balloond(BalloondClient(address), address)

    def looked_up() -> None:
        members.renew()
        cluster.searching = names.unanswered
        cluster.changed()

    def read_again(fresh: PlacementConfig) -> None:
        members.named(fresh.members)
        looked_up()
        if fresh.model_dump(exclude=set(MEMBERS)) != config.model_dump(exclude=set(MEMBERS)):
            _log.warning("settings other than lists of addresses need a restart", file=path)

    spawn = partial(tasks.spawn, on_failure=service.fail)
    names = Names(config.look_up_s, looked_up, spawn)
    kinds = {
        "groups": MemberKind(follow_group, cluster.has_group, cluster.forget_group),
        "loaders": MemberKind(follow_loader, loaders.is_there, loaders.forget),
        "balloond": MemberKind(follow_balloond, cluster.refusals.has_ledger, cluster.refusals.forget_ledger),
    }
    members = Members(kinds, names, spawn)
    members.named(config.members)
    cluster.searching = names.unanswered
    service.follow(Followed("addresses", [path], partial(read, PlacementConfig, path))).on_change(read_again)
    service.spawn(reconciler.run(), "reconcile")
    service.spawn(traffic.run(), "traffic")
    service.on_stop(traffic.write)
    service.spawn(metrics.keep(cluster, reconciler.demands, config.load_weight), "metrics")
    # A gateway that called before the catalogue is known would be answered that no model exists.
    await reconciler.informed(_HEAR_S)
    await service.ready()


def main() -> None:
    path = config_path("Which model lives on which group.")
    run(load(PlacementConfig, path), partial(build, path))


if __name__ == "__main__":
    main()
