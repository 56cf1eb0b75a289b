"""Chooses which live KV blocks (envelopes) to move together, so that extents empty.

The sparsest extents are emptied into holes of the fullest. Where no envelope straddles two extents, and all extents are
of one size, that is the fewest moves by which as many can be emptied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_scheduler.engines.sglang.policy.envelopes import Envelopes
from gpu_scheduler.engines.sglang.policy.layout import Indices


def moves(
    envelopes: Envelopes, ratio: float, units: Indices, fixed: Sequence[int] | Indices = ()
) -> tuple[Indices, Indices]:
    """Moves (see `moves_within`) after which the live envelopes lie on at most as many extents as `ratio` times their
    bytes fill."""
    allowed = int(ratio * envelopes.live * envelopes.envelope_bytes / envelopes.extent_bytes)
    return moves_within(envelopes, allowed, units, fixed)


def renumbered(numbers: Indices, sources: Indices, destinations: Indices) -> Indices:
    """The numbers of envelopes after a move: a source becomes its destination, any other number stays."""
    if not len(sources):
        return numbers
    order = np.argsort(sources)
    near = np.minimum(np.searchsorted(sources, numbers, sorter=order), len(sources) - 1)
    moved = order[near]
    return np.where(sources[moved] == numbers, destinations[moved], numbers)


def begun(envelopes: Envelopes, units: Indices) -> int:
    """Number of extents that hold a live envelope, or that leave only together with one that does."""
    in_use = np.zeros(len(units), dtype=bool)
    in_use[units[np.flatnonzero(envelopes.live_by_extent())]] = True
    return int(np.count_nonzero(in_use[units]))


def moves_within(
    envelopes: Envelopes, allowed: int, units: Indices, fixed: Sequence[int] | Indices = ()
) -> tuple[Indices, Indices]:
    """Sources and destinations for `Envelopes.move`, two arrays of one length, after which live envelopes lie on at
    most `allowed` extents; extents that are empty already leave without a move. `units` names for each extent the first
    of those that leave with it: of such a unit all are in use, or none.

    More extents stay in use when that cannot be reached, because the next sparsest unit has more live envelopes than
    there are holes elsewhere. No destination is on a unit that is emptied, nor on an empty one. `fixed` live envelopes
    stay where they are.
    """
    count = envelopes.n_extents
    live_here = envelopes.live_by_extent()
    on_unit = np.bincount(units, weights=live_here, minlength=count)
    size = np.bincount(units, minlength=count)
    in_use = np.flatnonzero(on_unit)
    # The padding of `touched` counts as a unit of its own.
    units = np.append(units, count)
    pinned = np.zeros(count + 1, dtype=bool)
    pinned[units[envelopes.touched(np.array(fixed, dtype=np.int64))]] = True
    in_use = in_use[np.lexsort((on_unit[in_use] / size[in_use], pinned[in_use]))]
    # An envelope has to leave with the first of its units that is emptied, and can be a destination until then.
    turns = np.full(count + 1, -1)
    turns[in_use] = np.arange(len(in_use))
    turns[-1] = len(in_use)
    turns = turns[units]
    leaving, lost = _by_turn(envelopes, turns, live_here, len(in_use))
    holes = lost.sum() - lost.cumsum()
    possible = min(
        int(np.count_nonzero(leaving.cumsum() <= holes)), len(in_use) - int(np.count_nonzero(pinned[in_use]))
    )
    leaving_first = size[in_use].cumsum()
    surplus = int(size[in_use].sum()) - allowed
    emptied = min(int(np.searchsorted(leaving_first, surplus)) + 1, possible) if surplus > 0 else 0
    sources = envelopes.touching(np.flatnonzero((turns[:-1] >= 0) & (turns[:-1] < emptied)))
    sources = sources[envelopes.are_live(sources)]
    return sources, _last_lost(envelopes, turns, lost, len(sources))


def _by_turn(envelopes: Envelopes, turns: Indices, live_here: Indices, count: int) -> tuple[Indices, Indices]:
    """Numbers of live and of available envelopes by the least turn of the extents that they touch, (count,) each.
    `turns`: the turn of each extent, below `count`, or -1: it has none, and an envelope that touches it is not counted;
    the last entry is for the padding of `touched`. Envelopes in one extent are counted together, because there may be
    millions of them; only those that lie over an edge are looked at."""
    used = np.flatnonzero(turns[:-1] >= 0)
    over = envelopes.crossing(used)
    touched = envelopes.touched(over)
    first, live, free = turns[touched].min(axis=1), envelopes.are_live(over), envelopes.are_available(over)
    inside = live_here[used] - np.bincount(touched[live].ravel(), minlength=len(turns))[used]
    room = np.where(envelopes.held_by_extent()[used], envelopes.inside(used), 0) - inside
    free &= first >= 0
    return (
        _counted(turns[used], inside, count) + np.bincount(first[live], minlength=count),
        _counted(turns[used], room, count) + np.bincount(first[free], minlength=count),
    )


def _counted(turns: Indices, numbers: Indices, count: int) -> Indices:
    """Sums of `numbers` by turn, (count,)."""
    sums = np.zeros(count, dtype=np.int64)
    np.add.at(sums, turns, numbers)
    return sums


def _last_lost(envelopes: Envelopes, turns: Indices, lost: Indices, count: int) -> Indices:
    """The `count` available envelopes whose least turn is greatest, so that they lie on the fullest extents. `turns`:
    as in `_by_turn`; `lost`: the number of available envelopes by their least turn."""
    if not count:
        return np.empty(0, dtype=np.int64)
    least = len(lost) - 1 - int(np.searchsorted(lost[::-1].cumsum(), count))
    free = envelopes.touching(np.flatnonzero(turns[:-1] >= least))
    free = free[envelopes.are_available(free)]
    first = turns[envelopes.touched(free)].min(axis=1)
    free, first = free[first >= least], first[first >= least]
    return free[np.argsort(-first, kind="stable")][:count]
