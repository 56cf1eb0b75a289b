"""Several nodes over TCP under one placement, and what can happen to one of them."""

import asyncio
import signal

import pytest
import pytest_asyncio

from loader.client import LoaderClient
from protos import common_pb2
from services.rpc import rpc
from testing.fleet.network import missing
from testing.fleet.world import PROMPT, fleet, group_name
from testing.systems.local import MODELS

_MISSING = missing()
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING),
]
MODEL, OTHER, THIRD = MODELS
TOKENS = 60
"""Of a stream: more than a second."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    async with fleet() as it:
        yield it


@pytest_asyncio.fixture(loop_scope="module")
async def nodes(running):
    await running.whole()
    return running


async def texts(streams):
    return [told.text for told in await asyncio.gather(*streams)]


async def test_models_of_both_nodes_serve_and_one_moves_between_them_while_it_streams(nodes):
    await nodes.on(MODEL, "a")
    await nodes.on(OTHER, "b")
    expected = await nodes.undisturbed(MODEL, TOKENS)
    for target in ("b", "a"):
        moved, started = asyncio.Event(), [asyncio.Event() for _ in expected]

        async def keep_asking(number, moved=moved, started=started):
            """A move on a busy machine may take longer than a stream."""
            while not (started[number].is_set() and moved.is_set()):
                told = await nodes.timed(MODEL, [7 + number, *PROMPT], TOKENS, started[number])
                assert told.text == expected[number]

        async with asyncio.TaskGroup() as streams:
            for number in range(len(expected)):
                streams.create_task(keep_asking(number))
            for each in started:
                await each.wait()
            await nodes.migrate(MODEL, group_name(target))
            moved.set()
        assert await nodes.places(MODEL) == [target]
    assert await nodes.places(OTHER) == ["b"], "nobody touched it"
    assert nodes.said("gateway", "stream paused"), "the streams were handed over, not finished"


async def test_a_node_with_files_and_clocks_of_its_own_makes_images_and_wakes_from_them(nodes):
    await nodes.on(MODEL, "b")
    before = await nodes.complete(MODEL, PROMPT, 8)

    await nodes.placement.drain(group_name("a"))  # or it might as well come up there
    try:
        assert await nodes.evict(MODEL, common_pb2.HIBERNATING) == common_pb2.HIBERNATING
        assert (await nodes.complete(MODEL, PROMPT, 8))["choices"] == before["choices"]
        assert await nodes.places(MODEL) == ["b"]
    finally:
        await nodes.placement.undo_drain(group_name("a"))


async def test_a_node_that_is_cut_off_has_its_streams_continued_elsewhere_and_may_come_back(nodes):
    # Node a: its loader is the first that placement asks for the catalogue.
    await nodes.on(MODEL, "a")
    await nodes.on(OTHER, "b")
    expected = await nodes.undisturbed(MODEL, TOKENS)
    streams = await nodes.streams(MODEL, TOKENS)
    endless = asyncio.get_running_loop().create_task(nodes.timed(MODEL, PROMPT, 1500))
    nodes.network.cut("a")
    await nodes.complete(OTHER, PROMPT, 4)
    assert await texts(streams) == expected
    assert await nodes.places(MODEL) == ["b"]
    endless.cancel()

    async def nothing_runs():
        has, made = await nodes.nodes["a"].requests(MODEL)
        return made if not has else 0

    # Nobody waits for what the node goes on to make: it stops long before its end.
    assert await nodes.until(nothing_runs, "requests run on where nobody hears them") < 1500

    nodes.kill("placement")
    await nodes.heard("b")
    assert await nodes.places(MODEL) == ["b"]
    await nodes.complete(THIRD, PROMPT, 4)
    assert await nodes.places(THIRD) == ["b"]

    # And comes back, with a model that is elsewhere by now.
    nodes.network.mend("a")
    await nodes.heard("a", "b")
    assert await nodes.places(MODEL) == ["b"]
    await nodes.settled()
    assert await nodes.places(MODEL) == ["b"]
    await nodes.on(MODEL, "a")
    assert await nodes.undisturbed(MODEL, TOKENS) == expected


async def test_a_node_that_is_killed_loses_no_stream_and_is_used_again_when_it_is_back(nodes):
    await nodes.on(MODEL, "b")
    expected = await nodes.undisturbed(MODEL, TOKENS)
    streams = await nodes.streams(MODEL, TOKENS)
    await nodes.nodes["b"].kill()
    assert await texts(streams) == expected
    assert await nodes.places(MODEL) == ["a"]
    await nodes.heard("a")
    await nodes.whole()
    await nodes.on(MODEL, "b")
    assert await nodes.undisturbed(MODEL, TOKENS) == expected


async def test_placement_that_is_killed_leaves_models_serving_and_recovers_its_knowledge(nodes):
    await nodes.on(MODEL, "b")
    await nodes.on(OTHER, "a")
    expected = await nodes.undisturbed(MODEL, TOKENS)
    streams = await nodes.streams(MODEL, TOKENS)
    nodes.kill("placement")
    await asyncio.gather(nodes.complete(MODEL, PROMPT, 4), nodes.complete(OTHER, PROMPT, 4))
    assert await texts(streams) == expected
    await nodes.heard("a", "b")
    assert (await nodes.places(MODEL), await nodes.places(OTHER)) == (["b"], ["a"])
    await nodes.complete(THIRD, PROMPT, 4)


@pytest.mark.parametrize("version", ["2.0", "1.7"])
async def test_a_node_of_another_major_version_is_refused_and_one_of_another_minor_version_serves(nodes, version):
    node = nodes.nodes["b"]
    await node.kill()
    await nodes.heard("a")
    before = len(nodes.said("placement", "stream refused"))
    await node.start(version)
    if version == "1.7":
        await nodes.heard("a", "b")
        await nodes.on(MODEL, "b")
        return

    async def refused():
        lines = nodes.said("placement", "stream refused")[before:]
        return [line for line in lines if node.group in line["stream"]]

    (line,) = await nodes.until(refused, "nobody said so")
    ours = ".".join(map(str, rpc.PROTOCOL))
    assert line["why"] == f"protocol {ours} is not spoken here: this process speaks 2.0"
    assert await nodes.reachable() == {"a"}
    await nodes.complete(MODEL, PROMPT, 4)
    assert await nodes.places(MODEL) == ["a"]
    await node.kill()


async def test_a_node_that_left_dns_is_forgotten_once_it_is_away_and_may_join_again(nodes):
    await nodes.on(MODEL, "b")
    expected = await nodes.undisturbed(MODEL, TOKENS)
    streams = await nodes.streams(MODEL, TOKENS)
    nodes.resolve("a")
    await nodes.until(lambda: nodes.looked_up("a"), "the name was not looked up again")
    assert await texts(streams) == expected
    assert (await nodes.places(MODEL), await nodes.reachable()) == (["b"], {"a", "b"})
    await nodes.on(OTHER, "b")  # it is used like any other

    await nodes.nodes["b"].kill()
    await nodes.until(lambda: nodes.knows("a"), "what is gone is still listed")
    await nodes.complete(MODEL, PROMPT, 4)
    assert await nodes.places(MODEL) == ["a"]
    # Its loader is not missed either.
    for name in ("added", "gone"):
        listing = common_pb2.ModelListing(name=name, path=str(nodes.nodes["a"].models / THIRD), engine="echo")
        await nodes.placement.add_model(listing)
    await nodes.placement.remove_model("gone")

    await nodes.nodes["b"].start()
    assert await nodes.named() == {"a"}, "nobody has named it"
    nodes.resolve("a", "b")
    await nodes.heard("a", "b")
    await nodes.on(MODEL, "b")
    assert await nodes.undisturbed(MODEL, TOKENS) == expected

    # What was added meanwhile is its as well.
    async def has_images_of(name):
        entries = (await loader.catalogue()).entries
        return [entry for entry in entries if entry.model.name == name and entry.has_image]

    loader = LoaderClient(nodes.nodes["b"].loader)
    await nodes.on("added", "b")
    await nodes.until(lambda: has_images_of("added"), "its loader was not told")
    await nodes.placement.remove_model("added")
    assert set((await loader.catalogue()).removed) == {"gone", "added"}
    await loader.close()


async def test_placement_file_that_changes_adds_and_removes_nodes_without_a_restart(nodes):
    a, b = nodes.nodes.values()
    before = nodes.control.running["placement"].pid
    nodes.configure(groups=[a.group])
    await b.kill()
    await nodes.until(lambda: nodes.knows("a"), "what is gone is still listed")
    await b.start()
    nodes.configure(groups=[a.group, "dns:nowhere"])
    nodes.kill("placement", signal.SIGHUP)

    async def refused():
        return [line["why"] for line in nodes.said("placement", "new file refused, the old one holds")]

    (why,) = await nodes.until(refused, "a bad file is taken")
    assert 'groups.1: "dns:nowhere" is not "dns:HOST:PORT"' in why
    assert await nodes.reachable() == {"a"}
    nodes.configure(groups=[a.group, b.group], idle_s=0.3)
    nodes.kill("placement", signal.SIGHUP)
    await nodes.heard("a", "b")
    await nodes.on(MODEL, "b")
    assert nodes.control.running["placement"].pid == before
    (line,) = nodes.said("placement", "settings other than lists of addresses need a restart")
    assert line["file"].endswith("placement.toml")


async def test_a_client_gets_503_within_the_time_when_no_node_can_be_reached(nodes):
    await nodes.on(MODEL, "b")
    for name in nodes.nodes:
        nodes.network.cut(name)

    async def asked(model):
        body = {"model": model, "prompt": PROMPT, "max_tokens": 4}
        async with nodes.http.post(nodes.base_soon + "/v1/completions", json=body) as answer:
            return answer.status, (await answer.json())["error"]

    for status, error in await asyncio.gather(asked(MODEL), asked(THIRD)):
        assert (status, error["code"]) == (503, "unavailable")
        assert "no group that serves it could be reached within 2 s" in error["message"]
    assert (await asked("nobody"))[0] == 404
    await nodes.whole()
    await nodes.complete(MODEL, PROMPT, 4)
