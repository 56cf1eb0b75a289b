"""Which envelopes of an elastic range are live, free, or without memory under them.

The range is cut twice: into extents (mapped and unmapped whole) and into envelopes packed back to back, so that an
envelope may straddle two extents, or span many. An envelope can be handed out while every extent that it touches is
held, and an extent can be given up while no envelope that touches it is live. Taking fills the fullest extent first,
so that others empty.

Conservation, checked by `audit`: live + available + stranded (free, but on memory that is not held) = all
envelopes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_NONE: Indices = np.empty(0, dtype=np.int64)


class Envelopes:
    """Accounting of one range. Envelopes and extents are numbered from the start of the range."""

    def __init__(self, *, envelope_bytes: int, extent_bytes: int, count: int) -> None:
        if envelope_bytes <= 0 or extent_bytes <= 0 or count <= 0:
            raise ValueError(f"{count} envelopes of {envelope_bytes} bytes in extents of {extent_bytes} bytes")
        self.envelope_bytes = envelope_bytes
        self.extent_bytes = extent_bytes
        self.total = count
        self.n_extents = n_extents = -(-count * envelope_bytes // extent_bytes)
        self.available = 0
        """Envelopes that `take` can hand out now."""
        self.live = 0
        self._live_here = np.zeros(n_extents, dtype=np.int64)
        """Live envelopes that touch an extent."""
        self._free_here = [0] * n_extents
        """Available envelopes that begin in an extent."""
        self._used = np.zeros(self.total, dtype=bool)
        self._held: set[int] = set()
        self._empty: set[int] = set()
        self._open: Indices = _NONE
        """What is left to hand out of the extent being filled, ascending."""
        self._open_extent = -1
        self._fullest: list[tuple[int, int]] = []
        """Heap of (-live, extent) of extents with something available; entries go stale and are dropped when met."""

    def __repr__(self) -> str:
        return (
            f"Envelopes({self.live} live, {self.available} available of {self.total}, {len(self._held)} extents held)"
        )

    # --- what lies where

    def extents_of(self, envelope: int) -> range:
        """The extents that an envelope touches."""
        start = envelope * self.envelope_bytes
        return range(start // self.extent_bytes, (start + self.envelope_bytes - 1) // self.extent_bytes + 1)

    def homes(self, envelopes: Indices) -> Indices:
        """For each envelope, the extent in which it begins."""
        return envelopes * self.envelope_bytes // self.extent_bytes

    def ends(self, envelopes: Indices) -> Indices:
        """For each envelope, the extent in which it ends."""
        return ((envelopes + 1) * self.envelope_bytes - 1) // self.extent_bytes

    def _touching(self, extent: int) -> range:
        start = extent * self.extent_bytes
        last = (start + self.extent_bytes - 1) // self.envelope_bytes
        return range(start // self.envelope_bytes, min(last + 1, self.total))

    def _beginning(self, extent: int) -> range:
        start = extent * self.extent_bytes
        return range(
            -(-start // self.envelope_bytes), min(-(-(start + self.extent_bytes) // self.envelope_bytes), self.total)
        )

    # --- extents come and go

    @property
    def held(self) -> int:
        """Extents held."""
        return len(self._held)

    @property
    def balloon(self) -> int:
        """Envelopes that are neither live nor available: there is no memory under them."""
        return self.total - self.live - self.available

    def is_held(self, extent: int) -> bool:
        return extent in self._held

    def held_extents(self) -> list[int]:
        return sorted(self._held)

    def all_live(self) -> Indices:
        return np.flatnonzero(self._used)

    def live_by_extent(self) -> NDArray[np.int64]:
        """A copy of the count of live envelopes that touch each extent."""
        return self._live_here.copy()

    def empties(self) -> list[int]:
        """Held extents without a live envelope, in order."""
        return sorted(self._empty)

    def live_in(self, extent: int) -> int:
        return int(self._live_here[extent])

    def needed_for(self, envelopes: int) -> int:
        """How many extents to ask for so that `envelopes` more become available, if they are neighbours of what is
        held."""
        return -(-envelopes * self.envelope_bytes // self.extent_bytes) if envelopes > 0 else 0

    def hold(self, extents: Iterable[int]) -> None:
        """These extents are mapped now and ours."""
        for extent in extents:
            if extent in self._held:
                raise ValueError(f"extent {extent} is held already")
            self._held.add(extent)
            self._empty.add(extent)
            self._count(extent, +1)

    def give_up(self, extents: Iterable[int]) -> None:
        """These extents, all of them empty, are not ours any more."""
        self._close()
        for extent in extents:
            if extent not in self._empty:
                raise ValueError(f"extent {extent} is not empty: {self._live_here[extent]} envelopes live on it")
            self._count(extent, -1)
            self._held.discard(extent)
            self._empty.discard(extent)

    def _count(self, extent: int, sign: int) -> None:
        """Adds or takes away what becomes or ceases to be available with `extent` held. Nothing live touches it."""
        touching = self._touching(extent)
        inside = self._beginning(extent)
        # Those that end beyond this extent, and those that began before it, depend on the neighbours too.
        while inside and self.extents_of(inside[-1])[-1] != extent:
            inside = inside[:-1]
        self._change(extent, sign * len(inside))
        before = range(touching.start, min(inside.start, touching.stop))
        after = range(max(inside.stop, inside.start), touching.stop)
        for envelope in (*before, *after):
            if all(other in self._held for other in self.extents_of(envelope)):
                self._change(self.extents_of(envelope)[0], sign)

    def _change(self, home: int, by: int) -> None:
        self._free_here[home] += by
        self.available += by
        if by > 0:
            self._offer(home)

    # --- envelopes come and go

    def take(self, count: int) -> Indices | None:
        """`count` envelopes, now live; None when fewer are available."""
        if count > self.available:
            return None
        parts: list[Indices] = []
        short = count
        while short > 0:
            if not len(self._open):
                self._open_fullest()
            part = self._open[:short]
            self._open = self._open[len(part) :]
            self._fill(part)
            parts.append(part)
            short -= len(part)
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else _NONE

    def take_exactly(self, envelope: int) -> None:
        """Makes one given, available envelope live."""
        self._close()
        if self._used[envelope] or not all(extent in self._held for extent in self.extents_of(envelope)):
            raise ValueError(f"envelope {envelope} is not available")
        self._open_extent = self.extents_of(envelope)[0]
        self._fill(np.array([envelope], dtype=np.int64))
        self._close()

    def _fill(self, part: Indices) -> None:
        """`part` of the open extent becomes live."""
        home = self._open_extent
        self._used[part] = True
        self._free_here[home] -= len(part)
        self.available -= len(part)
        self.live += len(part)
        self._live_here[home] += len(part)
        self._empty.discard(home)
        # Only the last envelope that begins in an extent reaches beyond it.
        for beyond in self.extents_of(int(part[-1]))[1:]:
            self._live_here[beyond] += 1
            self._empty.discard(beyond)
            self._offer(beyond)

    def give(self, envelopes: Indices) -> None:
        """These envelopes are free again. Raises ValueError if one was not live."""
        if not len(envelopes):
            return
        if not self._used[envelopes].all():
            raise ValueError("an envelope was freed twice")
        self._used[envelopes] = False
        homes = self.homes(envelopes)
        first = int(homes.min())
        counts = np.bincount(homes - first)
        changed = np.flatnonzero(counts)
        for offset in changed.tolist():
            self._release(first + offset, int(counts[offset]))
        self.live -= len(envelopes)
        for envelope in envelopes[self.ends(envelopes) != homes].tolist():
            for beyond in self.extents_of(envelope)[1:]:
                self._live_here[beyond] -= 1
                self._settle(beyond)

    def _release(self, home: int, count: int) -> None:
        self._live_here[home] -= count
        self._change(home, count)
        self._settle(home)

    def _settle(self, extent: int) -> None:
        live = self._live_here[extent]
        if live < 0:
            raise ValueError(f"extent {extent} lost more envelopes than it had: one was freed twice")
        if live == 0 and extent in self._held:
            self._empty.add(extent)
        self._offer(extent)

    # --- the fullest extent first

    def _offer(self, extent: int) -> None:
        if self._free_here[extent] > 0 and extent != self._open_extent:
            heapq.heappush(self._fullest, (-int(self._live_here[extent]), extent))
            if len(self._fullest) > 4 * len(self._held) + 64:
                self._fullest = [(-self.live_in(e), e) for e in self._held if self._free_here[e] > 0]
                heapq.heapify(self._fullest)

    def _open_fullest(self) -> None:
        self._close()
        while self._fullest:
            minus_live, extent = heapq.heappop(self._fullest)
            if self._free_here[extent] > 0 and -minus_live == self._live_here[extent]:
                candidates = self._beginning(extent)
                free = np.flatnonzero(~self._used[candidates.start : candidates.stop]) + candidates.start
                # A straddler at the end may lack its neighbour's memory.
                while len(free) and not all(e in self._held for e in self.extents_of(int(free[-1]))):
                    free = free[:-1]
                self._open, self._open_extent = free, extent
                return
        raise AssertionError(f"{self!r}: {self.available} available, but none found")

    def _close(self) -> None:
        extent, self._open_extent, self._open = self._open_extent, -1, _NONE
        if extent >= 0:
            self._offer(extent)

    # --- for tests and for a process that doubts itself

    def audit(self) -> None:
        """Recounts everything from the envelopes alone. Raises AssertionError where a counter is wrong."""
        live = np.zeros(self.n_extents, dtype=np.int64)
        free = [0] * self.n_extents
        for envelope in range(self.total):
            extents = self.extents_of(envelope)
            if self._used[envelope]:
                assert all(extent in self._held for extent in extents), f"live envelope {envelope} without memory"
                live[extents.start : extents.stop] += 1
            elif all(extent in self._held for extent in extents):
                free[extents[0]] += 1
        assert (live == self._live_here).all(), "live envelopes of an extent"
        assert free == self._free_here, "available envelopes of an extent"
        assert self.available == sum(free) and self.live == int(self._used.sum())
        assert self._empty == {extent for extent in self._held if not live[extent]}


@dataclass(frozen=True)
class Piece:
    """Cached tokens that may be evicted, from their end on: one node of the prefix tree."""

    age_s: float
    """Since the last use."""
    depth: int
    """Tokens of the prefix before it."""
    touched: NDArray[np.int64]
    """The extents that its envelopes touch, one entry for each envelope and extent."""
    position: NDArray[np.int64]
    """For each entry of `touched`, which token of the piece it is."""


def coldest_first(pieces: Sequence[Piece], live: NDArray[np.int64], wanted: int) -> list[int]:
    """The extents to empty by eviction, at most `wanted`.

    An extent can be emptied only if every live envelope on it (`live[e]` of them) belongs to a piece. It is as old
    as its youngest piece; the oldest goes first. Among equals the one deepest in its prefix, because what is
    evicted takes everything behind it along.
    """
    cached = np.zeros_like(live)
    youngest = np.full(len(live), np.inf)
    shallowest = np.full(len(live), np.iinfo(np.int64).max)
    for piece in pieces:
        np.add.at(cached, piece.touched, 1)
        np.minimum.at(youngest, piece.touched, piece.age_s)
        np.minimum.at(shallowest, piece.touched, piece.depth + piece.position)
    candidates = np.flatnonzero((live > 0) & (cached == live))
    order = sorted(candidates.tolist(), key=lambda extent: (-youngest[extent], -shallowest[extent], extent))
    return order[:wanted]
