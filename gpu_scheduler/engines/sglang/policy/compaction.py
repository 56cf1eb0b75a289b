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
    live_here = np.bincount(units, weights=envelopes.live_by_extent(), minlength=count)
    size = np.bincount(units, minlength=count)
    in_use = np.flatnonzero(live_here)
    # The padding of `touched` counts as a unit of its own.
    units = np.append(units, count)
    pinned = np.zeros(count + 1, dtype=bool)
    pinned[units[envelopes.touched(np.array(fixed, dtype=np.int64))]] = True
    in_use = in_use[np.lexsort((live_here[in_use] / size[in_use], pinned[in_use]))]
    # An envelope has to leave with the first of its units that is emptied, and can be a destination until then.
    turns = np.full(count + 1, -1)
    turns[in_use] = np.arange(len(in_use))
    turns[-1] = len(in_use)
    turns = turns[units]
    live, free = envelopes.all_live(), envelopes.all_available()
    leaves, lost = turns[envelopes.touched(live)].min(axis=1), turns[envelopes.touched(free)].min(axis=1)
    free, lost = free[lost >= 0], lost[lost >= 0]
    leaving = np.bincount(leaves, minlength=len(in_use)).cumsum()
    holes = len(free) - np.bincount(lost, minlength=len(in_use)).cumsum()
    possible = min(int(np.count_nonzero(leaving <= holes)), len(in_use) - int(np.count_nonzero(pinned[in_use])))
    leaving_first = size[in_use].cumsum()
    surplus = int(size[in_use].sum()) - allowed
    emptied = min(int(np.searchsorted(leaving_first, surplus)) + 1, possible) if surplus > 0 else 0
    sources = live[leaves < emptied]
    # The fullest extents are emptied last.
    destinations = free[np.argsort(-lost, kind="stable")][: len(sources)]
    return sources, destinations
