"""What a copy is for the loader, whatever the device."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from loader.policy.chunks import Chunk


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
    """Copies for one kind of device. Both run in a thread of their own, block, and follow the plan in its order. `done`
    is called with each chunk once its bytes are where they belong, and may raise Cancelled: then nothing is touched any
    more when the call ends. Raises OSError when the device or the memory fails."""

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
