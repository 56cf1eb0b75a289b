import asyncio
from math import inf

import pytest

from placement.actuation import reconcile
from placement.actuation.reconcile import EvictionOutcome
from protos import common_pb2, gpu_scheduler_pb2, loader_pb2
from services.errors import Conflict, NotFound, Refused, Unmet
from services.runtime import tasks
from testing.patience import PATIENCE_S
from tests.placement.fakes import MIB, FakeCluster


async def test_activation_of_a_new_model_takes_the_group_with_the_least_pressure():
    world = FakeCluster()
    world.model("busy")
    world.model("new")
    world.groups[0].put("busy", weights_bytes=30 * MIB)
    world.tell()
    world.planner.observe()
    world.groups[0].put("busy", weights_bytes=30 * MIB, decode_tokens=10_000)
    world.tell()
    world.planner.observe()
    assert (await world.reconciler.activate("new")).name == "g1"
    assert world.groups[1].calls == [("new", "ACTIVE", [])]
    decision = world.history.last("new", 1)[0]
    assert decision.action == "activate" and "pressure" in decision.reason and decision.candidates


async def test_activations_of_one_model_requested_at_once_are_one():
    world = FakeCluster()
    world.model("new")
    groups = await asyncio.gather(*(world.reconciler.activate("new") for _ in range(20)))
    assert len({group.name for group in groups}) == 1
    assert sum(len(group.calls) for group in world.groups) == 1


async def test_activations_of_two_models_at_once_take_different_groups():
    world = FakeCluster(capacity=50 * MIB, silent_s=1000.0)
    for group in world.groups:
        group.tell = lambda: None  # their reports are late
    world.model("a")
    world.model("b")
    groups = await asyncio.gather(world.reconciler.activate("a"), world.reconciler.activate("b"))
    assert {group.name for group in groups} == {"g0", "g1"}


async def test_activation_of_an_active_model_returns_its_group_without_a_change():
    world = FakeCluster()
    world.model("m")
    world.groups[1].put("m")
    world.tell()
    assert (await world.reconciler.activate("m")).name == "g1"
    assert world.groups[1].calls == []


async def test_activation_of_a_model_that_is_draining_wakes_it_as_soon_as_it_sleeps():
    world = FakeCluster(groups=1, hold_s=60.0)
    world.model("m")
    world.groups[0].put("m", common_pb2.DRAINING, weights_bytes=30 * MIB)
    world.tell()
    asked = tasks.spawn(world.reconciler.activate("m"), "a request for m")
    for _ in range(20):
        await asyncio.sleep(0)
        world.tell()
    assert not asked.done() and world.groups[0].calls == []  # it would have been refused
    world.groups[0].put("m", common_pb2.HIBERNATING, weights_bytes=30 * MIB)
    world.tell()
    assert (await asked).name == "g0"
    assert world.groups[0].calls == [("m", "ACTIVE", [])]


async def test_activation_of_a_model_that_drains_too_long_is_refused_by_its_group():
    world = FakeCluster(groups=1, hold_s=0.05)
    world.model("m")
    world.groups[0].put("m", common_pb2.DRAINING, weights_bytes=30 * MIB)
    world.groups[0].fail = Conflict("m is on its way to HIBERNATING")
    world.tell()
    with pytest.raises(Conflict, match="on its way"):
        await world.reconciler.activate("m")
    assert world.groups[0].calls == [("m", "ACTIVE", [])]


async def test_activation_hibernates_an_idle_model_whose_memory_it_needs():
    world = FakeCluster(groups=1, idle_s=45)
    for name in ("idle", "busy", "new"):
        world.model(name)
    world.groups[0].put("idle", weights_bytes=30 * MIB, idle_s=60)
    world.groups[0].put("busy", weights_bytes=30 * MIB, idle_s=1)
    world.tell()
    await world.reconciler.activate("new")
    assert world.groups[0].calls == [("new", "ACTIVE", ["idle"])]
    assert world.history.last("idle", 1)[0].action == "hibernate"


async def test_activation_without_an_idle_model_is_refused_with_the_arithmetic():
    world = FakeCluster(groups=1)
    for name in ("a", "b", "new"):
        world.model(name)
    for name in "ab":
        world.groups[0].put(name, weights_bytes=30 * MIB, idle_s=0.5)
    world.tell()
    with pytest.raises(Refused, match=r"weights 31,457,280 \+ floor"):
        await world.reconciler.activate("new")


async def test_a_model_that_fits_nowhere_is_in_error_with_the_arithmetic_and_others_are_not():
    world = FakeCluster()
    spec = world.model("huge", weights=500 * MIB)
    world.model("small", has_image=False)
    with pytest.raises(Unmet, match="the largest group, g1, has 104,857,600"):
        world.reconciler.check_fits(spec)
    world.reconciler.changed()
    table = {r.model.name: r for r in world.routes()}
    assert table["huge"].residency == common_pb2.ERROR and "524,288,000" in table["huge"].error
    assert table["small"].residency == common_pb2.ON_DISK and not table["small"].error
    assert world.reconciler.prospect("huge") is None and world.reconciler.prospect("small") is not None


