"""Which live envelopes to move together, so that extents empty.

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
    """Sources and destinations for `Envelopes.move`, after which the extents that something lives on are at most
    `ratio` times the bytes that live; those that are empty already leave without a move. `units` names for each extent
    the first of those that leave with it: of such a unit all are in use, or none.

    Fewer when that cannot be reached: the next sparsest unit has more on it than there are holes elsewhere. No
    destination is on a unit that something leaves, nor on an empty one. `fixed` live envelopes stay where they are.
    """
    count = envelopes.n_extents
    live_here = np.bincount(units, weights=envelopes.live_by_extent(), minlength=count)
    size = np.bincount(units, minlength=count)
    begun = np.flatnonzero(live_here)
    allowed = int(ratio * envelopes.live * envelopes.envelope_bytes / envelopes.extent_bytes)
    # What fills up `touched` is a unit of its own.
    units = np.append(units, count)
    pinned = np.zeros(count + 1, dtype=bool)
    pinned[units[envelopes.touched[np.array(fixed, dtype=np.int64)]]] = True
    begun = begun[np.lexsort((live_here[begun] / size[begun], pinned[begun]))]
    # An envelope has to leave with the first of its units that is emptied, and is a place to go to until then.
    turns = np.full(count + 1, -1)
    turns[begun] = np.arange(len(begun))
    turns[-1] = len(begun)
    turns = turns[units]
    live, free = envelopes.all_live(), envelopes.all_available()
    leaves, lost = turns[envelopes.touched[live]].min(axis=1), turns[envelopes.touched[free]].min(axis=1)
    free, lost = free[lost >= 0], lost[lost >= 0]
    leaving = np.bincount(leaves, minlength=len(begun)).cumsum()
    holes = len(free) - np.bincount(lost, minlength=len(begun)).cumsum()
    possible = min(int(np.count_nonzero(leaving <= holes)), len(begun) - int(np.count_nonzero(pinned[begun])))
    leaving_first = size[begun].cumsum()
    surplus = int(size[begun].sum()) - allowed
    emptied = min(int(np.searchsorted(leaving_first, surplus)) + 1, possible) if surplus > 0 else 0
    sources = live[leaves < emptied]
    # The fullest extents are emptied last.
    destinations = free[np.argsort(-lost, kind="stable")][: len(sources)]
    return sources, destinations
