"""One stream to a group: what it carries, and what happens when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.policy.replica_choice import GroupOutlook
from gateway.routing.groups import GroupLink, GroupLinks
from protos import common_pb2, gpu_scheduler_pb2
from testing.patience import PATIENCE_S
from tests.gateway.fakes import FakeGroup, Output, Running


class Collector:
    """A receiver that remembers."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.lost_with: tuple[str, bool] | None = None
        self.ended = asyncio.Event()

    def deliver(self, chunk: common_pb2.TokenChunk) -> None:
        self.tokens += chunk.token_ids
        if chunk.finish:
            self.ended.set()

    def lost(self, reason: str, was_sent: bool) -> None:
        self.lost_with = (reason, was_sent)
        self.ended.set()


def submit(name: str) -> gpu_scheduler_pb2.Submit:
    return gpu_scheduler_pb2.Submit(request_id=name, sampling=common_pb2.Sampling(max_new_tokens=9))


@pytest.fixture(params=["on the node", "over gRPC"])
async def group(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FakeGroup]:
    where = str(tmp_path / "group.sock") if request.param == "on the node" else "127.0.0.1:0"
    group = FakeGroup(where, Output([1, 2, 3]))
    await group.start()
    yield group
    await group.die()


@pytest.fixture
async def links() -> AsyncIterator[GroupLinks]:
    links = GroupLinks(connect_s=60.0)
    yield links
    await links.close()


async def hold(running: Running) -> None:
    await running.cancelled.wait()


async def test_group_link_carries_many_requests_over_one_stream(group: FakeGroup, links: GroupLinks) -> None:
    collectors = [Collector() for _ in range(20)]
    for number, collector in enumerate(collectors):
        links.get(group.address).submit(submit(str(number)), collector)
    for collector in collectors:
        await asyncio.wait_for(collector.ended.wait(), PATIENCE_S)
        assert collector.tokens == [1, 2, 3]
    assert group.streams == 1
    assert links.get(group.address).in_flight == 0


async def test_cancelled_request_is_cancelled_in_its_group_and_gets_no_more_tokens(
    group: FakeGroup, links: GroupLinks
) -> None:
    group.script = hold
    link, collector = links.get(group.address), Collector()
    link.submit(submit("a"), collector)
    running = await asyncio.wait_for(group.arrived(1), PATIENCE_S)
    link.cancel("a")
    await asyncio.wait_for(running.cancelled.wait(), PATIENCE_S)
    running.tokens([5])
    other = Collector()
    group.script = Output([7])
    link.submit(submit("b"), other)
    await asyncio.wait_for(other.ended.wait(), PATIENCE_S)
    assert (collector.tokens, collector.lost_with, other.tokens) == ([], None, [7])


async def test_a_broken_stream_loses_all_its_requests_and_comes_back(group: FakeGroup, links: GroupLinks) -> None:
    group.script = hold
    link, collectors = links.get(group.address), [Collector(), Collector()]
    for number, collector in enumerate(collectors):
        link.submit(submit(str(number)), collector)
    await asyncio.wait_for(group.arrived(2), PATIENCE_S)
    await group.die()
    for collector in collectors:
        await asyncio.wait_for(collector.ended.wait(), PATIENCE_S)
        assert collector.lost_with is not None
        assert collector.lost_with[1] is True
    again = FakeGroup(group.address.removeprefix("unix:"), Output([4]))
    await again.start()
    after = Collector()
    link.submit(submit("after"), after)
    await asyncio.wait_for(after.ended.wait(), PATIENCE_S)
    assert after.tokens == [4]
    await again.die()


async def test_a_request_to_a_group_that_is_not_there_is_lost_unsent(tmp_path: Path) -> None:
    links, collector = GroupLinks(connect_s=0.05), Collector()
    links.get(f"unix:{tmp_path}/nobody.sock").submit(submit("a"), collector)
    await asyncio.wait_for(collector.ended.wait(), PATIENCE_S)
    assert collector.lost_with is not None
    assert collector.lost_with[1] is False
    await links.close()


async def test_links_open_with_the_routes_and_close_when_idle_and_unnamed(group: FakeGroup, links: GroupLinks) -> None:
    group.script = hold
    links.keep([[group.address]])
    link, collector = links.get(group.address), Collector()
    link.submit(submit("a"), collector)
    await asyncio.wait_for(group.arrived(1), PATIENCE_S)
    links.keep([])
    assert links.get(group.address) is link  # it has a request
    link.cancel("a")
    links.keep([])
    assert links.get(group.address) is not link


async def outlook(group: FakeGroup, link: GroupLink, requests: int) -> GroupOutlook:
    """What is known of the model, once the group has told so many requests of it."""
    async with asyncio.timeout(PATIENCE_S):
        while link.outlook("m").requests != requests:
            await asyncio.sleep(0)
    return link.outlook("m")


async def test_link_follows_a_groups_outlook_while_there_is_a_choice(group: FakeGroup, links: GroupLinks) -> None:
    group.outlook.models.add(model="m", queue_s=100.0, tokens_per_s=1000.0, requests=7)
    links.keep([[group.address]])
    link, collector = links.get(group.address), Collector()
    link.submit(submit("a"), collector)
    await asyncio.wait_for(collector.ended.wait(), PATIENCE_S)
    assert group.followed == [] and link.outlook("m") == GroupOutlook(0)
    links.keep([[group.address, "unix:/another"], [group.address]])
    told = await outlook(group, link, 7)
    assert told.tokens_per_s == 1000.0 and 0 < told.queue_s <= 100.0
    link.sends(50.0)
    assert link.outlook("m").queue_s > told.queue_s, "what was sent since comes before the next request"
    assert link.outlook("m", 5).cached_tokens == 5
    links.keep([[group.address]])
    assert link.outlook("m") == GroupOutlook(0)


async def test_link_counts_its_own_requests_once(group: FakeGroup, links: GroupLinks) -> None:
    group.script = hold
    group.outlook.models.add(model="m", tokens_per_s=1000.0, requests=3)
    link = links.get(group.address)
    request = submit("a")
    request.model = "m"
    link.submit(request, Collector())
    of_adapter = submit("b")
    of_adapter.model = "adapter"
    link.submit(of_adapter, Collector(), base="m")
    await asyncio.wait_for(group.arrived(2), PATIENCE_S)
    links.keep([[group.address, "unix:/another"]])
    await outlook(group, link, 3)
    link.cancel("a")
    assert link.outlook("m").requests == 2
    link.cancel("b")
    assert link.outlook("m").requests == 1


async def test_link_follows_on_after_its_stream_broke(tmp_path: Path, links: GroupLinks) -> None:
    first = FakeGroup(str(tmp_path / "group.sock"), Output([1]))
    first.outlook.models.add(model="m", requests=1)
    await first.start()
    links.keep([[first.address, "unix:/another"]])
    link = links.get(first.address)
    await outlook(first, link, 1)
    await first.die()
    await outlook(first, link, 0)
    second = FakeGroup(str(tmp_path / "group.sock"), Output([1]))
    second.outlook.models.add(model="m", requests=2)
    await second.start()
    await outlook(second, link, 2)
    await second.die()
