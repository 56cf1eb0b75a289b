"""The interface of a copy for the loader, whatever the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from loader.policy.chunks import Chunk, Pair


@dataclass(frozen=True)
class Borrowed:
    """One extent of a lease, here for the time of a copy. The descriptor belongs to the borrower."""

    id: int
    nbytes: int
    fd: int
    device: str


Busy = Callable[[Sequence[str]], Mapping[str, float]]
"""Callback when a copy begins that may go over several devices' links. Returns the part of its time, 0 to 1, that each
device works for others; 0 for those that it does not name."""


def nobody(devices: Sequence[str]) -> Mapping[str, float]:
    return {}


Tidy = Callable[[], None]
"""What a copy leaves to do when its bytes are where they belong. When it returns, nothing of the extents is mapped here
any more, and only then may they be given back. To be called once, in any thread; blocks. Raises OSError when the device
fails."""


def nothing() -> None:
    """The Tidy of a copy that mapped nothing."""


class Transfer(Protocol):
    """Copies for one device, each over all links that reach it and are no other running copy's own. Methods run in a
    thread of the caller's, block, and begin the plan in its order; over several links it ends in another order. `done`
    is called in that thread with each part of the plan once its bytes are where they belong, and may raise
    (loader.copies.threads.Stopped). However a call ends, no byte is touched any more when it has. One that raises has
    tidied up after itself. Raises OSError when the device or the memory fails."""

    def out_of(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> Tidy:
        """Copies extents to an image. The extents are only read: an engine may be serving from them."""
        ...

    def into(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> Tidy:
        """Copies an image to extents."""
        ...

    def between(
        self,
        sources: Sequence[Borrowed],
        targets: Sequence[Borrowed],
        plan: Sequence[Pair],
        done: Callable[[Pair], None],
    ) -> Tidy:
        """Copies extents of this device to extents of any other, or of the same one; the sources are only read. Raises
        Unmet where there is no way."""
        ...


class TransferKind(Protocol):
    """All devices of one kind."""

    def reaching(self, device: str, others: Sequence[str]) -> tuple[str, ...]:
        """Those of the other devices whose links fill this device's memory beside its own and make that faster. Raises
        OSError when the driver does not answer."""
        ...

    def transfer(self, device: str, links: Sequence[str]) -> Transfer:
        """The transfer of a device, over these links."""
        ...

    def forget(self, weights: memoryview) -> None:
        """Forgets an image that is about to be unmapped; no copy of it is under way."""
        ...
