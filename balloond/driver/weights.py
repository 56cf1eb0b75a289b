"""The weights' addresses of one engine: filled with large extents, emptied for hibernation, filled again at the same
addresses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import groupby

from balloond.backends.base import Mapper
from balloond.driver.lease import WEIGHTS, Granted, Lease
from balloond.policy.extents import cut

_TOGETHER = 64
"""Extents of one request: no process holds more descriptors at a time, however large the model."""


def _parts(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """(size, count) of requests for extents of these sizes in their order."""
    for size, same in groupby(sizes):
        count = len(list(same))
        for start in range(0, count, _TOGETHER):
            yield size, min(_TOGETHER, count - start)


class WeightsRange:
    """Addresses for at most `span_bytes` of weights. Methods are the engine's, from one thread."""

    def __init__(self, lease: Lease, mapper: Mapper, *, span_bytes: int, extent_bytes: int) -> None:
        self._lease = lease
        self._mapper = mapper
        self._extent_bytes = extent_bytes
        self._span = -(-max(span_bytes, 1) // mapper.page_bytes) * mapper.page_bytes
        self.address = mapper.reserve(self._span)
        self._ids: list[int] = []
        self.mapped_bytes = 0

    def grow(self, total_bytes: int, *, timeout_s: float) -> None:
        """Maps until `total_bytes` are mapped from the start of the range, zeros behind what was there. May be called
        again for more while what is mapped is whole extents; the last one is cut to whole pages. Raises GrowRefused
        (then no more is mapped than before), ValueError when it does not fit the addresses."""
        sizes = cut(total_bytes, self._extent_bytes, self._mapper.page_bytes)
        if sum(sizes) > self._span:
            raise ValueError(f"{sum(sizes)} bytes do not fit {self._span} bytes of addresses")
        if self.mapped_bytes % self._extent_bytes:
            raise ValueError(f"{self.mapped_bytes} bytes are mapped already, and the last extent is cut")
        before = len(self._ids)
        try:
            for size, count in _parts(sizes[before:]):
                self._map(self._lease.grow(WEIGHTS, size, count, timeout_s=timeout_s))
        except BaseException:
            self._leave_from(before)
            raise

    def _map(self, granted: list[Granted]) -> None:
        """Takes the extents over, whatever happens."""
        self._ids += [extent.id for extent in granted]
        try:
            for extent in granted:
                self._mapper.map(self.address + self.mapped_bytes, extent.fd, extent.bytes)
                self.mapped_bytes += extent.bytes
        finally:
            for extent in granted:
                os.close(extent.fd)

    def leave(self) -> None:
        """Unmaps and returns everything; the addresses stay. Waits for nothing, so the device must be done with it: on
        CUDA the engine synchronises first, or a kernel that still reads is a fault."""
        self._leave_from(0)

    def _leave_from(self, kept: int) -> None:
        """The first `kept` extents, all of full size, stay."""
        start = kept * self._extent_bytes
        if self.mapped_bytes > start:
            self._mapper.unmap(self.address + start, self.mapped_bytes - start)
            self.mapped_bytes = start
        if self._ids[kept:]:
            self._lease.give_back(self._ids[kept:])
        del self._ids[kept:]

    def close(self) -> None:
        """The same, and gives the addresses up."""
        self.leave()
        if self._span:
            self._mapper.release(self.address, self._span)
            self._span = 0
