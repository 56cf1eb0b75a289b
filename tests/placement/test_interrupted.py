"""Operators who do not wait for what they asked for."""

import asyncio

import pytest

from placement.client import PlacementClient
from placement.server import NAME, PlacementServicer
from protos import common_pb2, placement_pb2_grpc
from services.rpc import rpc
from services.runtime import tasks
from testing.patience import PATIENCE_S
from tests.placement.fakes import FakeCluster


@pytest.mark.parametrize("asked", ["migrate", "drain"])
async def test_a_move_whose_call_was_cancelled_leaves_the_model_in_one_place(tmp_path, asked):
    world = FakeCluster(groups=2)
    world.model("m")
    source, target = world.groups
    source.put("m", running=1)
    world.tell()
    coming, come = asyncio.Event(), asyncio.Event()
    begin = target.set_residency

    async def slowly(*arguments, **keys):
        coming.set()
        await come.wait()
        return await begin(*arguments, **keys)

    async def followed(*arguments, **keys):
        """A group goes on with what it was asked for."""
        return await asyncio.shield(tasks.spawn(slowly(*arguments, **keys), "change"))

    target.set_residency = followed
    server = rpc.Server(f"unix:{tmp_path}/p.sock")
    servicer = PlacementServicer(world.cluster, world.reconciler, world.history, None, None, world.drain)
    server.add(placement_pb2_grpc.add_PlacementServicer_to_server, servicer, NAME)
    await server.start()
    client = PlacementClient(f"unix:{tmp_path}/p.sock")
    try:
        call = tasks.spawn(client.migrate("m", "g1") if asked == "migrate" else client.drain("g0"), "an operator")
        await coming.wait()
        call.cancel()
        await asyncio.wait([call])
        come.set()
        async with asyncio.timeout(PATIENCE_S):
            while source.state.residents:
                await asyncio.sleep(0.005)
    finally:
        await client.close()
        await server.stop(0.1)
    assert [(r.model, r.residency) for r in target.state.residents] == [("m", common_pb2.ACTIVE)]
    assert not world.actuator.moving and world.history.last("m", 1)[0].outcome.startswith("done")
