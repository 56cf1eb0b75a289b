"""Groups of several nodes: names, catalogues, groups that were away."""

import asyncio
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from placement import server
from placement.actuation import deduplicate
from placement.actuation.evacuation import Evacuation
from placement.cluster.cluster import Cluster
from placement.cluster.loaders import CatalogueRequest, Loaders, merged
from protos import balloond_pb2, common_pb2, loader_pb2, placement_pb2
from services.errors import Conflict, Exists, NotFound, TimedOut, Unavailable
from services.runtime import tasks
from testing.patience import PATIENCE_S
from tests.placement.fakes import MIB, FakeCluster, FakeGroup


def two_nodes():
    """Every node calls its device cuda:0."""
    world = FakeCluster()
    for group in world.groups:
        group.state.memory[0].device = "cuda:0"
    world.tell()
    return world


def refusal(world, model):
    return world.reconciler.refusal(world.cluster.entry(model))


def places(world, model):
    (route,) = (r for r in world.routes() if r.model.name == model)
    return [place.group for place in route.places]


async def test_devices_of_two_nodes_may_have_one_name():
    world = two_nodes()
    world.model("m", weights=60 * MIB)
    world.model("n", weights=60 * MIB)
    first, second = await world.reconciler.activate("m"), await world.reconciler.activate("n")
    assert {first.name, second.name} == {"g0", "g1"}, "each has room for one"


async def test_a_second_group_of_a_name_is_refused_until_the_first_is_away():
    world = FakeCluster()
    world.groups[1].state.group = "g0"
    with capture_logs() as lines:
        world.tell()
        world.tell()
    assert [line["why"] for line in lines if line["event"] == "group refused"] == [
        "the group at unix:/g0 is called g0 as well"
    ]
    assert [group.client.address for group in world.cluster.reachable()] == ["unix:/g0"]
    world.cluster.heard_group("unix:/g0", None)
    world.cluster.heard_group("unix:/g1", world.groups[1].state)
    assert [group.client.address for group in world.cluster.reachable()] == ["unix:/g1"]


async def test_a_refused_group_is_not_logged_as_found_with_each_report():
    world = FakeCluster()
    world.groups[1].state.group = "g0"
    world.cluster.heard_group("unix:/g1", None)

    async def watch(figures_ms, heard):
        for state in (world.groups[1].state, world.groups[1].state, None):
            yield state

    world.groups[1].watch = watch
    with capture_logs() as lines:
        await world.follower.group(world.groups[1])
    assert [line["event"] for line in lines] == ["group refused"]


@pytest.mark.parametrize("groups", [2, 300])
async def test_report_interval_of_groups_and_ledgers_grows_with_the_number_of_groups(groups):
    world = FakeCluster(groups=groups)
    asked = []

    async def watch(figures_ms, heard):
        asked.append(figures_ms())
        yield None

    world.groups[0].watch = watch
    await world.follower.group(world.groups[0])
    await world.follower.balloond(types.SimpleNamespace(watch=watch), "node")
    assert asked == [groups] * 2


async def test_a_group_lost_while_its_stream_is_opened_again_is_away():
    world = FakeCluster(groups=2)
    told = []

    async def watch(figures_ms, heard):
        figures_ms()
        told.append(heard)
        if heard:  # as `follow_stream`, which says once that it cannot be reached
            yield None
            return
        for number in range(300):
            world.cluster.add_group(FakeGroup(f"new {number}"))
        yield world.groups[0].state

    world.groups[0].watch = watch
    following = tasks.spawn(world.follower.group(world.groups[0]), "follow")
    await world.heard(lambda: not world.cluster.group("g0").reachable)
    assert told == [False, True]
    await tasks.cancel(following)


class Balloond:
    def __init__(self, *states):
        self.states = states

    async def watch(self, pages_ms, heard):
        for state in self.states:
            yield state


