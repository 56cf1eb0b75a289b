import asyncio

from placement.actuation.evacuation import Evacuation
from protos import common_pb2
from services.errors import Conflict
from tests.placement.fakes import FakeCluster


def stops(world, group):
    stopping = Evacuation(world.drain)
    group.state.stopping = group.state.drained = True
    world.tell()
    stopping.look(world.cluster.groups.values())
    return stopping


async def test_evacuation_moves_models_with_requests_and_holds_the_group_until_they_moved():
    world = FakeCluster()
    for name in ("busy", "waited for", "idle"):
        world.model(name, weights=20 << 20)
    group = world.groups[0]
    group.put("busy", running=1)
    group.put("waited for", waiting=1)
    group.put("idle")
    began, up = world.groups[1].set_residency, asyncio.Event()

    async def slowly(*arguments, **keys):
        await up.wait()
        return await began(*arguments, **keys)

    world.groups[1].set_residency = slowly
    stopping = stops(world, group)
    await world.heard(lambda: world.actuator.moving)
    stopping.look(world.cluster.groups.values())
    assert group.held == 1  # once, however often it is looked at
    up.set()
    await world.heard(lambda: not group.held)
    assert [r.model for r in group.state.residents] == ["idle"]
    assert {r.model for r in world.groups[1].state.residents} == {"busy", "waited for"}
    assert "g0 is stopping: " in world.history.last("busy", 1)[0].reason


async def test_evacuation_without_room_or_refused_by_the_target_leaves_models_and_holds_no_group():
    world = FakeCluster(groups=1)
    world.model("m")
    world.groups[0].put("m", running=1)
    stops(world, world.groups[0])
    await world.heard(lambda: world.groups[0].holds)
    await world.heard(lambda: not world.groups[0].held)
    assert world.groups[0].calls == []

    world = FakeCluster()
    world.model("m")
    world.groups[0].put("m", running=1)
    world.groups[1].fail = Conflict("m is on its way down")
    stops(world, world.groups[0])
    await world.heard(lambda: world.groups[0].holds)
    await world.heard(lambda: not world.groups[0].held)
    assert [r.model for r in world.groups[0].state.residents] == ["m"]


async def test_evacuation_of_a_group_that_stops_a_second_time_moves_its_models_again():
    world = FakeCluster()
    world.model("m")
    stopping = stops(world, world.groups[0])
    await world.heard(lambda: not world.groups[0].held)
    world.groups[0].state.stopping = world.groups[0].state.drained = False
    world.tell()
    stopping.look(world.cluster.groups.values())
    world.groups[0].put("m", common_pb2.ACTIVE, running=1)
    stops(world, world.groups[0])
    await world.heard(lambda: [r.model for r in world.groups[1].state.residents] == ["m"])


async def test_evacuation_moves_other_models_while_one_with_long_streams_drains():
    world = FakeCluster()
    group = world.groups[0]
    for name in ("long", "short"):
        world.model(name, weights=20 << 20)
        group.put(name, running=1)
    ended, down = asyncio.Event(), group.set_residency

    async def drains(spec, target, *arguments, **keys):
        if spec.name == "long":
            await ended.wait()
        return await down(spec, target, *arguments, **keys)

    group.set_residency = drains
    stops(world, group)

    def gone():
        world.cluster.changed()
        return [r.model for r in group.state.residents] == ["long"]

    await world.heard(gone)
    assert [model for model, *_ in world.groups[1].calls] == ["long", "short"] and group.held == 1
    ended.set()
    await world.heard(lambda: not group.held)
    assert not group.state.residents
