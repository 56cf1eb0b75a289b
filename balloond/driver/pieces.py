"""Addresses that are handed out piece by piece, for an allocator that takes memory and keeps it: torch's, for CUDA
graphs. A piece stays handed out while its memory is away; the memory is back, zero, at the same addresses, before
anything touches it again."""

from __future__ import annotations

from balloond.backends.base import Mapper
from balloond.driver.connection.lease import GRAPHS, Lease
from balloond.driver.weights import WeightsRange


class PieceRange:
    """Addresses for at most `span_bytes`, mapped in whole extents as they are taken. The engine calls the methods from
    one thread. Those that map raise GrowRefused (then nothing has changed), or ValueError beyond the span."""

    def __init__(self, lease: Lease, mapper: Mapper, *, span_bytes: int, extent_bytes: int, timeout_s: float) -> None:
        """`timeout_s`: seconds to wait for extents, which others may have to give back first."""
        self._range = WeightsRange(lease, mapper, span_bytes=span_bytes, extent_bytes=extent_bytes, kind=GRAPHS)
        self._extent_bytes = extent_bytes
        self._page_bytes = mapper.page_bytes
        self._timeout_s = timeout_s
        self._out: dict[int, int] = {}
        """Bytes of each piece that is handed out, by address."""
        self._end = 0
        """End of the last piece, in bytes from the start of the range."""
        self._away = 0
        """Bytes that were mapped before they left; 0 while they are there."""

    @property
    def address(self) -> int:
        return self._range.address

    @property
    def mapped_bytes(self) -> int:
        return self._range.mapped_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes in pieces, mapped or away."""
        return sum(self._out.values())

    def reserve(self, nbytes: int) -> None:
        """Maps extents so that the next `nbytes` can be taken without mapping."""
        needed = -(-(self._end + nbytes) // self._extent_bytes) * self._extent_bytes
        if needed > self.mapped_bytes:
            self._range.grow(needed, timeout_s=self._timeout_s)

    def take(self, nbytes: int) -> int:
        """Address of a new piece of `nbytes`, in whole pages."""
        assert not self._away, "memory that is away cannot be taken"
        size = -(-max(nbytes, 1) // self._page_bytes) * self._page_bytes
        self.reserve(size)
        address = self.address + self._end
        self._out[address] = size
        self._end += size
        return address

    def give(self, address: int) -> None:
        """Ends the use of a piece. Its addresses are handed out again once no piece lies behind them."""
        del self._out[address]
        self._end = max((start + size for start, size in self._out.items()), default=self.address) - self.address

    def trim(self) -> None:
        """Returns the extents in which no piece lies. The device must be done with them."""
        self._range.shrink(self._end)

    def leave(self) -> None:
        """Unmaps and returns everything; pieces stay handed out. The device must be done with them."""
        self._away = self._away or self.mapped_bytes
        self._range.leave()

    def come_back(self) -> None:
        """Maps again what left, at the same addresses."""
        if self._away:
            self._range.grow(self._away, timeout_s=self._timeout_s)
            self._away = 0

    def close(self) -> None:
        """Returns everything. Addresses of pieces that are still handed out stay reserved: nothing else may come to lie
        there."""
        if self._out:
            self._range.leave()
        else:
            self._range.close()
