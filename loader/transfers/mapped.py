"""Extents under addresses of this process for the time of a copy.

Mapping an extent takes longer the more devices have access to it, as long as copying some hundred MiB where several
links carry. So a thread maps all of them ahead, in order, while the first are copied, and takes away those that are
done while the last are.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Protocol

from loader.policy.chunks import Chunk
from loader.transfers.base import Borrowed


class Addresses(Protocol):
    """The part of balloond.backends.base.Mapper that a copy needs."""

    def reserve(self, span: int) -> int: ...

    def release(self, address: int, span: int) -> None: ...

    def map(self, address: int, fd: int, nbytes: int) -> None: ...

    def unmap(self, address: int, nbytes: int) -> None: ...


class Mapped:
    """Back to back. When it is left, whatever is mapped goes with the addresses."""

    def __init__(self, mapper: Addresses, extents: Sequence[Borrowed], uses: Iterable[Chunk]) -> None:
        """`uses`: the parts of the extents that will be `left`, once each."""
        self._mapper = mapper
        self._extents = extents
        self._offsets = list(accumulate((extent.nbytes for extent in extents), initial=0))
        self._base = 0
        self._thread = threading.Thread(target=self._work, name="map extents")
        self._changed = threading.Condition()
        """Its lock guards everything below."""
        self._uses = Counter(chunk.extent for chunk in uses)
        self._mapped = 0
        self._over: deque[int] = deque()
        """Extents that nothing uses any more."""
        self._failure: Exception | None = None
        self._ending = False

    def __enter__(self) -> Mapped:
        self._base = self._mapper.reserve(self._offsets[-1])
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join()
        self._mapper.release(self._base, self._offsets[-1])

    def reach(self, chunk: Chunk) -> None:
        """The chunk's extent is mapped when this returns. Raises what mapping it, or one before it, raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._mapped > chunk.extent or self._failure is not None)
            if self._mapped <= chunk.extent and self._failure is not None:
                raise self._failure

    def at(self, chunk: Chunk) -> int:
        """The address."""
        return self._base + self._offsets[chunk.extent] + chunk.offset

    def left(self, chunk: Chunk) -> None:
        """Nothing of the chunk is being moved any more."""
        with self._changed:
            self._uses[chunk.extent] -= 1
            if not self._uses[chunk.extent]:
                self._over.append(chunk.extent)
                self._changed.notify_all()

    # --- the thread

    def _work(self) -> None:
        try:
            for number, extent in enumerate(self._extents):
                if self._ending:
                    return
                self._mapper.map(self._base + self._offsets[number], extent.fd, extent.nbytes)
                with self._changed:
                    self._mapped += 1
                    self._changed.notify_all()
            while (over := self._next_over()) is not None:
                self._mapper.unmap(self._base + self._offsets[over], self._extents[over].nbytes)
        except Exception as error:  # whatever it is: somebody waits for the extent
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next_over(self) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._over) or self._ending)
            return None if self._ending else self._over.popleft()
