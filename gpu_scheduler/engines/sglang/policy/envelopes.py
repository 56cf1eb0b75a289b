"""Accounting of the KV blocks (envelopes) of an elastic range: which are live, free, or without memory under them.

An envelope can be handed out while every extent that it touches is held, and an extent can be given up while no
envelope that touches it is live. The lowest are taken first, so that the highest extents empty; that keeps about as few
extents as filling the fullest first does (benchmarks/consolidation.py), and needs no search.

Conservation, checked by `audit`: live + available + stranded (free, but on memory that is not held) = all envelopes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from gpu_scheduler.engines.sglang.policy.layout import BlockLayout, distinct
from gpu_scheduler.engines.sglang.policy.layout import Indices as Indices

_NONE: Indices = np.empty(0, dtype=np.int64)
_MANY = 1 << 16
"""Envelopes from which their number on each extent is found by searching for the extent's first and last, because
looking up what each touches takes tens of times their own memory: a cache that is flushed has millions. Nor are so
many kept as available before the frontier."""
_SORTED_AT_MOST = 512
"""Most available envelopes before the frontier that `give` sorts, beside those that it frees; with more it moves the
frontier back."""


class Envelopes(BlockLayout):
    """Accounting of the envelopes of one range, each named by its number."""

    def __init__(self, *, envelope_bytes: int, extent_bytes: int, count: int) -> None:
        """`count` envelopes of `envelope_bytes` each, in extents of `extent_bytes`; no extent is held. Raises
        ValueError unless all are positive."""
        super().__init__(envelope_bytes, extent_bytes, count)
        self.available = 0
        """Number of envelopes that `take` can hand out now."""
        self.live = 0
        self._is_free = np.zeros(count, dtype=bool)
        """True for each envelope that is available; (count,)."""
        self._is_live = np.zeros(count, dtype=bool)
        self._frontier = 0
        self._lowest: Indices = np.empty(0, dtype=np.int64)
        """Numbers of all available envelopes below the frontier, sorted."""
        # These two have an entry for each extent, and one more for the padding of `touched`, which counts as held
        # always.
        self._is_held = np.zeros(self.n_extents + 1, dtype=bool)
        self._is_held[-1] = True
        self._live_here = np.zeros(self.n_extents + 1, dtype=np.int64)

    def __repr__(self) -> str:
        return f"Envelopes({self.live} live, {self.available} available of {self.total}, {self.held} extents held)"

    def all_live(self) -> Indices:
        """Numbers of all live envelopes, sorted."""
        return np.flatnonzero(self._is_live[: self._end])

    def all_live_but(self, envelopes: Indices) -> Indices:
        """Numbers of the live envelopes that are not among these, sorted. All of these must be live."""
        others = self._is_live[: self._end].copy()
        others[envelopes] = False
        return np.flatnonzero(others)

    def all_available(self) -> Indices:
        """Numbers of all available envelopes, sorted."""
        return np.flatnonzero(self._is_free[: self._end])

    def are_live(self, envelopes: Indices) -> NDArray[np.bool_]:
        """Whether each of these envelopes is live; same shape."""
        return self._is_live[envelopes]

    def are_available(self, envelopes: Indices) -> NDArray[np.bool_]:
        """Whether each of these envelopes is available; same shape."""
        return self._is_free[envelopes]

    @property
    def _end(self) -> int:
        """Number of envelopes before the end of the last held extent. Those behind it are neither live nor available,
        and there may be a hundred million of them."""
        held = np.flatnonzero(self._is_held[:-1])
        return min(self.total, (int(held[-1]) + 1) * self.extent_bytes // self.envelope_bytes) if len(held) else 0

    # --- extents come and go

    @property
    def held(self) -> int:
        """Number of extents held."""
        return int(np.count_nonzero(self._is_held)) - 1

    def is_held(self, extent: int) -> bool:
        """Whether this extent is held."""
        return bool(self._is_held[extent])

    def held_by_extent(self) -> NDArray[np.bool_]:
        """A copy of whether each extent is held; (n_extents,)."""
        return self._is_held[:-1].copy()

    def live_in(self, extent: int) -> int:
        """Number of live envelopes that touch this extent."""
        return int(self._live_here[extent])

    def live_by_extent(self) -> NDArray[np.int64]:
        """A copy of the number of live envelopes that touch each extent; (n_extents,)."""
        return self._live_here[:-1].copy()

    def empties(self) -> list[int]:
        """Held extents that no live envelope touches, sorted."""
        empties: list[int] = (self._is_held & (self._live_here == 0))[:-1].nonzero()[0].tolist()
        return empties

    def available_on(self, extents: Sequence[int]) -> int:
        """Number of available envelopes that touch any of these extents."""
        return int(np.count_nonzero(self._is_free[self.touching(np.array(extents, dtype=np.int64))]))

    def needed_for(self, envelopes: int) -> int:
        """Number of extents to request so that `envelopes` more become available, if they are neighbours of held
        ones."""
        return -(-envelopes * self.envelope_bytes // self.extent_bytes) if envelopes > 0 else 0

    def hold(self, extents: Iterable[int]) -> None:
        """Adds extents that are now mapped and ours. Raises ValueError if one is held already."""
        added = np.fromiter(extents, dtype=np.int64)
        if (held := self._is_held[added]).any():
            raise ValueError(f"extent {added[held][0]} is held already")
        self._is_held[added] = True
        envelopes = self.touching(added)
        ready = envelopes[self._is_held[self.touched(envelopes)].all(axis=1)]
        self._is_free[ready] = True
        self.available += len(ready)
        self._draw_back(int(ready.min(initial=self._frontier)))

    def give_up(self, extents: Iterable[int]) -> None:
        """Removes extents that are not ours any more, all of them empty. Raises ValueError if one is not empty, or not
        held."""
        removed = np.fromiter(extents, dtype=np.int64)
        if (unfit := ~self._is_held[removed] | (self._live_here[removed] > 0)).any():
            extent = int(removed[unfit][0])
            raise ValueError(f"extent {extent} is not empty: {self.live_in(extent)} envelopes live on it")
        envelopes = self.touching(removed)
        self.available -= int(np.count_nonzero(self._is_free[envelopes]))
        self._is_free[envelopes] = False
        self._is_held[removed] = False
        self._lowest = self._lowest[self._is_free[self._lowest]]

    # --- envelopes come and go

    def take(self, count: int) -> Indices | None:
        """Makes the `count` lowest available envelopes live and returns their numbers, sorted; None when fewer are
        available."""
        if count > self.available:
            return None
        if count > len(self._lowest):
            self._advance(count)
        envelopes, self._lowest = self._lowest[:count], self._lowest[count:]
        self._become_live(envelopes)
        return envelopes

    def take_exactly(self, envelope: int) -> None:
        """Makes one given envelope live. Raises ValueError if it is not available."""
        if not self._is_free[envelope]:
            raise ValueError(f"envelope {envelope} is not available")
        self._become_live(np.array([envelope]))
        self._lowest = self._lowest[self._lowest != envelope]

    def give(self, envelopes: Indices) -> None:
        """Frees live envelopes. Raises ValueError if one was not live."""
        if np.count_nonzero(self._is_live.take(envelopes)) != len(envelopes):
            raise ValueError("an envelope is not live: it was freed twice")
        self._is_live[envelopes] = False
        self._is_free[envelopes] = True
        self._count_live(envelopes, -1)
        self.available += len(envelopes)
        self.live -= len(envelopes)
        if len(envelopes) >= _MANY:  # the next that are taken are found again, without sorting them all
            self._draw_back(min(self._frontier, int(envelopes.min())))
        if len(self._lowest) > _SORTED_AT_MOST:
            self._draw_back(int(self._lowest[_SORTED_AT_MOST // 2]))
        self._lowest = np.concatenate((self._lowest, envelopes.compress(envelopes < self._frontier)))
        self._lowest.sort()

    def move(self, sources: Indices, destinations: Indices) -> None:
        """Makes each destination live in place of its source, which is free afterwards. Raises ValueError, with nothing
        changed, unless all sources are live, all destinations available, and each is named once."""
        if not len(sources) == len(distinct(sources)) == len(destinations) == len(distinct(destinations)):
            raise ValueError("sources and destinations are not pairs")
        if not self._is_free[destinations].all():
            raise ValueError("a destination is not available")
        self.give(sources)
        self._become_live(destinations)
        self._lowest = self._lowest[self._is_free[self._lowest]]

    def _advance(self, count: int) -> None:
        """Moves the frontier up until `count` envelopes are available below it; there must be as many."""
        window = 4 * count + 64
        while len(self._lowest) < count:
            found = self._is_free[self._frontier : self._frontier + window].nonzero()[0] + self._frontier
            self._lowest = np.concatenate((self._lowest, found))
            self._frontier += window
            window *= 4

    def _draw_back(self, frontier: int) -> None:
        """Moves the frontier down to `frontier`."""
        self._frontier = frontier
        self._lowest = self._lowest[: self._lowest.searchsorted(frontier)]

    def _become_live(self, envelopes: Indices) -> None:
        self._is_free[envelopes] = False
        self._is_live[envelopes] = True
        self._count_live(envelopes, 1)
        self.available -= len(envelopes)
        self.live += len(envelopes)

    def _count_live(self, envelopes: Indices, change: int) -> None:
        """Adds `change` to the number of live envelopes of each extent for each of these that touches it."""
        if len(envelopes) < _MANY:
            np.add.at(self._live_here, self.touched(envelopes).ravel(), change)
            return
        envelopes = np.sort(envelopes, kind="stable")  # they are sorted nearly always, and then it only looks at them
        extents = np.arange(self.homes(envelopes[:1])[0], self.ends(envelopes[-1:])[0] + 1)
        first, last = self.first_and_last(extents)
        here = envelopes.searchsorted(last, side="right") - envelopes.searchsorted(first)
        self._live_here[extents] += change * here

    # --- for tests, and for a process that checks itself

    def mark(self) -> tuple[int, ...]:
        """Digest of which envelopes are live and available and which extents are held; equal for the same ones in every
        process."""
        return tuple(crc32(np.packbits(which).tobytes()) for which in (self._is_live, self._is_free, self._is_held))

    def audit(self) -> None:
        """Recounts everything from the envelopes alone. Raises AssertionError where a counter is wrong."""
        live = [0] * self.n_extents
        for envelope in range(self.total):
            extents = self.extents_of(envelope)
            has_memory = all(self._is_held[extent] for extent in extents)
            assert has_memory or not self._is_live[envelope], f"live envelope {envelope} without memory"
            assert self._is_free[envelope] == (has_memory and not self._is_live[envelope]), f"envelope {envelope}"
            for extent in extents:
                live[extent] += int(self._is_live[envelope])
        assert live == self._live_here[:-1].tolist(), "live envelopes of an extent"
        assert self.available == int(self._is_free.sum()) and self.live == int(self._is_live.sum())
        assert self._lowest.tolist() == np.flatnonzero(self._is_free[: self._frontier]).tolist(), "the lowest"


@dataclass(frozen=True)
class CachedPieces:
    """Cached tokens that may be evicted, in pieces, each from its end on: nodes of the prefix tree. There is one entry
    for each run of a piece's envelopes that touch one extent: envelopes of one token are millions, and lie in few
    runs."""

    age_s: NDArray[np.float64]
    """Seconds since the last use of each piece; (pieces,)."""
    depth: Indices
    """Number of envelopes of the prefix before each piece; (pieces,)."""
    piece: Indices
    """Index of the piece; (entries,), like all below."""
    extent: Indices
    position: Indices
    """Index of the run's first envelope within the piece."""
    count: Indices
    """Number of envelopes in the run."""

    @classmethod
    def of(
        cls, layout: BlockLayout, places: Sequence[Indices], age_s: Sequence[float], depth: Sequence[int]
    ) -> CachedPieces:
        """Pieces of these ages and depths. `places`: the envelopes of each."""
        every = np.concatenate([_NONE, *places])
        ends = np.cumsum([len(some) for some in places], dtype=np.int64)
        extents, last = layout.homes(every), layout.ends(every)
        begins = np.append(True, extents[1:] != extents[:-1])[: len(every)]
        begins[ends[ends < len(every)]] = True  # a run ends with its piece
        first = np.flatnonzero(begins)
        parts = [(first, extents[first], np.diff(np.append(first, len(every))))]
        # Those that lie over edges touch further extents, and are runs by themselves there.
        over = np.flatnonzero(extents < last)
        while len(over):
            extents[over] += 1
            parts.append((over, extents[over], np.ones(len(over), dtype=np.int64)))
            over = over[extents[over] < last[over]]
        at, extent, count = (np.concatenate(each) for each in zip(*parts, strict=True))
        piece = np.searchsorted(ends, at, side="right")
        position = at - np.append(0, ends)[piece]
        return cls(np.array(age_s, dtype=np.float64), np.array(depth, dtype=np.int64), piece, extent, position, count)

    def first_on(self, extents: NDArray[np.bool_]) -> list[int | None]:
        """Index of the first envelope of each piece that touches one of these extents; None: no envelope does.
        `extents`: whether each is one of these."""
        least = np.full(len(self.depth), np.iinfo(np.int64).max)
        hit = extents[self.extent]
        np.minimum.at(least, self.piece[hit], self.position[hit])
        return [first if first < np.iinfo(np.int64).max else None for first in least.tolist()]