async def test_activation_of_an_unknown_and_of_a_broken_model_raise_different_errors():
    world = FakeCluster()
    world.model("broken", error="model.safetensors is truncated")
    with pytest.raises(NotFound, match="nobody"):
        await world.reconciler.activate("nobody")
    with pytest.raises(Unmet, match="truncated"):
        await world.reconciler.activate("broken")


async def test_activation_refused_by_its_group_raises_and_is_recorded():
    world = FakeCluster()
    world.model("m")
    for group in world.groups:
        group.fail = Refused("no room")
    with pytest.raises(Refused, match="no room"):
        await world.reconciler.activate("m")
    assert world.history.last("m", 1)[0].outcome == "failed: no room"
    assert not world.actuator.activating


async def test_a_migration_activates_the_target_before_the_source_goes_cold():
    world = FakeCluster()
    world.model("m")
    world.groups[0].put("m", weights_bytes=30 * MIB)
    world.tell()
    await world.reconciler.migrate("m", "g1")
    assert world.groups[1].calls == [("m", "ACTIVE", [])]
    assert world.groups[0].calls == [("m", "COLD", [])]


async def test_migration_names_a_successor_only_within_the_same_node():
    for nodes, successor in ((("here", "here"), "unix:/g1"), (("here", "there"), ""), (("", ""), "")):
        world = FakeCluster()
        world.model("m")
        for group, node in zip(world.groups, nodes, strict=True):
            group.state.node = node
        world.groups[0].put("m", weights_bytes=30 * MIB)
        world.tell()
        await world.reconciler.migrate("m", "g1")
        assert world.groups[0].successors == [successor] and world.groups[1].successors == [""]


async def test_a_failed_migration_leaves_the_source_serving():
    world = FakeCluster()
    world.model("m")
    world.groups[0].put("m", weights_bytes=30 * MIB)
    world.tell()
    world.groups[1].fail = Refused("no room")
    with pytest.raises(Refused):
        await world.reconciler.migrate("m", "g1")
    assert world.groups[0].calls == []
    assert not world.actuator.moving and not world.actuator.leaving


async def test_migration_source_that_refused_to_release_a_moved_model_is_retried():
    """Its engine died meanwhile, and is being replaced."""
    world = FakeCluster(rebalance=False)
    world.model("m")
    world.groups[0].put("m")
    world.tell()
    world.cluster.doubtful.clear()
    world.groups[0].fail = Conflict("m is on its way to ACTIVE")
    with pytest.raises(Conflict):
        await world.reconciler.migrate("m", "g1")
    world.groups[0].fail = None
    world.reconciler.changed()
    running = asyncio.get_running_loop().create_task(world.reconciler.run())
    await world.heard(lambda: not world.cluster.doubtful)
    running.cancel()
    assert world.groups[0].calls == [("m", "COLD", [])] * 2
    assert [group.name for group, _ in world.cluster.residents("m")] == ["g1"]


async def test_moves_begin_once_a_request_misses_its_target_and_not_for_pressure_alone():
    world = FakeCluster(first_do_no_harm=True)
    for name in "ab":
        world.model(name)

    def reports(tokens, **facts):
        for name in "ab":
            world.groups[0].put(name, weights_bytes=30 * MIB, decode_tokens=tokens, **facts)
        world.tell()
        world.time += 1
        world.planner.observe()
        return [(move.source.name, move.group.name) for move in world.planner.moves()]

    assert reports(0, ttft_missed=3) == [], "what was missed before the group was found is of any age"
    assert reports(10_000, ttft_missed=3) == []
    assert reports(20_000, ttft_missed=3, tpot_missed=1) == [("g0", "g1")]


async def test_pressure_on_one_group_moves_a_model_to_the_other_once_per_cool_down():
    world = FakeCluster(cool_down_s=30)
    for name in "ab":
        world.model(name)
        world.groups[0].put(name, weights_bytes=30 * MIB)
    world.tell()
    world.planner.observe()
    for name in "ab":
        world.groups[0].put(name, weights_bytes=30 * MIB, decode_tokens=10_000)
    world.tell()
    world.time += 1
    world.planner.observe()
    moves = world.planner.moves()
    assert len(moves) == 1 and moves[0].group.name == "g1" and "instead of" in moves[0].reason
    world.planner.moved("a")
    world.planner.moved("b")
    assert world.planner.moves() == []


@pytest.mark.parametrize("by_an_operator", [False, True])
async def test_model_that_an_operator_moved_stays_there_for_the_cool_down(by_an_operator):
    world = FakeCluster(cool_down_s=30)
    world.model("a", pinned=True)
    world.model("b")
    world.groups[0].put("a", weights_bytes=30 * MIB)
    world.groups[1 if by_an_operator else 0].put("b", weights_bytes=30 * MIB)
    world.tell()
    world.planner.observe()
    if by_an_operator:
        await world.reconciler.migrate("b", "g0")
    for name in "ab":
        world.groups[0].put(name, weights_bytes=30 * MIB, decode_tokens=10_000)
    world.tell()
    world.time += 1
    world.planner.observe()
    assert [move.model for move in world.planner.moves()] == ([] if by_an_operator else ["b"])


