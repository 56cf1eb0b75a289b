import asyncio

import pytest

from placement.drain import Left
from protos import common_pb2, gpu_scheduler_pb2
from services.errors import Conflict, NotFound, Unavailable
from tests.placement.fakes import MIB, FakeCluster


async def test_a_drained_group_is_empty_and_takes_nothing_until_that_is_undone():
    world = FakeCluster()
    world.model("awake")
    world.model("asleep")
    world.groups[0].put("asleep", common_pb2.HIBERNATING)
    world.groups[0].put("awake", running=1)
    world.tell()
    assert await world.drain.begin("g0") == [Left("awake", "g1"), Left("asleep")]
    assert [r.model for r in world.groups[0].state.residents] == []
    assert [r.model for r in world.groups[1].state.residents] == ["awake"]
    # The emptier one is not chosen.
    assert (await world.reconciler.activate("asleep")).name == "g1"
    world.groups[1].remove("asleep")
    world.groups[1].put("awake")
    await world.drain.undo("g0")
    assert (await world.reconciler.activate("asleep")).name == "g0"


async def test_where_there_is_no_other_place_a_model_goes_cold_after_a_drain_and_a_pinned_one_stays():
    world = FakeCluster(groups=1, drain_ms=700)
    world.model("m")
    world.model("pinned", pinned=True)
    world.groups[0].put("m")
    world.groups[0].put("pinned")
    world.tell()
    cold, stays = await world.drain.begin("g0")
    assert cold == Left("m") and world.groups[0].drained == [700]
    assert stays.model == "pinned" and "g0 has 1, but is drained" in stays.error
    assert [r.model for r in world.groups[0].state.residents] == ["pinned"]
    assert [(d.action, d.reason) for d in world.history.last("m", 1)] == [("go cold", "g0 is drained")]


async def test_a_model_on_its_way_up_is_moved_when_it_is_there():
    world = FakeCluster()
    world.model("m", weights=60 * MIB)
    world.model("other", weights=60 * MIB)
    group, begin, up = world.groups[0], world.groups[0].set_residency, asyncio.Event()

    async def slowly(spec, target, *arguments, on_progress=None, **keys):
        if target == common_pb2.ACTIVE:
            on_progress(gpu_scheduler_pb2.ResidencyProgress(residency=common_pb2.WAKING))
            await up.wait()
        return await begin(spec, target, *arguments, **keys)

    group.set_residency = slowly
    assert (await world.reconciler.activate("m")).name == "g0"
    draining = asyncio.get_running_loop().create_task(world.drain.begin("g0"))
    await world.heard(lambda: group.state.drained)
    assert not draining.done()
    up.set()
    assert await draining == [Left("m", "g1")]


async def test_what_a_group_refuses_is_told_and_the_others_leave():
    world = FakeCluster(groups=1)
    world.model("m")
    world.groups[0].put("m")
    world.groups[0].fail = Conflict("m is on its way to HIBERNATING")
    world.tell()
    assert await world.drain.begin("g0") == [Left("m", error="m is on its way to HIBERNATING")]


async def test_a_group_that_is_unknown_or_away_cannot_be_drained():
    world = FakeCluster()
    with pytest.raises(NotFound, match="no group 'gpu9'; there are g0, g1"):
        await world.drain.begin("gpu9")
    world.cluster.heard_group(world.groups[0].address, None)
    with pytest.raises(Unavailable, match="g0 is away"):
        await world.drain.begin("g0")
