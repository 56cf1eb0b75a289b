"""Extents under addresses of this process for the time of a copy.

To give access takes as long as what the links have under way, once anything is copied (docs/measurements.md). So a
thread maps all extents ahead, in order, while the first are copied, and more of them at once each time. What takes them
away again would hold up either, as the driver does one such thing at a time: it is left to whoever closes this, when
nobody waits for the bytes any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from loader.policy.chunks import Chunk
from loader.transfers.base import Borrowed

Map = Callable[[int, Sequence[Borrowed]], None]
"""Maps extents back to back from an address."""
_FIRST, _MOST = 4, 16
"""Extents that are mapped together: those for which the copy waits, and in the end."""


class Addresses(Protocol):
    """The part of balloond.backends.base.Mapper that a copy needs beside mapping."""

    def reserve(self, span: int) -> int: ...

    def release(self, address: int, span: int) -> None:
        """With whatever is mapped there."""
        ...


class Mapped:
    """Back to back. When it is left, in any thread, whatever is mapped goes with the addresses."""

    def __init__(self, addresses: Addresses, extents: Sequence[Borrowed]) -> None:
        self._addresses = addresses
        self._extents = extents
        self._offsets = list(accumulate((extent.nbytes for extent in extents), initial=0))
        self._base = 0
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        """Its lock guards everything below."""
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

    def start(self, map: Map) -> None:
        """Begins to map them all, in a thread; what cannot be mapped ends that."""
        self._thread = threading.Thread(target=self._work, args=(map,), name="map extents")
        self._thread.start()

    def reach(self, chunk: Chunk) -> None:
        """The chunk's extent is mapped when this returns. Raises what mapping it, or one before it, raised."""
        if self._mapped > chunk.extent:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._mapped > chunk.extent or self._failure is not None)
            if self._mapped <= chunk.extent and self._failure is not None:
                raise self._failure

    def at(self, chunk: Chunk) -> int:
        """The address."""
        return self._base + self._offsets[chunk.extent] + chunk.offset

    def _work(self, map: Map) -> None:
        try:
            while self._mapped < len(self._extents) and not self._ending:
                some = min(max(_FIRST, self._mapped), _MOST)
                extents = self._extents[self._mapped : self._mapped + some]
                map(self._base + self._offsets[self._mapped], extents)
                with self._changed:
                    self._mapped += len(extents)
                    self._changed.notify_all()
        except Exception as error:  # whatever it is: somebody waits for the extent
            with self._changed:
                self._failure = error
                self._changed.notify_all()