@pytest.mark.parametrize("room", [True, False])
async def test_round_of_two_moves_is_finished_despite_a_moment_without_room(room, monkeypatch):
    """As in policy/assignment/test_rebalance.py: a and b change places."""
    world = FakeCluster(capacity=1000 * MIB, load_weight=0, cool_down_s=60)
    weights = {"a": 200, "b": 200, "c": 400, "d": 500}
    tokens = {"a": 600, "b": 100, "c": 600, "d": 900}
    on = {"a": 0, "b": 1, "c": 1, "d": 0}
    for name, size in weights.items():
        world.model(name, weights=size * MIB, floor=0, quota=0)

    def wanted():
        for name, i in on.items():
            group = world.groups[i]
            told = sum(r.decode_tokens for r in group.state.residents if r.model == name)
            group.put(name, weights_bytes=weights[name] * MIB, decode_tokens=told + tokens[name])
        world.tell()
        world.time += 1
        world.planner.observe()
        return [(move.model, move.group.name) for move in world.planner.moves()]

    wanted()
    assert wanted() == [("a", "g1")]
    told = next(r.decode_tokens for r in world.groups[0].state.residents if r.model == "a")
    world.groups[0].remove("a")
    on["a"] = 1
    world.groups[1].put("a", weights_bytes=200 * MIB, decode_tokens=told)
    world.planner.moved("a")
    if not room:
        monkeypatch.setattr(world.planner, "_move", lambda there, wanted: None)
        assert wanted() == []
        monkeypatch.undo()
    assert wanted() == [("b", "g0")]


async def test_failed_move_is_retried_after_doubling_pauses_up_to_the_cool_down():
    world = FakeCluster(cool_down_s=12)
    for name in "ab":
        world.model(name, weights=28 * MIB)
        world.groups[0].put(name, weights_bytes=28 * MIB)
    world.tell()
    world.planner.observe()

    def wanted():
        for name in "ab":
            before = next(r.decode_tokens for r in world.groups[0].state.residents if r.model == name)
            world.groups[0].put(name, weights_bytes=28 * MIB, decode_tokens=before + 10_000)
        world.tell()
        world.time += 1
        world.planner.observe()
        return {move.model for move in world.planner.moves()}

    (moved,) = wanted()
    rests = []
    for _ in range(4):
        world.planner.not_moved(moved)
        began = world.time
        while moved not in wanted():
            other = {"a": "b", "b": "a"}[moved]
            world.planner.moved(other)  # or it would go instead
        rests.append(world.time - began)
    assert rests == [5, 10, 12, 12]


@pytest.mark.parametrize(
    ("setup", "target", "error", "words"),
    [
        (None, "g1", Unmet, "is not active"),
        ("g0", "g0", Unmet, "is on g0 already"),
        ("g0", "g9", NotFound, "no group 'g9'; there are g0, g1"),
    ],
)
async def test_impossible_migrations_are_refused_with_one_line(setup, target, error, words):
    world = FakeCluster()
    world.model("m")
    if setup:
        world.groups[0].put("m")
        world.tell()
    with pytest.raises(error, match=words):
        await world.reconciler.migrate("m", target)


def test_route_leaves_out_the_place_that_the_model_is_leaving_while_another_is_active():
    world = FakeCluster()
    world.model("m")
    world.groups[0].put("m")
    world.groups[1].put("m")
    world.tell()
    (route,) = world.routes({"m": "g0"})
    assert [place.group for place in route.places] == ["g1"]


def test_a_lost_group_has_no_routes():
    world = FakeCluster()
    world.model("m")
    world.groups[0].put("m")
    world.tell()
    world.cluster.groups[world.groups[0].address].reachable = False
    (route,) = world.routes()
    assert not route.places


# --- what a request would meet


async def test_a_prospect_names_the_group_and_the_models_that_would_leave_and_changes_nothing():
    world = FakeCluster(groups=1)
    world.model("asleep", quota=40 * MIB)
    world.model("new", weights=70 * MIB, floor=MIB)
    world.groups[0].put("asleep", common_pb2.HIBERNATING)
    world.tell()
    verdict, waiting_s = world.reconciler.prospect("new")
    assert verdict.group.name == "g0" and [y.model for y in verdict.yields] == ["asleep"] and waiting_s == 0.0
    assert world.groups[0].calls == [] and world.history.last("", 0) == []


async def test_a_prospect_without_room_names_the_nearest_group():
    world = FakeCluster(groups=1)
    world.model("busy", weights=60 * MIB)
    world.model("new", weights=60 * MIB)
    world.groups[0].put("busy", running=1)
    world.tell()
    verdict, _ = world.reconciler.prospect("new")
    assert verdict.group is None and "the nearest is g0" in verdict.reason
    assert not world.planner.waits()


async def test_a_prospect_of_an_active_broken_or_unknown_model_is_none():
    world = FakeCluster()
    world.model("here")
    world.model("broken", error="truncated")
    world.groups[0].put("here")
    world.tell()
    assert [world.reconciler.prospect(name) for name in ("here", "broken", "ghost")] == [None] * 3


# --- removing


def routed(world):
    return [r.model.name for r in world.routes()]


async def test_a_removed_model_has_no_route_and_leaves_every_group_after_a_drain():
    world = FakeCluster(drain_ms=500)
    world.model("m")
    world.model("other")
    for group in world.groups:
        group.put("m")
    world.tell()
    async with world.reconciler.removing("m"):
        for group in world.groups:
            assert (group.calls, group.drained) == ([("m", "ON_DISK", [])], [500])
        assert routed(world) == ["other"]
        with pytest.raises(NotFound, match="no model 'm'"):
            await world.reconciler.activate("m")
        with pytest.raises(Conflict):
            async with world.reconciler.removing("m"):
                pass
        del world.cluster.catalogue["m"]
    assert [decision.action for decision in world.history.last("m", 2)] == ["remove", "remove"]


