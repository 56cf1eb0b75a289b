"""The accounting against a slow, obvious model: a set of live envelopes and a set of held extents."""

from __future__ import annotations

import math
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from gpu_scheduler.engines.sglang.policy import envelopes as envelopes_module
from gpu_scheduler.engines.sglang.policy.envelopes import CachedPieces, Envelopes, coldest_first

Taken = NDArray[np.int64]


class AgainstSets(RuleBasedStateMachine):
    """Sizes are chosen so that envelopes fit exactly, straddle, and span several extents."""

    @initialize(
        envelope_bytes=st.integers(1, 40),
        extent_bytes=st.sampled_from([1, 7, 16, 24, 32]),
        count=st.integers(1, 40),
    )
    def start(self, envelope_bytes: int, extent_bytes: int, count: int) -> None:
        self.envelopes = Envelopes(envelope_bytes=envelope_bytes, extent_bytes=extent_bytes, count=count)
        self.b, self.x, self.count = envelope_bytes, extent_bytes, count
        self.n = self.envelopes.n_extents
        assert (self.n - 1) * extent_bytes < count * envelope_bytes <= self.n * extent_bytes
        self.held: set[int] = set()
        self.live: set[int] = set()

    def touches(self, envelope: int) -> set[int]:
        return {byte // self.x for byte in range(envelope * self.b, (envelope + 1) * self.b)}

    def free(self) -> set[int]:
        return {e for e in range(self.count) if e not in self.live and self.touches(e) <= self.held}

    def on(self, extent: int) -> set[int]:
        return {e for e in self.live if extent in self.touches(e)}

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        missing = sorted(set(range(self.n)) - self.held)
        if missing:
            extents = data.draw(st.lists(st.sampled_from(missing), unique=True, min_size=1))
            self.envelopes.hold(extents)
            self.held |= set(extents)

    @rule(data=st.data())
    def give_up_empties(self, data: st.DataObject) -> None:
        empties = self.envelopes.empties()
        assert empties == sorted(e for e in self.held if not self.on(e))
        if empties:
            extents = data.draw(st.lists(st.sampled_from(empties), unique=True))
            self.envelopes.give_up(extents)
            self.held -= set(extents)

    @rule(count=st.integers(0, 30))
    def take(self, count: int) -> None:
        free = self.free()
        taken = self.envelopes.take(count)
        if count > len(free):
            assert taken is None
            return
        assert taken is not None
        assert taken.tolist() == sorted(free)[:count]
        self.live |= set(taken.tolist())

    @rule(data=st.data())
    def take_exactly(self, data: st.DataObject) -> None:
        free = sorted(self.free())
        if free:
            one = data.draw(st.sampled_from(free))
            self.envelopes.take_exactly(one)
            self.live.add(one)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        back = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True))
        self.envelopes.give(np.array(back, dtype=np.int64))
        self.live -= set(back)

    @precondition(lambda self: self.live and self.free())
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        sources = data.draw(st.lists(st.sampled_from(sorted(self.live)), unique=True, max_size=len(self.free())))
        count = len(sources)
        free = sorted(self.free())
        destinations = data.draw(st.lists(st.sampled_from(free), unique=True, min_size=count, max_size=count))
        self.envelopes.move(np.array(sources, dtype=np.int64), np.array(destinations, dtype=np.int64))
        self.live = self.live - set(sources) | set(destinations)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_live_extent_cannot_be_given_up(self, data: st.DataObject) -> None:
        full = sorted(e for e in self.held if self.on(e))
        if full:
            with pytest.raises(ValueError, match="not empty"):
                self.envelopes.give_up([data.draw(st.sampled_from(full))])

    @invariant()
    def counters_agree(self) -> None:
        if not hasattr(self, "envelopes"):
            return
        assert self.envelopes.available == len(self.free())
        assert self.envelopes.live == len(self.live)
        assert self.envelopes.held == len(self.held)
        assert self.envelopes.all_live().tolist() == sorted(self.live)
        assert self.envelopes.all_available().tolist() == sorted(self.free())
        every = np.arange(self.count)
        assert np.flatnonzero(self.envelopes.are_live(every)).tolist() == sorted(self.live)
        assert np.flatnonzero(self.envelopes.are_available(every)).tolist() == sorted(self.free())
        assert np.flatnonzero(self.envelopes.held_by_extent()).tolist() == sorted(self.held)
        some = sorted(self.live)[::2]
        others = self.envelopes.all_live_but(np.array(some, dtype=np.int64))
        assert others.tolist() == sorted(self.live - set(some))
        assert self.envelopes.live_by_extent().tolist() == [len(self.on(extent)) for extent in range(self.n)]
        for extent in range(self.n):
            assert self.envelopes.live_in(extent) == len(self.on(extent))
        self.envelopes.audit()