def coldest_first(pieces: CachedPieces, live: NDArray[np.int64], wanted: int, units: Indices) -> Indices:
    """Units to empty by eviction, in order, so that `wanted` extents can leave, or as many as can. `units` names for
    each extent the first of those that leave with it, a unit.

    A unit can be emptied only if every live envelope on it (`live[e]` of them on extent `e`) belongs to a piece. It is
    as old as its youngest piece; the oldest goes first. Among equals the one deepest in its prefix goes first, because
    evicting a token evicts everything behind it in the prefix.
    """
    if not len(pieces.extent) or wanted <= 0:
        return np.empty(0, dtype=np.int64)
    count = len(units)
    touched = units[pieces.extent]
    youngest = np.full(count, np.inf)
    np.minimum.at(youngest, touched, pieces.age_s[pieces.piece])
    shallowest = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(shallowest, touched, pieces.depth[pieces.piece] + pieces.position)
    on_unit = np.bincount(units, weights=live, minlength=count)
    cached = np.bincount(touched, weights=pieces.count, minlength=count)
    candidates = np.flatnonzero((on_unit > 0) & (cached == on_unit))
    order = candidates[np.lexsort((candidates, -shallowest[candidates], -youngest[candidates]))]
    leaving = np.bincount(units, minlength=count)[order].cumsum()
    return order[: int(np.searchsorted(leaving, wanted)) + 1]
