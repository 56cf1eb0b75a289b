"""A model on several groups: it comes up on a further one where its load exceeds one, and leaves once that is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from placement.planning.planner import DepartingModel, PlacementPlan
from protos import common_pb2
from services.errors import Conflict, NotFound, Refused, Unmet
from services.runtime import tasks
from testing.patience import PATIENCE_S
from tests.placement.fakes import MIB, FakeCluster


@pytest.fixture
async def world() -> AsyncIterator[FakeCluster]:
    """Three groups, of which the first serves "hot", with placement's loop."""
    world = FakeCluster(groups=3, period_s=0.01)
    world.model("hot")
    world.tokens = 0
    world.groups[0].put("hot", weights_bytes=30 * MIB)
    world.tell()
    world.reconciler.changed()
    loop = tasks.spawn(world.reconciler.run(), "placement's loop")
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(2):
            report(world, late=0, tokens=0, seconds=10.0)
        yield world
    await tasks.cancel(loop)


def report(world: FakeCluster, late: int, tokens: int, seconds: float = 1.0) -> None:
    """All groups that serve the model say how it is after so many seconds, with so many tokens more on each."""
    world.time += seconds
    world.tokens += tokens
    for group in world.groups:
        if any(r.model == "hot" and r.residency == common_pb2.ACTIVE for r in group.state.residents):
            group.put("hot", weights_bytes=30 * MIB, decode_tokens=world.tokens, late=late, waiting=late)
    world.tell()
    world.reconciler.changed()


def places(world: FakeCluster) -> list[str]:
    (route,) = world.routes()
    return [place.group for place in route.places]


async def overloaded(world: FakeCluster) -> None:
    """Returns once the model is on two groups."""
    while len(places(world)) < 2:
        report(world, late=5, tokens=1000)
        await asyncio.sleep(0)


async def test_replica_comes_up_where_a_model_is_late_on_a_group_of_its_own(world: FakeCluster) -> None:
    await overloaded(world)
    (decision,) = [each for each in world.history.last("hot", 10) if each.action == "replicate"]
    assert decision.reason.startswith("its requests are late on g0, where most of the demand is its own")
    assert world.groups[0].calls == [], "the first group serves on"


async def test_replica_is_let_go_to_sleep_once_the_rate_has_fallen(world: FakeCluster) -> None:
    await overloaded(world)
    while len(places(world)) == 2:
        report(world, late=0, tokens=1, seconds=10.0)
        await asyncio.sleep(0)
    (slept,) = [group for group in world.groups if ("hot", "HIBERNATING", []) in group.calls]
    assert slept.drained[-1] == 30_000, "what runs there may finish"
    assert world.cluster.doubtful == set()


async def test_replicas_that_placement_finds_after_its_start_all_stay(world: FakeCluster) -> None:
    world.groups[1].put("hot", weights_bytes=30 * MIB)
    world.cluster.heard_group(world.groups[1].address, None)
    world.tell()
    await world.heard(lambda: not world.cluster.doubtful)
    assert sorted(places(world)) == ["g0", "g1"] and not world.groups[0].calls + world.groups[1].calls


async def test_drained_group_leaves_its_replica_to_the_other_group(world: FakeCluster) -> None:
    world.groups[1].put("hot", weights_bytes=30 * MIB, running=1)
    world.tell()
    (left,) = await world.drain.begin("g0")
    assert (left.to_group, left.error) == ("g1", "")
    assert world.groups[0].calls == [("hot", "COLD", [])] and world.groups[1].calls == []


async def test_operators_move_of_a_model_with_replicas_leaves_one_of_its_groups(world: FakeCluster) -> None:
    world.groups[1].put("hot", weights_bytes=30 * MIB)
    world.tell()
    with pytest.raises(Unmet, match="hot is on g1 already"):
        await world.reconciler.migrate("hot", "g1")
    world.groups[0].put("hot", weights_bytes=30 * MIB, running=7)
    world.tell()
    await world.reconciler.migrate("hot", "g2")
    assert sorted(places(world)) == ["g0", "g2"], "the one with the fewest requests is left"
    assert world.cluster.doubtful == set()


