"""What a copy is for the loader, whatever the device."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from loader.policy.chunks import Chunk, Pair


@dataclass(frozen=True)
class Borrowed:
    """One extent of a lease, here for the time of a copy. The descriptor belongs to whoever borrowed it."""

    id: int
    nbytes: int
    fd: int
    device: str


class Cancelled(Exception):
    """Raised in the copying thread, between two chunks, once nobody waits for the copy any more."""


class Transfer(Protocol):
    """Copies for one device, each over all links that reach it. All run in a thread of the caller's, block, and begin
    the plan in its order; over several links it ends in another. `done` is called in that thread with each part of the
    plan once its bytes are where they belong, and may raise Cancelled. However a call ends, nothing is touched any more
    when it has. Raises OSError when the device or the memory fails."""

    def out_of(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> None:
        """Extents -> image. The extents are only read: an engine may be serving from them."""
        ...

    def into(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> None:
        """Image -> extents."""
        ...

    def between(
        self,
        sources: Sequence[Borrowed],
        targets: Sequence[Borrowed],
        plan: Sequence[Pair],
        done: Callable[[Pair], None],
    ) -> None:
        """Extents of this device -> extents of any other, or of the same one; the former are only read. Raises Unmet
        where there is no way."""
        ...


class Kind(Protocol):
    """All devices of one kind."""

    def reaching(self, device: str, others: Sequence[str]) -> tuple[str, ...]:
        """Those of the others whose links fill the device's memory beside its own and make that faster. Raises OSError
        when the driver cannot be asked."""
        ...

    def transfer(self, device: str, links: Sequence[str]) -> Transfer:
        """Of a device, over these links."""
        ...

    def forget(self, weights: memoryview) -> None:
        """An image is about to be unmapped; no copy of it is under way."""
        ...


class Meter:
    """How far a copy is: counted by its thread, read by the loop, and the way to stop it."""

    def __init__(self) -> None:
        self.done = 0
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        self._cancelled = threading.Event()

    def advance(self, nbytes: int) -> None:
        """From the thread. Raises Cancelled."""
        if self._cancelled.is_set():
            raise Cancelled
        self.done += nbytes
        if not self._moved.is_set():  # or the loop has yet to look at `done`
            self._loop.call_soon_threadsafe(self._moved.set)

    def cancel(self) -> None:
        """The thread stops at the end of its chunk."""
        self._cancelled.set()

    def stir(self) -> None:
        """In the loop: lets `moved` return although nothing moved."""
        self._moved.set()

    async def moved(self) -> None:
        """Returns when `done` has changed since the last time, or after `stir`."""
        await self._moved.wait()
        self._moved.clear()
