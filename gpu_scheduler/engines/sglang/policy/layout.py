"""Where envelopes lie in a range that is cut into extents: packed back to back, so that one may straddle two extents
or span many."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class Layout:
    """Envelopes and extents are numbered from the start of the range.

    Holds tables, about 8 bytes for each extent that an envelope touches and 8 more, because looking up is several
    times faster than dividing on the token path.
    """

    def __init__(self, envelope_bytes: int, extent_bytes: int, count: int) -> None:
        if envelope_bytes <= 0 or extent_bytes <= 0 or count <= 0:
            raise ValueError(f"{count} envelopes of {envelope_bytes} bytes in extents of {extent_bytes} bytes")
        self.envelope_bytes = envelope_bytes
        self.extent_bytes = extent_bytes
        self.total = count
        self.n_extents = -(-count * envelope_bytes // extent_bytes)
        envelopes = np.arange(count)
        homes, ends = self.homes(envelopes), self.ends(envelopes)
        span = int((ends - homes).max()) + 1
        touched = homes[:, None] + np.arange(span)
        self.touched: Indices = np.where(touched <= ends[:, None], touched, self.n_extents)
        """For each envelope, the extents that it touches, the first one first; filled up with `n_extents`."""
        starts = np.arange(self.n_extents + 1) * extent_bytes
        first = np.minimum(-(-starts // envelope_bytes), count)
        beginning = first[:-1, None] + np.arange(int(np.diff(first).max()))
        self.beginning: Indices = np.where(beginning < first[1:, None], beginning, count)
        """For each extent, the envelopes that begin in it; filled up with `total`."""
        self.reaching: Indices = np.where(first[:-1] * envelope_bytes > starts[:-1], first[:-1] - 1, count)
        """For each extent, the one envelope that begins before it and reaches into it; `total` where there is none."""

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

    def touching(self, extents: Indices) -> Indices:
        """The envelopes that touch any of these extents, each once, in order."""
        envelopes = np.unique(np.concatenate((self.beginning[extents].ravel(), self.reaching[extents])))
        return envelopes[: np.searchsorted(envelopes, self.total)]