async def test_model_that_its_source_did_not_release_leaves_it_though_it_may_have_replicas(world: FakeCluster) -> None:
    source = world.groups[0]
    source.fail = Conflict("hot is busy")
    with pytest.raises(Conflict, match="hot is busy"):
        await world.reconciler.migrate("hot", "g1")
    assert sorted(places(world)) == ["g1"], "the source gets no new requests"
    source.fail = None
    await world.heard(lambda: places(world) == ["g1"] and not world.cluster.doubtful and not source.state.residents)


async def test_eviction_of_a_model_is_refused_while_its_replica_comes_up(world: FakeCluster) -> None:
    asked, up = world.groups[1].come_up_slowly()
    world.groups[2].state.drained = True
    world.tell()
    while not asked.is_set():
        report(world, late=5, tokens=1000)
        await asyncio.sleep(0)
    with pytest.raises(Conflict, match="hot is on its way"):
        await world.reconciler.evict("hot", common_pb2.HIBERNATING)
    up.set()
    await world.heard(lambda: len(places(world)) == 2)
    await world.reconciler.evict("hot", common_pb2.HIBERNATING)
    assert places(world) == []


async def test_replica_that_fails_is_not_tried_where_the_model_is_in_error_and_the_model_serves_on(
    world: FakeCluster,
) -> None:
    for group in world.groups[1:]:
        group.put("hot", common_pb2.ERROR, reason="out of memory")
    world.tell()
    for _ in range(5):
        report(world, late=5, tokens=1000)
        await asyncio.sleep(0)
    assert places(world) == ["g0"] and not world.groups[1].calls + world.groups[2].calls
    world.groups[0].put("hot", common_pb2.HIBERNATING)
    world.tell()
    (route,) = world.routes()
    assert (route.residency, route.error) == (common_pb2.HIBERNATING, ""), "it can wake"


@pytest.mark.parametrize(("nodes", "successor"), [(("here", "here", "there"), "unix:/g1"), (("here", "there", ""), "")])
async def test_replica_that_is_let_go_hands_its_requests_to_another_of_the_same_node(
    world: FakeCluster, nodes: tuple[str, str, str], successor: str
) -> None:
    for group, node in zip(world.groups, nodes, strict=True):
        group.state.node = node
        group.put("hot", weights_bytes=30 * MIB, running=1)
    world.tell()
    leaves = world.cluster.known_group("g0")
    record = world.history.add("hot", "hibernate", "g0", "it is not needed")
    routed: list[list[str]] = []
    bring = world.groups[0].set_residency

    async def observed(*given: object, **more: object) -> object:
        (route,) = world.routes(world.actuator.leaving)
        routed.append(sorted(place.group for place in route.places))
        return await bring(*given, **more)

    world.groups[0].set_residency = observed
    await world.actuator.let_go("hot", leaves, record)
    assert world.groups[0].successors == [successor] and world.groups[0].drained == [30_000]
    assert routed == [["g1", "g2"]], "no new requests go to it while it is active still"


@pytest.mark.parametrize(("running", "node", "successor"), [(1, "here", "unix:/g1"), (0, "here", ""), (1, "there", "")])
async def test_replica_that_makes_way_gives_its_kv_to_another_group_of_the_node_if_it_has_requests(
    world: FakeCluster, running: int, node: str, successor: str
) -> None:
    for group, its_node in zip(world.groups, ("here", node, "there"), strict=True):
        group.state.node = its_node
    world.groups[0].put("hot", weights_bytes=30 * MIB, running=running)
    world.groups[1].put("hot", weights_bytes=30 * MIB)
    world.tell()
    leaves = DepartingModel("hot", common_pb2.HIBERNATING, "its time is over")
    plan = PlacementPlan("new", world.cluster.known_group("g0"), "", yields=[leaves])
    whole = world.history.add("new", "activate", "g0", "a request")
    (told,) = world.reconciler.yields(plan, whole, "part of activating new")
    assert (told.model, told.target, told.successor) == ("hot", common_pb2.HIBERNATING, successor)
    assert [part.model for part in whole.parts] == ["hot"]