TestAgainstSets = AgainstSets.TestCase
TestAgainstSets.settings = settings(max_examples=80, stateful_step_count=30)


@pytest.mark.parametrize("seed", range(3))
def test_lowest_free_envelopes_are_taken_in_a_large_pool_too(seed: int) -> None:
    chance = np.random.default_rng(seed)
    envelopes = Envelopes(envelope_bytes=7, extent_bytes=32, count=20_000)
    envelopes.hold(range(envelopes.n_extents))
    free, live = np.arange(20_000), np.empty(0, dtype=np.int64)
    for _ in range(300):
        count = min(int(chance.integers(0, 3000)), len(free))
        taken = envelopes.take(count)
        assert taken is not None and taken.tolist() == free[:count].tolist()
        live = chance.permutation(np.concatenate((live, taken)))
        back, live = np.split(live, [min(int(chance.integers(0, 3000)), len(live))])
        envelopes.give(back)
        free = np.sort(np.concatenate((free[count:], back)))
    envelopes.audit()


def test_highest_extents_become_empty_as_envelopes_are_given_back() -> None:
    envelopes = Envelopes(envelope_bytes=4, extent_bytes=16, count=16)
    envelopes.hold(range(4))
    first, second = envelopes.take(6), envelopes.take(6)
    assert first is not None and second is not None
    envelopes.give(first)
    assert envelopes.take(4) is not None
    envelopes.give(second)
    assert envelopes.empties() == [1, 2, 3]


def test_envelopes_on_an_extent_that_was_given_up_are_not_taken() -> None:
    envelopes = Envelopes(envelope_bytes=4, extent_bytes=16, count=12)
    envelopes.hold([0, 1, 2])
    taken = envelopes.take(1)
    assert taken is not None and envelopes.empties() == [1, 2]
    envelopes.give(taken)
    envelopes.give_up([0, 1])
    taken = envelopes.take(2)
    assert taken is not None and taken.tolist() == [8, 9]
    envelopes.hold([1])
    taken = envelopes.take(5)
    assert taken is not None and taken.tolist() == [4, 5, 6, 7, 10]


class FullestFirst:
    """The slow, obvious choice, for each envelope anew."""

    def __init__(self, envelopes: Envelopes) -> None:
        self.envelopes = envelopes

    def take(self, count: int) -> Taken:
        taken = []
        for _ in range(count):
            free = self.envelopes.all_available()
            taken.append(int(free[self.envelopes.live_by_extent()[self.envelopes.homes(free)].argmax()]))
            self.envelopes.take_exactly(taken[-1])
        return np.array(taken, dtype=np.int64)


def mean_extents_held(envelopes: Envelopes, take: Callable[[int], Taken | None], seed: int) -> float:
    """Requests come, grow by one envelope now and then, and go; empty extents are given up, and held again at need."""
    chance = random.Random(seed)
    running: list[Taken] = []
    held = 0
    for step in range(400):
        load = 12 + 10 * math.sin(step / 40)
        wanted = [(index, 1) for index in range(len(running)) if chance.random() < 0.2]
        if len(running) < load:
            running.append(np.empty(0, dtype=np.int64))
            wanted.append((len(running) - 1, chance.randint(4, 24)))
        for index, count in wanted:
            while envelopes.available < count:
                envelopes.hold([next(e for e in range(envelopes.n_extents) if not envelopes.is_held(e))])
            taken = take(count)
            assert taken is not None
            running[index] = np.concatenate((running[index], taken))
        for index in reversed(range(len(running))):
            if chance.random() < 0.03 or len(running) > load + 1:
                envelopes.give(running.pop(index))
        envelopes.give_up(envelopes.empties())
        held += envelopes.held
    return held / 400


@pytest.mark.parametrize(("envelope_bytes", "extent_bytes"), [(4, 16), (7, 32), (3, 64)])
def test_taking_the_lowest_needs_hardly_more_extents_than_filling_the_fullest_first(
    envelope_bytes: int, extent_bytes: int
) -> None:
    lowest, fullest = 0.0, 0.0
    for seed in range(3):
        envelopes = Envelopes(envelope_bytes=envelope_bytes, extent_bytes=extent_bytes, count=1000)
        lowest += mean_extents_held(envelopes, envelopes.take, seed)
        envelopes = Envelopes(envelope_bytes=envelope_bytes, extent_bytes=extent_bytes, count=1000)
        fullest += mean_extents_held(envelopes, FullestFirst(envelopes).take, seed)
    assert lowest < 1.05 * fullest


