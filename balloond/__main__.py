"""`python -m balloond --config FILE`: the wiring of one node's balloond."""

from __future__ import annotations

import itertools
import secrets
import time

from balloond import metrics
from balloond.config import BalloondConfig
from balloond.keeper.client import KeeperClient
from balloond.node import devices, records, recovery, saved_capacity
from balloond.node.daemon import Daemon
from balloond.node.extent_store import ExtentStore
from balloond.policy.device import DevicePolicy
from balloond.wire.handoff import HandoffServer
from balloond.wire.server import NAME, BalloondServicer
from protos import balloond_pb2_grpc
from services.runtime.process_limits import allow_descriptors
from services.service import Service, read_arguments, run


async def build(service: Service) -> None:
    config = service.config
    assert isinstance(config, BalloondConfig)
    allow_descriptors()
    hardware = devices.look(config)
    handoff = HandoffServer(config.handoff)
    handoff.start()
    service.on_stop(handoff.stop)
    keeper = KeeperClient(config.keeper, records.OWNER)
    found = recovery.sort(await keeper.start(config.keeper_timeout_s))
    service.on_stop(keeper.close)
    capacities = devices.capacities(config, hardware, found)
    saved_capacity.write(config.handoff, capacities)
    most_extents = devices.most_extents(config, capacities, keeper)
    makers, given_out = devices.open_makers(config, capacities)
    # Microseconds since 1970 are ahead of every id that a predecessor gave out, also when the keeper lost them.
    extent_ids = itertools.count(time.time_ns() // 1000)
    serials = itertools.count(1)
    ledgers = {
        name: DevicePolicy(name, given_out[name], maker.page_bytes, extent_ids, serials, config.patience)
        for name, maker in makers.items()
    }
    store = ExtentStore(makers, keeper, most_extents)
    daemon = Daemon(ledgers, store, keeper, time.monotonic, lambda: secrets.token_hex(16))
    keeper.follow(daemon.everything, service.fail)
    daemon.restore(found)
    service.add(balloond_pb2_grpc.add_BalloondServicer_to_server, BalloondServicer(config.node, daemon, keeper), NAME)
    handoff.serve(daemon)
    service.spawn(metrics.publish(daemon), "metrics")
    await service.ready()


def main() -> None:
    run(read_arguments(BalloondConfig, "Owns the memory of a node's devices."), build)


if __name__ == "__main__":
    main()