def node(name, free):
    device = balloond_pb2.DeviceState(device="g0-device", capacity_bytes=100 * MIB, free_bytes=free)
    return balloond_pb2.NodeState(node=name, devices=[device])


async def test_a_stream_of_reports_is_opened_again_when_the_size_of_the_cluster_changed_much():
    world = FakeCluster(groups=200)
    asked = []

    async def watch(figures_ms, heard):
        asked.append(figures_ms())
        for _ in range(3):
            if len(asked) == 1:
                for number in range(300):
                    world.cluster.add_group(FakeGroup(f"new {number}"))
            yield None

    world.groups[0].watch = watch
    await world.follower.group(world.groups[0])
    assert asked == [200, 500]


async def test_a_group_that_takes_the_name_of_a_lost_one_is_used_in_the_same_look():
    world = FakeCluster(groups=2)
    spec = world.model("m", weights=80 * MIB)
    world.tell()
    world.planner.observe()
    first, second = world.groups
    second.state.group = "g0"
    world.cluster.heard_group("unix:/g1", second.state)  # refused: the other has that name
    world.cluster.heard_group("unix:/g0", None)
    world.cluster.heard_group("unix:/g1", second.state)
    assert not world.planner.refused(spec)
    assert world.planner.activation(spec).group.client is second


async def test_a_forgotten_group_that_joins_again_takes_no_model_before_its_first_report():
    world = FakeCluster(groups=1)
    spec = world.model("m")
    world.planner.observe()
    world.cluster.forget_group("unix:/g0")
    world.cluster.add_group(world.groups[0])
    assert world.planner.activation(spec).group is None
    world.cluster.heard_group("unix:/g0", world.groups[0].state)
    assert world.planner.activation(spec).group.name == "g0"


async def test_a_model_under_activation_is_booked_with_the_current_sizes_of_the_catalogue():
    world = FakeCluster(groups=1)
    world.model("coming", weights=10 * MIB)
    group = world.cluster.group("g0")
    world.actuator.on_their_way = lambda: {"coming": group}
    world.planner._group_indexes._on_their_way = world.actuator.on_their_way
    other = world.model("other", weights=40 * MIB)
    assert world.planner.activation(other).group is group
    world.model("coming", weights=60 * MIB)
    assert world.planner.activation(other).group is None


def test_a_forgotten_group_leaves_no_state():
    world = FakeCluster(groups=1)
    stopping = Evacuation(world.drain)
    for number in range(3):
        client = FakeGroup(f"n{number}")
        client.state.node, client.state.stopping = f"node {number}", True
        world.cluster.add_group(client)
        world.cluster.heard_group(client.address, client.state)
        stopping._seen |= set(world.cluster.news().groups.values())
        world.cluster.forget_group(client.address)
        stopping.look(world.cluster.news().groups.values())
    world.planner.observe()
    assert not stopping._seen
    assert not [node for node in world.cluster._of_node if node.startswith("node")]
    assert [*world.planner._group_indexes._stood] == ["unix:/g0"]


def test_a_ledger_is_read_again_when_a_booking_changes_and_not_with_every_page():
    world = FakeCluster(groups=2)
    for group in world.groups:
        group.state.node = f"node of {group.state.group}"
    world.tell()
    world.cluster.heard_ledger("node of g0", node("node of g0", 100 * MIB))
    world.cluster.fresh()
    world.cluster.heard_ledger("node of g0", node("node of g0", 40 * MIB))
    assert world.cluster.group("g0").free_bytes == 40 * MIB and not world.cluster.fresh()
    booked = node("node of g0", 40 * MIB)
    booked.devices[0].bookings.add(model="buried", quota_bytes=60 * MIB)
    world.cluster.heard_ledger("node of g0", booked)
    assert [group.name for group in world.cluster.fresh()] == ["g0"]


