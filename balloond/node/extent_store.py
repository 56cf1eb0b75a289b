"""The extents that exist, with their descriptors here and their records in the keeper."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from balloond.backends.base import ExtentMaker
from balloond.keeper.client import KeeperClient, Kept
from balloond.node import records
from balloond.node.records import ExtentFacts
from balloond.policy.ledger import Extent

_FORGOTTEN_TOGETHER = 32
"""Number of extents that are forgotten together: once the keeper has let go of them, others may be created in their
place."""


class ExtentStore:
    """One descriptor for each extent, of all devices."""

    def __init__(self, makers: Mapping[str, ExtentMaker], keeper: KeeperClient, most: int) -> None:
        """`most`: number of extents for which this process and the keeper have descriptors."""
        self._makers = dict(makers)
        self._most = most
        self._keeper = keeper
        self._fds: dict[int, int] = {}
        self._there: defaultdict[str, int] = defaultdict(int)
        """Bytes of the extents in `_fds`, by device."""
        self._leaving: defaultdict[str, dict[asyncio.Task[None], int]] = defaultdict(dict)
        """Bytes that were destroyed here and whose memory lasts until the keeper has closed its descriptors: by device,
        then by the task that waits for that."""

    def __contains__(self, extent: Extent) -> bool:
        return extent.id in self._fds

    def descriptors(self, extents: Iterable[Extent]) -> list[int]:
        """Descriptors of `extents`, in their order; they stay the store's."""
        return [self._fds[extent.id] for extent in extents]

    def take(self, device: str, id: int, nbytes: int, fd: int) -> None:
        """Takes over the descriptor of an extent that a predecessor created."""
        self._fds[id] = fd
        self._there[device] += nbytes

    def create(self, device: str, token: str, extents: Sequence[Extent]) -> asyncio.Task[None]:
        """Creates `extents`. The task ends when the keeper has them and they may be sent. Raises OSError, also for
        more extents than there are descriptors; then none of `extents` exists."""
        if len(self._fds) + len(extents) > self._most:
            # The keeper would lose the connection over a message with more descriptors than it may open.
            raise OSError(errno.EMFILE, f"there are descriptors for {self._most} extents, and {len(self._fds)} exist")
        maker = self._makers[device]
        made: list[int] = []
        try:
            for extent in extents:
                made.append(maker.create(extent.bytes))
        except OSError:
            for fd in made:
                os.close(fd)
            raise
        self._fds.update(zip((extent.id for extent in extents), made, strict=True))
        self._there[device] += sum(extent.bytes for extent in extents)
        return self._keeper.keep([self.kept(device, token, extent) for extent in extents])

    def has_headroom(self, device: str, nbytes: int, all_bytes: int) -> bool:
        """Whether `nbytes` that the ledger has granted can be created without exceeding the device for a moment.
        `all_bytes` is what extents may take of it; the memory of destroyed ones is in use until the keeper has let go
        of them."""
        leaving = self._leaving[device]
        return not leaving or self._there[device] + sum(leaving.values()) + nbytes <= all_bytes

    async def wait_for_headroom(self, device: str, nbytes: int, all_bytes: Callable[[], int]) -> None:
        """Waits until `has_room`."""
        while not self.has_headroom(device, nbytes, all_bytes()):
            # The keeper lets go of extents in the order in which they were destroyed.
            await asyncio.wait([next(iter(self._leaving[device]))])

    def destroy(self, device: str, extents: Iterable[Extent]) -> None:
        """Closes the last descriptors, here and in the keeper, of extents that no process has any more. Extents that
        never existed here (lost, or not created yet) are passed over."""
        extents = list(extents)
        for start in range(0, len(extents), _FORGOTTEN_TOGETHER):
            self._destroy(device, extents[start : start + _FORGOTTEN_TOGETHER])

    def _destroy(self, device: str, extents: Sequence[Extent]) -> None:
        nbytes = 0
        for extent in extents:
            fd = self._fds.pop(extent.id, None)
            if fd is not None:
                os.close(fd)
                nbytes += extent.bytes
        self._there[device] -= nbytes
        gone = self._keeper.forget([records.extent_id(extent.id) for extent in extents])
        self._leaving[device][gone] = nbytes
        gone.add_done_callback(self._leaving[device].pop)

    def kept(self, device: str, token: str, extent: Extent) -> Kept:
        return records.encode(ExtentFacts(extent.id, device, extent.bytes, extent.kind, token)), self._fds[extent.id]
