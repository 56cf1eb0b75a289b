"""What a copy is for the loader, whatever the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


Busy = Callable[[Sequence[str]], Mapping[str, float]]
"""Asked when a copy begins that may go over several devices' links: which part of its time each of them works for
others, 0 to 1; 0 for those that it does not name."""


def nobody(devices: Sequence[str]) -> Mapping[str, float]:
    return {}


Tidy = Callable[[], None]
"""What a copy leaves to do when its bytes are where they belong: nothing of the extents is mapped here any more when
this returns, and only then may they be given back. To be called once, in any thread; blocks. Raises OSError when the
device fails."""


def nothing() -> None:
    """The Tidy of a copy that mapped nothing."""


class Transfer(Protocol):
    """Copies for one device, each over all links that reach it and are no other running copy's own. All run in a thread
    of the caller's, block, and begin the plan in its order; over several links it ends in another. `done` is called in
    that thread with each part of the plan once its bytes are where they belong, and may raise
    (loader.copies.threads.Stopped). However a call ends, no byte is touched any more when it has. One that raises has
    tidied up after itself. Raises OSError when the device or the memory fails."""

    def out_of(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> Tidy:
        """Extents -> image. The extents are only read: an engine may be serving from them."""
        ...

    def into(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> Tidy:
        """Image -> extents."""
        ...

    def between(
        self,
        sources: Sequence[Borrowed],
        targets: Sequence[Borrowed],
        plan: Sequence[Pair],
        done: Callable[[Pair], None],
    ) -> Tidy:
        """Extents of this device -> extents of any other, or of the same one; the former are only read. Raises Unmet
        where there is no way."""
        ...


class TransferKind(Protocol):
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