def test_a_straddling_envelope_needs_both_extents_and_keeps_both() -> None:
    envelopes = Envelopes(envelope_bytes=10, extent_bytes=16, count=3)  # 0 in [0], 1 over both, 2 in [1]
    envelopes.hold([0])
    assert envelopes.available == 1
    envelopes.hold([1])
    assert envelopes.available == 3
    envelopes.take_exactly(1)
    assert envelopes.empties() == []
    envelopes.give(np.array([1]))
    assert envelopes.empties() == [0, 1]


def test_listing_live_envelopes_takes_no_memory_for_those_without_memory() -> None:
    envelopes = Envelopes(envelope_bytes=4 << 10, extent_bytes=8 << 20, count=100_000_000)
    envelopes.hold([0])
    taken = envelopes.take(3)
    assert taken is not None
    tracemalloc.start()
    try:
        assert envelopes.all_live_but(taken[:1]).tolist() == [1, 2]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.integers(1, 40), st.sampled_from([1, 7, 16, 24, 32]), st.integers(1, 40), st.randoms())
def test_many_envelopes_are_counted_on_the_extents_that_they_touch(
    envelope_bytes: int, extent_bytes: int, count: int, chance: random.Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(envelopes_module, "_MANY", 1)
        envelopes = Envelopes(envelope_bytes=envelope_bytes, extent_bytes=extent_bytes, count=count)
        envelopes.hold(each for each in range(envelopes.n_extents) if chance.random() < 0.9)
        taken = envelopes.take(envelopes.available)
        assert taken is not None
        envelopes.audit()
        some = [each for each in taken.tolist() if chance.random() < 0.5]
        chance.shuffle(some)
        envelopes.give(np.array(some, dtype=np.int64))
        envelopes.audit()


def test_freeing_millions_of_envelopes_looks_up_no_extents_of_each() -> None:
    envelopes = Envelopes(envelope_bytes=6 << 10, extent_bytes=8 << 20, count=30_000_000)
    envelopes.hold(range(1000))
    taken = envelopes.take(1_000_000)
    assert taken is not None
    tracemalloc.start()
    try:
        envelopes.give(taken)
        left, most = tracemalloc.get_traced_memory()
        assert most < 3 * taken.nbytes and left < 1 << 16
    finally:
        tracemalloc.stop()
    assert envelopes.live == 0 and not envelopes.live_by_extent().any()
    again = envelopes.take(3)
    assert again is not None and again.tolist() == [0, 1, 2]


def test_envelope_freed_twice_is_refused() -> None:
    envelopes = Envelopes(envelope_bytes=4, extent_bytes=16, count=4)
    envelopes.hold([0])
    taken = envelopes.take(2)
    assert taken is not None
    envelopes.give(taken)
    with pytest.raises(ValueError, match="twice"):
        envelopes.give(taken)


@pytest.mark.parametrize(
    ("sources", "destinations", "why"),
    [([0, 1], [8], "pairs"), ([0, 0], [8, 9], "pairs"), ([0, 1], [8, 8], "pairs"), ([0], [1], "available")]
    + [([8], [9], "live"), ([0], [12], "available")],
)
def test_invalid_move_of_envelopes_is_refused_and_nothing_changes(
    sources: list[int], destinations: list[int], why: str
) -> None:
    envelopes = Envelopes(envelope_bytes=4, extent_bytes=16, count=16)
    envelopes.hold([0, 2])
    for envelope in (0, 1):
        envelopes.take_exactly(envelope)
    with pytest.raises(ValueError, match=why):
        envelopes.move(np.array(sources), np.array(destinations))
    assert envelopes.all_live().tolist() == [0, 1]
    envelopes.audit()


@given(
    n=st.integers(1, 8),
    pieces=st.lists(
        st.tuples(st.floats(0, 100), st.integers(0, 5), st.lists(st.integers(0, 7), max_size=6)), max_size=8
    ),
    running=st.lists(st.integers(0, 7), max_size=4),
    wanted=st.integers(0, 8),
    together=st.sampled_from([1, 1, 2, 3]),
)
def test_eviction_picks_extents_of_cached_pieces_alone_oldest_and_deepest_first(
    n: int, pieces: list[tuple[float, int, list[int]]], running: list[int], wanted: int, together: int
) -> None:
    """The first `together` extents leave together, the others alone."""
    units = np.arange(n)
    units[:together] = 0
    pieces = [(age, depth, [e for e in touched if e < n]) for age, depth, touched in pieces]
    live = np.zeros(n, dtype=np.int64)
    for extent in [e for _, _, touched in pieces for e in touched] + [e for e in running if e < n]:
        live[extent] += 1
    # An extent may hold any envelope of a piece here, each in a run of its own.
    entries = [(piece, e, i, 1) for piece, (_, _, t) in enumerate(pieces) for i, e in enumerate(t)]
    cached = CachedPieces(
        np.array([age for age, _, _ in pieces]),
        np.array([depth for _, depth, _ in pieces], dtype=np.int64),
        *np.array(entries, dtype=np.int64).reshape(-1, 4).T,
    )
    chosen = coldest_first(cached, live, wanted, units).tolist()
    on = {u: [(a, d, [int(units[e]) for e in t]) for a, d, t in pieces] for u in units.tolist()}
    ages = {u: min((a for a, _, t in some if u in t), default=None) for u, some in on.items()}
    depths = {u: min((d + t.index(u) for _, d, t in some if u in t), default=0) for u, some in on.items()}
    busy = {int(units[e]) for e in running if e < n}
    eligible = [u for u in on if ages[u] is not None and u not in busy]
    sizes = {u: int(np.count_nonzero(units == u)) for u in eligible}
    assert len(chosen) == len(set(chosen)) and set(chosen) <= set(eligible)
    assert sum(sizes[u] for u in chosen) >= min(wanted, sum(sizes.values()))
    assert sum(sizes[u] for u in chosen[:-1]) < max(wanted, 1), "no more than are needed"
    left_out = [(ages[u], depths[u]) for u in eligible if u not in chosen]
    if chosen and left_out:
        assert min((ages[u], depths[u]) for u in chosen) >= max(left_out)


@given(st.integers(1, 40), st.sampled_from([7, 16, 24]), st.lists(st.lists(st.integers(0, 30), max_size=8)))
def test_runs_of_cached_pieces_have_all_that_their_envelopes_touch(
    envelope_bytes: int, extent_bytes: int, places: list[list[int]]
) -> None:
    envelopes = Envelopes(envelope_bytes=envelope_bytes, extent_bytes=extent_bytes, count=31)
    arrays = [np.array(some, dtype=np.int64) for some in places]
    pieces = CachedPieces.of(envelopes, arrays, [0.0] * len(places), [0] * len(places))
    counts: Counter[tuple[int, int]] = Counter()
    first: dict[tuple[int, int], int] = {}
    for piece, extent, position, count in zip(
        pieces.piece.tolist(), pieces.extent.tolist(), pieces.position.tolist(), pieces.count.tolist(), strict=True
    ):
        counts[piece, extent] += count
        first[piece, extent] = min(position, first.get((piece, extent), position))
    touching = [
        (piece, extent, position)
        for piece, some in enumerate(places)
        for position, envelope in enumerate(some)
        for extent in envelopes.extents_of(envelope)
    ]
    assert counts == Counter((piece, extent) for piece, extent, _ in touching)
    assert first == {(piece, extent): position for piece, extent, position in reversed(touching)}
    for extent in range(envelopes.n_extents):
        found = pieces.first_on(np.arange(envelopes.n_extents) == extent)
        assert found == [first.get((piece, extent)) for piece in range(len(places))]


def test_straddling_envelopes_count_on_every_extent_that_they_touch() -> None:
    envelopes = Envelopes(envelope_bytes=10, extent_bytes=16, count=8)
    pieces = CachedPieces.of(envelopes, [np.array([0, 1, 4])], [0.0], [0])
    runs = zip(pieces.extent, pieces.position, pieces.count, strict=True)
    assert sorted(tuple(map(int, run)) for run in runs) == [(0, 0, 2), (1, 1, 1), (2, 2, 1), (3, 2, 1)]
    alone = CachedPieces.of(envelopes, np.split(np.arange(8), 8), [0.0] * 8, [0] * 8)
    first = alone.first_on(np.arange(envelopes.n_extents) == 1)
    assert [envelope for envelope in range(8) if first[envelope] == 0] == [1, 2, 3]


def test_neighbours_on_one_extent_are_one_run() -> None:
    envelopes = Envelopes(envelope_bytes=10, extent_bytes=1000, count=1000)
    pieces = CachedPieces.of(envelopes, [np.arange(50, 350), np.arange(350, 360)], [1.0, 2.0], [0, 300])
    runs = zip(pieces.piece, pieces.extent, pieces.position, pieces.count, strict=True)
    assert [tuple(map(int, run)) for run in runs] == [(0, 0, 0, 50), (0, 1, 50, 100), (0, 2, 150, 100)] + [
        (0, 3, 250, 50),
        (1, 3, 0, 10),
    ]


def test_mark_tells_the_same_numbers_in_other_places_apart() -> None:
    here, there, again = (Envelopes(envelope_bytes=8, extent_bytes=16, count=8) for _ in range(3))
    for each, extents in ((here, [0, 1]), (there, [0, 2]), (again, [1, 0])):
        each.hold(extents)
        each.take(3)
    assert (here.live, here.available, here.held) == (there.live, there.available, there.held)
    assert here.mark() == again.mark() != there.mark()
