"""Extents under addresses of this process for the time of a copy.

Giving access to an extent takes about half of the time that the bytes under way on the links still need, and a tenth
of that before anything is copied (docs/lab/measurements.md). So a thread maps all of them ahead, in order: some before
any is reported, the others while those are copied. The driver maps or unmaps one extent at a time, so that unmapping
would hold up mapping and copies: it is left to the caller that closes this, when nothing waits for the bytes any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from loader.policy.chunks import Chunk
from loader.transfers.base import Borrowed

Map = Callable[[int, int, int], None]
"""Callback that maps an extent: (address, descriptor, bytes)."""


class Addresses(Protocol):
    """The part of balloond.backends.base.Mapper that a copy needs beside mapping."""

    def reserve(self, span: int) -> int: ...

    def release(self, address: int, span: int) -> None:
        """Gives addresses up, with whatever is mapped there."""
        ...


class Mapped:
    """Extents that are mapped back to back. When the context is left, in any thread, whatever is mapped goes with the
    addresses."""

    def __init__(self, addresses: Addresses, extents: Sequence[Borrowed]) -> None:
        self._addresses = addresses
        self._extents = extents
        self._offsets = list(accumulate((extent.nbytes for extent in extents), initial=0))
        self._base = 0
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        """Condition whose lock guards everything below."""
        self._mapped = 0
        self._failure: Exception | None = None
        self._ending = False

    def __enter__(self) -> Mapped:
        self._base = self._addresses.reserve(self._offsets[-1])
        return self

    def __exit__(self, *failure: object) -> None:
        self._ending = True
        if self._thread is not None:
            self._thread.join()
        self._addresses.release(self._base, self._offsets[-1])

    def start(self, map: Map, first: int = 4) -> None:
        """Begins to map all extents, in a thread; one that cannot be mapped ends that. `first`: how many are mapped
        before any is reported."""
        self._thread = threading.Thread(target=self._work, args=(map, first), name="map extents")
        self._thread.start()

    def reach(self, chunk: Chunk) -> None:
        """Waits until the chunk's extent is mapped. Raises what mapping it, or one before it, raised."""
        if self._mapped > chunk.extent:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._mapped > chunk.extent or self._failure is not None)
            if self._mapped <= chunk.extent and self._failure is not None:
                raise self._failure

    def at(self, chunk: Chunk) -> int:
        """Address of the chunk."""
        return self._base + self._offsets[chunk.extent] + chunk.offset

    def _work(self, map: Map, first: int) -> None:
        try:
            for number, extent in enumerate(self._extents, start=1):
                if self._ending:
                    return
                map(self._base + self._offsets[number - 1], extent.fd, extent.nbytes)
                if number >= min(first, len(self._extents)):
                    with self._changed:
                        self._mapped = number
                        self._changed.notify_all()
        except Exception as error:  # whatever it is: a caller waits for the extent
            with self._changed:
                self._failure = error
                self._changed.notify_all()