async def test_removal_of_a_model_whose_activation_is_under_way_waits_until_it_is_up():
    world = FakeCluster(groups=1)
    world.model("m")
    group, begin = world.groups[0], world.groups[0].set_residency
    under_way, up = asyncio.Event(), asyncio.Event()

    async def slowly(spec, target, *arguments, on_progress=None, **keys):
        if target == common_pb2.ACTIVE:
            on_progress(gpu_scheduler_pb2.ResidencyProgress(residency=common_pb2.WAKING))
            under_way.set()
            await up.wait()
        return await begin(spec, target, *arguments, **keys)

    group.set_residency = slowly
    await world.reconciler.activate("m")
    await under_way.wait()

    async def remove():
        async with world.reconciler.removing("m"):
            return list(group.calls)

    removing = asyncio.get_running_loop().create_task(remove())
    await asyncio.sleep(0)
    assert not removing.done() and group.calls == []
    up.set()
    assert await removing == [("m", "ACTIVE", []), ("m", "ON_DISK", [])]


@pytest.mark.parametrize("by_listing", [True, False])
async def test_a_pinned_model_is_removed_by_force_only(by_listing):
    world = FakeCluster()
    world.model("m", pinned=by_listing)
    world.cluster.entry("m").image_pinned = True
    with pytest.raises(Unmet, match="m is pinned"):
        async with world.reconciler.removing("m"):
            pass
    async with world.reconciler.removing("m", force=True):
        assert routed(world) == []


async def test_a_model_that_has_requests_is_removed_by_force_only():
    world = FakeCluster()
    world.model("m")
    world.groups[0].put("m", waiting=1, running=2)
    world.tell()
    with pytest.raises(Unmet, match="m has requests that run or wait"):
        async with world.reconciler.removing("m"):
            pass
    async with world.reconciler.removing("m", force=True):
        assert routed(world) == []


async def test_a_removal_that_a_group_refuses_leaves_the_model_in_the_routes():
    world = FakeCluster()
    world.model("m")
    world.groups[0].put("m")
    world.groups[0].fail = Conflict("m is on its way to HIBERNATING")
    world.tell()
    with pytest.raises(Conflict, match="on its way"):
        async with world.reconciler.removing("m"):
            pass
    assert routed(world) == ["m"]


async def test_a_model_whose_checkpoint_broke_while_it_ran_can_be_removed():
    world = FakeCluster()
    world.model("m", error="model.safetensors is truncated")
    world.groups[0].put("m")
    world.tell()
    async with world.reconciler.removing("m"):
        assert world.groups[0].calls == [("m", "ON_DISK", [])]


async def test_removal_of_an_unknown_model_is_not_found():
    with pytest.raises(NotFound, match="no model 'm' in the catalogue"):
        async with FakeCluster().reconciler.removing("m"):
            pass


# --- KV, promises


async def test_idle_model_hibernates_for_kv_of_a_busy_one_and_the_history_names_that_one():
    world = FakeCluster(groups=2, kv_idle_s=1)
    for name in ("busy", "idle", "elsewhere"):
        world.model(name)
    lacks = {"waiting": 3, "kv_used_bytes": 20 * MIB, "kv_lacking_bytes": 15 * MIB}
    world.groups[0].put("busy", weights_bytes=30 * MIB, **lacks)
    world.groups[0].put("idle", weights_bytes=30 * MIB, idle_s=60)
    world.groups[1].put("elsewhere", weights_bytes=30 * MIB, idle_s=60)
    world.tell()
    world.reconciler.relieve()
    world.reconciler.relieve()  # one at a time for each group
    await asyncio.wait_for(world.heard(lambda: world.groups[0].calls), PATIENCE_S)
    assert [group.calls for group in world.groups] == [[("idle", "HIBERNATING", [])], []]
    (decision,) = world.history.last("idle", 5)
    assert decision.action == "hibernate" and "for KV of busy" in decision.reason
    assert decision.outcome.startswith("done")
    world.reconciler.relieve()
    assert not world.planner.reliefs()


async def test_model_that_waited_its_patience_replaces_a_busy_one_after_its_quantum():
    world = FakeCluster(groups=1, patience_s=2, quantum_s=4)
    for name in ("long", "lately", "new"):
        world.model(name, weights=35 * MIB)
    world.groups[0].put("long", weights_bytes=35 * MIB, active_s=60, waiting=2, late=2)
    world.groups[0].put("lately", weights_bytes=35 * MIB, active_s=3, waiting=2, late=2)
    world.tell()
    with pytest.raises(Refused, match="no group has room now"):
        await world.reconciler.activate("new")
    assert world.planner.waits()
    world.time += 2
    await world.reconciler.activate("new")
    assert world.groups[0].calls == [("new", "ACTIVE", ["long"])]
    assert "awake for 62 s while another waited for 2.0 s" in world.history.last("long", 1)[0].reason
    assert not world.planner.waits()


