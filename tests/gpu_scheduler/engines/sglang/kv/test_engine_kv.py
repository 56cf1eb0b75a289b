"""KV of two kinds over one range of balloond's driver, with CPU pages: the books of both, and what one gives up for the
other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from balloond.backends.cpu import PAGE_BYTES
from balloond.driver.kv import range as driver_range
from balloond.driver.kv import watermarks
from balloond.driver.kv.range import ElasticRange
from gpu_scheduler.engines.sglang.kv.elastic_kv import DUMMY, ElasticKv
from gpu_scheduler.engines.sglang.kv.engine_kv import EVERY, WINDOW, EngineKv
from gpu_scheduler.engines.sglang.memory.kv_stretch import KvStretch
from gpu_scheduler.engines.sglang.policy.compaction import begun, moves_within
from tests.balloond.conftest import TIMEOUT_S
from tests.balloond.driver.fakes import FakeLease, GatedMapper

ENVELOPES = PAGE_BYTES * 3 // 8, PAGE_BYTES * 5 // 4
"""Bytes of a token of each kind: extents hold several of one, and parts of the other."""
TOKENS, WAIT_S = 40, 1.0


def made(
    lease: FakeLease,
    *,
    large: int = 1,
    low: int = 0,
    high: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[EngineKv, ElasticRange]:
    spans = [TOKENS * nbytes + PAGE_BYTES for nbytes in ENVELOPES]
    memory = ElasticRange(
        lease, GatedMapper(), span_bytes=spans, extent_bytes=PAGE_BYTES, low=low, high=high, large=large
    )
    kinds = [ElasticKv(KvStretch(memory, number), nbytes, TOKENS, clock) for number, nbytes in enumerate(ENVELOPES)]
    return EngineKv(memory, kinds, window=8), memory


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(watermarks, "IDLE_S", 1e6)
    monkeypatch.setattr(driver_range, "IDLE_S", 1e6)
    lease = FakeLease(capacity=60)
    yield lease
    lease.loop.stop()


def take(kv: EngineKv, kind: int, tokens: int) -> np.ndarray:
    taken = kv.kinds[kind].envelopes.take(tokens)
    assert taken is not None
    return taken


def at_the_limit(lease: FakeLease, clock: Callable[[], float]) -> tuple[EngineKv, ElasticRange]:
    """Room for 16 tokens of one kind and 8 of the other, which takes all extents that the limit allows."""
    kv, memory = made(lease, clock=clock)
    lease.set_limit(16)
    lease.settle()
    assert kv.grow((16, 8), WAIT_S, (0, 0)) and memory.headroom(EVERY) == 0
    return kv, memory


def test_growth_makes_room_in_every_kind_and_bytes_are_those_of_both(lease: FakeLease) -> None:
    kv, memory = made(lease)
    assert kv.short((10, 4)) == (10, 4)
    assert kv.grow((10, 4), WAIT_S, (0, 0))
    assert kv.available[EVERY] >= 10 and kv.available[WINDOW] >= 4 and kv.short((10, 4)) == (0, 0)
    take(kv, EVERY, 10)
    take(kv, WINDOW, 4)
    assert kv.used_bytes == 10 * ENVELOPES[EVERY] + 4 * ENVELOPES[WINDOW]
    assert kv.bytes_of(1) == sum(ENVELOPES)
    assert kv.held_bytes == memory.mapped_bytes


def test_a_kind_that_lacks_memory_gets_the_empty_extents_of_the_other(lease: FakeLease) -> None:
    kv, memory = made(lease)
    lease.set_limit(12)
    lease.settle()
    assert kv.grow((30, 0), WAIT_S, (0, 0))
    assert memory.headroom(WINDOW) < 5
    assert kv.grow((0, 4), WAIT_S, (0, 0)), "the other kind needs none now"
    assert kv.available[WINDOW] >= 4 and memory.overage_bytes() == 0


def test_a_kind_gives_up_nothing_that_is_to_be_used_together_with_the_other(lease: FakeLease) -> None:
    kv, memory = made(lease)
    lease.set_limit(12)
    lease.settle()
    assert kv.grow((30, 0), WAIT_S, (0, 0))
    held = kv.kinds[EVERY].envelopes.held
    take(kv, EVERY, 5)
    assert not kv.grow((25, 4), 0.0, (0, 0)) and kv.available[EVERY] >= 25
    assert kv.kinds[EVERY].envelopes.held == held


def test_kinds_that_could_evict_do_not_pass_extents_to_and_fro_with_every_step(lease: FakeLease) -> None:
    now = 0.0
    kv, memory = at_the_limit(lease, lambda: now)
    held = [kind.envelopes.held for kind in kv.kinds]
    cached = take(kv, EVERY, kv.available[EVERY])
    for _ in range(40):  # a step takes all of the window's room and frees it, a tenth of a second each
        kv.look()
        in_window = take(kv, WINDOW, 8)
        now += 0.05
        kv.look()
        kv.kinds[WINDOW].envelopes.give(in_window)
        now += 0.05
        assert not kv.grow((4, 0), WAIT_S, (len(cached), 0), politely=True)
        assert [kind.envelopes.held for kind in kv.kinds] == held
    # Two seconds without such a step show that the window does not need it.
    for _ in range(25):
        kv.look()
        now += 0.1
    assert kv.grow((4, 0), WAIT_S, (len(cached), 0), politely=True)
    assert kv.available[EVERY] >= 4 and memory.overage_bytes() == 0


def test_a_kind_that_could_not_evict_gets_extents_that_the_other_used_a_moment_ago(lease: FakeLease) -> None:
    now = 0.0
    kv, memory = at_the_limit(lease, lambda: now)
    take(kv, EVERY, kv.available[EVERY])
    in_window = take(kv, WINDOW, 8)
    kv.look()
    kv.kinds[WINDOW].envelopes.give(in_window)
    assert kv.grow((4, 0), WAIT_S, (3, 0), politely=True), "three cached tokens do not make room for four"


@pytest.mark.parametrize(("leave", "shares"), [(0, (0, 0)), (3, (0, 3)), (6, (2, 4)), (9, (3, 6)), (50, (5, 8))])
def test_extents_that_only_have_to_be_compacted_leave_first(
    lease: FakeLease, leave: int, shares: tuple[int, int]
) -> None:
    kv, _ = made(lease)
    assert kv.grow((12, 6), WAIT_S, (0, 0))
    every, window = take(kv, EVERY, 12), take(kv, WINDOW, 6)
    kv.kinds[EVERY].envelopes.give(every[5:10])
    kv.kinds[WINDOW].envelopes.give(window[1:4])
    held, least = [kind.envelopes.held for kind in kv.kinds], [kind.least_extents for kind in kv.kinds]
    assert (held, least) == ([5, 8], [3, 4])
    assert kv.share_of(leave) == shares
    assert kv.beyond(6) == (0, 0) and all(kv.beyond(9))


class KindsMachine(RuleBasedStateMachine):
    """Tokens of two kinds come together; those of the window leave sooner. Extents come and go under a limit."""

    LARGE = 1

    def __init__(self) -> None:
        super().__init__()
        self.lease = FakeLease(capacity=40)
        self.now = 0.0
        self.looks: list[list[tuple[float, int]]] = [[], []]
        """Time and tokens that had room, at each look, for each kind."""
        self.kv, self.memory = made(self.lease, large=self.LARGE, low=1, high=4, clock=lambda: self.now)
        self.kv.hold_dummy(TIMEOUT_S)
        self.live: list[list[int]] = [[], []]

    def _free(self, kind: int, some: list[int]) -> None:
        if some:
            self.kv.kinds[kind].envelopes.give(np.array(sorted(some), dtype=np.int64))
            self.live[kind] = [each for each in self.live[kind] if each not in some]

    @rule(tokens=st.integers(1, 12), waits=st.booleans(), cached=st.integers(0, 12))
    def compute(self, tokens: int, waits: bool, cached: int) -> None:
        needs, before = self.kv.of_each(tokens), self.kv.available
        there = self.kv.grow(needs, TIMEOUT_S if waits else 0.0, self.kv.of_each(cached), politely=True)
        if cached >= tokens:  # so much could be evicted instead
            for had, has, looks in zip(before, self.kv.available, self.looks, strict=True):
                lately = [free for at, free in looks if self.now - at < 1.0] or [free for _, free in looks[-1:]]
                assert had - has <= min(lately, default=0), "a kind loses only what it has not used lately"
        assert not there or not any(self.kv.short(needs))
        if not any(self.kv.short(needs)):
            for kind in (EVERY, WINDOW):
                self.live[kind] += take(self.kv, kind, tokens).tolist()

    @rule(later_s=st.sampled_from([0.1, 0.6, 1.2]))
    def look(self, later_s: float) -> None:
        self.now += later_s
        self.kv.look()
        for looks, free in zip(self.looks, self.kv.available, strict=True):
            looks.append((self.now, free))

    @rule(picks=st.sets(st.integers(0, TOKENS)), kind=st.integers(0, 1))
    def free(self, picks: set[int], kind: int) -> None:
        self._free(kind, [each for each in self.live[kind] if each in picks])

    @rule(tokens=st.integers(0, TOKENS), kind=st.integers(0, 1))
    def give_up_spare(self, tokens: int, kind: int) -> None:
        before = self.kv.kinds[kind].available
        self.kv.kinds[kind].give_up_spare(tokens)
        assert self.kv.kinds[kind].available >= min(before, tokens)

    @rule(extents=st.integers(0, 40))
    def limit(self, extents: int) -> None:
        self.lease.set_limit(extents)

    @rule(extents=st.integers(1, 8))
    def reclaim(self, extents: int) -> None:
        self.lease.reclaim(1, extents, deep=True)

    @rule()
    def shrink(self) -> None:
        """Makes memory leave as an engine over its limit does: frees tokens that would have no place, and moves the
        others together."""
        self.lease.settle()
        kv, memory, lost = self.kv, self.memory, 0
        memory.take_reclaims()
        while (over := memory.overage_bytes()) > 0 and any(self.live):
            kv.hold_tied()
            extents = -(-over // memory.extent_bytes)
            for kind, tokens in enumerate(kv.beyond(extents + lost)):
                self._free(kind, self.live[kind][:tokens])
            for kind, (each, share) in enumerate(zip(kv.kinds, kv.share_of(extents), strict=True)):
                envelopes, units = each.envelopes, each.units()
                if share > each.leaving():
                    sources, destinations = moves_within(envelopes, begun(envelopes, units) - share, units, [DUMMY])
                    envelopes.move(sources, destinations)
                    gone = set(sources.tolist())
                    self.live[kind] = [one for one in self.live[kind] if one not in gone] + destinations.tolist()
            kv.give_up_empties()
            self.lease.settle()
            lost = 2 * lost + 1
        memory.reclaimed()

    @rule()
    def give_up_empties(self) -> None:
        self.kv.give_up_empties()

    @rule()
    def hibernate(self) -> None:
        for kind in (EVERY, WINDOW):
            self._free(kind, self.live[kind])
        self.kv.give_up_everything()
        assert self.memory.mapped_bytes == 0 and self.lease.held == set()
        self.lease.set_limit(40)
        self.lease.settle()
        self.kv.may_wait_again()
        self.kv.hold_dummy(TIMEOUT_S)

    @invariant()
    def the_books_of_both_kinds_hold(self) -> None:
        self.lease.settle()
        kv, memory = self.kv, self.memory
        memory.check()
        for number, kind in enumerate(kv.kinds):
            kind.envelopes.audit()
            assert sorted([*self.live[number], DUMMY]) == kind.envelopes.all_live().tolist()
            held = {extent for extent in range(kind.envelopes.n_extents) if kind.envelopes.is_held(extent)}
            assert held == memory._stretches[number].owned, "what a kind holds is what its stretch has given it"
        places = [
            place
            for number, kind in enumerate(kv.kinds)
            for place in memory.located(
                [extent for extent in range(kind.envelopes.n_extents) if kind.envelopes.is_held(extent)],
                stretch=number,
            )
        ]
        assert len(set(places)) == len(places), "no memory belongs to two kinds"
        assert kv.held_bytes == len(places) * PAGE_BYTES <= memory.mapped_bytes
        assert kv.used_bytes == sum(len(some) * nbytes for some, nbytes in zip(self.live, ENVELOPES, strict=True))

    def teardown(self) -> None:
        self.hibernate()
        assert self.kv.grow((TOKENS // 2, TOKENS // 4), TIMEOUT_S, (0, 0))
        self.kv.give_up_everything()
        self.memory.close()
        assert self.lease.held == set()
        self.lease.loop.stop()


KindsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestKindsUnderEverything = KindsMachine.TestCase


class LargeExtentsMachine(KindsMachine):
    LARGE = 3


LargeExtentsMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestKindsInLargeExtentsUnderEverything = LargeExtentsMachine.TestCase
