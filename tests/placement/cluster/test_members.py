import asyncio

import pytest

from placement.cluster.members import MemberKind, Members
from services.runtime import tasks


class FakeNames:
    def __init__(self):
        self.answer = []

    def keep(self, addresses):
        self.kept = list(addresses)

    def expand(self, addresses):
        return [found for each in addresses for found in (self.answer if each == "dns:nodes:1" else [each])]


class World:
    def __init__(self):
        self.names, self.there, self.followed, self.forgotten, self.tasks = FakeNames(), set(), [], [], []
        kinds = {
            kind: MemberKind(
                lambda address, kind=kind: self.follow(kind, address),
                lambda address, kind=kind: (kind, address) in self.there,
                lambda address, kind=kind: self.forgotten.append((kind, address)),
            )
            for kind in ("groups", "loaders")
        }
        self.members = Members(kinds, self.names, self.spawn)

    def follow(self, kind, address):
        self.followed.append((kind, address))
        return asyncio.Event().wait()

    def spawn(self, work, name):
        self.tasks.append(tasks.spawn(work, name))
        return self.tasks[-1]


@pytest.fixture
async def world():
    it = World()
    yield it
    await tasks.cancel(*it.tasks)


async def test_member_at_a_new_address_is_followed_once(world):
    world.members.named({"groups": ["a", "dns:nodes:1"], "loaders": ["a"]})
    assert world.names.kept == ["a", "dns:nodes:1", "a"]
    assert world.followed == [("groups", "a"), ("loaders", "a")]
    world.names.answer = ["b"]
    world.members.renew()
    world.members.renew()
    assert world.followed[2:] == [("groups", "b")]


async def test_member_no_longer_named_is_kept_until_it_cannot_be_reached(world):
    world.names.answer = ["a", "b"]
    world.members.named({"groups": ["dns:nodes:1"], "loaders": ["a"]})
    world.there = {("groups", "a"), ("groups", "b"), ("loaders", "a")}
    world.names.answer = ["b"]
    world.members.renew()
    world.members.look()
    assert world.forgotten == []
    world.there -= {("groups", "a"), ("groups", "b")}
    world.members.look()
    assert world.forgotten == [("groups", "a")], "b is away, and named"
    await asyncio.sleep(0)
    assert [task.cancelled() for task in world.tasks] == [True, False, False]


async def test_member_named_again_while_it_was_reachable_stays(world):
    world.names.answer = ["a"]
    world.members.named({"groups": ["dns:nodes:1"]})
    world.there = {("groups", "a")}
    for world.names.answer in ([], ["a"]):
        world.members.renew()
    world.there.clear()
    world.members.look()
    assert (world.forgotten, len(world.followed)) == ([], 1)


async def test_member_named_again_after_it_was_forgotten_is_followed_anew(world):
    world.names.answer = ["a"]
    world.members.named({"groups": ["dns:nodes:1"]})
    for world.names.answer in ([], ["a"]):
        world.members.renew()
    assert world.forgotten == [("groups", "a")]
    assert world.followed == [("groups", "a")] * 2


async def test_members_after_a_change_of_the_file_are_those_that_it_names(world):
    world.members.named({"groups": ["a", "b"], "loaders": ["a"]})
    world.there = {("groups", "a")}
    world.members.named({"groups": ["c"], "loaders": ["c"]})
    assert world.followed[3:] == [("groups", "c"), ("loaders", "c")]
    assert world.forgotten == [("groups", "b"), ("loaders", "a")] or world.forgotten == [
        ("loaders", "a"),
        ("groups", "b"),
    ]