async def test_a_second_ledger_of_a_node_is_refused_until_the_first_is_away():
    world = FakeCluster()
    await world.follower.balloond(Balloond(node("n", 1)), "one")
    with capture_logs() as lines:
        await world.follower.balloond(Balloond(node("n", 2), node("n", 2), None), "two")
    assert [line["why"] for line in lines] == ["one is of a node 'n' as well"]
    assert world.cluster.ledgers["n"]["g0-device"].free_bytes == 1
    await world.follower.balloond(Balloond(node("n", 1), None), "one")
    await world.follower.balloond(Balloond(node("n", 2)), "two")
    assert world.cluster.ledgers["n"]["g0-device"].free_bytes == 2


# --- groups that were away


async def back_with(residency=common_pb2.ACTIVE, **facts):
    """g1 was away while its model came up on g0, and is back; the reconciler runs."""
    world = FakeCluster(drain_ms=700, rebalance=False)
    world.model("m")
    world.groups[1].put("m", residency, **facts)
    world.tell()
    world.cluster.heard_group("unix:/g1", None)
    world.groups[0].put("m")
    world.cluster.heard_group("unix:/g0", world.groups[0].state)
    world.cluster.doubtful.clear()  # g0 has been looked at for long
    assert places(world, "m") == ["g0"]
    world.tell()
    return world


async def run(world, condition):
    world.reconciler.changed()
    running = asyncio.get_running_loop().create_task(world.reconciler.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await world.heard(condition)
    finally:
        running.cancel()


@pytest.mark.parametrize("residency", [common_pb2.ACTIVE, common_pb2.HIBERNATING])
async def test_a_group_that_is_back_releases_a_model_active_elsewhere_and_is_not_routed_before(residency):
    world = await back_with(residency)
    assert places(world, "m") == ["g0"]
    await run(world, lambda: world.groups[1].calls)
    assert world.groups[1].calls == [("m", "COLD", [])] and world.groups[1].drained == [700]
    assert world.groups[0].calls == []
    assert world.history.last("m", 1)[0].reason == "g0 has it as well"


async def test_a_group_that_is_back_is_not_routed_before_it_reports_that_the_model_left():
    world = await back_with()
    group = world.groups[1]
    group.tell = lambda: None  # the answer to the call is there before its state
    await run(world, lambda: world.history.last("m", 1) and world.history.last("m", 1)[0].outcome.startswith("done"))
    assert places(world, "m") == ["g0"]
    world.tell()
    assert places(world, "m") == ["g0"] and not world.cluster.doubtful


async def test_a_model_asleep_elsewhere_leaves_there_when_the_group_that_is_back_serves_it():
    world = await back_with()
    world.groups[0].put("m", common_pb2.HIBERNATING)
    world.cluster.heard_group("unix:/g0", world.groups[0].state)
    assert world.cluster.doubtful == {("unix:/g1", "m")}
    assert places(world, "m") == ["g1"]
    await run(world, lambda: not world.cluster.doubtful)
    assert world.groups[0].calls == [("m", "COLD", [])] and world.groups[1].calls == []


async def test_a_group_that_refuses_to_release_a_model_is_retried_after_a_pause(monkeypatch):
    pauses = []

    async def pause(seconds):
        pauses.append(seconds)
        world.groups[1].fail = None

    monkeypatch.setattr(deduplicate, "asyncio", types.SimpleNamespace(sleep=pause))
    world = await back_with()
    world.groups[1].fail = Conflict("m is on its way to ACTIVE")
    await run(world, lambda: not world.cluster.doubtful)
    assert world.groups[1].calls == [("m", "COLD", [])] * 2 and len(pauses) == 1


async def test_a_model_on_two_groups_during_its_move_is_not_removed_from_either():
    world = await back_with()
    world.actuator.moving.add("m")
    looked = []
    world.planner.observe = lambda: looked.append(1)
    await run(world, lambda: len(looked) > 2 or world.reconciler.changed())
    assert world.groups[1].calls == []


async def test_a_model_that_came_up_elsewhere_while_its_move_lost_its_source_stays_on_one_group():
    world = FakeCluster(groups=3, rebalance=False)
    world.model("m")
    world.model("busy", weights=60 * MIB)
    source, target, _ = world.groups
    source.put("m", running=1)
    world.tell()
    asked, up = target.come_up_slowly()
    move = tasks.spawn(world.reconciler.migrate("m", "g1"), "move")
    await asked.wait()
    # The source is gone before the target has said that the model wakes there, and is the fuller one by now.
    target.put("busy", running=1)
    source.fail = Unavailable("gone")
    world.groups.remove(source)
    world.cluster.heard_group(source.address, None)
    world.tell()
    assert (await world.reconciler.activate("m")).name == "g2"
    up.set()
    with pytest.raises(Unavailable):
        await move
    world.tell()
    await world.reconciler.informed(0.0)
    await run(world, lambda: len(list(world.cluster.residents("m"))) == 1)


async def test_a_start_with_a_node_away_refuses_no_model_for_good():
    world = FakeCluster()
    world.model("large", weights=500 * MIB)
    world.cluster.heard_group("unix:/g1", None)
    world.reconciler.changed()
    await world.reconciler.informed(0.0)
    assert not refusal(world, "large"), "the node that is away may be larger"
    world.tell()
    world.reconciler.changed()
    assert "large" in refusal(world, "large")


# --- catalogues


def entry(name, generation=1, **facts):
    return loader_pb2.Entry(model=common_pb2.ModelSpec(name=name, generation=generation), **facts)


def test_a_catalogue_entry_of_several_nodes_is_the_first_valid_one_with_the_image_of_any():
    here, there = entry("m", 1), entry("m", 2, has_image=True)
    assert merged([here, there]) == entry("m", 1, has_image=True)
    assert merged([entry("m", 0, error="cut"), there, here]) == there
    assert merged([entry("m", 0, error="cut"), entry("m", 3, on_disk=True)]) == entry("m", 3, on_disk=True)
    passing = entry("m", 0, error="away", retry_s=2.0)
    assert merged([entry("m", 0, error="cut"), passing]) == passing
    assert merged([passing, there]) == there
    large = entry("m", 1, no_image="it takes more")
    assert merged([large, entry("m", 1)]) == large
    assert merged([large, entry("m", 1, has_image=True)]) == entry("m", 1, has_image=True)
    assert merged([entry("m", 4)]) == entry("m", 4) and merged([]) is None
    assert not here.has_image, "what was heard stays as it was"


said = st.dictionaries(
    st.sampled_from(["a", "b", "c"]),
    st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)),  # an image, a fault, the number of a call
)


