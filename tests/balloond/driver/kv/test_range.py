import ctypes
import select
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from balloond.backends.cpu import PAGE_BYTES, CpuMapper
from balloond.driver.kv import range as driver_range
from balloond.driver.kv import watermarks
from balloond.driver.kv.range import ElasticRange, _runs
from testing import descriptors
from tests.balloond.conftest import TIMEOUT_S
from tests.balloond.driver.fakes import FakeLease, GatedMapper, readable


def make(lease, low=0, high=0, extents=64, poison=False, mapper=None, large=1, span_bytes=None, **more):
    return ElasticRange(
        lease,
        mapper or GatedMapper(),
        span_bytes=span_bytes or extents * PAGE_BYTES,
        extent_bytes=PAGE_BYTES,
        low=low,
        high=high,
        large=large,
        poison=poison,
        **more,
    )


@pytest.fixture
def lease(monkeypatch):
    # Between two steps of a test its engine is not idle, however long they take.
    monkeypatch.setattr(watermarks, "IDLE_S", 1e6)
    monkeypatch.setattr(driver_range, "IDLE_S", 1e6)
    lease = FakeLease()
    yield lease
    lease.loop.stop()


def byte_at(kv, index, stretch=0):
    return ctypes.string_at(kv.address + kv.offset_bytes(stretch) + index * PAGE_BYTES, 1)[0]


def test_range_acquire_maps_extents_at_the_lowest_addresses(lease):
    kv = make(lease)
    assert sorted(kv.acquire(3, timeout_s=TIMEOUT_S)) == [0, 1, 2]
    assert byte_at(kv, 2) == 0
    assert kv.mapped_bytes == 3 * PAGE_BYTES
    kv.check()
    kv.close()
    assert lease.held == set()


def test_range_reserve_is_filled_ahead_and_serves_an_acquire_without_balloond(lease):
    kv = make(lease, low=4, high=8)
    lease.settle()
    assert kv.mapped_bytes == 4 * PAGE_BYTES
    lease.silent = True
    assert len(kv.acquire(3)) == 3
    lease.settle()
    assert lease.asked[-1][2], "what is ahead of need is asked for as such"
    kv.close()


def test_range_of_running_engine_below_the_low_mark_requests_its_reserve_as_growth(lease):
    kv = make(lease, low=4, high=8)
    lease.settle()
    kv.usage(PAGE_BYTES, [])
    assert len(kv.acquire(1)) == 1
    lease.settle()
    assert not lease.asked[-1][2]
    kv.usage(0, [])
    assert len(kv.acquire(3)) == 3
    lease.settle()
    assert lease.asked[-1][2]
    kv.close()


def test_range_growth_requests_carry_the_evictable_bytes(lease):
    kv = make(lease, low=3, high=8)
    lease.settle()
    lease.capacity = lease.held_extents
    kv.cached_bytes = 7 * PAGE_BYTES
    assert not kv.refused()
    assert len(kv.acquire(5, timeout_s=TIMEOUT_S, instead_bytes=2 * PAGE_BYTES)) == 3
    assert kv.refused() and lease.cached[1] == 2
    lease.settle()
    assert set(lease.cached[2:]) <= {7}
    lease.capacity += 4
    assert len(kv.acquire(1, timeout_s=TIMEOUT_S)) == 1 and not kv.refused() and 0 in lease.cached[2:]
    kv.close()


def test_an_engine_that_could_evict_instead_and_does_not_wait_asks_once_after_a_refusal(lease):
    kv = make(lease)
    lease.capacity = lease.held_extents
    assert kv.acquire(1, timeout_s=TIMEOUT_S) == [] and kv.refused()
    asked = len(lease.asked)
    for _ in range(5):
        assert kv.acquire(2, instead_bytes=2 * PAGE_BYTES) == []
        lease.settle()
    assert len(lease.asked) == asked and kv.refused()
    assert kv.acquire(2, instead_bytes=PAGE_BYTES) == []
    lease.settle()
    assert len(lease.asked) == asked + 1
    assert kv.acquire(2, timeout_s=TIMEOUT_S, instead_bytes=2 * PAGE_BYTES) == []
    assert len(lease.asked) == asked + 2
    kv.close()


def test_range_acquire_without_free_memory_returns_fewer_extents(lease):
    lease.capacity = 5
    kv = make(lease)
    assert len(kv.acquire(8, timeout_s=TIMEOUT_S)) == 5
    assert kv.acquire(1, timeout_s=TIMEOUT_S) == []
    kv.close()


def test_range_acquire_and_headroom_are_bounded_by_the_limit(lease):
    lease.limit = type(lease.limit)(1, 5 * PAGE_BYTES)
    kv = make(lease)
    assert kv.headroom() == 5
    assert len(kv.acquire(8, timeout_s=TIMEOUT_S)) == 5
    assert (kv.headroom(), lease.asked) == (0, [(5, 1, False)])
    assert kv.acquire(1, timeout_s=TIMEOUT_S) == []
    assert len(lease.asked) == 1
    kv.close()


def test_range_acquire_is_bounded_by_its_addresses(lease):
    kv = make(lease, extents=3)
    assert len(kv.acquire(8, timeout_s=TIMEOUT_S)) == 3
    assert kv.headroom() == 0
    kv.close()


def test_range_acquire_of_many_extents_has_four_requests_at_a_time(lease):
    lease.capacity = 200
    lease.set_limit(200)
    lease.settle()
    kv = make(lease, extents=200)
    lease.silent = True
    assert kv.acquire(200) == []
    lease.settle()
    assert [count for count, _, _ in lease.asked] == [32, 32, 32, 32]
    lease.speak()
    assert len(kv.acquire(200, timeout_s=TIMEOUT_S)) == 200
    assert [count for count, _, _ in lease.asked] == [32, 32, 32, 32, 32, 32, 8]
    kv.check()
    kv.close()


def test_range_late_grant_goes_into_the_reserve_and_wakes_the_engine(lease):
    lease.silent = True
    kv = make(lease)
    assert kv.acquire(3) == []
    lease.settle()
    lease.speak()
    assert select.select([kv.wake_fd], [], [], TIMEOUT_S)[0]
    assert kv.take_reclaims() == 0
    assert not readable(kv.wake_fd)
    lease.silent = True
    assert len(kv.acquire(3)) == 3
    kv.close()


