"""Room in a buffer that goes round."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sglang.policy.ring import ALIGN_BYTES, Ring

UNIT = ALIGN_BYTES


def test_ring_places_follow_each_other_and_begin_again_where_the_oldest_were() -> None:
    ring = Ring(10 * UNIT)
    assert [ring.take(4 * UNIT), ring.take(3 * UNIT), ring.take(4 * UNIT)] == [0, 4 * UNIT, None]
    ring.give(0)
    assert ring.take(4 * UNIT) == 0  # three units at the end are too few
    assert ring.take(1) is None


def test_ring_room_returned_out_of_order_is_used_once_the_oldest_is_back() -> None:
    ring = Ring(3 * UNIT)
    for _ in range(3):
        ring.take(UNIT)
    ring.give(UNIT)
    assert ring.take(UNIT) is None
    ring.give(0)
    assert ring.take(2 * UNIT) == 0


def test_ring_request_larger_than_the_ring_never_fits_and_one_as_large_does() -> None:
    ring = Ring(2 * UNIT)
    assert ring.take(2 * UNIT + 1) is None
    assert ring.take(2 * UNIT - 1) == 0


@given(st.integers(0, 1 << 30))
def test_ring_places_never_overlap_and_the_whole_ring_can_be_taken_again(seed: int) -> None:
    chance, ring = random.Random(seed), Ring(16 * UNIT)
    taken: dict[int, int] = {}
    for _ in range(60):
        if taken and chance.random() < 0.5:
            start = chance.choice(list(taken))
            ring.give(start)
            del taken[start]
            continue
        nbytes = chance.randrange(1, 6 * UNIT)
        start = ring.take(nbytes)
        if start is None:
            continue
        assert start % ALIGN_BYTES == 0 and start + nbytes <= 16 * UNIT
        assert all(start + nbytes <= other or other + size <= start for other, size in taken.items())
        taken[start] = nbytes
    for start in taken:
        ring.give(start)
    assert ring.take(16 * UNIT) == 0