told = st.none() | st.tuples(said, st.sets(st.sampled_from("abc")))


@given(st.lists(st.tuples(st.integers(0, 2), told), max_size=20))
def test_a_catalogue_merged_message_by_message_equals_that_of_all_messages(story):
    """Of nodes that come, go, and say other things each time."""
    cluster = Cluster([], lambda: None)
    loaders = Loaders(cluster)
    for number in range(3):
        loaders.join(f"n{number}", None)
    for at, (number, told) in enumerate(story):
        if told is None:
            loaders._lose(f"n{number}")
            continue
        listed, removed = told
        catalogue = loader_pb2.Catalogue(removed={name: at for name in removed})
        for name, (image, fault, call) in listed.items():
            facts = {"listing": common_pb2.ModelListing(name=name), "change": call} if call else {}
            catalogue.entries.append(entry(name, at % 2, has_image=image, error="cut" * fault, **facts))
        loaders._hear(f"n{number}", CatalogueRequest.of(catalogue))
        found = dict(cluster.catalogue)
        loaders._in_order = False  # of all, the next time
        loaders._tell(())
        assert cluster.catalogue == found


async def test_a_catalogue_message_merges_only_the_entries_that_changed(monkeypatch):
    cluster = Cluster([], lambda: None)
    loaders, names = Loaders(cluster), [f"m{number}" for number in range(50)]
    for number in range(4):
        loaders.join(f"n{number}", None)
        loaders._hear(f"n{number}", CatalogueRequest({name: entry(name) for name in names}, {}))
    looked = []

    def counted(entries):
        looked.append(list(entries))
        return merged(looked[-1])

    monkeypatch.setattr("placement.cluster.loaders.merged", counted)
    loaders._hear("n2", CatalogueRequest({name: entry(name, has_image=name == "m7") for name in names}, {}))
    assert [each[0].model.name for each in looked] == ["m7"]
    assert [name for name, each in cluster.catalogue.items() if each.has_image] == ["m7"]