def test_range_released_extents_above_the_high_mark_go_back(lease):
    kv = make(lease, low=1, high=2)
    lease.settle()
    mine = kv.acquire(9, timeout_s=TIMEOUT_S)
    kv.release(mine)
    lease.settle()
    assert kv.mapped_bytes == 2 * PAGE_BYTES
    assert len(lease.held) == 2
    kv.check()
    kv.close()


def test_range_after_lowering_new_extents_lie_at_the_lowest_addresses(lease):
    kv = make(lease, low=2, high=4)
    mine = sorted(kv.acquire(9, timeout_s=TIMEOUT_S))
    kv.release([index for index in mine if index not in (0, 1)])
    lease.settle()
    assert kv.mapped_bytes == 6 * PAGE_BYTES
    kv.lower(TIMEOUT_S)
    assert kv.mapped_bytes == 2 * PAGE_BYTES
    assert sorted(kv.acquire(3, timeout_s=TIMEOUT_S)) == [2, 3, 4]
    lease.settle()
    assert kv.mapped_bytes > 5 * PAGE_BYTES, "from then on there is a reserve again"
    kv.check()
    kv.close()


def test_range_lower_waits_for_fences_up_to_its_timeout(lease):
    kv = make(lease, low=0, high=0)
    mine = kv.acquire(2, timeout_s=TIMEOUT_S)
    kv._mapper.closed = True
    kv.release(mine)
    kv.lower(0.01)
    assert kv.mapped_bytes == 2 * PAGE_BYTES
    kv._mapper.closed = False
    kv.close()


def test_range_release_of_an_index_that_is_not_owned_is_refused(lease):
    kv = make(lease)
    (index,) = kv.acquire(1, timeout_s=TIMEOUT_S)
    for wrong in ([index, index], [5], [index, 5]):
        with pytest.raises(ValueError, match="not owned"):
            kv.release(wrong)
    kv.release([index])
    with pytest.raises(ValueError):
        kv.release([index])
    kv.close()


def test_a_released_extent_stays_mapped_until_its_fence_opens(lease):
    mapper = GatedMapper()
    kv = make(lease, mapper=mapper)
    mine = kv.acquire(2, timeout_s=TIMEOUT_S)
    mapper.closed = True
    kv.release(mine)
    lease.settle()
    assert byte_at(kv, mine[0]) == 0
    assert len(lease.held) == 2
    assert kv.acquire(0) == []
    kv.check()
    back = threading.Event()
    given, lease.give_back = lease.give_back, lambda ids: (given(ids), back.set())
    mapper.gates[0].open = True
    assert back.wait(TIMEOUT_S)
    assert lease.held == set()
    kv.close()


def test_range_with_poison_poisons_fresh_and_released_memory(lease):
    kv = make(lease, low=1, high=1, poison=True)
    (index,) = kv.acquire(1, timeout_s=TIMEOUT_S)
    assert byte_at(kv, index) == 0xFF
    ctypes.memset(kv.address + index * PAGE_BYTES, 7, PAGE_BYTES)
    lease.capacity = 2
    kv.release([index])
    again = kv.acquire(2, timeout_s=TIMEOUT_S)
    assert [byte_at(kv, i) for i in again] == [0xFF] * len(again)
    kv.close()


# --- large extents


def bulk(lease, extents=64, large=4, **others):
    lease.capacity = extents
    lease.set_limit(extents)
    lease.settle()
    return make(lease, extents=extents, large=large, **others)


def test_range_acquire_of_many_extents_maps_large_ones_and_small_ones_for_the_rest(lease):
    kv = bulk(lease)
    mine = kv.acquire(19, timeout_s=TIMEOUT_S)
    assert sorted(mine) == list(range(19))
    assert lease.asked_of == [(4, 4, 3), (1, 3, 0)]
    assert kv.extents()[:20].tolist() == [*[0] * 4, *[4] * 4, *[8] * 4, *[12] * 4, 16, 17, 18, 19]
    assert kv.mapped_bytes == lease.held_extents * PAGE_BYTES == 19 * PAGE_BYTES
    kv.check()
    kv.close()
    assert lease.held == set()


def test_range_located_index_is_its_extent_and_the_offset_in_it(lease):
    kv = bulk(lease)
    kv.acquire(18, timeout_s=TIMEOUT_S)
    found = kv.located([0, 3, 4, 16, 17])
    ids = [id for id, _ in found]
    assert ids[0] == ids[1] and len(set(ids)) == 4 and set(ids) <= lease.held
    assert [offset for _, offset in found] == [0, 3 * PAGE_BYTES, 0, 0, 0]
    kv.close()


def test_range_acquire_of_few_extents_requests_small_ones(lease):
    kv = bulk(lease)
    assert len(kv.acquire(15, timeout_s=TIMEOUT_S)) == 15
    assert lease.asked_of == [(1, 15, 0)]
    kv.close()


def grow_fast(kv):
    """Three times so much that the reserve should be 10; the engine's own questions are for small extents."""
    for _ in range(3):
        assert len(kv.acquire(15, timeout_s=TIMEOUT_S)) == 15


def test_range_reserve_far_below_its_mark_is_filled_with_large_extents(lease):
    kv = bulk(lease, low=1, high=12)
    lease.settle()
    assert lease.asked_of == [(1, 1, 0)]
    grow_fast(kv)
    lease.settle()
    ahead = [of for (of, _, _), (_, _, only_free) in zip(lease.asked_of, lease.asked, strict=True) if only_free]
    assert 4 in ahead
    kv.check()
    kv.close()


def test_range_large_extents_never_fill_the_reserve_beyond_its_mark(lease):
    kv = bulk(lease, extents=128, low=1, high=6)
    grow_fast(kv)
    lease.settle()
    # What lies above it would go back at once.
    assert lease.returned_extents == 0
    assert kv.mapped_bytes <= (45 + 6) * PAGE_BYTES
    kv.check()
    kv.close()


