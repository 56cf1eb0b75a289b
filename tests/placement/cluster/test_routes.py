"""What gateways are told, kept up to date message by message."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.cluster import routes
from protos import common_pb2, gpu_scheduler_pb2, loader_pb2
from tests.placement.fakes import MIB, FakeCluster

RESIDENCIES = [common_pb2.ACTIVE, common_pb2.WAKING, common_pb2.HIBERNATING, common_pb2.DRAINING, common_pb2.ERROR]
MODELS = ["a", "b", "large"]


def entry(name, **facts):
    weights = 500 * MIB if name == "large" else 10 * MIB
    return loader_pb2.Entry(model=common_pb2.ModelSpec(name=name, weights_bytes=weights, floor_bytes=MIB), **facts)


residents = st.dictionaries(st.sampled_from(MODELS), st.tuples(st.sampled_from(RESIDENCIES), st.integers(0, 2)))
messages = st.tuples(st.just("group"), st.integers(0, 2), residents, st.sampled_from([50, 100, 600]), st.booleans())
events = st.one_of(
    messages,
    messages,
    st.tuples(st.just("away"), st.integers(0, 2)),
    st.tuples(st.just("catalogue"), st.dictionaries(st.sampled_from(MODELS), st.booleans())),
    st.tuples(st.just("removing"), st.sampled_from(MODELS)),
    st.tuples(st.just("leaving"), st.sampled_from(MODELS), st.integers(0, 2)),
    st.tuples(st.sampled_from(["doubt", "trust"]), st.sampled_from(MODELS), st.integers(0, 2)),
)


def happens(world, what, *how):
    """As the service would hear it, or decide."""
    cluster, addresses = world.cluster, [group.address for group in world.groups]
    if what == "group":
        number, here, capacity, drained = how
        state = gpu_scheduler_pb2.GroupState(group=f"g{number}", address=addresses[number], drained=drained)
        state.memory.add(device=f"g{number}-device", capacity_bytes=capacity * MIB, free_bytes=capacity * MIB)
        for name, (residency, measured) in here.items():
            state.residents.add(model=name, residency=residency, weights_bytes=measured * 30 * MIB, reason="it broke")
        cluster.heard_group(addresses[number], state)
    elif what == "away":
        cluster.heard_group(addresses[how[0]], None)
    elif what == "catalogue":
        entries = [entry(name, has_image=image) for name, image in how[0].items()]
        adapter = common_pb2.Adapter(name="of a", base="a")
        of_a = [loader_pb2.Entry(model=common_pb2.ModelSpec(name="of a", adapter=adapter))] if "b" in how[0] else []
        cluster.heard_catalogue(entries + of_a)
    elif what == "removing":
        world.actuator.removing ^= set(how)
        cluster.changed(how[0])
    elif what == "leaving":
        model, number = how
        if world.actuator.leaving.pop(model, None) is None:
            world.actuator.leaving[model] = f"g{number}"
        cluster.changed(model)
    else:
        model, number = how
        getattr(cluster, what)(cluster.groups[addresses[number]], model)
    world.reconciler.changed()
    cluster.changed()


@given(st.lists(events, max_size=25))
def test_routes_updated_message_by_message_equal_those_made_afresh(story):
    world = FakeCluster(groups=3)
    happens(world, "catalogue", dict.fromkeys(MODELS, True))
    for event in story:
        happens(world, *event)
        assert list(world.table.message().routes) == world.routes(world.actuator.leaving)


def test_route_of_an_adapter_leads_to_its_base_and_says_what_is_wrong_with_either():
    world = FakeCluster()
    world.model("base")
    world.groups[0].put("base")
    spec = common_pb2.ModelSpec(name="x", adapter=common_pb2.Adapter(name="x", base="base"))
    adapter = loader_pb2.Entry(model=spec)

    def route_of_x():
        world.cluster.heard_catalogue([*world.cluster.catalogue.values(), adapter])
        world.tell()
        return next(each for each in world.routes() if each.model.name == "x")

    found = route_of_x()
    assert [place.group for place in found.places] == ["g0"] and found.residency == common_pb2.ACTIVE
    assert found.model.adapter.base == "base" and world.cluster.entry("x") is None
    world.groups[0].put("base", common_pb2.ERROR, reason="it broke", retry_s=2.0)
    found = route_of_x()
    assert (found.error, found.retry_s, list(found.places)) == ("it broke", 2.0, [])
    adapter.error, adapter.model.adapter.base = "its base 'x' is an adapter itself", "x"
    assert route_of_x().error == "its base 'x' is an adapter itself"


def test_routes_made_after_a_report_are_those_of_the_models_of_its_group(monkeypatch):
    world = FakeCluster(groups=20)
    for number in range(60):
        world.model(f"m{number}", weights=MIB, floor=MIB)
        world.groups[number % 20].put(f"m{number}")
    world.tell()
    world.reconciler.changed()
    world.changed()
    made, route = Counter(), routes.route

    def counted(cluster, entry, *how):
        made[entry.model.name] += 1
        return route(cluster, entry, *how)

    monkeypatch.setattr(routes, "route", counted)
    world.groups[7].put("m7", running=3)
    world.cluster.heard_group(world.groups[7].address, world.groups[7].state)
    world.cluster.changed()
    assert set(made) == {"m7", "m27", "m47"}


@pytest.mark.parametrize(("facts", "told"), [({"running": 3, "decode_tokens": 99}, 0), ({"weights_bytes": 7}, 1)])
def test_routes_revision_rises_only_when_a_route_changes(facts, told):
    world = FakeCluster()
    world.model("m")
    world.groups[0].put("m")
    world.tell()
    before = world.table.message().revision
    world.groups[0].put("m", **facts)
    world.tell()
    assert world.table.message().revision == before + told


@pytest.mark.parametrize(
    ("catalogue", "groups", "told"),
    [
        pytest.param({"error": "it is away", "retry_s": 4.0}, {}, ("it is away", 4.0), id="away"),
        pytest.param({"error": "NoSuchModel is not supported"}, {}, ("NoSuchModel is not supported", 0.0), id="wrong"),
        pytest.param({}, {"g0": ("EIO", 2.0)}, ("EIO", 2.0), id="on a group"),
        pytest.param({}, {"g0": ("EIO", 2.0), "g1": ("ENOMEM", 8.0)}, ("EIO", 8.0), id="on two, until both are over"),
        pytest.param({}, {"g0": ("EIO", 2.0), "g1": ("NaN", 0.0)}, ("EIO", 0.0), id="on two, of which one stays"),
        pytest.param({"error": "cut", "retry_s": 1.0}, {"g0": ("NaN", 0.0)}, ("cut", 1.0), id="the catalogue counts"),
    ],
)
def test_route_error_carries_the_time_until_a_retry(catalogue, groups, told):
    world = FakeCluster()
    world.model("m")
    world.cluster.catalogue["m"].MergeFrom(loader_pb2.Entry(**catalogue))
    for group in world.groups:
        if (name := group.state.group) in groups:
            reason, retry_s = groups[name]
            group.put("m", common_pb2.ERROR, reason=reason, retry_s=retry_s)
    world.tell()
    (route,) = world.routes()
    assert (route.residency, route.error, route.retry_s) == (common_pb2.ERROR, *told)


def test_route_error_of_a_model_that_fits_no_group_has_no_retry_and_ends_once_it_is_active():
    world = FakeCluster()
    world.model("m", weights=500 * MIB)
    world.groups[0].put("m", common_pb2.ERROR, reason="EIO", retry_s=2.0)
    world.tell()
    world.reconciler.changed()
    (route,) = world.routes()
    assert "the largest group" in route.error and route.retry_s == 0.0
    world.groups[1].put("m")
    world.tell()
    (route,) = world.routes()
    assert (route.residency, route.error, route.retry_s) == (common_pb2.ACTIVE, "", 0.0)


def test_route_carries_the_reason_for_which_a_model_has_no_image():
    world = FakeCluster()
    world.model("m", has_image=False)
    world.cluster.catalogue["m"].no_image = "its weights take more"
    assert [route.no_image for route in world.routes()] == ["its weights take more"]


async def test_routes_are_sent_to_a_follower_at_once_and_after_a_change():
    world = FakeCluster()
    world.model("m")
    world.tell()
    followed = world.table.follow()
    assert [route.residency for route in (await anext(followed)).routes] == [common_pb2.COLD]
    world.groups[0].put("m")
    world.tell()
    world.groups[0].put("m", running=2)
    world.tell()
    told = await anext(followed)
    assert [route.residency for route in told.routes] == [common_pb2.ACTIVE]
    assert told.revision == world.table.message().revision


def test_route_of_a_served_model_whose_files_cannot_be_read_has_the_sizes_that_were_read_last():
    """Gateways would refuse every prompt as longer than a context of 0."""
    world = FakeCluster()
    whole = common_pb2.ModelSpec(name="a", path="/m/a", context_tokens=512, vocab_size=100, generation=7)
    world.cluster.heard_catalogue([loader_pb2.Entry(model=whole)])
    happens(world, "group", 0, {"a": (common_pb2.ACTIVE, 1)}, 100, False)

    def routed(**entry):
        world.cluster.heard_catalogue([loader_pb2.Entry(**entry)])
        return routes.route(world.cluster, world.cluster.entry("a"), lambda entry: "", None)

    unread = common_pb2.ModelSpec(name="a", path="/m/a")
    found = routed(model=unread, error="its folder does not exist")
    assert (found.model, len(found.places), found.residency) == (whole, 1, common_pb2.ACTIVE)
    assert routed(model=unread, error="it still does not").model == whole
    elsewhere = common_pb2.ModelSpec(name="a", path="/m/b")
    assert routed(model=elsewhere, error="another folder").model == elsewhere
    happens(world, "away", 0)
    assert routed(model=unread, error="its folder does not exist").residency == common_pb2.ERROR