class FakeLoader:
    """Its file lists `models`."""

    def __init__(self, *models):
        self.models = list(models)
        self.added = {}
        self.removed = {}
        self.calls = []
        self.told = asyncio.Queue()
        self.refuses = None
        self.pinned = set()
        self.tell()

    @property
    def all(self):
        return [*self.models, *self.added]

    def tell(self):
        entries = [entry(name) for name in self.models]
        entries += [entry(name, listing=listing, change=change) for name, (listing, change) in self.added.items()]
        self.told.put_nowait(loader_pb2.Catalogue(entries=entries, removed=self.removed))

    def lose(self):
        self.told.put_nowait(None)

    async def watch(self):
        while True:
            yield await self.told.get()

    async def add(self, listing, change):
        self.calls.append(("add", listing.name, change))
        if self.refuses is not None:
            raise self.refuses
        if listing.name not in self.models:
            self.added[listing.name] = (listing, change)
            self.removed.pop(listing.name, None)
        self.tell()
        return common_pb2.ModelSpec(name=listing.name)

    async def pin(self, name):
        if name not in self.all:
            raise NotFound(name)
        self.pinned.add(name)

    async def unpin(self, name):
        self.pinned.discard(name)

    async def remove(self, name, change):
        self.calls.append(("remove", name, change))
        if name in self.models:
            self.models.remove(name)
        else:
            self.removed[name] = change
            if self.added.pop(name, None) is None:
                self.tell()
                raise NotFound(name)
        self.tell()


@pytest.fixture
async def nodes():
    """(loaders, their clients, cluster): two nodes, both heard."""
    world, clients = FakeCluster(), [FakeLoader("m"), FakeLoader("m")]
    loaders = Loaders(world.cluster)
    for address, client in zip(("one", "two"), clients, strict=True):
        loaders.join(address, client)
    following = [asyncio.get_running_loop().create_task(loaders.follow(address)) for address in ("one", "two")]
    await world.heard(lambda: loaders.is_there("one") and loaders.is_there("two"))
    yield loaders, clients, world
    for task in following:
        task.cancel()


NEW = common_pb2.ModelListing(name="new", path="/new")


async def test_a_model_is_added_and_removed_at_all_nodes(nodes):
    loaders, clients, _ = nodes
    await loaders.add(NEW)
    assert [client.all for client in clients] == [["m", "new"]] * 2
    await loaders.remove("new")
    assert [client.all for client in clients] == [["m"]] * 2
    with pytest.raises(NotFound):
        await loaders.remove("new")


async def test_an_image_is_pinned_at_all_nodes_that_have_its_model(nodes):
    loaders, clients, _ = nodes
    clients[0].models.remove("m")
    await loaders.pin_image("m", True)
    assert [client.pinned for client in clients] == [set(), {"m"}]
    await loaders.pin_image("m", False)
    assert [client.pinned for client in clients] == [set(), set()]
    with pytest.raises(NotFound, match="no model 'new' in the catalogue"):
        await loaders.pin_image("new", True)


