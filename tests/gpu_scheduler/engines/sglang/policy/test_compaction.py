"""Moving live envelopes together, against slow and obvious models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sglang.policy import compaction
from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes, Indices

RATIOS = st.sampled_from([0.5, 1.0, 1.15, 1.5, 3.0])


def made(envelope_bytes: int, extent_bytes: int, count: int, held: Sequence[int], live: Sequence[int]) -> Envelopes:
    """What of `live` cannot be live stays free."""
    envelopes = Envelopes(envelope_bytes=envelope_bytes, extent_bytes=extent_bytes, count=count)
    envelopes.hold(held)
    for envelope in set(live) & set(envelopes.all_available().tolist()):
        envelopes.take_exactly(envelope)
    return envelopes


@st.composite
def pools(draw: st.DrawFn) -> Envelopes:
    """Envelopes fit exactly, straddle, or span several extents."""
    envelope_bytes, extent_bytes = draw(st.integers(1, 20)), draw(st.sampled_from([7, 16, 24]))
    count = draw(st.integers(1, 60))
    n_extents = -(-count * envelope_bytes // extent_bytes)
    held = draw(st.lists(st.integers(0, n_extents - 1), unique=True))
    live = draw(st.lists(st.integers(0, count - 1), unique=True))
    return made(envelope_bytes, extent_bytes, count, held, live)


def alone(envelopes: Envelopes) -> Indices:
    """Units of one extent each."""
    return np.arange(envelopes.n_extents)


@st.composite
def units_of(draw: st.DrawFn, envelopes: Envelopes) -> Indices:
    """Some extents leave with their neighbours, others alone."""
    units, factor = alone(envelopes), draw(st.integers(1, 4))
    for first in range(0, envelopes.n_extents - factor + 1, factor):
        if draw(st.booleans()):
            units[first : first + factor] = first
    return units


def begun(envelopes: Envelopes) -> set[int]:
    return set(np.flatnonzero(envelopes.live_by_extent()).tolist())


def begun_units(envelopes: Envelopes, units: Indices) -> set[int]:
    """All extents of the units that something lives on."""
    return set(np.flatnonzero(np.isin(units, units[list(begun(envelopes))])).tolist())


def excess(envelopes: Envelopes, ratio: float, used: set[int]) -> int:
    """How many extents too many are in use."""
    live_bytes = envelopes.live * envelopes.envelope_bytes
    return max(0, len(used) - int(ratio * live_bytes / envelopes.extent_bytes))


def to_move(envelopes: Envelopes, emptied: set[int]) -> set[int]:
    return {e for e in envelopes.all_live().tolist() if emptied & set(envelopes.extents_of(e))}


def places(envelopes: Envelopes, emptied: set[int], used: set[int]) -> set[int]:
    stay = used - emptied
    return {e for e in envelopes.all_available().tolist() if stay >= set(envelopes.extents_of(e))}


@given(pools(), RATIOS, st.data())
def test_the_sparsest_extents_are_emptied_until_the_ratio_is_met_or_the_next_does_not_fit(
    envelopes: Envelopes, ratio: float, data: st.DataObject
) -> None:
    live, units = envelopes.all_live().tolist(), data.draw(units_of(envelopes))
    fixed = data.draw(st.lists(st.sampled_from(live), max_size=3)) if live else []
    pinned = {int(units[extent]) for envelope in fixed for extent in envelopes.extents_of(envelope)}
    used = begun_units(envelopes, units)
    of = {first: {extent for extent in used if units[extent] == first} for first in {int(units[e]) for e in used}}
    sparse = {first: sum(map(envelopes.live_in, extents)) / len(extents) for first, extents in of.items()}
    emptied: set[int] = set()
    for first in sorted(of.keys() - pinned, key=lambda first: (sparse[first], first)):
        more = emptied | of[first]
        too_many = len(emptied) < excess(envelopes, ratio, used)
        if not too_many or len(to_move(envelopes, more)) > len(places(envelopes, more, used)):
            break
        emptied = more
    expected, allowed = to_move(envelopes, emptied), places(envelopes, emptied, used)
    held = envelopes.held

    sources, destinations = compaction.moves(envelopes, ratio, units, fixed)

    assert set(sources.tolist()) == expected and len(sources) == len(destinations)
    assert set(destinations.tolist()) <= allowed
    envelopes.move(sources, destinations)
    envelopes.audit()
    assert envelopes.live == len(live) and envelopes.held == held
    assert set(envelopes.all_live().tolist()) == set(live) - expected | set(destinations.tolist())
    assert set(fixed) <= set(envelopes.all_live().tolist())
    assert begun(envelopes) <= used - emptied


@given(
    st.lists(st.integers(0, 15), min_size=1, max_size=6),
    st.data(),
    RATIOS,
)
def test_compaction_without_straddling_envelopes_makes_the_fewest_moves(
    bits: list[int], data: st.DataObject, ratio: float
) -> None:
    live = [4 * extent + place for extent, mask in enumerate(bits) for place in range(4) if mask >> place & 1]
    held = [extent for extent, mask in enumerate(bits) if mask or data.draw(st.booleans())]
    envelopes = made(4, 16, 4 * len(bits), held, live)
    feasible = [
        set(some)
        for size in range(len(bits) + 1)
        for some in combinations(begun(envelopes), size)
        if len(to_move(envelopes, set(some))) <= len(places(envelopes, set(some), begun(envelopes)))
    ]
    most = min(excess(envelopes, ratio, begun(envelopes)), max(map(len, feasible)))
    fewest = min(len(to_move(envelopes, some)) for some in feasible if len(some) >= most)
    sources, destinations = compaction.moves(envelopes, ratio, alone(envelopes))
    before = len(begun(envelopes))
    envelopes.move(sources, destinations)
    assert len(sources) == fewest and before - len(begun(envelopes)) >= most


def test_a_pool_in_which_every_second_envelope_died_is_packed() -> None:
    envelopes = made(4, 16, 400, range(100), range(0, 400, 2))
    assert len(begun(envelopes)) == 100
    sources, destinations = compaction.moves(envelopes, 1.15, alone(envelopes))
    envelopes.move(sources, destinations)
    assert len(begun(envelopes)) == 57 and len(sources) == 2 * 43
    envelopes.give_up(envelopes.empties())
    assert envelopes.held * 16 <= 1.15 * envelopes.live * 4


def test_extents_that_leave_together_are_emptied_together() -> None:
    envelopes = made(4, 16, 400, range(100), range(0, 400, 2))
    units = alone(envelopes) // 5 * 5
    sources, destinations = compaction.moves(envelopes, 1.15, units)
    envelopes.move(sources, destinations)
    assert len(begun_units(envelopes, units)) == 55 <= 1.15 * envelopes.live * 4 / 16


def test_compaction_moves_envelopes_to_the_fullest_extents() -> None:
    live = [0, 4, 5, 8, 9, 10]  # One, two and three of four.
    envelopes = made(4, 16, 12, range(3), live)
    sources, destinations = compaction.moves(envelopes, 4 / 3, alone(envelopes))
    assert sources.tolist() == [0] and destinations.tolist() == [11]


def test_compaction_of_a_pool_without_live_envelopes_needs_no_move() -> None:
    envelopes = made(4, 16, 12, range(3), [])
    sources, destinations = compaction.moves(envelopes, 1.15, alone(envelopes))
    assert len(sources) == len(destinations) == 0


class Counted(Envelopes):
    """Envelopes that count those whose extents are looked up."""

    looked_up = 0

    def touched(self, envelopes: Indices) -> Indices:
        self.looked_up += len(envelopes)
        return super().touched(envelopes)


@pytest.mark.parametrize("envelope_bytes", [4, 5])
def test_choosing_moves_looks_up_envelopes_that_move_or_lie_over_edges_alone(envelope_bytes: int) -> None:
    extents = 40
    envelopes = Counted(envelope_bytes=envelope_bytes, extent_bytes=4000, count=extents * 4000 // envelope_bytes)
    envelopes.hold(range(extents))
    taken = envelopes.take(envelopes.total)
    assert taken is not None
    sparse = envelopes.touching(np.array([3]))
    envelopes.give(np.concatenate((sparse[:-5], envelopes.touching(np.array([7]))[:100])))
    envelopes.looked_up = 0
    sources, _ = compaction.moves_within(envelopes, extents - 1, alone(envelopes), [0])
    assert 0 < len(sources) <= 5
    assert envelopes.looked_up <= extents + 100 + 10


@given(st.dictionaries(st.integers(0, 1 << 40), st.integers(0, 1 << 40), max_size=8), st.data())
def test_sources_of_a_move_become_its_destinations_and_other_numbers_stay(
    moved: dict[int, int], data: st.DataObject
) -> None:
    """Numbers are so large that a table of all of them has no place."""
    any_number = st.one_of(st.integers(0, 1 << 40), st.sampled_from([*moved, 0]))
    numbers = data.draw(st.lists(any_number))
    sources, destinations = (np.array([*some], dtype=np.int64) for some in (moved, moved.values()))
    found = compaction.renumbered(np.array(numbers, dtype=np.int64), sources, destinations)
    assert found.tolist() == [moved.get(number, number) for number in numbers]