def test_a_reserve_is_filled_with_small_extents_where_no_large_one_is_left(lease):
    kv = bulk(lease, extents=128, low=1, high=12)
    grow_fast(kv)
    lease.settle()
    lease.capacity = lease.held_extents + 2
    reserve = lease.held_extents - 45
    assert len(kv.acquire(reserve)) == reserve
    lease.settle()
    assert kv.mapped_bytes == lease.capacity * PAGE_BYTES
    kv.check()
    kv.close()


def test_range_reserve_of_a_running_engine_is_filled_with_small_extents_when_large_ones_lack(lease):
    """Below the low mark, while requests run."""
    kv = bulk(lease, extents=128, low=5, high=12)
    grow_fast(kv)
    kv.usage(PAGE_BYTES, ())
    lease.settle()
    lease.capacity = lease.held_extents + 2
    before = len(lease.asked)
    assert kv.acquire(lease.held_extents - 45)
    lease.settle()
    asked = [(of, only_free) for (of, _, _), (_, _, only_free) in zip(lease.asked_of, lease.asked, strict=True)]
    assert asked[before : before + 2] == [(4, True), (1, False)]
    assert kv.mapped_bytes == lease.capacity * PAGE_BYTES
    kv.check()
    kv.close()


def test_range_requests_carry_the_count_behind_them(lease):
    kv = bulk(lease, extents=300)
    lease.silent = True
    assert kv.acquire(200) == []
    lease.settle()
    assert lease.asked_of == [(4, 8, 168), (4, 8, 136), (4, 8, 104), (4, 8, 72)]
    lease.speak()
    assert len(kv.acquire(200, timeout_s=TIMEOUT_S)) == 200
    kv.close()


def test_range_acquire_maps_small_extents_where_no_large_one_is_left(lease):
    kv = bulk(lease)
    lease.capacity = 18
    assert len(kv.acquire(40, timeout_s=TIMEOUT_S)) == 18
    assert sorted(lease.sizes.values()) == [1, 1, 4, 4, 4, 4]
    kv.check()
    kv.close()


def test_large_extents_lie_where_nothing_is_mapped(lease):
    kv = bulk(lease)
    kv.acquire(3, timeout_s=TIMEOUT_S)
    mine = kv.acquire(16, timeout_s=TIMEOUT_S)
    assert sorted(mine) == list(range(4, 20))
    assert kv.acquire(1, timeout_s=TIMEOUT_S) == [3]
    kv.check()
    kv.close()


def test_range_large_extent_leaves_only_as_a_whole(lease):
    kv = bulk(lease)
    mine = sorted(kv.acquire(16, timeout_s=TIMEOUT_S))
    kv.release(mine[4:7])
    lease.settle()
    assert kv.mapped_bytes == 16 * PAGE_BYTES
    kv.check()
    kv.release(mine[7:8])
    lease.settle()
    assert kv.mapped_bytes == 12 * PAGE_BYTES and lease.held_extents == 12
    kv.check()
    kv.close()


def test_range_rest_of_a_large_extent_is_taken_before_the_reserve(lease):
    kv = bulk(lease, low=8, high=16)
    mine = sorted(kv.acquire(16, timeout_s=TIMEOUT_S))
    lease.settle()
    kv.release(mine[5:7])
    assert sorted(kv.acquire(2)) == mine[5:7]
    kv.close()


def test_range_rest_of_a_large_extent_does_not_count_as_returned_for_a_reclaim(lease):
    kv = bulk(lease)
    mine = sorted(kv.acquire(16, timeout_s=TIMEOUT_S))
    kv.release(mine[4:7])
    lease.settle()
    lease.reclaim(7, 3, deep=True)
    assert select.select([kv.wake_fd], [], [], TIMEOUT_S)[0]
    assert kv.take_reclaims() == 3 * PAGE_BYTES, "the reserve covers nothing of it"
    assert lease.reports[-1].reserve == 0
    kv.reclaimed()
    lease.settle()
    assert [(r.reclaim_id, r.returned) for r in lease.reports if r.reclaim_id] == [(7, 0)]
    lease.reclaim(8, 3, deep=True)
    assert select.select([kv.wake_fd], [], [], TIMEOUT_S)[0]
    kv.take_reclaims()
    kv.release(mine[7:8])
    kv.reclaimed()
    lease.settle()
    assert [(r.reclaim_id, r.returned) for r in lease.reports if r.reclaim_id][-1] == (8, 3 * PAGE_BYTES)
    assert kv.mapped_bytes == 12 * PAGE_BYTES
    kv.close()


def test_range_lowered_limit_takes_whole_large_extents_and_the_rest_is_overage(lease):
    kv = bulk(lease, high=16)
    lease.capacity = 16  # so that nothing fills the reserve
    mine = sorted(kv.acquire(16, timeout_s=TIMEOUT_S))
    kv.release(mine[:6])
    lease.set_limit(15)
    lease.settle()
    assert kv.mapped_bytes == 12 * PAGE_BYTES and kv.overage_bytes() == 0
    lease.set_limit(10)
    lease.settle()
    assert kv.mapped_bytes == 12 * PAGE_BYTES and kv.overage_bytes() == 2 * PAGE_BYTES
    kv.release(mine[6:8])
    lease.settle()
    assert lease.returned_extents == 8 and kv.overage_bytes() == 0
    kv.check()
    kv.close()