async def test_a_node_that_cannot_add_a_model_is_logged_and_a_refusal_of_the_first_node_raises(nodes):
    loaders, clients, _ = nodes
    clients[1].refuses = Exists("taken")
    with capture_logs() as lines:
        await loaders.add(NEW)
    assert [(line["loader"], line["why"]) for line in lines] == [("two", "taken")]
    clients[0].refuses = Exists("taken here")
    with pytest.raises(Exists, match="taken here"):
        await loaders.add(NEW)


async def test_adding_a_model_in_error_returns_after_its_groups_forgot_the_error(nodes):
    loaders, clients, world = nodes
    world.groups[1].put("m", common_pb2.ERROR, reason="it broke")
    world.tell()

    async def inspect(listing):
        return entry("m").model

    async def add(listing, change):
        clients[0].calls.append(("add", listing.name, change))
        return entry("m").model

    clients[0].inspect, clients[0].add = inspect, add
    request = placement_pb2.AddModelRequest(model=common_pb2.ModelListing(name="m", path="/m"))
    call = tasks.spawn(serving(loaders, world, forgotten_s=60.0).AddModel(request, None), "add")
    await world.heard(lambda: clients[0].calls)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not call.done()
    world.groups[1].remove("m")
    world.tell()
    assert (await call).model.name == "m"

    # One whose group is told nothing, by an older loader say, is added all the same.
    world.groups[1].put("m", common_pb2.ERROR, reason="it broke")
    world.tell()
    assert (await serving(loaders, world, forgotten_s=0.0).AddModel(request, None)).model.name == "m"


def serving(loaders, world, **patience):
    return server.PlacementServicer(
        world.cluster, world.reconciler, world.history, world.table, loaders, world.drain, **patience
    )


def removal(loaders, world, model):
    """The call, which does not wait for long."""
    servicer = serving(loaders, world, gone_s=0.05)
    return servicer.RemoveModel(placement_pb2.RemoveModelRequest(name=model), None)


async def test_a_model_still_listed_by_a_node_is_served_again_after_its_removal_timed_out(nodes):
    loaders, clients, world = nodes

    async def refuses(name, change):
        raise TimedOut("no answer")

    clients[1].remove = refuses
    with pytest.raises(Unavailable, match="m is not gone after .*: a node's catalogue lists it; ask again"):
        await removal(loaders, world, "m")
    assert await world.reconciler.activate("m")


async def test_a_group_that_comes_back_with_a_model_under_removal_releases_it(nodes):
    loaders, clients, world = nodes
    await loaders.add(NEW)
    group, told = world.groups[1], asyncio.Event()
    group.put("new")
    world.tell()
    world.cluster.heard_group(group.address, None)
    world.cluster.changed()
    remove = clients[0].remove

    async def slowly(name, change):
        await told.wait()
        await remove(name, change)

    clients[0].remove = slowly
    call = tasks.spawn(removal(loaders, world, "new"), "remove")
    await world.heard(lambda: "new" in world.actuator.removing)
    world.tell()
    told.set()
    with pytest.raises(Unavailable, match="g1 still has it"):
        await call
    await run(world, lambda: not list(world.cluster.residents("new")))
    assert group.calls == [("new", "COLD", [])] and "new" not in world.cluster.catalogue


async def away(loaders, clients, world, which=0):
    clients[which].lose()
    await world.heard(lambda: not loaders.is_there(("one", "two")[which]))


async def test_a_node_that_was_away_gets_the_models_added_and_removed_meanwhile(nodes):
    loaders, clients, world = nodes
    old = common_pb2.ModelListing(name="old", path="/old", pinned=True)
    await loaders.add(old)
    await away(*nodes)
    assert set(world.cluster.catalogue) == {"m", "old"}
    await loaders.add(NEW)
    await loaders.remove("old")
    assert [client.all for client in clients] == [["m", "old"], ["m", "new"]]
    await world.heard(lambda: set(world.cluster.catalogue) == {"m", "new"})  # whatever who is away said

    clients[0].tell()
    await world.heard(lambda: clients[0].all == ["m", "new"])
    assert clients[0].added["new"] == (NEW, 2) and clients[0].removed == {"old": 3}
    await world.heard(lambda: clients[0].told.empty() and not any(loaders._lacking()))
    assert len(clients[0].calls) == 3 and set(world.cluster.catalogue) == {"m", "new"}


