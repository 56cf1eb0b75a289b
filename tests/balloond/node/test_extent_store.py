import asyncio
import errno
import os

import pytest

from balloond.backends.cpu import PAGE_BYTES, CpuMaker
from balloond.node import records
from balloond.node.extent_store import ExtentStore
from balloond.policy.ledger import Extent
from services.runtime import tasks
from testing import descriptors

MOST = 100


class Keeper:
    """Remembers what it was told; answers when the test says so."""

    def __init__(self):
        self.kept, self.forgotten, self.answers = [], [], []

    def keep(self, kept):
        self.kept += kept
        return "kept"

    def forget(self, ids):
        self.forgotten += ids
        self.answers.append(asyncio.get_running_loop().create_future())
        return self.answers[-1]


class FailingMaker(CpuMaker):
    def __init__(self, after):
        self.left = after

    def create(self, nbytes):
        if not self.left:
            raise OSError(12, "Cannot allocate memory")
        self.left -= 1
        return super().create(nbytes)


def extents(*ids):
    return [Extent(id, PAGE_BYTES, "kv", "lease") for id in ids]


def open_descriptors():
    return descriptors.held("/memfd:")


async def test_extent_store_created_extents_are_kept_and_destroyed_ones_forgotten():
    before = open_descriptors()
    keeper = Keeper()
    store = ExtentStore({"cpu:0": CpuMaker()}, keeper, MOST)
    assert store.create("cpu:0", "token", extents(1, 2)) == "kept"
    assert [(records.decode(record).id, fd) for record, fd in keeper.kept] == [
        (1, store.descriptors(extents(1))[0]),
        (2, store.descriptors(extents(2))[0]),
    ]
    store.take("cpu:0", 3, PAGE_BYTES, os.memfd_create("x"))
    assert all(extent in store for extent in extents(1, 2, 3))
    store.destroy("cpu:0", extents(1, 2, 3, 99))
    assert keeper.forgotten == ["extent/1", "extent/2", "extent/3", "extent/99"]
    assert open_descriptors() == before


def test_extent_store_creates_all_extents_or_none():
    before = open_descriptors()
    store = ExtentStore({"cpu:0": FailingMaker(after=2)}, Keeper(), MOST)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        store.create("cpu:0", "token", extents(1, 2, 3))
    assert open_descriptors() == before
    assert not any(extent in store for extent in extents(1, 2, 3))


async def test_extent_store_headroom_waits_for_destroyed_extents_that_the_keeper_still_holds():
    keeper = Keeper()
    store = ExtentStore({"cpu:0": CpuMaker(), "cpu:1": CpuMaker()}, keeper, MOST)
    store.create("cpu:0", "token", extents(1, 2, 3, 4))
    store.destroy("cpu:0", extents(1))
    store.destroy("cpu:0", extents(2, 3))
    await store.wait_for_headroom("cpu:0", 3 * PAGE_BYTES, lambda: 7 * PAGE_BYTES)
    await store.wait_for_headroom("cpu:1", PAGE_BYTES, lambda: PAGE_BYTES)
    waiting = tasks.spawn(store.wait_for_headroom("cpu:0", 2 * PAGE_BYTES, lambda: 4 * PAGE_BYTES), "room")
    for answer, there in ((keeper.answers[0], False), (keeper.answers[1], True)):
        answer.set_result(None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert waiting.done() == there


async def test_extent_store_small_claim_does_not_wait_behind_a_larger_one():
    keeper = Keeper()
    store = ExtentStore({"cpu:0": CpuMaker()}, keeper, MOST)
    store.create("cpu:0", "token", extents(1, 2, 3, 4))
    store.destroy("cpu:0", extents(1))
    store.destroy("cpu:0", extents(2, 3))
    much, little = (
        tasks.spawn(store.wait_for_headroom("cpu:0", count * PAGE_BYTES, lambda: 4 * PAGE_BYTES), "room")
        for count in (2, 1)
    )
    keeper.answers[0].set_result(None)
    await little
    assert not much.done()
    assert store.has_headroom("cpu:0", PAGE_BYTES, 4 * PAGE_BYTES)
    assert not store.has_headroom("cpu:0", 2 * PAGE_BYTES, 4 * PAGE_BYTES)
    keeper.answers[1].set_result(None)
    await much


async def test_extent_store_headroom_with_too_little_memory_waits_only_for_destroyed_extents():
    keeper = Keeper()
    store = ExtentStore({"cpu:0": CpuMaker()}, keeper, MOST)
    store.create("cpu:0", "token", extents(1))
    store.destroy("cpu:0", extents(1))
    keeper.answers[0].set_result(None)
    await store.wait_for_headroom("cpu:0", PAGE_BYTES, lambda: -1)


async def test_extents_beyond_those_that_have_descriptors_are_not_created_until_others_have_gone():
    keeper = Keeper()
    store = ExtentStore({"cpu:0": CpuMaker(), "cpu:1": CpuMaker()}, keeper, 3)
    store.create("cpu:0", "token", extents(1, 2))
    before = open_descriptors()
    with pytest.raises(OSError, match="there are descriptors for 3 extents") as refused:
        store.create("cpu:1", "token", extents(3, 4))
    assert refused.value.errno == errno.EMFILE
    assert open_descriptors() == before and len(keeper.kept) == 2
    store.destroy("cpu:0", extents(1))
    store.create("cpu:1", "token", extents(3, 4))
    assert all(extent in store for extent in extents(2, 3, 4))
    store.destroy("cpu:0", extents(2, 3, 4))