def test_range_tied_indices_are_taken_over_the_limit_and_leave_with_their_extent(lease):
    kv = bulk(lease, high=16)
    lease.capacity = 16
    mine = sorted(kv.acquire(16, timeout_s=TIMEOUT_S))
    kv.release(mine[1:])
    lease.set_limit(1)
    lease.settle()
    assert (kv.mapped_bytes, kv.overage_bytes()) == (4 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert kv.take_tied() == mine[1:4] and kv.take_tied() == []
    assert kv.overage_bytes() == 3 * PAGE_BYTES
    kv.check()
    kv.release(mine[:4])
    lease.settle()
    assert (kv.mapped_bytes, kv.overage_bytes()) == (0, 0)
    kv.close()


def test_range_large_extent_that_reaches_below_the_floor_does_not_leave_for_a_reclaim(lease):
    kv = bulk(lease, high=8)
    lease.limit = type(lease.limit)(9, 64 * PAGE_BYTES, floor_bytes=14 * PAGE_BYTES)
    lease.capacity = 16
    mine = sorted(kv.acquire(16, timeout_s=TIMEOUT_S))
    lease.reclaim(7, 1, deep=True)
    assert select.select([kv.wake_fd], [], [], TIMEOUT_S)[0]
    kv.take_reclaims()
    kv.release(mine[12:])
    kv.reclaimed()
    lease.settle()
    assert [(r.reclaim_id, r.returned) for r in lease.reports if r.reclaim_id] == [(7, 0)]
    kv.close()


def test_range_offer_consists_of_small_extents(lease):
    kv = bulk(lease)
    assert len(kv.offer(32, timeout_s=TIMEOUT_S)) == 32
    assert set(lease.sizes.values()) == {1}
    kv.take([])
    kv.close()


# --- limits and reclaims


def test_range_acquire_returns_when_a_falling_limit_leaves_no_more_to_wait_for(lease):
    kv, gate, got = make(lease), threading.Event(), []
    lease.loop.call(gate.wait)
    waiting = threading.Thread(target=lambda: got.append(kv.acquire(8, timeout_s=TIMEOUT_S)))
    waiting.start()
    while kv._stretches[0].growth.missing != 8:
        waiting.join(0.001)
    lease.limit = type(lease.limit)(2, 5 * PAGE_BYTES)
    lease.loop.call(lambda: lease.on_limit())
    gate.set()
    waiting.join(TIMEOUT_S / 2)
    assert not waiting.is_alive() and len(got[0]) == 5
    kv.close()


def test_range_lowered_limit_takes_the_reserve_at_once_and_leaves_the_rest_to_the_engine(lease):
    kv = make(lease, low=4, high=4)
    mine = kv.acquire(6, timeout_s=TIMEOUT_S)
    lease.settle()
    assert kv.mapped_bytes == 10 * PAGE_BYTES
    lease.set_limit(4)
    lease.settle()
    assert kv.mapped_bytes == 6 * PAGE_BYTES
    assert readable(kv.wake_fd)
    assert kv.overage_bytes() == 2 * PAGE_BYTES
    assert lease.reports[-1].held == 6 * PAGE_BYTES
    kv.release(mine[:2])
    lease.settle()
    assert (kv.mapped_bytes, kv.overage_bytes()) == (4 * PAGE_BYTES, 0)
    kv.close()


def test_range_overage_leaves_out_indices_behind_a_closed_fence(lease):
    mapper = GatedMapper()
    kv = make(lease, mapper=mapper)
    mine = kv.acquire(6, timeout_s=TIMEOUT_S)
    lease.set_limit(4)
    lease.settle()
    assert kv.overage_bytes() == 2 * PAGE_BYTES
    mapper.closed = True
    kv.release(mine[4:])
    lease.settle()
    assert (kv.mapped_bytes, kv.overage_bytes()) == (6 * PAGE_BYTES, 0)
    kv.check()
    mapper.gates[0].open = True
    kv.close()


def test_range_overage_leaves_out_indices_being_unmapped(lease):
    class Held(CpuMapper):
        begun, go_on = threading.Event(), threading.Event()

        def unmap(self, address, nbytes):
            self.begun.set()
            assert self.go_on.wait(TIMEOUT_S)
            super().unmap(address, nbytes)

    mapper = Held()
    kv = make(lease, low=0, high=0, mapper=mapper)
    mine = kv.acquire(6, timeout_s=TIMEOUT_S)
    lease.set_limit(4)
    lease.settle()
    assert kv.overage_bytes() == 2 * PAGE_BYTES
    kv.release(mine[4:])
    assert mapper.begun.wait(TIMEOUT_S)
    assert (kv.mapped_bytes, kv.overage_bytes(), kv.headroom()) == (6 * PAGE_BYTES, 0, 0)
    mapper.go_on.set()
    lease.settle()
    assert (kv.mapped_bytes, kv.overage_bytes()) == (4 * PAGE_BYTES, 0)
    kv.check()
    kv.close()


def test_range_reserve_over_a_lowered_limit_is_not_taken_again(lease):
    kv = make(lease, low=0, high=4)
    mine = sorted(kv.acquire(6, timeout_s=TIMEOUT_S))

    def in_between():
        lease.limit = type(lease.limit)(2, 4 * PAGE_BYTES)  # and its thread has not come to that yet
        kv.release(mine[3:])
        return kv.headroom(), kv.acquire(3), kv.headroom(), kv.overage_bytes()

    headroom, again, none, over = lease.at_rest(in_between)
    assert (headroom, again, none, over) == (1, mine[3:4], 0, 0)
    lease.on_limit()
    lease.settle()
    assert kv.mapped_bytes == 4 * PAGE_BYTES
    kv.check()
    kv.close()


def test_range_reclaim_covered_by_the_reserve_is_answered_without_the_engine(lease):
    kv = make(lease, low=4, high=4)
    kv.acquire(2, timeout_s=TIMEOUT_S)
    lease.settle()
    lease.reclaim(7, 3)
    lease.settle()
    assert [(r.reclaim_id, r.returned) for r in lease.reports if r.reclaim_id] == [(7, 3 * PAGE_BYTES)]
    assert kv.take_reclaims() == 0
    assert kv.mapped_bytes == 3 * PAGE_BYTES
    kv.close()


def test_a_shallow_reclaim_takes_no_more_than_the_reserve(lease):
    kv = make(lease, low=2, high=2)
    kv.acquire(2, timeout_s=TIMEOUT_S)
    lease.settle()
    lease.reclaim(7, 9)
    lease.settle()
    assert [(r.reclaim_id, r.returned) for r in lease.reports if r.reclaim_id] == [(7, 2 * PAGE_BYTES)]
    assert not readable(kv.wake_fd)
    kv.close()


def test_range_deep_reclaim_wakes_the_engine_for_bytes_that_the_reserve_does_not_cover(lease):
    kv = make(lease, low=2, high=2, refused_pause_s=1e6)  # after the pause, the reserve is filled again
    mine = kv.acquire(6, timeout_s=TIMEOUT_S)
    lease.settle()
    lease.reclaim(7, 5, deep=True)
    assert select.select([kv.wake_fd], [], [], TIMEOUT_S)[0]
    assert kv.take_reclaims() == 3 * PAGE_BYTES
    assert kv.take_reclaims() == 0
    assert not any(r.reclaim_id for r in lease.reports)
    kv.release(mine[:1])
    kv.reclaimed()
    lease.settle()
    assert [(r.reclaim_id, r.returned) for r in lease.reports if r.reclaim_id] == [(7, 3 * PAGE_BYTES)]
    assert len(lease.held) == 5
    kv.close()


def test_range_deep_reclaim_of_a_running_engine_takes_the_reserve_after_the_engine_answered(lease):
    kv = make(lease, low=2, high=2)
    extents = kv.acquire(4, timeout_s=TIMEOUT_S)
    kv.usage(PAGE_BYTES, [])
    lease.settle()
    lease.reclaim(7, 3, deep=True)
    lease.settle()
    assert kv.take_reclaims() == 3 * PAGE_BYTES
    kv.release(extents[:2])
    lease.settle()
    assert kv.mapped_bytes == 4 * PAGE_BYTES, "two of the engine's, two of reserve"
    kv.reclaimed()
    lease.settle()
    assert [(r.reclaim_id, r.returned) for r in lease.reports if r.reclaim_id] == [(7, 3 * PAGE_BYTES)]
    kv.close()


def test_a_reclaim_waits_for_fences_before_it_is_answered(lease):
    mapper = GatedMapper()
    kv = make(lease, mapper=mapper)
    mine = kv.acquire(4, timeout_s=TIMEOUT_S)
    lease.reclaim(7, 3, deep=True)
    assert select.select([kv.wake_fd], [], [], TIMEOUT_S)[0]
    kv.take_reclaims()
    mapper.closed = True
    kv.release(mine[:2])
    kv.reclaimed()
    lease.settle()
    assert not any(r.reclaim_id for r in lease.reports)
    answered = threading.Event()
    told, lease.report = lease.report, lambda usage: (told(usage), usage.reclaim_id and answered.set())
    mapper.gates[0].open = True
    assert answered.wait(TIMEOUT_S)
    assert [(r.reclaim_id, r.returned) for r in lease.reports if r.reclaim_id] == [(7, 2 * PAGE_BYTES)]
    kv.close()


def test_a_reclaimed_reserve_is_not_filled_again_before_growth(lease):
    kv = make(lease, low=4, high=4)
    lease.settle()
    lease.reclaim(7, 4)
    lease.settle()
    assert kv.mapped_bytes == 0
    asked = len(lease.asked)
    lease.settle()
    assert len(lease.asked) == asked
    kv.close()


# --- reports


def test_range_usage_report_carries_the_ages_of_prefixes(lease):
    kv = make(lease)
    kv.acquire(2, timeout_s=TIMEOUT_S)
    told = threading.Event()
    lease.report = lambda usage: (lease.reports.append(usage), usage.used and told.set())
    kv.usage(100, [(5.0, 30), (1.0, 20)])
    assert told.wait(TIMEOUT_S)
    usage = lease.reports[-1]
    assert (usage.held, usage.used, usage.reserve) == (2 * PAGE_BYTES, 100, 0)
    assert [nbytes for _, nbytes in usage.cached] == [30, 20]
    assert usage.cached[0][0] >= 5.0
    kv.close()


def test_adjacent_indices_form_one_run():
    assert list(_runs([5, 1, 2, 3, 9])) == [(1, 3), (5, 1), (9, 1)]
    assert list(_runs([])) == []


# --- hibernation and the end


def test_range_empty_needs_every_extent_released_and_returns_all_memory(lease):
    kv = make(lease, low=3, high=3)
    mine = kv.acquire(2, timeout_s=TIMEOUT_S)
    with pytest.raises(ValueError, match="2 extents are still in use"):
        kv.empty()
    kv.release(mine)
    kv.empty()
    assert (kv.mapped_bytes, lease.held) == (0, set())
    lease.settle()
    assert kv.mapped_bytes == 0, "nothing is mapped ahead while asleep"
    address = kv.address
    assert len(kv.acquire(2, timeout_s=TIMEOUT_S)) == 2
    lease.settle()
    assert (kv.address, kv.mapped_bytes) == (address, 5 * PAGE_BYTES)
    kv.close()


def test_range_grant_after_emptying_is_returned_at_once(lease):
    lease.silent = True
    kv = make(lease, low=3, high=3)
    lease.settle()
    kv.empty()
    lease.speak()
    lease.settle()
    assert (kv.mapped_bytes, lease.held) == (0, set())
    kv.close()


def test_range_close_returns_all_memory_and_leaks_no_descriptor(lease):
    before = descriptors.held()
    kv = make(lease, low=3, high=3)
    kv.acquire(5, timeout_s=TIMEOUT_S)
    lease.settle()
    lease.silent = True
    kv.acquire(5)
    lease.settle()
    kv.close()
    assert lease.held == set()
    lease.speak()
    lease.settle()
    assert lease.held == set()
    assert descriptors.held() == before


@pytest.mark.parametrize("end", [ElasticRange.empty, ElasticRange.close])
def test_range_reclaim_that_the_engine_did_not_take_is_answered_by_empty_or_close(lease, end):
    kv = make(lease)
    mine = kv.acquire(2, timeout_s=TIMEOUT_S)
    lease.reclaim(7, 5, deep=True)
    assert select.select([kv.wake_fd], [], [], TIMEOUT_S)[0]
    kv.release(mine)
    end(kv)
    lease.settle()
    assert [r.reclaim_id for r in lease.reports if r.reclaim_id] == [7]
    kv.close()


def test_range_with_extents_of_broken_pages_is_refused(lease):
    with pytest.raises(ValueError, match="not whole pages"):
        ElasticRange(lease, GatedMapper(), span_bytes=PAGE_BYTES, extent_bytes=100, low=0, high=0)


# --- whatever the engine does


class RangeMachine(RuleBasedStateMachine):
    LARGE, EXTENTS = 1, 16

    def __init__(self):
        super().__init__()
        self.lease = FakeLease(capacity=self.EXTENTS + 4)
        self.mapper = GatedMapper()
        sizes = {"extents": self.EXTENTS, "large": self.LARGE}
        self.kv = make(self.lease, low=1, high=4, poison=True, mapper=self.mapper, **sizes)
        self.mine = []
        self.reclaims = 0

    @rule(count=st.integers(0, 40), wait=st.booleans())
    def acquire(self, count, wait):
        taken = self.kv.acquire(count, timeout_s=TIMEOUT_S if wait else 0.0)
        assert len(taken) <= count and not set(taken) & set(self.mine)
        for index in taken:
            assert byte_at(self.kv, index) == 0xFF
            ctypes.memset(self.kv.address + index * PAGE_BYTES, 1, PAGE_BYTES)
        self.mine += taken

    @rule()
    def lower(self):
        self.kv.lower(0.0)

    @rule(picks=st.lists(st.integers(0, 40), min_size=1, max_size=40), closed=st.booleans())
    def release(self, picks, closed):
        # How much is there depends on the other thread: what is drawn must not.
        some = list({self.mine[pick % len(self.mine)] for pick in picks if self.mine})
        self.mapper.closed = closed
        self.kv.release(some)
        self.mine = [index for index in self.mine if index not in some]

    @rule()
    def open_fences(self):
        for gate in self.mapper.gates:
            gate.open = True

    @rule(extents=st.integers(0, 40))
    def limit(self, extents):
        self.lease.set_limit(extents)

    @rule(extents=st.integers(1, 8), deep=st.booleans())
    def reclaim(self, extents, deep):
        self.reclaims += 1
        self.lease.reclaim(self.reclaims, extents, deep)

    @rule()
    def attend(self):
        wanted = self.kv.take_reclaims() + self.kv.overage_bytes()
        count = min(len(self.mine), -(-wanted // PAGE_BYTES))
        self.kv.release(self.mine[:count])
        del self.mine[:count]
        self.kv.reclaimed()

    @invariant()
    def nothing_is_lost(self):
        self.lease.settle()
        self.kv.check()
        kv, lease = self.kv, self.lease
        mapped, held, nbytes, extents = lease.at_rest(
            lambda: (set(kv._stretches[0].addresses.ids.values()), lease.held, kv.mapped_bytes, lease.held_extents)
        )
        assert mapped == held and nbytes == extents * PAGE_BYTES
        answered = sum(report.returned for report in lease.reports if report.reclaim_id)
        assert answered <= lease.returned_extents * PAGE_BYTES
        assert self.kv._stretches[0].owned == set(self.mine)
        # Untouched extents are still what the engine wrote.
        assert all(byte_at(self.kv, index) == 1 for index in self.mine)

    def teardown(self):
        self.open_fences()
        self.mapper.closed = False
        self.kv.release(self.mine)
        # Every reclaim is answered once the engine did what it could and fences are open.
        self.kv.take_reclaims()
        self.kv.reclaimed()
        self.kv.empty()
        self.lease.settle()
        answers = sorted(r.reclaim_id for r in self.lease.reports if r.reclaim_id)
        assert answers == list(range(1, self.reclaims + 1))
        self.kv.close()
        assert self.lease.held == set()
        self.lease.loop.stop()


RangeMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestRangeUnderEverything = RangeMachine.TestCase


class MixedRangeMachine(RangeMachine):
    LARGE, EXTENTS = 3, 32


MixedRangeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestMixedRangeUnderEverything = MixedRangeMachine.TestCase


def test_range_offered_indices_stay_mapped_until_some_are_taken(lease):
    kv = make(lease, low=2, high=2)
    lease.settle()
    assert kv.offer(3, timeout_s=TIMEOUT_S) == [0, 1, 2]
    lease.set_limit(0)
    lease.settle()
    assert kv.mapped_bytes == 3 * PAGE_BYTES, "a limit that falls meanwhile waits for the end of the offer"
    kv.take([0, 2])
    lease.settle()
    assert kv.mapped_bytes == 2 * PAGE_BYTES and kv.overage_bytes() == 2 * PAGE_BYTES
    kv.check()
    kv.release([0, 2])
    lease.settle()
    assert kv.mapped_bytes == 0
    kv.close()


def test_range_extent_above_a_hole_is_exchanged_for_the_lowest_address(lease):
    mapper = GatedMapper()
    lease.capacity = 4
    kv = make(lease, low=0, high=8, mapper=mapper)
    assert len(kv.acquire(4, timeout_s=TIMEOUT_S)) == 4
    kv.release([0])
    mapper.closed = True
    kv.release([3])
    lease.set_limit(3)
    lease.settle()  # extent 0 went back, because 3 could not
    mapper.gates[0].open = True
    lease.loop.call(kv._tend)
    lease.settle()
    assert kv.offer(1) == [3], "the limit leaves nothing else"
    kv.take([])
    lease.settle()
    assert kv.offer(1, timeout_s=TIMEOUT_S) == [0]
    kv.take([0])
    kv.check()
    kv.close()


# --- several stretches of one range


def two(lease, first=16, second=16, **more):
    return make(lease, span_bytes=[first * PAGE_BYTES, second * PAGE_BYTES], **more)


def test_stretches_of_a_range_have_indices_and_addresses_of_their_own(lease):
    kv = two(lease, first=6, second=10)
    assert sorted(kv.acquire(2, timeout_s=TIMEOUT_S)) == [0, 1]
    assert sorted(kv.acquire(3, timeout_s=TIMEOUT_S, stretch=1)) == [0, 1, 2]
    assert (kv.offset_bytes(0), kv.offset_bytes(1)) == (0, 6 * PAGE_BYTES)
    assert byte_at(kv, 1) == byte_at(kv, 2, stretch=1) == 0
    assert kv.mapped_bytes == 5 * PAGE_BYTES
    assert len({*kv.located([0, 1]), *kv.located([0, 1, 2], stretch=1)}) == 5
    with pytest.raises(ValueError, match="not owned"):
        kv.release([2])
    kv.release([2], stretch=1)
    lease.settle()
    assert kv.mapped_bytes == 4 * PAGE_BYTES
    kv.close()
    assert lease.held == set()


def test_an_engine_that_could_evict_instead_asks_again_where_another_stretch_has_memory_to_spare(lease):
    lease.capacity = 4
    kv = two(lease, low=0, high=40)
    others = kv.acquire(4, timeout_s=TIMEOUT_S, stretch=1)
    assert kv.acquire(1, timeout_s=TIMEOUT_S) == [] and kv.refused()
    asked = len(lease.asked)
    assert kv.acquire(1, instead_bytes=PAGE_BYTES) == []
    lease.settle()
    assert len(lease.asked) == asked, "nothing has changed since"
    kv.release(others[:2], stretch=1)
    assert kv.acquire(1, instead_bytes=PAGE_BYTES) == []
    lease.settle()
    assert len(kv.acquire(1, instead_bytes=PAGE_BYTES)) == 1
    kv.close()


def test_stretches_that_do_not_end_with_a_large_extent_begin_at_one(lease):
    kv = two(lease, first=6, second=16, large=4)
    assert kv.offset_bytes(1) == 8 * PAGE_BYTES
    assert len(kv.acquire(16, timeout_s=TIMEOUT_S, stretch=1)) == 16
    assert kv.extents(1).tolist() == [*[0] * 4, *[4] * 4, *[8] * 4, *[12] * 4]
    kv.release([0, 1, 2], stretch=1)
    assert kv.take_tied() == [] and sorted(kv.take_tied(1)) == [0, 1, 2]
    kv.close()


def test_stretches_share_one_limit(lease):
    lease.limit = type(lease.limit)(1, 5 * PAGE_BYTES)
    kv = two(lease)
    assert kv.headroom(0) == kv.headroom(1) == 5
    assert len(kv.acquire(3, timeout_s=TIMEOUT_S)) == 3
    assert kv.headroom(0) == kv.headroom(1) == 2
    assert len(kv.acquire(8, timeout_s=TIMEOUT_S, stretch=1)) == 2
    lease.set_limit(4)
    lease.settle()
    assert kv.overage_bytes() == PAGE_BYTES
    kv.release([0], stretch=1)
    lease.settle()
    assert (kv.overage_bytes(), kv.mapped_bytes) == (0, 4 * PAGE_BYTES)
    kv.close()


@pytest.mark.parametrize("full", ["limit", "device"])
@pytest.mark.parametrize("large", [1, 4])
def test_a_stretch_gets_what_another_one_has_in_reserve_where_there_is_no_more(lease, full, large):
    lease.capacity = 16
    kv = two(lease, large=large, low=0, high=40)
    mine = kv.acquire(16, timeout_s=TIMEOUT_S)
    if full == "limit":
        lease.set_limit(16)
        lease.capacity = 40
        lease.settle()
    kv.release(mine[:12])
    assert kv.headroom(1) >= 9
    assert len(kv.acquire(9, timeout_s=TIMEOUT_S, stretch=1)) == 9
    lease.settle()
    assert kv.mapped_bytes <= 16 * PAGE_BYTES and kv.overage_bytes() == 0
    kv.check()
    kv.close()


def test_a_stretch_makes_way_only_with_what_its_own_engine_does_not_want(lease):
    lease.capacity = 6
    kv = two(lease)
    mine = kv.acquire(4, timeout_s=TIMEOUT_S)
    lease.silent = True
    assert kv.acquire(4, timeout_s=0.0) == []
    lease.settle()
    lease.speak()
    lease.settle()  # two came, which the first stretch wants
    assert kv.acquire(2, timeout_s=TIMEOUT_S, stretch=1) == [] and kv.refused(1)
    assert len(kv.acquire(2)) == 2
    kv.release(mine[:1])
    assert len(kv.acquire(1, timeout_s=TIMEOUT_S, stretch=1)) == 1
    kv.close()


def test_a_reserve_is_not_filled_while_another_stretch_misses_extents(lease):
    lease.silent = True
    kv = two(lease, low=4, high=8)
    lease.settle()
    assert [count for count, *_ in lease.asked] == [2, 2], "the marks are shared"
    assert kv.acquire(3, stretch=1) == []
    lease.speak()
    lease.settle()
    assert len(kv.acquire(3, timeout_s=TIMEOUT_S, stretch=1)) == 3
    kv.close()


def test_offers_of_a_stretch_are_of_that_stretch(lease):
    kv = two(lease, low=4, high=4)
    lease.settle()
    assert kv.offer(3, timeout_s=TIMEOUT_S, stretch=1) == [0, 1, 2]
    kv.take([0, 2], stretch=1)
    lease.settle()
    kv.check()
    assert kv._stretches[1].owned == {0, 2} and not kv._stretches[0].owned
    kv.close()


def test_what_an_offer_left_makes_way_for_another_stretch_and_for_nothing_else(lease):
    lease.limit = type(lease.limit)(1, 6 * PAGE_BYTES)
    kv = two(lease)
    assert kv.offer(4, timeout_s=TIMEOUT_S) == [0, 1, 2, 3]
    kv.take([])  # another rank had none of these
    lease.settle()
    assert kv.mapped_bytes == 4 * PAGE_BYTES, "the next offer finds it again"
    assert kv.offer(6, timeout_s=TIMEOUT_S, stretch=1) == [0, 1, 2, 3, 4, 5]
    kv.take([0, 1, 2, 3, 4, 5], stretch=1)
    lease.settle()
    kv.check()
    assert kv.mapped_bytes == 6 * PAGE_BYTES
    kv.close()


def test_hibernation_needs_every_stretch_released(lease):
    kv = two(lease, low=4, high=4)
    kv.acquire(1, timeout_s=TIMEOUT_S, stretch=1)
    with pytest.raises(ValueError, match="1 extents are still in use"):
        kv.empty()
    kv.release([0], stretch=1)
    kv.empty()
    assert (kv.mapped_bytes, lease.held) == (0, set())
    kv.close()


def test_a_stretch_gets_the_memory_that_another_is_giving_back_just_then():
    begun, go = threading.Event(), threading.Event()

    class SlowMapper(GatedMapper):
        def unmap(self, address, nbytes):
            begun.set()
            assert go.wait(TIMEOUT_S)
            super().unmap(address, nbytes)

    lease = FakeLease(capacity=16)
    kv = two(lease, low=2, high=6, mapper=SlowMapper(), first=13, second=10)
    kv.release(kv.acquire(13, timeout_s=TIMEOUT_S))
    assert begun.wait(TIMEOUT_S), "the reserve goes back, down to its mark"
    call = lease.loop.call
    lease.loop.call = lambda function: (go.set(), call(function))  # what is missing is known by then
    assert len(kv.acquire(10, timeout_s=TIMEOUT_S, stretch=1)) == 10
    kv.check()
    kv.close()
    lease.loop.stop()


class StretchesMachine(RuleBasedStateMachine):
    """Two stretches of one range. Each writes its number into what it has."""

    LARGE, EXTENTS = 1, (7, 12)

    def __init__(self):
        super().__init__()
        self.lease = FakeLease(capacity=16)
        self.mapper = GatedMapper()
        spans = {"first": self.EXTENTS[0], "second": self.EXTENTS[1]}
        self.kv = two(self.lease, low=2, high=6, poison=True, mapper=self.mapper, large=self.LARGE, **spans)
        self.mine = [set(), set()]
        self.reclaims = 0

    @rule(stretch=st.integers(0, 1), count=st.integers(0, 14), wait=st.booleans())
    def acquire(self, stretch, count, wait):
        taken = self.kv.acquire(count, timeout_s=TIMEOUT_S if wait else 0.0, stretch=stretch)
        assert len(taken) <= count and not set(taken) & self.mine[stretch]
        for index in taken:
            assert byte_at(self.kv, index, stretch) == 0xFF, "nobody has written here since it came"
            address = self.kv.address + self.kv.offset_bytes(stretch) + index * PAGE_BYTES
            ctypes.memset(address, 1 + stretch, PAGE_BYTES)
        self.mine[stretch] |= set(taken)

    @rule(stretch=st.integers(0, 1))
    def take_tied(self, stretch):
        for index in self.kv.take_tied(stretch):
            address = self.kv.address + self.kv.offset_bytes(stretch) + index * PAGE_BYTES
            ctypes.memset(address, 1 + stretch, PAGE_BYTES)
            self.mine[stretch].add(index)

    @rule(stretch=st.integers(0, 1), picks=st.sets(st.integers(0, 11), min_size=1), closed=st.booleans())
    def release(self, stretch, picks, closed):
        some = sorted(picks & self.mine[stretch])
        self.mapper.closed = closed
        self.kv.release(some, stretch=stretch)
        self.mine[stretch] -= set(some)

    @rule()
    def open_fences(self):
        for gate in self.mapper.gates:
            gate.open = True

    @rule()
    def lower(self):
        self.kv.lower(0.0)

    @rule(extents=st.integers(0, 24))
    def limit(self, extents):
        self.lease.set_limit(extents)

    @rule(extents=st.integers(1, 8), deep=st.booleans())
    def reclaim(self, extents, deep):
        self.reclaims += 1
        self.lease.reclaim(self.reclaims, extents, deep)

    @rule(first=st.integers(0, 1))
    def attend(self, first):
        """The engine gives up what it has to, of one stretch before the other."""
        wanted = self.kv.take_reclaims() + self.kv.overage_bytes()
        count = -(-wanted // PAGE_BYTES)
        for stretch in (first, 1 - first):
            leaving = sorted(self.mine[stretch])[:count]
            self.kv.release(leaving, stretch=stretch)
            self.mine[stretch] -= set(leaving)
            count -= len(leaving)
        self.kv.reclaimed()

    @invariant()
    def the_books_of_both_stretches_hold(self):
        self.lease.settle()
        kv, lease = self.kv, self.lease
        kv.check()
        ids, held, nbytes, extents = lease.at_rest(
            lambda: (
                [id for each in kv._stretches for id in each.addresses.ids.values()],
                lease.held,
                kv.mapped_bytes,
                lease.held_extents,
            )
        )
        assert len(ids) == len(set(ids)), "no extent is in two stretches"
        assert set(ids) == held and nbytes == extents * PAGE_BYTES, "the range has what both stretches have"
        assert [each.owned for each in kv._stretches] == self.mine
        for stretch, mine in enumerate(self.mine):
            assert {byte_at(kv, index, stretch) for index in mine} <= {1 + stretch}
        owned = sum(len(mine) for mine in self.mine) * PAGE_BYTES
        assert kv.overage_bytes() >= owned - lease.limit.bytes, "what is owned beyond the limit has to go"
        answered = sum(report.returned for report in lease.reports if report.reclaim_id)
        assert answered <= lease.returned_extents * PAGE_BYTES

    def teardown(self):
        self.open_fences()
        self.mapper.closed = False
        for stretch in (0, 1):
            self.kv.release(sorted(self.mine[stretch]), stretch=stretch)
        self.kv.take_reclaims()
        self.kv.reclaimed()
        self.kv.empty()
        self.lease.settle()
        answers = sorted(r.reclaim_id for r in self.lease.reports if r.reclaim_id)
        assert answers == list(range(1, self.reclaims + 1))
        # Whatever happened before, either stretch can have all that the limit and its addresses allow.
        self.lease.set_limit(16)
        self.lease.settle()
        for stretch in (0, 1):
            there = min(16, self.EXTENTS[stretch])
            got = self.kv.acquire(there, timeout_s=TIMEOUT_S, stretch=stretch)
            assert len(got) == there
            self.kv.release(got, stretch=stretch)
        self.kv.close()
        assert self.lease.held == set()
        self.lease.loop.stop()


StretchesMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestStretchesUnderEverything = StretchesMachine.TestCase


class MixedStretchesMachine(StretchesMachine):
    LARGE, EXTENTS = 3, (13, 10)


MixedStretchesMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestMixedStretchesUnderEverything = MixedStretchesMachine.TestCase