async def test_a_node_that_joins_gets_models_added_by_calls_and_not_those_of_other_files(nodes):
    loaders, clients, world = nodes
    clients[0].models.append("of the file")
    clients[0].tell()
    await loaders.add(NEW)
    third = FakeLoader("m")
    loaders.join("three", third)
    following = asyncio.get_running_loop().create_task(loaders.follow("three"))
    await world.heard(lambda: third.all == ["m", "new"])
    following.cancel()
    assert [client.calls for client in (*clients, third)] == [[("add", "new", 1)]] * 3


async def test_a_catalogue_change_with_the_higher_number_counts_whichever_node_knows_it(nodes):
    loaders, clients, world = nodes
    clients[0].added = {"x": (common_pb2.ModelListing(name="x"), 4)}
    clients[1].removed = {"x": 5, "y": 1}
    clients[1].tell()
    clients[0].tell()
    await world.heard(lambda: clients[0].removed == {"x": 5, "y": 1})
    assert set(world.cluster.catalogue) == {"m"}
    await loaders.add(common_pb2.ModelListing(name="x"))
    assert clients[0].added["x"][1] == clients[1].added["x"][1] == 6


async def test_a_model_removed_while_a_node_was_away_stays_removed_after_others_forgot_it(nodes):
    loaders, clients, world = nodes
    await loaders.add(NEW)
    await world.heard(lambda: all(client.told.empty() for client in clients))
    await away(*nodes, which=1)
    await loaders.remove("new")
    await world.heard(lambda: clients[0].told.empty())
    clients[0].removed.clear()
    clients[0].tell()
    await world.heard(lambda: clients[0].told.empty())
    assert set(world.cluster.catalogue) == {"m"} and world.cluster.removed == {"new"}
    clients[1].tell()
    await world.heard(lambda: clients[1].added == {} and clients[1].told.empty())
    assert set(world.cluster.catalogue) == {"m"}
    assert [call for call, *_ in clients[0].calls] == ["add", "remove"]


async def test_a_node_that_refused_a_change_gets_it_again_after_it_was_away(nodes):
    loaders, clients, world = nodes
    clients[1].refuses = Exists("taken")
    await loaders.add(NEW)
    clients[1].tell()
    await world.heard(lambda: clients[1].told.empty())
    assert len(clients[1].calls) == 1
    await away(*nodes, which=1)
    clients[1].refuses = None
    clients[1].tell()
    await world.heard(lambda: "new" in clients[1].added)


async def test_a_model_of_a_catalogue_file_is_not_removed_while_its_node_is_away(nodes):
    loaders, clients, world = nodes
    await away(*nodes)
    with pytest.raises(Unavailable, match="the loader at one is away, and its catalogue file lists the model"):
        await loaders.remove("m")
    assert clients[1].calls == []


async def test_a_model_that_was_removed_while_its_group_was_away_leaves_it(nodes):
    world = await back_with()
    world.groups[0].remove("m")
    world.cluster.heard_group("unix:/g0", world.groups[0].state)
    world.cluster.heard_catalogue([], ["m"])
    await run(world, lambda: world.groups[1].calls)
    assert world.groups[1].calls == [("m", "COLD", [])]
    assert world.history.last("m", 1)[0].reason == "g1 is back, and it was removed"


async def test_a_model_that_no_loader_has_listed_yet_stays_on_its_group():
    world = await back_with()
    world.groups[0].remove("m")
    world.cluster.heard_group("unix:/g0", world.groups[0].state)
    world.cluster.heard_catalogue([])
    looked = []
    world.planner.observe = lambda: looked.append(1)
    await run(world, lambda: len(looked) > 2 or world.reconciler.changed())
    assert world.groups[1].calls == []


