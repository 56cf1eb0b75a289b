"""Which envelopes of an elastic range are live, free, or without memory under them.

The range is cut twice: into extents (mapped and unmapped whole) and into envelopes packed back to back, so that an
envelope may straddle two extents, or span many. An envelope can be handed out while every extent that it touches is
held, and an extent can be given up while no envelope that touches it is live. Taking fills the fullest extent first,
so that others empty.

Conservation, checked by `audit`: live + available + stranded (free, but on memory that is not held) = all
envelopes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class Envelopes:
    """Accounting of one range. Envelopes and extents are numbered from the start of the range."""

    def __init__(self, *, envelope_bytes: int, extent_bytes: int, count: int) -> None:
        if envelope_bytes <= 0 or extent_bytes <= 0 or count <= 0:
            raise ValueError(f"{count} envelopes of {envelope_bytes} bytes in extents of {extent_bytes} bytes")
        self.envelope_bytes = envelope_bytes
        self.extent_bytes = extent_bytes
        self.total = count
        self.n_extents = -(-count * envelope_bytes // extent_bytes)
        self.available = 0
        """Envelopes that `take` can hand out now."""
        self.live = 0
        self._live_here = array("q", bytes(8 * self.n_extents))
        """Live envelopes that touch an extent."""
        self._free_here: dict[int, list[int]] = {}
        """For each held extent, the available envelopes that begin in it; taken from the end."""
        self._used = np.zeros(count, dtype=bool)
        self._empty: dict[int, None] = {}
        """Held extents without a live envelope."""
        # Extents with something available, by how many live envelopes they have; and which counts occur, as bits, so
        # that the fullest is found at once.
        self._by_live: list[dict[int, None]] = [{} for _ in range(extent_bytes // envelope_bytes + 3)]
        self._occurring = 0

    def __repr__(self) -> str:
        return f"Envelopes({self.live} live, {self.available} available of {self.total}, {self.held} extents held)"

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

    def _inside(self, extent: int) -> tuple[int, int]:
        """The envelopes that touch no other extent: from the first up to, without, the second."""
        start = extent * self.extent_bytes
        first = min(-(-start // self.envelope_bytes), self._touching(extent).stop)
        return first, max(first, min((start + self.extent_bytes) // self.envelope_bytes, self.total))

    def _has_memory(self, envelope: int) -> bool:
        return all(extent in self._free_here for extent in self.extents_of(envelope))

    # --- extents come and go

    @property
    def held(self) -> int:
        """Extents held."""
        return len(self._free_here)

    def is_held(self, extent: int) -> bool:
        return extent in self._free_here

    def all_live(self) -> Indices:
        return np.flatnonzero(self._used)

    def live_by_extent(self) -> NDArray[np.int64]:
        """A copy of the count of live envelopes that touch each extent."""
        return np.frombuffer(self._live_here, dtype=np.int64).copy()

    def empties(self) -> list[int]:
        """Held extents without a live envelope, in order."""
        return sorted(self._empty)

    def live_in(self, extent: int) -> int:
        return self._live_here[extent]

    def needed_for(self, envelopes: int) -> int:
        """How many extents to ask for so that `envelopes` more become available, if they are neighbours of what is
        held."""
        return -(-envelopes * self.envelope_bytes // self.extent_bytes) if envelopes > 0 else 0

    def hold(self, extents: Iterable[int]) -> None:
        """These extents are mapped now and ours."""
        for extent in extents:
            if extent in self._free_here:
                raise ValueError(f"extent {extent} is held already")
            first, last = self._inside(extent)
            # From the end, because the list is taken from its end: low addresses are filled first.
            self._free_here[extent] = list(range(last - 1, first - 1, -1))
            self._settle(extent)
            self.available += last - first
            touching = self._touching(extent)
            for envelope in (*range(touching.start, first), *range(last, touching.stop)):
                if self._has_memory(envelope):
                    home = self.extents_of(envelope)[0]
                    self._leave(home)
                    self._free_here[home].append(envelope)
                    self._settle(home)
                    self.available += 1

    def give_up(self, extents: Iterable[int]) -> None:
        """These extents, all of them empty, are not ours any more."""
        for extent in extents:
            if extent not in self._empty:
                raise ValueError(f"extent {extent} is not empty: {self._live_here[extent]} envelopes live on it")
            self.available -= len(self._free_here[extent])
            # Those that begin before it and reach into it lose their memory too.
            for envelope in self._touching(extent):
                home = self.extents_of(envelope)[0]
                if home == extent:
                    break
                if self._has_memory(envelope):
                    self._leave(home)
                    self._free_here[home].remove(envelope)
                    self._settle(home)
                    self.available -= 1
            self._leave(extent)
            del self._free_here[extent], self._empty[extent]

    # --- envelopes come and go

    def take(self, count: int) -> Indices | None:
        """`count` envelopes, now live; None when fewer are available."""
        if count > self.available:
            return None
        taken: list[int] = []
        short = count
        # This loop is on the token path: what `_leave` and `_settle` do is written out for the common case, an extent
        # that is used up.
        while short > 0:
            live = self._occurring.bit_length() - 1
            row = self._by_live[live]
            home = next(iter(row))
            free = self._free_here[home]
            if len(free) > short:
                self._leave(home)
                part = free[-short:]
                del free[-short:]
                self._live_here[home] = live + short
                self._settle(home)
            else:
                part, self._free_here[home] = free, []
                del row[home]
                if not row:
                    self._occurring ^= 1 << live
                if not live:
                    del self._empty[home]
                self._live_here[home] = live + len(part)
            short -= len(part)
            taken += part
            if (end := (home + 1) * self.extent_bytes) % self.envelope_bytes and end // self.envelope_bytes in part:
                self._reach(end // self.envelope_bytes, +1)
        self.available -= count
        self.live += count
        envelopes = np.array(taken, dtype=np.int64)
        self._used[envelopes] = True
        return envelopes

    def take_exactly(self, envelope: int) -> None:
        """Makes one given, available envelope live."""
        home = self.extents_of(envelope)[0]
        if self._used[envelope] or not self._has_memory(envelope):
            raise ValueError(f"envelope {envelope} is not available")
        self._leave(home)
        self._free_here[home].remove(envelope)
        self._live_here[home] += 1
        self._settle(home)
        self._reach(envelope, +1)
        self.available -= 1
        self.live += 1
        self._used[envelope] = True

    def give(self, envelopes: Indices) -> None:
        """These envelopes are free again. Raises ValueError if one was not live."""
        if not len(envelopes):
            return
        if not self._used[envelopes].all():
            raise ValueError("an envelope was freed twice")
        self._used[envelopes] = False
        homes = self.homes(envelopes)
        order = np.argsort(homes, kind="stable")
        grouped, homes = envelopes[order].tolist(), homes[order]
        starts = [0, *(np.flatnonzero(homes[1:] != homes[:-1]) + 1).tolist(), len(grouped)]
        for start, stop in zip(starts, starts[1:], strict=False):
            home, part = int(homes[start]), grouped[start:stop]
            self._leave(home)
            self._live_here[home] -= len(part)
            self._free_here[home] += part
            self._settle(home)
            if (end := (home + 1) * self.extent_bytes) % self.envelope_bytes and end // self.envelope_bytes in part:
                self._reach(end // self.envelope_bytes, -1)
        self.available += len(grouped)
        self.live -= len(grouped)

    def _reach(self, envelope: int, by: int) -> None:
        """Counts an envelope on the extents beyond the one in which it begins."""
        for extent in self.extents_of(envelope)[1:]:
            self._leave(extent)
            self._live_here[extent] += by
            self._settle(extent)

    # --- the fullest extent first

    def _leave(self, extent: int) -> None:
        """Before anything about a held extent changes: it is not found any more."""
        if self._free_here[extent]:
            live = self._live_here[extent]
            row = self._by_live[live]
            del row[extent]
            if not row:
                self._occurring ^= 1 << live

    def _settle(self, extent: int) -> None:
        """Afterwards: it is found under its number of live envelopes, if there is something to take."""
        live = self._live_here[extent]
        if not live:
            self._empty[extent] = None
        elif extent in self._empty:
            del self._empty[extent]
        if live < 0:
            raise ValueError(f"extent {extent} lost more envelopes than it had: one was freed twice")
        if self._free_here[extent]:
            self._by_live[live][extent] = None
            self._occurring |= 1 << live

    # --- for tests and for a process that doubts itself

    def audit(self) -> None:
        """Recounts everything from the envelopes alone. Raises AssertionError where a counter is wrong."""
        live = [0] * self.n_extents
        free: dict[int, set[int]] = {extent: set() for extent in self._free_here}
        for envelope in range(self.total):
            extents = self.extents_of(envelope)
            if self._used[envelope]:
                assert self._has_memory(envelope), f"live envelope {envelope} without memory"
                for extent in extents:
                    live[extent] += 1
            elif self._has_memory(envelope):
                free[extents[0]].add(envelope)
        assert live == self._live_here.tolist(), "live envelopes of an extent"
        assert free == {extent: set(part) for extent, part in self._free_here.items()}, "available envelopes"
        assert self.available == sum(map(len, self._free_here.values())) and self.live == int(self._used.sum())
        assert set(self._empty) == {extent for extent in self._free_here if not live[extent]}
        rows = {extent: live for live, row in enumerate(self._by_live) for extent in row}
        assert rows == {extent: live[extent] for extent, part in self._free_here.items() if part}
        assert self._occurring == sum(1 << live for live, row in enumerate(self._by_live) if row)


@dataclass(frozen=True)
class Piece:
    """Cached tokens that may be evicted, from their end on: one node of the prefix tree."""

    age_s: float
    """Since the last use."""
    depth: int
    """Envelopes of the prefix before it."""
    touched: NDArray[np.int64]
    """The extents that its envelopes touch, one entry for each envelope and extent."""
    position: NDArray[np.int64]
    """For each entry of `touched`, which envelope of the piece it is."""


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