async def test_model_whose_activation_on_a_reserved_group_failed_keeps_its_waiting_time(monkeypatch):
    world = FakeCluster(groups=1, patience_s=2, quantum_s=4)
    for name in ("long", "new"):
        world.model(name, weights=60 * MIB)
    world.groups[0].put("long", weights_bytes=60 * MIB, active_s=60, waiting=2, late=2)
    world.tell()
    with pytest.raises(Refused, match="no group has room now"):
        await world.reconciler.activate("new")
    world.time += 2

    async def refused(*_):
        raise Refused("it did not fit after all")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(world.actuator, "activate", refused)
        with pytest.raises(Refused, match="did not fit"):
            await world.reconciler.activate("new")
    assert world.planner.waits()
    await world.reconciler.activate("new")  # at once: it has waited already
    assert world.groups[0].calls == [("new", "ACTIVE", ["long"])] and not world.planner.waits()


async def test_activation_that_waits_goes_on_as_soon_as_there_is_room():
    world = FakeCluster(groups=1, hold_s=60)
    for name in ("busy", "new"):
        world.model(name, weights=60 * MIB)
    world.groups[0].put("busy", weights_bytes=60 * MIB, active_s=1)
    world.tell()
    running = asyncio.get_running_loop().create_task(world.reconciler.run())
    asked = asyncio.get_running_loop().create_task(world.reconciler.activate("new"))
    await world.heard(lambda: world.planner.waits())
    assert not asked.done()
    world.groups[0].put("busy", weights_bytes=60 * MIB, active_s=9, idle_s=5)
    world.tell()
    world.reconciler.changed()
    assert (await asyncio.wait_for(asked, PATIENCE_S)).name == "g0"
    assert world.groups[0].calls == [("new", "ACTIVE", ["busy"])]
    running.cancel()


async def test_activation_that_waits_is_judged_again_only_when_eligibility_changes(monkeypatch):
    world = FakeCluster(groups=1, pauses={"look_s": 0.0}, hold_s=60, patience_s=60, period_s=60)
    for name in ("busy", "new"):
        world.model(name, weights=60 * MIB)
    judged, looks = [], []
    activation, observe = world.planner.activation, world.planner.observe
    monkeypatch.setattr(world.planner, "activation", lambda *given: judged.append(given) or activation(*given))
    monkeypatch.setattr(world.planner, "observe", lambda: looks.append(observe()))

    async def looked():
        before = len(looks)
        world.reconciler.changed()
        await asyncio.wait_for(world.heard(lambda: len(looks) > before), PATIENCE_S)

    async def tell(**facts):
        """The group says so, and the loop has looked at it twice."""
        world.groups[0].put("busy", weights_bytes=60 * MIB, **facts)
        world.tell()
        await looked()
        await looked()

    running = asyncio.get_running_loop().create_task(world.reconciler.run())
    await tell(active_s=60, running=1)
    asked = asyncio.get_running_loop().create_task(world.reconciler.activate("new"))
    for tokens in range(20):
        await tell(active_s=60, running=1, waiting=tokens, decode_tokens=100 * tokens, kv_used_bytes=tokens * MIB)
    assert len(judged) == 1
    await tell(active_s=60, idle_s=0.5)
    assert len(judged) == 1, "not idle for long enough yet"
    assert not asked.done()
    world.time += 0.6  # nobody reports it
    world.reconciler.changed()
    assert (await asyncio.wait_for(asked, PATIENCE_S)).name == "g0"
    assert len(judged) == 2
    running.cancel()


async def test_activation_that_waits_goes_on_when_a_quantum_ends_without_a_report():
    world = FakeCluster(groups=1, pauses={"look_s": 0.0}, hold_s=60, patience_s=2, quantum_s=4, period_s=60)
    for name in ("busy", "new"):
        world.model(name, weights=60 * MIB)
    world.groups[0].put("busy", weights_bytes=60 * MIB, active_s=0.5, waiting=1, wake_s=0.1)
    world.tell()
    assert world.planner.rest_s() == inf, "it was not looked at yet"
    running = asyncio.get_running_loop().create_task(world.reconciler.run())
    asked = asyncio.get_running_loop().create_task(world.reconciler.activate("new"))
    await world.heard(world.planner.waits)
    for seconds in (2.0, 1.5):
        assert world.planner.rest_s() == pytest.approx(seconds), "its patience, then the quantum of the other"
        assert not asked.done()
        world.time += seconds
        world.reconciler.changed()
        await world.heard(lambda: world.planner.rest_s() > 0 or asked.done())
    assert (await asyncio.wait_for(asked, PATIENCE_S)).name == "g0"
    assert world.groups[0].calls == [("new", "ACTIVE", ["busy"])]
    running.cancel()


async def test_broken_model_that_cannot_make_way_for_kv_does_not_keep_another_from_it():
    world = relieved(broken="bad.safetensors is truncated")
    world.reconciler.relieve()
    await asyncio.wait_for(world.heard(lambda: world.groups[0].calls), PATIENCE_S)
    assert world.groups[0].calls == [("idle", "HIBERNATING", [])]
    assert not world.history.last("bad", 1), "nothing was begun"


