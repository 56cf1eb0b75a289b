"""Extents made ahead, on host memory."""

import os
import threading

import pytest

from balloond.backends.cpu import PAGE_BYTES, CpuMaker
from balloond.node.extent_pool import ExtentPool, shares
from tests.balloond.conftest import TIMEOUT_S

SMALL, LARGE = 2 * PAGE_BYTES, 4 * PAGE_BYTES
BUDGET = 16 * PAGE_BYTES


class CountingMaker(CpuMaker):
    """Knows what it made and who asked for it; can be out of memory."""

    def __init__(self):
        self.made = []
        self.by = []
        self.exhausted = threading.Event()
        self.refused = threading.Event()

    def create(self, nbytes):
        if self.exhausted.is_set():
            self.refused.set()
            raise OSError(12, "nothing left")
        self.made.append(nbytes)
        self.by.append(threading.current_thread().name)
        return super().create(nbytes)


@pytest.fixture
def maker():
    return CountingMaker()


@pytest.fixture
def spares(maker):
    spares = ExtentPool(maker, BUDGET, SMALL)
    assert spares.wait_full(TIMEOUT_S)
    yield spares
    spares.close()


def held_bytes(before):
    """Of memfds that this process holds beyond those of `before`."""
    return sum(os.fstat(fd).st_size for fd in memfds() - before)


def memfds():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "prism-extent" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except FileNotFoundError:
            pass  # the listing's own
    return found


def test_extent_pool_budget_is_shared_among_the_sizes_requested_last():
    assert shares([SMALL], BUDGET) == {SMALL: 8}
    assert shares([LARGE, SMALL], BUDGET) == {LARGE: 2, SMALL: 4}
    assert shares([], BUDGET) == {}


def test_extent_pool_has_spares_of_the_expected_size_before_the_first_request(spares):
    assert spares.ready == {SMALL: 8}


def test_extent_pool_request_takes_a_spare_and_the_thread_makes_another(spares, maker):
    fds = [spares.create(SMALL) for _ in range(3)]
    assert [os.fstat(fd).st_size for fd in fds] == [SMALL] * 3
    assert spares.wait_full(TIMEOUT_S)
    assert spares.ready == {SMALL: 8}
    # But for the one that keeps the device awake, everything was made by the thread.
    assert maker.by[0] == threading.current_thread().name
    assert set(maker.by[1:]) == {"spares"}
    for fd in fds:
        os.close(fd)


def test_extent_pool_keeps_spares_of_the_last_sizes_and_closes_those_of_older_ones(spares):
    before = memfds()
    os.close(spares.create(LARGE))
    assert spares.wait_full(TIMEOUT_S)
    assert spares.ready == {SMALL: 4, LARGE: 2}
    os.close(spares.create(PAGE_BYTES))
    assert spares.wait_full(TIMEOUT_S)
    assert spares.ready == {LARGE: 2, PAGE_BYTES: 8}
    assert len(memfds()) == len(before) + 2  # 8 small ones then, 10 now


def test_extent_pool_extent_above_its_budget_is_made_on_demand(spares, maker):
    os.close(spares.create(BUDGET // 2))
    assert maker.by[-1] == threading.current_thread().name
    assert spares.ready == {SMALL: 8}


def test_extent_pool_never_holds_more_than_was_set_aside(maker):
    before = memfds()
    spares = ExtentPool(maker, BUDGET, SMALL)
    for size in (SMALL, LARGE, SMALL, PAGE_BYTES, LARGE):
        os.close(spares.create(size))
        assert spares.wait_full(TIMEOUT_S)
        assert held_bytes(before) <= spares.set_aside_bytes == BUDGET + PAGE_BYTES
    spares.close()
    assert memfds() == before


def test_extent_pool_without_a_budget_holds_one_extent(maker):
    before = memfds()
    spares = ExtentPool(maker, 0, SMALL)
    assert (spares.ready, held_bytes(before)) == ({}, PAGE_BYTES)
    spares.close()


def test_extent_pool_of_a_full_device_is_refilled_after_the_next_request(spares, maker):
    maker.exhausted.set()
    fds = [spares.create(SMALL)]
    assert maker.refused.wait(TIMEOUT_S)
    fds += [spares.create(SMALL) for _ in range(7)]
    with pytest.raises(OSError, match="nothing left"):
        spares.create(SMALL)
    maker.exhausted.clear()
    fds.append(spares.create(SMALL))
    assert spares.wait_full(TIMEOUT_S)
    assert spares.ready == {SMALL: 8}
    for fd in fds:
        os.close(fd)
