"""Which leases hold the bytes of which image, as far as this process filled them or made the image of them. Pure.

What a lease holds is known by its extents: their ids are never used again and an engine only reads its weights, so the
same extents are the same bytes, however long ago that was. A lease that slept meanwhile has others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST = 256
"""Most leases that are remembered: many times the engines of a node. Those that ended are only noticed when they are
used as a source."""


@dataclass(frozen=True)
class Content:
    """One rank's weights of a generation of a model, in one layout: what two engines may exchange."""

    model: str
    generation: int
    rank: int
    manifest: bytes


@dataclass(frozen=True)
class LeaseSource:
    """A lease that holds some content in these extents, in the order of the range."""

    lease_id: str
    device: str
    extent_ids: tuple[int, ...]
    content: Content
    checksum: str
    """Checksum of the image that the content is."""


class Sources:
    """All leases whose content is known."""

    def __init__(self) -> None:
        self._sources: dict[str, LeaseSource] = {}
        """Sources by lease id, in the order in which they were filled."""

    def __contains__(self, source: LeaseSource) -> bool:
        return self._sources.get(source.lease_id) == source

    def filled(self, source: LeaseSource) -> None:
        self.forget(source.lease_id)
        self._sources[source.lease_id] = source
        while len(self._sources) > _MOST:
            del self._sources[next(iter(self._sources))]

    def forget(self, lease_id: str) -> None:
        """Forgets a lease that is written to, is gone, or holds something else."""
        self._sources.pop(lease_id, None)

    def doubt(self, content: Content) -> None:
        """Forgets all leases that hold `content`: a copy from one of them was not what it should be."""
        for source in self.of(content):
            self.forget(source.lease_id)

    def of(self, content: Content, checksum: str = "") -> Sequence[LeaseSource]:
        """Leases that hold `content`, newest first; with a checksum, only those that hold the image of this
        checksum."""
        return [
            source
            for source in reversed(self._sources.values())
            if source.content == content and checksum in ("", source.checksum)
        ]
