"""The extents that exist: their descriptors here, and their records in the keeper."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence

from balloond import records
from balloond.backends.base import ExtentMaker
from balloond.keeper_client import KeeperClient, Kept
from balloond.policy.ledger import Extent
from balloond.records import ExtentFacts


class Custody:
    """One descriptor for each extent, of all devices."""

    def __init__(self, makers: Mapping[str, ExtentMaker], keeper: KeeperClient) -> None:
        self._makers = dict(makers)
        self._keeper = keeper
        self._fds: dict[int, int] = {}

    def __contains__(self, extent: Extent) -> bool:
        return extent.id in self._fds

    def descriptors(self, extents: Iterable[Extent]) -> list[int]:
        """They stay ours."""
        return [self._fds[extent.id] for extent in extents]

    def take(self, id: int, fd: int) -> None:
        """An extent that a predecessor created."""
        self._fds[id] = fd

    def create(self, device: str, token: str, extents: Sequence[Extent]) -> asyncio.Task[None]:
        """Done when the keeper has them, and they may be sent. Raises OSError; then none of them exists."""
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
        return self._keeper.keep([self.kept(device, token, extent) for extent in extents])

    def destroy(self, extents: Iterable[Extent]) -> None:
        """Nobody has them any more: here and in the keeper the last descriptors close. Those that never existed here
        (lost, or not created yet) are passed over."""
        ids = [extent.id for extent in extents]
        for id in ids:
            fd = self._fds.pop(id, None)
            if fd is not None:
                os.close(fd)
        self._keeper.forget_soon([records.extent_id(id) for id in ids])

    def kept(self, device: str, token: str, extent: Extent) -> Kept:
        return records.encode(ExtentFacts(extent.id, device, extent.bytes, extent.kind, token)), self._fds[extent.id]