async def test_model_whose_activation_is_under_way_does_not_make_way_for_kv():
    world = relieved()
    world.actuator.activating["bad"] = (world.cluster.group("g0"), None)
    world.reconciler.relieve()
    await asyncio.wait_for(world.heard(lambda: world.groups[0].calls), PATIENCE_S)
    assert world.groups[0].calls == [("idle", "HIBERNATING", [])]


@pytest.mark.parametrize("moves", [False, True])
async def test_model_that_makes_way_for_an_activation_or_a_move_is_not_hibernated_again_for_kv(moves):
    world = relieved()
    world.model("new")
    group, other = world.cluster.group("g0"), FakeCluster().cluster.group("g1")
    begin, through = world.groups[0].set_residency, asyncio.Event()

    async def slowly(spec, *arguments, **keys):
        if spec.name == "new":
            await through.wait()
        return await begin(spec, *arguments, **keys)

    world.groups[0].set_residency = slowly
    record = world.history.add("new", "activate", "g0", "asked for")
    yields = [gpu_scheduler_pb2.Yield(model="bad", target=common_pb2.HIBERNATING)]
    coming = (
        world.actuator.migrate("new", other, group, record, yields)
        if moves
        else world.actuator.activate("new", group, record, yields)
    )
    task = tasks.spawn(coming, "comes")
    while "bad" not in world.actuator.making_way:
        await asyncio.sleep(0)
    world.reconciler.relieve()
    await asyncio.wait_for(world.heard(lambda: world.groups[0].calls), PATIENCE_S)
    assert world.groups[0].calls == [("idle", "HIBERNATING", [])]
    assert not world.history.last("bad", 1)
    through.set()
    await asyncio.wait_for(task, PATIENCE_S)
    assert not world.actuator.making_way


@pytest.mark.parametrize("silent_s", [1000.0, 0.0])
async def test_model_that_hibernated_for_kv_is_not_hibernated_again_by_an_older_report(silent_s):
    world = relieved(silent_s=silent_s)
    ((group, yields),) = world.planner.reliefs()
    await world.reconciler._relieve(group, yields)
    world.groups[0].put("bad", weights_bytes=20 * MIB, idle_s=60)
    world.groups[0].put("idle", weights_bytes=20 * MIB, idle_s=40)
    world.tell()  # what it said before either slept, or after both came back
    ((group, yields),) = world.planner.reliefs()
    await world.reconciler._relieve(group, yields)
    twice = 1 if silent_s else 2
    assert world.groups[0].calls == [("bad", "HIBERNATING", []), ("idle", "HIBERNATING", [])] * twice
    assert len(world.history.last("bad", 5)) == twice


async def test_model_with_new_requests_stays_while_another_makes_way_for_kv():
    world = relieved()
    begin = world.groups[0].set_residency

    async def meanwhile(spec, *arguments, **keys):
        last = await begin(spec, *arguments, **keys)
        other = "idle" if spec.name == "bad" else "bad"
        world.groups[0].put(other, weights_bytes=20 * MIB, running=1)
        world.tell()
        return last

    world.groups[0].set_residency = meanwhile
    relieving = world.planner.reliefs()
    assert [[y.model for y in yields] for _, yields in relieving] == [["bad", "idle"]]
    ((group, yields),) = relieving
    await world.reconciler._relieve(group, yields)
    assert world.groups[0].calls == [("bad", "HIBERNATING", [])]


def relieved(broken="", silent_s=0.5):
    """One group whose KV lacks memory, and two idle models there that are to make way, `bad` first."""
    world = FakeCluster(groups=1, kv_idle_s=1, silent_s=silent_s)
    world.model("busy")
    world.model("bad", weights=20 * MIB, floor=0, error=broken)
    world.model("idle", weights=20 * MIB, floor=0)
    lacks = {"waiting": 3, "kv_used_bytes": 20 * MIB, "kv_lacking_bytes": 60 * MIB}
    world.groups[0].put("busy", weights_bytes=30 * MIB, **lacks)
    world.groups[0].put("bad", weights_bytes=20 * MIB, idle_s=60)
    world.groups[0].put("idle", weights_bytes=20 * MIB, idle_s=40)
    world.tell()
    return world


async def test_model_without_an_image_makes_way_for_kv_last_and_the_reason_states_its_cold_start():
    world = FakeCluster(groups=1, kv_idle_s=1)
    world.model("busy")
    world.model("bare", weights=20 * MIB, floor=0, has_image=False)
    world.model("imaged", weights=20 * MIB, floor=0)

    def lack(nbytes):
        lacks = {"waiting": 3, "kv_used_bytes": 10 * MIB, "kv_lacking_bytes": nbytes}
        world.groups[0].put("busy", weights_bytes=30 * MIB, **lacks)
        world.groups[0].put("bare", weights_bytes=20 * MIB, idle_s=60, wake_s=0.1, cold_s=12.0)
        world.groups[0].put("imaged", weights_bytes=20 * MIB, idle_s=2, wake_s=0.3)
        world.tell()
        return [y.model for _, yields in world.planner.reliefs() for y in yields]

    assert lack(15 * MIB) == ["imaged"]
    assert lack(60 * MIB) == ["imaged", "bare"]
    world.tell()
    world.reconciler.relieve()
    await asyncio.wait_for(world.heard(lambda: len(world.groups[0].calls) == 2), PATIENCE_S)
    (decision,) = world.history.last("bare", 1)
    assert decision.reason.endswith("back in about 12 s, from its checkpoint: there is no image of its weights")


