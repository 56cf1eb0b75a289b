"""The places of KV blocks (envelopes) in a range that is cut into extents: they are packed back to back, so that one
may straddle two extents or span many."""

from __future__ import annotations

from math import gcd

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_TABLE_BYTES = 16 << 20
"""Most bytes of a layout's table: with pages of one token a range has tens of millions of envelopes, and every process
of a host has a table."""


def distinct(numbers: Indices) -> Indices:
    """The numbers, sorted and each once. `numpy.unique` (of 2.3 and later) takes seconds for a few million of them."""
    numbers = np.sort(numbers)
    return numbers[np.append(True, numbers[1:] != numbers[:-1])[: len(numbers)]]


class BlockLayout:
    """The layout of one range. Envelopes and extents are numbered from its start."""

    def __init__(self, envelope_bytes: int, extent_bytes: int, count: int) -> None:
        """A layout of `count` envelopes of `envelope_bytes` in extents of `extent_bytes`. Raises ValueError unless all
        are positive."""
        if envelope_bytes <= 0 or extent_bytes <= 0 or count <= 0:
            raise ValueError(f"{count} envelopes of {envelope_bytes} bytes in extents of {extent_bytes} bytes")
        self.envelope_bytes = envelope_bytes
        self.extent_bytes = extent_bytes
        self.total = count
        self.n_extents = -(-count * envelope_bytes // extent_bytes)
        period = extent_bytes // gcd(envelope_bytes, extent_bytes)  # envelopes after which they lie the same way again
        some = np.arange(min(count, period))
        self._most = int((self.ends(some) - self.homes(some)).max()) + 1
        self._offsets = np.arange((extent_bytes - 1) // envelope_bytes + 2)
        # Looking up is done on the token path, and takes half a microsecond for a step; dividing takes up to ten.
        small = self._most > 1 and 8 * count * self._most <= _TABLE_BYTES
        self._table: Indices | None = self._computed(np.arange(count)) if small else None

    def touched(self, envelopes: Indices) -> Indices:
        """Extents that each of these envelopes touches, in order; (envelopes, most per envelope), padded with
        `n_extents`."""
        return self._computed(envelopes) if self._table is None else self._table.take(envelopes, axis=0)

    def _computed(self, envelopes: Indices) -> Indices:
        homes = self.homes(envelopes)[:, None]
        if self._most == 1:
            return homes
        touched = homes + np.arange(self._most)
        return np.where(touched <= self.ends(envelopes)[:, None], touched, self.n_extents)

    def extents_of(self, envelope: int) -> range:
        """The extents that an envelope touches."""
        start = envelope * self.envelope_bytes
        return range(start // self.extent_bytes, (start + self.envelope_bytes - 1) // self.extent_bytes + 1)

    def homes(self, envelopes: Indices) -> Indices:
        """The extent in which each envelope begins; same shape."""
        return envelopes * self.envelope_bytes // self.extent_bytes

    def ends(self, envelopes: Indices) -> Indices:
        """The extent in which each envelope ends; same shape."""
        return ((envelopes + 1) * self.envelope_bytes - 1) // self.extent_bytes

    def first_and_last(self, extents: Indices) -> tuple[Indices, Indices]:
        """Numbers of the first and of the last envelope that touch each of these extents; same shape."""
        first = extents * self.extent_bytes // self.envelope_bytes
        last = ((extents + 1) * self.extent_bytes - 1) // self.envelope_bytes
        return first, np.minimum(last, self.total - 1)

    def touching(self, extents: Indices) -> Indices:
        """Numbers of the envelopes that touch any of these extents, each once, sorted."""
        first, last = self.first_and_last(np.sort(extents))
        first[1:] = np.maximum(first[1:], last[:-1] + 1)
        envelopes = first[:, None] + self._offsets
        return envelopes[envelopes <= last[:, None]]

    def inside(self, extents: Indices) -> Indices:
        """Number of envelopes that lie wholly in each of these extents; same shape."""
        first = -(-extents * self.extent_bytes // self.envelope_bytes)
        end = np.minimum((extents + 1) * self.extent_bytes // self.envelope_bytes, self.total)
        return np.maximum(end - first, 0)

    def crossing(self, extents: Indices) -> Indices:
        """Numbers of the envelopes that touch one of these extents and another extent as well, each once, sorted."""
        outer = distinct(np.concatenate(self.first_and_last(extents)))
        return outer[self.homes(outer) < self.ends(outer)]
