"""Which envelopes of an elastic range are live, free, or without memory under them.

An envelope can be handed out while every extent that it touches is held, and an extent can be given up while no
envelope that touches it is live.

Taking fills the fullest extents first, so that others empty. An extent on which nothing lives is begun only when the
others have nothing left. To find the fullest is a pass over all extents, so a search chooses a little ahead, and
`give` puts in front of what is chosen what it freed on extents about as full: the order is as old as that choice. What
is chosen is available like anything else, and its extent may be given up.

Conservation, checked by `audit`: live + available + stranded (free, but on memory that is not held) = all
envelopes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_scheduler.engines.sglang.policy.layout import Indices as Indices
from gpu_scheduler.engines.sglang.policy.layout import Layout

_AHEAD, _AHEAD_AT_MOST = 32, 1024
"""Envelopes chosen ahead that are enough: as many as the last call took, within these bounds."""
_SPARE = 4
"""Extents that a search looks at beyond what it expects to need."""


class Envelopes(Layout):
    """Accounting of one range."""

    def __init__(self, *, envelope_bytes: int, extent_bytes: int, count: int) -> None:
        super().__init__(envelope_bytes, extent_bytes, count)
        self.available = 0
        """Envelopes that `take` can hand out now."""
        self.live = 0
        self._is_held = np.zeros(self.n_extents + 1, dtype=bool)
        self._is_held[-1] = True  # What fills up `touched` lacks no memory.
        self._is_free = np.zeros(count + 1, dtype=bool)
        """Whether an envelope is available; never true of what fills up `beginning`."""
        self._is_live = np.zeros(count, dtype=bool)

        # One number says how full an extent is: step * (available envelopes that begin in it) - (live ones that touch
        # it) - 1. The step, a power of two, exceeds what can be live there, so both counts can be read from the number.
        # It is below 0 where there is nothing to take, which is last in unsigned arithmetic: one comparison finds the
        # extents that have little left, but something.
        most, span = self.beginning.shape[1], self.touched.shape[1]
        self._step = 1 << (most + 1).bit_length()
        self._above_all = self._step * most
        """Above the rank of every extent that has something to take."""
        signed, unsigned = (np.int16, np.uint16) if self._above_all < 1 << 15 else (np.int32, np.uint32)
        self._ranks: NDArray[Any] = np.full(self.n_extents + 1, -1, dtype=signed)
        """Of each extent, and of one more, without meaning, for what fills up `touched`."""
        self._rank: NDArray[Any] = self._ranks[:-1]
        self._order: NDArray[Any] = self._rank.view(unsigned)
        self._rank_if_empty: NDArray[Any] = np.full(self.n_extents, self._above_all, dtype=signed)
        """The rank if nothing lived there; no rank at all where an extent is not held."""
        self._least_if_empty = self._above_all
        self._change: NDArray[Any] = np.tile(np.array([self._step + 1] + [1] * (span - 1), dtype=signed), count)
        """What envelopes, each becoming free, add to the ranks of what they touch."""

        self._ahead: Indices = np.empty(0, dtype=np.int64)
        """What `take` hands out next: available, each once."""
        self._last_count = 0
        """How many the last call took."""
        self._reached = 0
        """The rank up to which `_ahead` goes."""
        self._limit = self._step
        """The next search looks at extents that rank below."""
        self._expected = 1.0
        """How many available envelopes it expects on each."""

    def __repr__(self) -> str:
        return f"Envelopes({self.live} live, {self.available} available of {self.total}, {self.held} extents held)"

    # --- extents come and go

    @property
    def held(self) -> int:
        """Extents held."""
        return int(np.count_nonzero(self._is_held)) - 1

    def is_held(self, extent: int) -> bool:
        return bool(self._is_held[extent])

    def all_live(self) -> Indices:
        return np.flatnonzero(self._is_live)

    def all_available(self) -> Indices:
        return np.flatnonzero(self._is_free)

    def live_by_extent(self) -> NDArray[np.int64]:
        """The count of live envelopes that touch each extent."""
        return (-1 - self._rank.astype(np.int64)) % self._step

    def empties(self) -> list[int]:
        """Held extents without a live envelope, in order."""
        empties: list[int] = (self._rank == self._rank_if_empty).nonzero()[0].tolist()
        return empties

    def live_in(self, extent: int) -> int:
        return (-1 - int(self._rank[extent])) % self._step

    def needed_for(self, envelopes: int) -> int:
        """How many extents to ask for so that `envelopes` more become available, if they are neighbours of what is
        held."""
        return -(-envelopes * self.envelope_bytes // self.extent_bytes) if envelopes > 0 else 0

    def hold(self, extents: Iterable[int]) -> None:
        """These extents are mapped now and ours."""
        added = np.fromiter(extents, dtype=np.int64)
        if (held := self._is_held[added]).any():
            raise ValueError(f"extent {added[held][0]} is held already")
        self._is_held[added] = True
        self._rank_if_empty[added] = -1
        envelopes = self.touching(added)
        self._change_memory(envelopes[self._is_held[self.touched[envelopes]].all(axis=1)], +1)

    def give_up(self, extents: Iterable[int]) -> None:
        """These extents, all of them empty, are not ours any more."""
        removed = np.fromiter(extents, dtype=np.int64)
        if (unfit := self._rank[removed] != self._rank_if_empty[removed]).any():
            extent = int(removed[unfit][0])
            raise ValueError(f"extent {extent} is not empty: {self.live_in(extent)} envelopes live on it")
        envelopes = self.touching(removed)
        self._change_memory(envelopes[self._is_free[envelopes]], -1)
        self._is_held[removed] = False
        self._rank_if_empty[removed] = self._above_all
        self._forget_choice()

    def _change_memory(self, envelopes: Indices, by: int) -> None:
        """These became available (+1) or stranded (-1)."""
        self._is_free[envelopes] = by > 0
        self.available += by * len(envelopes)
        homes = self.touched[envelopes, 0]
        np.add.at(self._rank, homes, self._rank.dtype.type(by * self._step))
        np.add.at(self._rank_if_empty, homes, self._rank.dtype.type(by * self._step))
        self._least_if_empty = int(self._rank_if_empty.view(self._order.dtype).min())

    # --- envelopes come and go

    def take(self, count: int) -> Indices | None:
        """`count` envelopes, now live; None when fewer are available."""
        if count > len(self._ahead):
            if count > self.available:
                return None
            self._ahead = self._choose(count)
        envelopes = self._ahead[:count]
        self._ahead = self._ahead[count:]
        self._last_count = count
        self._become_live(envelopes)
        return envelopes

    def take_exactly(self, envelope: int) -> None:
        """Makes one given, available envelope live."""
        if not self._is_free[envelope]:
            raise ValueError(f"envelope {envelope} is not available")
        self._forget_choice()
        self._become_live(np.array([envelope]))

    def give(self, envelopes: Indices) -> None:
        """These envelopes are free again. Raises ValueError if one was not live."""
        if not len(envelopes):
            return
        homes = self._become_free(envelopes)
        enough = min(max(_AHEAD, self._last_count), _AHEAD_AT_MOST)
        if len(self._ahead) < enough:
            ranks = self._rank.take(homes[:enough])
            fuller = ranks <= self._reached
            if self._reached >= self._least_if_empty:
                fuller &= ranks != self._rank_if_empty.take(homes[:enough])
            self._ahead = np.concatenate((envelopes[:enough].compress(fuller), self._ahead))
        else:
            # Only fuller extents may add to it from now on.
            self._reached = max(self._reached - self._step, 0)

    def move(self, sources: Indices, destinations: Indices) -> None:
        """What was live in each source is live in its destination now, and the sources are free. Raises ValueError,
        with nothing changed, unless all sources are live, all destinations available, and each named once."""
        if not len(sources) == len(np.unique(sources)) == len(destinations) == len(np.unique(destinations)):
            raise ValueError("sources and destinations are not pairs")
        if not self._is_free[destinations].all():
            raise ValueError("a destination is not available")
        self._become_free(sources)
        self._become_live(destinations)
        self._forget_choice()

    def _become_live(self, envelopes: Indices) -> None:
        self._is_free[envelopes] = False
        self._is_live[envelopes] = True
        touched = self.touched.take(envelopes, axis=0).ravel()
        np.subtract.at(self._ranks, touched, self._change[: len(touched)])
        self.available -= len(envelopes)
        self.live += len(envelopes)

    def _become_free(self, envelopes: Indices) -> Indices:
        """Returns the extents in which they begin."""
        if np.count_nonzero(self._is_live.take(envelopes)) != len(envelopes):
            raise ValueError("an envelope is not live: it was freed twice")
        self._is_live[envelopes] = False
        self._is_free[envelopes] = True
        touched = self.touched.take(envelopes, axis=0)
        np.add.at(self._ranks, touched.ravel(), self._change[: touched.size])
        self.available += len(envelopes)
        self.live -= len(envelopes)
        return touched[:, 0]

    # --- the fullest extents first

    def _forget_choice(self) -> None:
        self._ahead = self._ahead[:0]

    def _choose(self, count: int) -> Indices:
        """At least `count` of the available envelopes, in the order in which to take them. Those that were chosen
        already are found again."""
        chosen = self._choose_on_begun(count)
        if len(chosen) < count:
            chosen = np.concatenate((chosen, self._choose_on_empty(count - len(chosen))))
            self._reached = self._above_all
        return chosen

    def _choose_on_begun(self, count: int) -> Indices:
        """`count` or more from extents on which something lives; all there are if they are fewer.

        How many extents are wanted is guessed from the last time. Only extents below the limit are looked at, and the
        limit follows, so that they are two to three times as many as wanted.
        """
        limit, wanted = self._limit, int(count / self._expected) + _SPARE
        while True:
            extents, below = self._begun(limit, 3 * wanted)
            looked_at = wanted
            chosen = self._available_in(extents[:looked_at])
            if len(chosen):
                self._expected = 0.9 * len(chosen) / min(looked_at, len(extents))
            while len(chosen) < count and looked_at < len(extents):
                looked_at *= 2
                chosen = self._available_in(extents[:looked_at])
            if len(chosen) >= count or (below == len(extents) and limit == self._above_all):
                break
            if below > len(extents):
                wanted *= 3
            else:
                limit = min(2 * limit, self._above_all)
        if len(chosen):
            self._reached = int(self._rank[extents[min(looked_at, len(extents)) - 1]])
        if below > len(extents):
            # As many as these are below the rank of this one, if these are like the others.
            limit = int(self._rank[extents[len(extents) ** 2 // below]]) + 1
        elif below < 2 * wanted:
            limit = min(limit + self._step, self._above_all)
        self._limit = limit
        return chosen

    def _begun(self, limit: int, most: int) -> tuple[Indices, int]:
        """Extents that rank below the limit and on which something lives, at most so many, most live first; and how
        many there are."""
        below = self._order < limit
        if limit > self._least_if_empty:
            below &= self._rank != self._rank_if_empty
        found = below.nonzero()[0]
        extents = found[:most]
        not_live = (self._rank.take(extents) + 1) & (self._step - 1)  # The step less what lives there.
        return extents.take(not_live.argsort(kind="stable")), len(found)

    def _choose_on_empty(self, count: int) -> Indices:
        """`count` or more from extents on which nothing lives, from as few as possible, the first ones."""
        extents = ((self._rank == self._rank_if_empty) & (self._rank >= 0)).nonzero()[0][:count]
        available = self._rank.take(extents) // self._step + 1
        return self._available_in(extents[: available.cumsum().searchsorted(count) + 1])

    def _available_in(self, extents: Indices) -> Indices:
        """The available envelopes that begin in these extents, extent by extent."""
        envelopes = self.beginning.take(extents, axis=0).ravel()
        return envelopes.compress(self._is_free.take(envelopes))

    # --- for tests and for a process that doubts itself

    def audit(self) -> None:
        """Recounts everything from the envelopes alone. Raises AssertionError where a counter is wrong."""
        live = [0] * self.n_extents
        free = [0] * self.n_extents
        free_if_empty = [0] * self.n_extents
        for envelope in range(self.total):
            extents = self.extents_of(envelope)
            has_memory = all(self._is_held[extent] for extent in extents)
            is_live = bool(self._is_live[envelope])
            assert has_memory or not is_live, f"live envelope {envelope} without memory"
            assert self._is_free[envelope] == (has_memory and not is_live), f"envelope {envelope} available"
            free[extents[0]] += has_memory and not is_live
            free_if_empty[extents[0]] += has_memory
            for extent in extents:
                live[extent] += is_live
        assert self.available == sum(free) and self.live == int(self._is_live.sum())
        assert not self._is_free[-1] and self._is_held[-1]
        for extent in range(self.n_extents):
            assert self._rank[extent] == self._step * free[extent] - live[extent] - 1, f"rank of extent {extent}"
            if_empty = self._step * free_if_empty[extent] - 1 if self._is_held[extent] else self._above_all
            assert self._rank_if_empty[extent] == if_empty, f"rank of extent {extent} if it were empty"
        assert self._is_free[self._ahead].all() and len(np.unique(self._ahead)) == len(self._ahead)


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