async def test_move_brings_measured_graph_bytes_along_and_makes_room_for_them():
    world = FakeCluster()
    for name in "ab":
        world.model(name)
        world.groups[0].put(name, weights_bytes=30 * MIB, graph_bytes=9 * MIB)
    world.model("quiet", weights=50 * MIB, floor=4 * MIB)  # 45 are free: enough but for the graphs
    world.groups[1].put("quiet", weights_bytes=50 * MIB, idle_s=60)
    world.tell()
    world.planner.observe()
    for name in "ab":
        world.groups[0].put(name, weights_bytes=30 * MIB, graph_bytes=9 * MIB, decode_tokens=10_000)
    world.tell()
    world.time += 1
    running = asyncio.get_running_loop().create_task(world.reconciler.run())
    world.reconciler.changed()
    await asyncio.wait_for(world.heard(lambda: world.groups[1].calls), PATIENCE_S)
    ((_, *rest),) = world.groups[1].calls
    assert rest == ["ACTIVE", ["quiet"]]
    assert world.groups[1].elsewhere[0].graph_bytes == 9 * MIB
    running.cancel()


async def test_a_move_whose_target_ends_in_error_leaves_the_source_serving(monkeypatch):
    world = FakeCluster()
    world.model("m")
    world.groups[0].put("m", weights_bytes=30 * MIB)
    world.tell()

    async def broken(*args, **keys):
        return gpu_scheduler_pb2.ResidencyProgress(residency=common_pb2.ERROR, reason="its weights are not there")

    monkeypatch.setattr(world.groups[1], "set_residency", broken)
    with pytest.raises(Unmet, match="m did not come up on g1: its weights are not there"):
        await world.reconciler.migrate("m", "g1")
    assert world.groups[0].calls == []


async def test_activated_model_is_booked_before_the_report_of_its_group_arrives(monkeypatch):
    world = FakeCluster(groups=1, silent_s=1000.0)
    for name in ("quick", "other"):
        world.model(name, weights=60 * MIB)
        world.groups[0].put(name, common_pb2.HIBERNATING, kept_bytes=MIB)
    world.tell()
    monkeypatch.setattr(world.groups[0], "tell", lambda: None)
    await world.reconciler.activate("quick")
    await asyncio.wait_for(world.heard(lambda: not world.actuator.activating), PATIENCE_S)
    assert world.planner.activation(world.cluster.entry("other").model).group is None


async def test_move_target_is_booked_before_the_report_of_its_group_arrives(monkeypatch):
    world = FakeCluster()
    for name in ("moving", "other"):
        world.model(name, weights=60 * MIB)
    world.groups[0].put("moving", weights_bytes=60 * MIB)
    world.tell()
    ready, client = asyncio.Event(), world.groups[1]
    prepare = client.set_residency

    async def slowly(*args, **keys):
        await ready.wait()
        return await prepare(*args, **keys)

    monkeypatch.setattr(client, "set_residency", slowly)
    assert world.planner.activation(world.cluster.entry("other").model).group.name == "g1"
    move = asyncio.get_running_loop().create_task(world.reconciler.migrate("moving", "g1"))
    await asyncio.wait_for(world.heard(lambda: world.actuator.moving), PATIENCE_S)
    assert world.planner.activation(world.cluster.entry("other").model).group is None
    ready.set()
    await move
    assert world.planner.activation(world.cluster.entry("other").model).group.name == "g0"


async def test_move_that_was_refused_is_not_tried_at_every_look(monkeypatch):
    world = FakeCluster()
    for name in "ab":
        world.model(name, weights=28 * MIB)
        world.groups[0].put(name, weights_bytes=28 * MIB)
    world.tell()
    world.planner.observe()
    world.groups[1].fail = Refused("no room for its graphs")
    moves, turns = world.planner.moves, []
    monkeypatch.setattr(world.planner, "moves", lambda: turns.append(moves()) or turns[-1])
    running = asyncio.get_running_loop().create_task(world.reconciler.run())
    for turn in range(1, 4):
        for name in "ab":
            world.groups[0].put(name, weights_bytes=28 * MIB, decode_tokens=10_000 * turn)
        world.tell()
        world.time += 1
        before = len(turns)
        world.reconciler.changed()
        await asyncio.wait_for(
            world.heard(lambda before=before: len(turns) > before and not world.actuator.moving), PATIENCE_S
        )
    assert any(turns)
    asked = [model for model, *_ in world.groups[1].calls]
    assert len(asked) == len(set(asked))
    running.cancel()


async def test_move_hibernates_an_idle_model_at_its_target():
    world = FakeCluster()
    for name in "ab":
        world.model(name)
        world.groups[0].put(name, weights_bytes=30 * MIB)
    world.model("quiet", weights=80 * MIB)
    world.groups[1].put("quiet", weights_bytes=80 * MIB, idle_s=60)
    world.tell()
    world.planner.observe()
    for name in "ab":
        world.groups[0].put(name, weights_bytes=30 * MIB, decode_tokens=10_000)
    world.tell()
    world.time += 1
    running = asyncio.get_running_loop().create_task(world.reconciler.run())
    world.reconciler.changed()
    await asyncio.wait_for(world.heard(lambda: world.groups[0].calls), PATIENCE_S)
    ((moved, *rest),) = world.groups[1].calls
    assert rest == ["ACTIVE", ["quiet"]] and world.groups[0].calls == [(moved, "COLD", [])]
    (decision,) = world.history.last("quiet", 5)
    assert (decision.action, decision.outcome) == ("hibernate", f"part of moving {moved}")
    running.cancel()


