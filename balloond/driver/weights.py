"""The weights' addresses of one engine: filled with large extents, emptied for hibernation, filled again at the same
addresses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import groupby

from balloond.backends.base import Mapper
from balloond.driver.connection.lease import WEIGHTS, Granted, Kind, Lease
from balloond.policy.extents import cut

_TOGETHER = 64
"""Most extents of one request: no process holds more descriptors at a time, however large the model."""


def _parts(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """(size, count) of each request for extents of these sizes, in their order."""
    for size, same in groupby(sizes):
        count = len(list(same))
        for start in range(0, count, _TOGETHER):
            yield size, min(_TOGETHER, count - start)


class WeightsRange:
    """Addresses for at most `span_bytes` of weights. The engine calls the methods from one thread."""

    def __init__(
        self, lease: Lease, mapper: Mapper, *, span_bytes: int, extent_bytes: int, kind: Kind = WEIGHTS
    ) -> None:
        self._lease = lease
        self._kind = kind
        self._mapper = mapper
        self._extent_bytes = extent_bytes
        self._span = -(-max(span_bytes, 1) // mapper.page_bytes) * mapper.page_bytes
        self.address = mapper.reserve(self._span)
        self._extents: list[tuple[int, int]] = []
        """(id, bytes) of each extent that is mapped, in a row from the start."""

    @property
    def mapped_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._extents)

    def grow(self, total_bytes: int, *, timeout_s: float) -> None:
        """Maps until `total_bytes` are mapped from the start of the range, zeros behind what was there. It may be
        called again for more while what is mapped is whole extents; the last one is cut to whole pages. Raises
        GrowRefused (then no more is mapped than before), ValueError when it does not fit the addresses."""
        mapped = self.mapped_bytes
        sizes = cut(total_bytes - mapped, self._extent_bytes, self._mapper.page_bytes)
        if mapped + sum(sizes) > self._span:
            raise ValueError(f"{mapped + sum(sizes)} bytes do not fit {self._span} bytes of addresses")
        if sizes and mapped % self._extent_bytes:
            raise ValueError(f"{mapped} bytes are mapped already, and the last extent is cut")
        before = len(self._extents)
        try:
            for size, count in _parts(sizes):
                self._map(self._lease.grow(self._kind, size, count, timeout_s=timeout_s))
        except BaseException:
            self._leave_from(before)
            raise

    def _map(self, granted: list[Granted]) -> None:
        """Maps extents in a row and closes their descriptors; whatever happens, those that were not mapped go back."""
        address = self.address + self.mapped_bytes
        unmapped = list(granted)
        try:
            for extent in granted:
                self._mapper.map(address, extent.fd, extent.bytes)
                address += extent.bytes
                self._extents.append((extent.id, extent.bytes))
                unmapped.remove(extent)
        finally:
            for extent in granted:
                os.close(extent.fd)
            if unmapped:
                self._lease.give_back([extent.id for extent in unmapped])

    def shrink(self, total_bytes: int) -> None:
        """Unmaps and returns the extents that begin behind `total_bytes`. Like `leave` it waits for nothing."""
        kept, end = 0, 0
        while kept < len(self._extents) and end < total_bytes:
            end += self._extents[kept][1]
            kept += 1
        self._leave_from(kept)

    def leave(self) -> None:
        """Unmaps and returns everything; the addresses stay. It waits for nothing, so the device must be done with it:
        on CUDA the engine synchronises first, or a kernel that still reads is a fault."""
        self._leave_from(0)

    def _leave_from(self, kept: int) -> None:
        """Unmaps and returns all extents but the first `kept`."""
        start = sum(nbytes for _, nbytes in self._extents[:kept])
        if self.mapped_bytes > start:
            self._mapper.unmap(self.address + start, self.mapped_bytes - start)
            self._lease.give_back([id for id, _ in self._extents[kept:]])
        del self._extents[kept:]

    def close(self) -> None:
        """Unmaps and returns everything, as `leave` does, and gives the addresses up."""
        self.leave()
        if self._span:
            self._mapper.release(self.address, self._span)
            self._span = 0
