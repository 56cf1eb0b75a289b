"""A checksum of large memory that host and GPU compute alike, each about as fast as it reads.

The memory is cut into rows of 4 KiB. A row's sum is that of its 64-bit words; the checksum is the sum of all rows'
sums, each times an odd number of its own, modulo 2^64. A changed, lost or misplaced row shows; words that only changed
places within their row do not. Rows may come in any order; zeros follow a last one that is short.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROW_BYTES = 4096
MULTIPLIER = 0x9E3779B97F4A7C15
"""Row i counts (2 i + 1) times this. (2^64 by the golden ratio, as in Fibonacci hashing.)"""


class Checksum:
    """Of memory that is seen piece by piece."""

    def __init__(self) -> None:
        self._sum = 0

    def add(self, at: int, piece: memoryview | NDArray[np.uint8] | bytes) -> None:
        """`piece` lies at byte `at`, where a row begins, and ends where one ends, unless it is the last."""
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
        """What `other` saw counts here too: several threads may see a memory, each its own parts."""
        self._sum = (self._sum + other._sum) % (1 << 64)

    def text(self) -> str:
        return as_text(self._sum)


def as_text(total: int) -> str:
    """How a checksum is written; `total` may be signed."""
    return f"rows:{total % (1 << 64):016x}"


def checksum(data: bytes | memoryview) -> str:
    """Of memory that is all here."""
    whole = Checksum()
    whole.add(0, data)
    return whole.text()
