"""The engine's elastic KV memory on a scripted driver."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sglang.base.errors import NoMemory
from gpu_scheduler.engines.sglang.kv.elastic_kv import ElasticKv
from tests.gpu_scheduler.engines.sglang.scripted import Clock, ScriptedRange


def made(
    envelope: int = 10, extent: int = 64, count: int = 200, limit: int = 20
) -> tuple[ElasticKv, ScriptedRange, Clock]:
    memory, clock = ScriptedRange(extent, limit), Clock()
    return ElasticKv(memory, envelope, count, clock), memory, clock


def test_growth_makes_the_slots_asked_for_available_and_no_more_than_are_mapped() -> None:
    kv, memory, _ = made()
    assert kv.available == 0
    assert kv.grow(13, wait_s=0.0)
    assert 13 <= kv.available <= len(memory.owned) * 64 // 10
    assert len(memory.owned) == 3


def test_growth_past_the_limit_keeps_the_extents_that_came_and_fails() -> None:
    kv, memory, _ = made(limit=2)
    assert not kv.grow(1000, wait_s=0.0)
    assert len(memory.owned) == 2 and kv.available == 12


def test_growth_that_balloond_refused_does_not_wait_again_for_a_moment() -> None:
    kv, memory, clock = made(limit=5)
    memory.there = 0  # the limit allows it, the device has nothing
    assert not kv.grow(1, wait_s=0.05) and not kv.grow(1, wait_s=0.05)
    kv.may_wait_again()
    assert not kv.grow(1, wait_s=0.05)
    clock.now += 1.0
    assert not kv.grow(1, wait_s=0.05)
    assert memory.waits == [0.05, 0.0, 0.05, 0.05]


def test_dummy_envelope_is_held_and_neither_used_nor_available() -> None:
    kv, memory, _ = made(envelope=100)  # over two extents
    kv.hold_dummy(wait_s=1.0)
    assert kv.has_dummy and {0, 1} <= memory.owned
    assert kv.used == 0 and kv.available == 0
    assert kv.unbacked == 199
    kv.free_all()
    assert kv.envelopes.live == 1


def test_growth_that_did_not_wait_makes_later_growth_no_more_patient() -> None:
    kv, memory, clock = made(limit=5)
    memory.there = 0
    assert not kv.grow(1, wait_s=0.05)  # refused: for a moment no growth waits
    assert not kv.grow_politely(1, 0.005, 100) and memory.waits == [0.05, 0.0]
    clock.now += 0.03
    assert not kv.grow_politely(1, 0.005, 100) and memory.waits[-1] == 0.005, "the first that waits"
    clock.now += 0.03
    assert not kv.grow_politely(1, 0.005, 100) and memory.waits[-1] == 0.0
    clock.now += 0.03
    assert not kv.grow_politely(1, 0.005, 100) and memory.waits[-1] == 0.005


@pytest.mark.parametrize("read", [True, False])
def test_dummy_envelope_that_is_read_is_zero_each_time_it_is_mapped(read: bool) -> None:
    kv = ElasticKv(ScriptedRange(64, 20), 10, 200, Clock(), dummy_is_read=read)
    kv.rows = torch.full((200, 10), 0xFF, dtype=torch.uint8)  # as memory comes that had another use
    for _ in range(2):
        kv.hold_dummy(wait_s=1.0)
        assert bool(kv.rows[0].any()) is not read and kv.rows[1:].all()
        kv.give_up_everything()
        kv.rows[0] = 0xFF


def test_dummy_envelope_that_finds_no_memory_leaves_nothing_held() -> None:
    kv, memory, _ = made(envelope=100, limit=1)
    with pytest.raises(NoMemory, match="first envelope"):
        kv.hold_dummy(wait_s=0.5)
    assert not memory.owned and not kv.has_dummy


def test_emptied_extents_linger_while_requests_run_and_leave_at_once_otherwise() -> None:
    kv, memory, clock = made()
    kv.grow(12, wait_s=0.0)
    taken = kv.envelopes.take(12)
    assert taken is not None
    kv.envelopes.give(taken)
    clock.now += 10  # they have been in use until now
    assert kv.give_up_empties(older_than_s=0.25) == 2 or len(memory.owned) == 2
    clock.now += 0.1
    kept = len(memory.owned)
    assert kv.give_up_empties(older_than_s=0.25) == 0 and len(memory.owned) == kept
    assert kv.give_up_empties() == kept and not memory.owned


def test_extents_that_are_mapped_as_one_are_given_up_together() -> None:
    kv, memory, _ = made(envelope=16)
    memory.extents[:4] = 0
    assert kv.grow(24, wait_s=0.0) and memory.owned == set(range(6))
    taken = kv.envelopes.take(24)
    assert taken is not None
    kv.envelopes.give(taken[1:])
    assert kv.give_up_empties() == 2 and memory.owned == set(range(4))
    assert kv.available == 15, "what is empty there is for the next request"
    kv.envelopes.give(taken[:1])
    assert kv.give_up_empties() == 4 and not memory.owned


def test_hibernation_leaves_nothing_mapped_and_the_range_can_be_used_again() -> None:
    kv, memory, _ = made()
    kv.hold_dummy(wait_s=1.0)
    kv.grow(30, wait_s=0.0)
    kv.envelopes.take(30)
    kv.give_up_everything()
    assert not memory.owned and kv.available == 0 and kv.used == 0
    kv.hold_dummy(wait_s=1.0)
    assert kv.grow(5, wait_s=0.0)
    kv.envelopes.audit()


@given(
    st.sampled_from([10, 64, 150]),
    st.lists(st.tuples(st.sampled_from(["grow", "take", "give", "spare"]), st.integers(1, 12)), max_size=30),
)
def test_each_empty_extent_is_found_and_leaves_as_long_as_there_is_room(
    envelope: int, steps: list[tuple[str, int]]
) -> None:
    kv, memory, _ = made(envelope, count=60, limit=min(20, -(-60 * envelope // 64)))  # no more than have addresses
    taken: list[int] = []
    for what, count in steps:
        if what == "grow":
            kv.grow(count, wait_s=0.0)
        elif what == "take" and (some := kv.envelopes.take(count)) is not None:
            taken += some.tolist()
        elif what == "give" and taken:
            kv.envelopes.give(np.array([taken.pop(count % len(taken))]))
        elif what == "spare":
            had, left = kv.available, kv.give_up_spare(count)
            assert not left or kv.available >= count
            rest = empty(kv, memory)
            if rest and had >= count:
                last = kv.envelopes.available_on([max(rest)])
                assert kv.available - last < count, "one more had room to leave"
        assert kv.leaving() == len(empty(kv, memory))


def empty(kv: ElasticKv, memory: ScriptedRange) -> list[int]:
    """Held extents that no live envelope touches."""
    touched = {extent for number in kv.envelopes.all_live().tolist() for extent in kv.envelopes.extents_of(number)}
    return sorted(set(memory.owned) - touched)
