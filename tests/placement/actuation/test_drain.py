import asyncio

import pytest

from placement.actuation.drain import DrainedModel
from protos import common_pb2, gpu_scheduler_pb2
from services.errors import Conflict, NotFound, Unavailable
from services.runtime import tasks
from tests.placement.fakes import MIB, FakeCluster


async def test_a_drained_group_is_empty_and_takes_no_model_until_the_drain_is_undone():
    world = FakeCluster()
    world.model("awake")
    world.model("asleep")
    world.groups[0].put("asleep", common_pb2.HIBERNATING)
    world.groups[0].put("awake", running=1)
    world.tell()
    assert await world.drain.begin("g0") == [DrainedModel("awake", "g1"), DrainedModel("asleep")]
    assert [r.model for r in world.groups[0].state.residents] == []
    assert [r.model for r in world.groups[1].state.residents] == ["awake"]
    # The emptier one is not chosen.
    assert (await world.reconciler.activate("asleep")).name == "g1"
    world.groups[1].remove("asleep")
    world.groups[1].put("awake")
    await world.drain.undo("g0")
    assert (await world.reconciler.activate("asleep")).name == "g0"


async def test_drain_without_another_place_sends_models_cold_and_leaves_pinned_ones():
    world = FakeCluster(groups=1, drain_ms=700)
    world.model("m")
    world.model("pinned", pinned=True)
    world.groups[0].put("m")
    world.groups[0].put("pinned")
    world.tell()
    cold, stays = await world.drain.begin("g0")
    assert cold == DrainedModel("m") and world.groups[0].drained == [700]
    assert stays.model == "pinned" and "g0 has 1, but is drained" in stays.error
    assert [r.model for r in world.groups[0].state.residents] == ["pinned"]
    assert [(d.action, d.reason) for d in world.history.last("m", 1)] == [("go cold", "g0 is drained")]


async def test_drain_moves_a_model_whose_activation_is_under_way_once_it_is_active():
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
    assert await draining == [DrainedModel("m", "g1")]


@pytest.mark.parametrize("told", [True, False], ids=["its group has said so", "nobody has said so yet"])
async def test_drain_waits_for_a_model_that_is_moving_to_the_group(told):
    world = FakeCluster()
    world.model("m")
    source, target = world.groups
    source.put("m", running=1)
    world.tell()

    def begun():
        if told:
            target.put("m", common_pb2.WAKING)
            world.tell()

    asked, up = target.come_up_slowly(begun)
    move = tasks.spawn(world.reconciler.migrate("m", "g1"), "move")
    await asked.wait()
    drain = tasks.spawn(world.drain.begin("g1"), "drain")
    await world.heard(lambda: target.state.drained)
    up.set()
    await move
    assert await drain == [DrainedModel("m", "g0")]
    assert not target.state.residents


async def test_drain_waits_for_the_report_of_the_group_after_a_model_came_up_there():
    """The answer to the activation is there before the report."""
    world = FakeCluster()
    world.model("m", pinned=True)
    first = world.groups[0]
    bring, up = first.set_residency, asyncio.Event()

    async def slowly(spec, residency, *rest, on_progress=None, **more):
        if residency != common_pb2.ACTIVE:
            return await bring(spec, residency, *rest, **more)
        first.put("m", common_pb2.WAKING)
        world.tell()
        on_progress(gpu_scheduler_pb2.ResidencyProgress(residency=common_pb2.WAKING))
        await up.wait()
        first.put("m", running=3)
        asyncio.get_running_loop().call_later(0.01, world.tell)
        return gpu_scheduler_pb2.ResidencyProgress(residency=common_pb2.ACTIVE)

    first.set_residency = slowly
    assert (await world.reconciler.activate("m")).name == "g0"
    drain = tasks.spawn(world.drain.begin("g0"), "drain")
    await world.heard(lambda: first.state.drained)
    up.set()
    assert await drain == [DrainedModel("m", "g1")]


@pytest.mark.parametrize("meanwhile", ["moved", "evicted"])
async def test_drain_leaves_out_a_model_that_left_while_others_were_drained(meanwhile):
    world = FakeCluster(groups=3)
    world.model("a", weights=60 * MIB)
    world.model("b", weights=30 * MIB)
    first = world.groups[0]
    first.put("a", running=1)
    first.put("b", running=1)
    world.tell()
    bring, finished = first.set_residency, asyncio.Event()

    async def slowly(spec, *rest, **more):
        if spec.name == "a":
            await finished.wait()
        return await bring(spec, *rest, **more)

    first.set_residency = slowly
    drain = tasks.spawn(world.drain.begin("g0"), "drain")
    await world.heard(lambda: any(call[0] == "a" for group in world.groups[1:] for call in group.calls))
    taken = next(group for group in world.groups[1:] if any(call[0] == "a" for call in group.calls))
    if meanwhile == "moved":
        await world.reconciler.migrate("b", taken.state.group)  # not where the drain would have it
    else:
        await world.reconciler.evict("b", common_pb2.COLD)
    finished.set()
    assert [left.model for left in await drain] == ["a"]
    assert [group.name for group, _ in world.cluster.residents("b")] == (
        [taken.state.group] if meanwhile == "moved" else []
    )


async def test_drain_reports_the_error_of_a_model_that_its_group_refuses_to_release():
    world = FakeCluster(groups=1)
    world.model("m")
    world.groups[0].put("m")
    world.groups[0].fail = Conflict("m is on its way to HIBERNATING")
    world.tell()
    assert await world.drain.begin("g0") == [DrainedModel("m", error="m is on its way to HIBERNATING")]


async def test_a_group_that_is_unknown_or_away_cannot_be_drained():
    world = FakeCluster()
    with pytest.raises(NotFound, match="no group 'gpu9'; there are g0, g1"):
        await world.drain.begin("gpu9")
    world.cluster.heard_group(world.groups[0].address, None)
    with pytest.raises(Unavailable, match="g0 is away"):
        await world.drain.begin("g0")