@pytest.mark.parametrize("moves", [False, True])
async def test_group_that_a_model_has_left_gets_no_requests_before_it_reports_so(
    world: FakeCluster, moves: bool
) -> None:
    world.actuator._silent_s = PATIENCE_S
    leaves, other = world.groups[0], world.groups[1]
    other.put("hot", weights_bytes=30 * MIB)
    world.tell()
    tell, told, leaves.tell = leaves.tell, asyncio.Event(), lambda: told.set()
    if moves:
        record = world.history.add("hot", "migrate", "g1", "an operator asked for it")
        source, target = world.cluster.known_group("g0"), world.cluster.known_group("g1")
        work: asyncio.Task[Any] = tasks.spawn(world.actuator.migrate("hot", source, target, record), "move")
    else:
        record = world.history.add("hot", "hibernate", "g0", "it is not needed")
        work = tasks.spawn(world.actuator.let_go("hot", world.cluster.known_group("g0"), record), "leave")
    await told.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    (route,) = world.table.message().routes
    assert not work.done() and [place.group for place in route.places] == ["g1"]
    tell()
    await work
    (route,) = world.table.message().routes
    assert [place.group for place in route.places] == ["g1"]


async def test_replica_that_no_other_group_outlasts_is_let_go_as_before(world: FakeCluster) -> None:
    for group in world.groups:
        group.state.node = "here"
    world.groups[1].put("hot", weights_bytes=30 * MIB)
    world.groups[1].state.drained = True
    world.tell()
    record = world.history.add("hot", "hibernate", "g0", "it is not needed")
    await world.actuator.let_go("hot", world.cluster.known_group("g0"), record)
    assert world.groups[0].successors == [""]


async def test_operators_replica_stays_though_nothing_asks_for_it_until_the_operator_takes_it_off(
    world: FakeCluster,
) -> None:
    group, took_s = await world.reconciler.replicate("hot")
    assert group in ("g1", "g2") and took_s > 0
    for _ in range(100):
        report(world, late=0, tokens=0, seconds=100.0)
        await asyncio.sleep(0)
    assert sorted(places(world)) == sorted(["g0", group])
    (decision,) = [each for each in world.history.last("hot", 10) if each.action == "replicate"]
    assert decision.reason.startswith("an operator asked for it: pressure")
    other = ({"g1", "g2"} - {group}).pop()
    assert (await world.reconciler.replicate("hot", other))[0] == other
    outcome = await world.reconciler.evict("hot", common_pb2.HIBERNATING, other)
    assert outcome.residency == common_pb2.HIBERNATING
    while len(places(world)) == 2:  # it is not held any more
        report(world, late=0, tokens=0, seconds=100.0)
        await asyncio.sleep(0)
    assert len(places(world)) == 1


async def test_operators_replica_is_refused_with_the_reason(world: FakeCluster) -> None:
    with pytest.raises(Unmet, match="hot is on g0 already"):
        await world.reconciler.replicate("hot", "g0")
    with pytest.raises(NotFound, match="no group 'g9'"):
        await world.reconciler.replicate("hot", "g9")
    world.groups[1].state.drained = True
    world.tell()
    with pytest.raises(Refused, match="hot: "):
        await world.reconciler.replicate("hot", "g1")
    world.groups[2].fail = Refused("no memory after all")
    with pytest.raises(Refused, match="no memory after all"):
        await world.reconciler.replicate("hot", "g2")
    world.groups[0].put("hot", common_pb2.HIBERNATING)
    world.tell()
    with pytest.raises(Unmet, match="hot is not active"):
        await world.reconciler.replicate("hot", "g2")
    assert places(world) == []


async def test_replica_that_placement_made_is_an_operators_once_it_is_asked_for_by_its_group(
    world: FakeCluster,
) -> None:
    await overloaded(world)
    group = next(each for each in places(world) if each != "g0")
    assert await world.reconciler.replicate("hot", group) == (group, 0.0)
    for _ in range(100):
        report(world, late=0, tokens=0, seconds=100.0)
        await asyncio.sleep(0)
    assert sorted(places(world)) == ["g0", group]


async def test_operators_replica_is_refused_where_every_group_has_the_model(world: FakeCluster) -> None:
    for _ in range(2):
        await world.reconciler.replicate("hot")
    with pytest.raises(Refused, match="hot: no group is left: it is on g0 and g1 and g2"):
        await world.reconciler.replicate("hot")