# --- operators


async def test_eviction_of_a_model_with_an_image_leaves_it_hibernating_or_cold_as_requested():
    world = FakeCluster(groups=1)
    world.model("m")
    for target in (common_pb2.HIBERNATING, common_pb2.COLD):
        world.groups[0].put("m")
        world.tell()
        assert await world.reconciler.evict("m", target) == EvictionOutcome(target)


async def test_eviction_of_a_model_that_wakes_is_refused_until_it_is_up():
    world = FakeCluster(groups=1)
    world.model("m")
    world.groups[0].put("m", common_pb2.WAKING)
    world.tell()
    with pytest.raises(Conflict, match="on its way"):
        await world.reconciler.evict("m", common_pb2.COLD)


async def test_eviction_to_disk_of_a_model_whose_image_is_pinned_is_refused():
    world = FakeCluster(groups=1)
    world.model("m")
    world.cluster.catalogue["m"].MergeFrom(loader_pb2.Entry(image_pinned=True))
    world.groups[0].put("m")
    world.tell()
    with pytest.raises(Unmet, match="m is pinned"):
        await world.reconciler.evict("m", common_pb2.ON_DISK)
    assert (await world.reconciler.evict("m", common_pb2.COLD)).residency == common_pb2.COLD


@pytest.mark.parametrize(
    ("target", "purpose"), [(common_pb2.HIBERNATING, "to sleep on"), (common_pb2.COLD, "to keep in host memory")]
)
@pytest.mark.parametrize(
    ("entry", "resident", "told", "why"),
    [
        ({"no_image": "its weights take more"}, {"no_image": "refused"}, "refused", "its weights take more"),
        ({}, {"no_image": "host memory is short"}, "", "host memory is short"),
        ({}, {}, "this group has no loader", "this group has no loader"),
        ({}, {}, "", "none was made of its weights yet"),
    ],
)
async def test_eviction_of_a_model_without_an_image_leaves_it_on_disk_and_says_why(
    target, purpose, entry, resident, told, why
):
    world = FakeCluster(groups=1)
    world.model("m", has_image=False)
    world.cluster.catalogue["m"].MergeFrom(loader_pb2.Entry(**entry))
    world.groups[0].put("m", **resident)
    world.tell()

    async def leaves(*_arguments, **_keys):
        return gpu_scheduler_pb2.ResidencyProgress(residency=common_pb2.DRAINING, reason=told)

    world.groups[0].set_residency = leaves
    assert await world.reconciler.evict("m", target) == EvictionOutcome(
        common_pb2.ON_DISK,
        f"it has no image {purpose}: {why}; its engine is given back, and the next start reads the checkpoint",
    )


async def test_eviction_of_a_model_whose_image_is_on_disk_alone_leaves_it_on_disk():
    world = FakeCluster(groups=1)
    world.model("m", has_image=False)
    world.cluster.catalogue["m"].on_disk = True
    world.groups[0].put("m")
    world.tell()
    evicted = await world.reconciler.evict("m", common_pb2.COLD)
    assert evicted == EvictionOutcome(common_pb2.ON_DISK, "its image is on disk, and not in host memory")


async def test_a_prospect_of_a_model_in_error_on_its_group_is_none():
    world = FakeCluster(groups=1)
    world.model("m")
    assert world.reconciler.prospect("m")[0].group is not None
    world.groups[0].put("m", common_pb2.ERROR, reason="it broke")
    world.tell()
    assert world.reconciler.prospect("m") is None, "its requests are refused"


async def test_search_for_moves_that_took_long_is_followed_by_a_rest():
    world = FakeCluster(pauses={"look_s": 0.0, "rest_after_moves_s": lambda took_s: inf})
    looks, searches = [], []
    observe = world.planner.observe
    world.planner.observe = lambda: looks.append(observe())
    world.planner.moves = lambda: searches.append(1) or []
    world.reconciler.changed()
    await world.reconciler.informed(0.0)
    running = asyncio.get_running_loop().create_task(world.reconciler.run())
    while len(looks) < 5:
        world.reconciler.changed()
        await asyncio.sleep(0)
    running.cancel()
    assert len(searches) == 1


def test_rest_between_looks_is_short_for_quick_ones_and_bounds_their_share_of_time():
    assert reconcile.rest_s(0.0002) == 0.01, "a hundred a second"
    for took_s in (0.001, 0.003, 0.005):
        assert reconcile.rest_s(took_s) == pytest.approx(20 * took_s), "a twentieth"
    assert reconcile.rest_s(0.015) == 0.1
    assert (reconcile.rest_s(0.1), reconcile.rest_s(60.0)) == (pytest.approx(0.4), 1.0)
    rests = [reconcile.rest_after_moves_s(took_s) for took_s in (0.1, 60.0)]
    assert rests == [pytest.approx(2.0), 30.0], "a search for moves takes more"
