"""A checksum of large memory that host and GPU compute alike, each about as fast as it reads.

The memory is cut into rows of 4 KiB. A row's sum is that of its 64-bit words; the checksum is the sum of all rows'
sums, each times an odd number of its own, modulo 2^64. A changed, lost or misplaced row shows; words that only changed
places within their row do not. Rows may come in any order; a short last row is filled up with zeros.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROW_BYTES = 4096
MULTIPLIER = 0x9E3779B97F4A7C15
"""Factor of the rows' weights: row i counts (2 i + 1) times this. (2^64 by the golden ratio, as in Fibonacci
hashing.)"""


class Checksum:
    """The checksum of memory that is read piece by piece."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, at: int, piece: memoryview | NDArray[np.uint8] | bytes) -> None:
        """Adds `piece`, which lies at byte `at`. A row has to begin at `at`, and the piece has to end where a row ends,
        unless it is the last one. Raises ValueError if no row begins at `at`."""
        if at % ROW_BYTES:
            raise ValueError(f"no row of {ROW_BYTES} bytes begins at {at}")
        whole = len(piece) // ROW_BYTES * ROW_BYTES
        if whole < len(piece):
            self.add(at + whole, bytes(piece[whole:]).ljust(ROW_BYTES, b"\0"))
        rows = np.frombuffer(piece, "<u8", whole // 8).reshape(-1, ROW_BYTES // 8).sum(axis=1, dtype=np.uint64)
        first = at // ROW_BYTES
        weights = np.arange(2 * first + 1, 2 * (first + len(rows)) + 1, 2, dtype=np.uint64) * np.uint64(MULTIPLIER)
        self._sum = (self._sum + int((rows * weights).sum(dtype=np.uint64))) % (1 << 64)

    def join(self, other: Checksum) -> None:
        """Adds what `other` has read: several threads may read a memory, each its own parts."""
        self._sum = (self._sum + other._sum) % (1 << 64)

    def text(self) -> str:
        return as_text(self._sum)


def as_text(total: int) -> str:
    """A checksum as it is written; `total` may be signed."""
    return f"rows:{total % (1 << 64):016x}"


def checksum(data: bytes | memoryview) -> str:
    """The checksum of memory that is all here."""
    whole = Checksum()
    whole.add(0, data)
    return whole.text()