async def test_a_forgotten_node_takes_its_models_along_and_does_not_block_a_removal(nodes):
    loaders, clients, world = nodes
    clients[0].models.append("only")
    clients[0].tell()
    await world.heard(lambda: set(world.cluster.catalogue) == {"m", "only"})
    clients[0].told.put_nowait(None)
    await world.heard(lambda: not loaders.is_there("one"))
    loaders.forget("one")
    assert set(world.cluster.catalogue) == {"m"}
    await loaders.remove("m")
    assert clients[1].models == [] and clients[0].calls == []


async def test_a_catalogue_of_the_last_loader_counts_until_another_is_heard(nodes):
    loaders, clients, world = nodes
    for client in clients:
        client.told.put_nowait(None)
    await world.heard(lambda: not loaders.is_there("one") and not loaders.is_there("two"))
    loaders.forget("one")
    loaders.forget("two")
    assert set(world.cluster.catalogue) == {"m"}
    with pytest.raises(Unavailable):
        await loaders.add(NEW)


# --- groups that come and go


async def test_a_group_that_joins_is_used_and_after_it_is_forgotten_has_no_places():
    world = FakeCluster(groups=1)
    world.model("m", weights=60 * MIB)
    world.model("n", weights=60 * MIB)
    assert (await world.reconciler.activate("m")).name == "g0"
    joined = FakeGroup("g1")
    joined.tell = world.tell
    world.groups.append(joined)
    world.cluster.add_group(joined)
    world.tell()
    assert (await world.reconciler.activate("n")).name == "g1"
    assert places(world, "n") == ["g1"]

    world.groups.remove(joined)
    world.cluster.forget_group(joined.address)
    assert places(world, "n") == [] and world.cluster.residents("n") == []
    assert world.cluster.group("g1") is None and world.cluster.group(joined.address) is None
    world.model("o")
    world.planner.observe()
    assert world.planner.activation(world.cluster.entry("o").model).group is None, "there is no room on g0"


async def test_a_group_may_come_back_at_another_address_under_its_name():
    world = FakeCluster()
    world.cluster.forget_group("unix:/g1")
    world.groups[1].address = "unix:/elsewhere"
    world.cluster.add_group(world.groups[1])
    world.tell()
    assert world.cluster.group("g1").client.address == "unix:/elsewhere"


def test_a_group_that_listens_on_all_addresses_has_the_address_that_placement_uses():
    world = FakeCluster(groups=1)
    for told, reached in (("0.0.0.0:7", "unix:/g0"), ("[::]:7", "unix:/g0"), ("", "unix:/g0"), ("a:7", "a:7")):
        world.groups[0].state.address = told
        world.tell()
        assert world.cluster.group("g0").address == reached


async def test_a_large_model_is_not_refused_for_good_while_names_are_looked_up():
    world = FakeCluster()
    world.model("large", weights=500 * MIB)
    world.cluster.searching = True
    world.reconciler.changed()
    await world.reconciler.informed(0.0)
    assert not refusal(world, "large")
    world.cluster.searching = False
    world.reconciler.changed()
    assert "large" in refusal(world, "large")


async def test_a_group_that_comes_back_is_used_while_an_activation_on_its_predecessor_hangs():
    world = FakeCluster()
    new = world.model("new", weights=60 * MIB)
    world.model("there", weights=60 * MIB)
    world.groups[0].put("there", running=1)
    world.tell()
    never = asyncio.get_running_loop().create_future()
    world.actuator.activating["lost"] = (world.cluster.group("g1"), never)
    world.planner.observe()
    world.cluster.forget_group("unix:/g1")
    world.cluster.add_group(world.groups[1])
    world.tell()
    for _ in range(2):
        world.planner.observe()
        assert world.planner.activation(new).group is world.cluster.group("g1")
