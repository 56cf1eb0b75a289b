from placement.actuation.reload_outdated import OutdatedReloader
from protos import common_pb2
from services.errors import Conflict
from tests.placement.fakes import FakeCluster


def looks(world):
    reloader = OutdatedReloader(world.cluster, world.actuator, world.drain, again_s=0.0)
    world.tell()
    reloader.look(world.cluster.groups.values())
    reloader.look(world.cluster.groups.values())
    return reloader


async def test_outdated_engine_serves_until_the_model_is_up_on_another_group():
    world = FakeCluster()
    world.model("m", pinned=True)
    world.model("other")
    world.groups[0].put("m", outdated=True, running=3)
    world.groups[0].put("other", running=1)
    looks(world)
    await world.heard(lambda: [r.model for r in world.groups[1].state.residents] == ["m"])
    await world.heard(lambda: [r.model for r in world.groups[0].state.residents] == ["other"])
    assert world.groups[0].calls == [("m", "COLD", [])] and world.groups[0].drained == [30_000]


async def test_outdated_engine_without_room_elsewhere_goes_after_a_drain_even_if_asleep_or_pinned():
    world = FakeCluster(groups=1, drain_ms=700)
    for name in ("awake", "asleep", "coming"):
        world.model(name, pinned=name == "awake")
    world.groups[0].put("awake", outdated=True)
    world.groups[0].put("asleep", common_pb2.HIBERNATING, outdated=True)
    world.groups[0].put("coming", common_pb2.WAKING, outdated=True)  # the next look will tell
    looks(world)
    await world.heard(lambda: [r.model for r in world.groups[0].state.residents] == ["coming"])
    assert world.groups[0].drained == [700, 700]


async def test_model_delisted_from_the_catalogue_leaves_and_one_never_listed_stays():
    world = FakeCluster()
    world.model("m")
    world.model("kept")
    for name in ("m", "kept", "never listed"):
        world.groups[0].put(name)
    world.cluster.heard_catalogue([world.cluster.catalogue["kept"]])
    looks(world)
    await world.heard(lambda: "m" not in [r.model for r in world.groups[0].state.residents])
    assert [r.model for r in world.groups[0].state.residents] == ["kept", "never listed"]


async def test_model_listed_again_stays_and_an_outdated_one_that_cannot_leave_is_retried():
    world = FakeCluster(groups=1)
    world.model("m")
    entry = world.cluster.catalogue["m"]
    world.cluster.heard_catalogue([])
    world.cluster.heard_catalogue([entry])
    group = world.groups[0]
    group.put("m")
    reloader = looks(world)
    assert group.calls == []
    group.put("m", outdated=True)
    group.fail = Conflict("m is on its way down")
    world.tell()
    reloader.look(world.cluster.groups.values())
    await world.heard(lambda: group.calls)
    group.fail = None

    def gone():
        reloader.look(world.cluster.groups.values())
        return not group.state.residents

    await world.heard(gone)


async def test_outdated_models_of_one_group_are_renewed_one_after_the_other(monkeypatch):
    world = FakeCluster(groups=1)
    for name in "abc":
        world.model(name)
        world.groups[0].put(name, outdated=True)
    under_way, seen, renew = set(), [], world.drain.renew

    async def watched(group, resident, why):
        under_way.add(resident.model)
        seen.append(len(under_way))
        await renew(group, resident, why)
        under_way.discard(resident.model)

    monkeypatch.setattr(world.drain, "renew", watched)
    looks(world)
    await world.heard(lambda: not world.groups[0].state.residents)
    assert seen == [1, 1, 1]
