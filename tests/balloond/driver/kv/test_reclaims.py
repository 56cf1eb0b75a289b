from hypothesis import given
from hypothesis import strategies as st

from balloond.driver.kv.reclaims import OpenReclaims

EXTENT = 10


def over(reclaims, more_to_come=False):
    return [(reclaim.id, reclaim.returned) for reclaim in reclaims.pop_over(more_to_come)]


def test_a_reclaim_is_over_when_extents_for_all_of_its_bytes_left():
    reclaims = OpenReclaims(EXTENT)
    reclaims.add(1, 25, deep=True)
    assert reclaims.extents() == (0, 3)
    reclaims.left(2)
    assert reclaims.extents() == (0, 1) and over(reclaims) == []
    reclaims.left(1)
    assert over(reclaims) == [(1, 30)] and over(reclaims) == []


def test_a_shallow_reclaim_is_over_at_once_with_what_the_reserve_had():
    reclaims = OpenReclaims(EXTENT)
    reclaims.add(1, 25, deep=False)
    assert reclaims.take() == 0 and reclaims.extents() == (3, 0)
    reclaims.left(1)
    assert over(reclaims) == [(1, 10)]


def test_reclaims_bytes_that_the_reserve_did_not_cover_are_taken_once():
    reclaims = OpenReclaims(EXTENT)
    reclaims.add(1, 25, deep=True)
    reclaims.left(1)
    assert reclaims.take() == 15 and reclaims.take() == 0


def test_a_deep_reclaim_is_over_when_the_engine_that_took_it_is_done():
    reclaims = OpenReclaims(EXTENT)
    reclaims.add(1, 25, deep=True)
    reclaims.take()
    reclaims.add(2, 25, deep=True)
    reclaims.done()
    assert reclaims.extents() == (3, 3)
    assert over(reclaims, more_to_come=True) == [], "what a fence holds may still leave for it"
    assert over(reclaims) == [(1, 0)], "the engine does not know of the other one"
    reclaims.done(every=True)
    assert over(reclaims) == [(2, 0)]


def test_reclaims_popped_together_leave_none_open():
    reclaims = OpenReclaims(EXTENT)
    reclaims.add(1, 25, deep=True)
    reclaims.add(2, 5, deep=False)
    reclaims.left(1)
    assert [(reclaim.id, reclaim.returned) for reclaim in reclaims.pop_all()] == [(1, 10), (2, 0)]
    assert reclaims.extents() == (0, 0)


@given(st.lists(st.integers(1, 60), max_size=5), st.lists(st.integers(0, 9), max_size=8))
def test_reclaims_extents_that_left_count_once_for_the_oldest_first(sizes, leaving):
    reclaims = OpenReclaims(EXTENT)
    opened = [reclaims.add(id, nbytes, deep=True) for id, nbytes in enumerate(sizes)]
    asked = [-(-nbytes // EXTENT) for nbytes in sizes]
    for extents in leaving:
        reclaims.left(extents)
    rest = sum(leaving)
    for reclaim, extents in zip(opened, asked, strict=True):
        part = min(rest, extents)
        assert reclaim.returned == part * EXTENT and (reclaim.remaining == 0) == (part == extents)
        rest -= part
    assert reclaims.extents() == (0, max(0, sum(asked) - sum(leaving)))
