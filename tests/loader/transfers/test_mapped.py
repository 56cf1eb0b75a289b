"""Extents under addresses for the time of a copy, with the CPU's pages."""

import ctypes
import os
import threading

import pytest

from balloond.backends.cpu import PAGE_BYTES, CpuMaker, CpuMapper
from loader.policy.chunks import plan
from loader.transfers.base import Borrowed
from loader.transfers.mapped import Mapped
from tests.balloond.conftest import TIMEOUT_S


class Watched(CpuMapper):
    """Counts what is mapped; mapping may wait, and fail."""

    def __init__(self):
        self.events = []
        self.changed = threading.Condition()
        self.may_map = threading.Event()
        self.may_map.set()
        self.maps = threading.Event()
        self.fails_at = None
        self.released = False

    def note(self, what):
        with self.changed:
            self.events.append(what)
            self.changed.notify_all()

    def wait_for(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, TIMEOUT_S), self.events

    def map(self, address, fd, nbytes):
        self.maps.set()
        assert self.may_map.wait(TIMEOUT_S)
        if self.fails_at == len(self.events):
            self.note("failed")
            raise OSError(5, "no mapping")
        super().map(address, fd, nbytes)
        self.note("mapped")

    def release(self, address, span):
        super().release(address, span)
        self.released = True


@pytest.fixture
def mapper():
    return Watched()


@pytest.fixture
def extents():
    made = [Borrowed(number, size, CpuMaker().create(size), "cpu:0") for number, size in enumerate(SIZES)]
    yield made
    for extent in made:
        os.close(extent.fd)


SIZES = [2 * PAGE_BYTES, PAGE_BYTES, *[3 * PAGE_BYTES] * 8]
STEPS = plan(SIZES, sum(SIZES), PAGE_BYTES)


def test_bytes_written_at_the_address_of_a_chunk_are_in_its_extent(mapper, extents):
    with Mapped(mapper, extents) as there:
        there.start(mapper.map)
        for number, chunk in enumerate(STEPS):
            there.reach(chunk)
            ctypes.memset(there.at(chunk), number + 1, chunk.nbytes)
        assert not mapper.released
    for number, chunk in enumerate(STEPS):
        part = os.pread(extents[chunk.extent].fd, chunk.nbytes, chunk.offset)
        assert part == bytes([number + 1]) * chunk.nbytes
    assert mapper.released


def test_extents_are_all_mapped_ahead_of_their_use(mapper, extents):
    with Mapped(mapper, extents) as there:
        assert mapper.events == []
        there.start(mapper.map)
        mapper.wait_for(lambda: mapper.events == ["mapped"] * len(SIZES))


def test_first_extent_is_ready_once_a_batch_is_mapped(mapper, extents):
    with Mapped(mapper, extents) as there:
        there.start(mapper.map)
        there.reach(STEPS[0])
        assert len(mapper.events) >= 4


def test_extents_fewer_than_a_batch_are_ready_too(mapper, extents):
    with Mapped(mapper, extents[:2]) as there:
        there.start(mapper.map)
        there.reach(STEPS[0])


def test_addresses_are_released_in_any_thread_even_without_a_mapping(mapper, extents):
    there = Mapped(mapper, extents)
    there.__enter__()
    ended = threading.Thread(target=there.__exit__)
    ended.start()
    ended.join(TIMEOUT_S)
    assert mapper.released and mapper.events == []


def test_mapping_failure_is_raised_at_its_extent_and_earlier_ones_are_ready(mapper, extents):
    mapper.fails_at = 4
    with Mapped(mapper, extents) as there:
        there.start(mapper.map)
        there.reach(STEPS[0])
        there.reach(next(chunk for chunk in STEPS if chunk.extent == 3))
        with pytest.raises(OSError, match="no mapping"):
            there.reach(next(chunk for chunk in STEPS if chunk.extent == 4))
    assert mapper.released


def test_addresses_stay_while_an_extent_is_being_mapped_there(mapper, extents):
    mapper.may_map.clear()
    there = Mapped(mapper, extents)
    there.__enter__().start(mapper.map)
    assert mapper.maps.wait(TIMEOUT_S)
    ended = threading.Thread(target=there.__exit__)
    ended.start()
    ended.join(0.05)  # long enough for who does not wait
    assert not mapper.released
    mapper.may_map.set()
    ended.join(TIMEOUT_S)
    assert mapper.released and mapper.events == ["mapped"]


def test_a_copy_that_ends_early_maps_no_more(mapper, extents):
    mapper.may_map.clear()
    there = Mapped(mapper, extents)
    there.__enter__().start(mapper.map)
    ended = threading.Thread(target=there.__exit__)
    ended.start()
    while not there._ending:
        ended.join(0.001)
    mapper.may_map.set()
    ended.join(TIMEOUT_S)
    assert mapper.released and mapper.events in ([], ["mapped"])
