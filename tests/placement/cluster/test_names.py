import asyncio
import socket

import pytest
from structlog.testing import capture_logs

from placement.cluster import names
from placement.cluster.names import Names, parse
from placement.config import PlacementConfig
from services.runtime import tasks
from services.runtime.config import parse as parse_config
from testing.patience import PATIENCE_S


@pytest.mark.parametrize("address", ["dns:nodes.prism.svc:7010", "dns:///nodes.prism.svc:7010"])
def test_a_dns_name_is_parsed_in_both_forms_of_grpc(address):
    assert parse(address) == ("nodes.prism.svc", 7010)


@pytest.mark.parametrize("address", ["unix:/s.sock", "node-a:7010", "10.0.0.1:7010"])
def test_address_without_a_dns_prefix_is_no_name(address):
    assert parse(address) is None


@pytest.mark.parametrize("address", ["dns:nodes", "dns:nodes:", "dns::7010", "dns://8.8.8.8/nodes:7010", "dns:[::1]:7"])
def test_a_name_without_host_or_port_is_refused_in_placements_file(address):
    text = f'name = "p"\nlisten = "unix:x"\nloaders = ["unix:l"]\ngroups = ["{address}"]\n'
    with pytest.raises(ValueError, match=r'f.toml: groups\.0: .*is not "dns:HOST:PORT"'):
        parse_config(PlacementConfig, text, "f.toml")


class Resolver:
    """Answers each look-up when it is told what."""

    def __init__(self):
        self.asked = []
        self.waiting = {}
        self.more = asyncio.Event()

    async def look_up(self, host):
        self.asked.append(host)
        self.waiting[host] = asyncio.get_running_loop().create_future()
        self.more.set()
        return await self.waiting[host]

    async def answer(self, host, answer):
        """Returns when that has been taken in: the next look-up has begun."""
        while host not in self.waiting:
            await self.next()
        before = self.asked.count(host)
        asked = self.waiting.pop(host)
        asked.set_exception(answer) if isinstance(answer, Exception) else asked.set_result(answer)
        while self.asked.count(host) == before:
            await self.next()

    async def next(self):
        self.more.clear()
        async with asyncio.timeout(PATIENCE_S):
            await self.more.wait()


@pytest.fixture
async def world():
    """(names, resolver, what was changed)"""
    resolver, changes, running = Resolver(), [], []

    def spawn(work, name):
        running.append(tasks.spawn(work, name))
        return running[-1]

    it = Names(0.0, lambda: changes.append(1), spawn, resolver.look_up)
    yield it, resolver, changes
    await tasks.cancel(*running)


LISTED = ["fixed:1", "dns:nodes:7010", "dns:nodes:7011"]


async def test_a_dns_name_expands_to_its_addresses_and_follows_their_changes(world):
    it, resolver, changes = world
    it.keep(LISTED)
    assert it.unanswered and it.expand(LISTED) == ["fixed:1"]
    await resolver.answer("nodes", ["10.0.0.1"])
    assert not it.unanswered
    assert it.expand(LISTED) == ["fixed:1", "10.0.0.1:7010", "10.0.0.1:7011"]
    await resolver.answer("nodes", ["10.0.0.1"])
    assert len(changes) == 1
    await resolver.answer("nodes", ["10.0.0.1", "10.0.0.2"])
    assert it.expand(["dns:nodes:7010"]) == ["10.0.0.1:7010", "10.0.0.2:7010"]
    assert len(changes) == 2


async def test_a_resolver_that_fails_or_knows_no_address_keeps_the_last_answer_and_is_named_once(world):
    it, resolver, changes = world
    it.keep(LISTED)
    await resolver.answer("nodes", ["10.0.0.1"])
    with capture_logs() as lines:
        await resolver.answer("nodes", socket.gaierror(socket.EAI_AGAIN, "try again"))
        await resolver.answer("nodes", [])
    assert [(line["why"], line["kept"]) for line in lines] == [("try again", ["10.0.0.1"])]
    assert it.expand(["dns:nodes:1"]) == ["10.0.0.1:1"] and len(changes) == 1
    with capture_logs() as lines:
        await resolver.answer("nodes", ["10.0.0.1"])
        await resolver.answer("nodes", [])
    assert [line["why"] for line in lines] == ["it has no address"]


async def test_a_look_up_that_hangs_delays_no_other_and_is_not_begun_twice(world):
    it, resolver, _ = world
    it.keep(["dns:hangs:1", "dns:nodes:1"])
    for last in range(3):
        await resolver.answer("nodes", [f"10.0.0.{last}"])
    assert resolver.asked.count("hangs") == 1
    assert it.unanswered and it.expand(["dns:hangs:1", "dns:nodes:1"]) == ["10.0.0.2:1"]


async def test_a_name_that_is_not_listed_any_more_is_not_looked_up(world):
    it, resolver, _ = world
    it.keep(LISTED)
    await resolver.answer("nodes", ["10.0.0.1"])
    it.keep(["dns:others:1"])
    await resolver.answer("others", ["10.0.0.9"])
    asked = resolver.asked.count("nodes")
    await resolver.answer("others", ["10.0.0.9"])
    assert resolver.asked.count("nodes") == asked
    assert it.expand([*LISTED, "dns:others:1"]) == ["fixed:1", "10.0.0.9:1"]


async def test_look_up_of_localhost_uses_the_resolver_of_the_system():
    assert await names.look_up("localhost") in (["127.0.0.1"], ["[::1]"])


async def test_look_up_of_a_name_with_addresses_of_both_kinds_gives_those_of_ipv4(monkeypatch):
    found = [(socket.AF_INET6, 0, 0, "", ("fd00::1", 0, 0, 0)), (socket.AF_INET, 0, 0, "", ("10.0.0.2", 0)),
             (socket.AF_INET, 0, 0, "", ("10.0.0.1", 0))]  # fmt: skip

    async def getaddrinfo(host, port, *, type):
        return found

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await names.look_up("both") == ["10.0.0.1", "10.0.0.2"]
    del found[1:]
    assert await names.look_up("one") == ["[fd00::1]"]