async def test_operators_replica_is_kept_over_the_absence_of_a_group_and_not_over_an_eviction(
    world: FakeCluster,
) -> None:
    async def calm() -> list[str]:
        for _ in range(100):
            report(world, late=0, tokens=0, seconds=100.0)
            await asyncio.sleep(0)
        return places(world)

    name, _ = await world.reconciler.replicate("hot")
    (group,) = [each for each in world.groups if each.state.group == name]
    world.cluster.heard_group(group.address, None)
    world.reconciler.changed()
    world.planner.surplus()  # a look while it is away
    assert len(places(world)) == 1
    world.tell()
    async with asyncio.timeout(PATIENCE_S):
        while len(places(world)) < 2:
            await calm()
    assert len(await calm()) == 2
    await world.reconciler.evict("hot", common_pb2.HIBERNATING)
    for each in (world.groups[0], group):
        each.put("hot", weights_bytes=30 * MIB)
    world.tell()
    async with asyncio.timeout(PATIENCE_S):
        while len(places(world)) == 2:
            await calm()


async def test_model_whose_most_replicas_falls_leaves_a_group(world: FakeCluster) -> None:
    await world.reconciler.replicate("hot")
    assert len(places(world)) == 2
    world.model("hot", most_replicas=1)
    async with asyncio.timeout(PATIENCE_S):
        while len(places(world)) == 2:
            report(world, late=0, tokens=0)
            await asyncio.sleep(0)
    (decision,) = [each for each in world.history.last("hot", 10) if each.action == "hibernate"]
    assert decision.reason == "its most_replicas is 1"


async def test_operators_replica_beyond_the_most_is_refused() -> None:
    world = FakeCluster(groups=3, most_replicas=2)
    world.model("hot")
    for group in world.groups[:2]:
        group.put("hot", weights_bytes=30 * MIB)
    world.tell()
    with pytest.raises(Unmet, match="hot is on g0 and g1: placement's most_replicas is 2"):
        await world.reconciler.replicate("hot")


async def test_eviction_from_one_group_leaves_the_others_alone(world: FakeCluster) -> None:
    world.groups[1].put("hot", weights_bytes=30 * MIB)
    world.tell()
    for target, group, why in (
        (common_pb2.COLD, "g2", "hot is not on g2"),
        (common_pb2.ON_DISK, "g0", "name no group"),
        (common_pb2.ACTIVE, "g0", "there is nothing to bring down"),
    ):
        with pytest.raises(Unmet, match=why):
            await world.reconciler.evict("hot", target, group)
    await world.reconciler.evict("hot", common_pb2.COLD, "g0")
    assert places(world) == ["g1"] and world.groups[0].drained == [30_000]
    await world.reconciler.evict("hot", common_pb2.HIBERNATING, "g1")
    assert places(world) == [] and world.groups[1].drained == [0], "its last group is left as by any eviction"


@pytest.mark.parametrize("most", [1, 2])
async def test_model_is_on_no_more_groups_than_its_own_most_replicas(most: int) -> None:
    world = FakeCluster(groups=3, period_s=0.01)
    world.model("hot", most_replicas=most)
    world.tokens = 0
    world.groups[0].put("hot", weights_bytes=30 * MIB)
    world.tell()
    world.reconciler.changed()
    loop = tasks.spawn(world.reconciler.run(), "placement's loop")
    for _ in range(200):
        report(world, late=5, tokens=1000, seconds=5.0)
        await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        while len(places(world)) < most:
            report(world, late=5, tokens=1000, seconds=5.0)
            await asyncio.sleep(0)
    assert len(places(world)) == most
    with pytest.raises(Unmet, match=f"its most_replicas is {most}"):
        await world.reconciler.replicate("hot")
    await tasks.cancel(loop)


async def test_model_found_again_on_more_groups_than_its_own_most_replicas_leaves_one() -> None:
    world = FakeCluster()
    world.model("hot", most_replicas=1)
    for group in world.groups:
        group.put("hot", weights_bytes=30 * MIB)
        world.cluster.heard_group(group.address, None)
    world.tell()
    world.reconciler.changed()
    loop = tasks.spawn(world.reconciler.run(), "placement's loop")
    async with asyncio.timeout(PATIENCE_S):
        await world.heard(lambda: len(places(world)) == 1 and not world.cluster.doubtful)
    await tasks.cancel(loop)
