"""Reclaims of balloond that a range has not answered yet. Pure.

A reclaim asks for bytes back. A deep one may also take prefixes that the engine caches: the engine evicts some for what
the reserve does not cover, and says when it did what it could.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class OpenReclaim:
    """One reclaim; its bytes are counted as extents leave the reserve."""

    id: int
    remaining: int
    """Bytes that it asks for beyond those in `returned`; 0: it is met."""
    returned: int = 0
    """Bytes that left for it, in whole extents."""
    taken: bool = False
    """Whether the engine knows of it."""
    done: bool = False
    """Whether the engine did what it could."""


class OpenReclaims:
    """The reclaims of one range, in the order in which they came."""

    def __init__(self, extent_bytes: int) -> None:
        self._extent_bytes = extent_bytes
        self._reclaims: list[OpenReclaim] = []

    def add(self, id: int, nbytes: int, deep: bool) -> OpenReclaim:
        """Adds a reclaim of `nbytes`. Unless it is `deep`, there is nothing in it for the engine to do."""
        reclaim = OpenReclaim(id, nbytes, taken=not deep, done=not deep)
        self._reclaims.append(reclaim)
        return reclaim

    def take(self) -> int:
        """Bytes that the engine has to find beyond the reserve, in reclaims that it did not take before."""
        wanted = 0
        for reclaim in self._reclaims:
            if not reclaim.taken:
                reclaim.taken = True
                wanted += reclaim.remaining
        return wanted

    def done(self, *, every: bool = False) -> None:
        """Marks reclaims as done: those that the engine took, or every one."""
        for reclaim in self._reclaims:
            reclaim.done = reclaim.done or reclaim.taken or every

    def extents(self) -> tuple[int, int]:
        """Extents that are still to leave: (for reclaims that are done, for those that the engine is at)."""
        if not self._reclaims:
            return 0, 0
        done, others = (
            sum(self._ceil(reclaim.remaining) for reclaim in self._reclaims if reclaim.done == done)
            for done in (True, False)
        )
        return done, others

    def left(self, extents: int) -> None:
        """Counts extents that leave the reserve for the reclaims, the oldest first."""
        for reclaim in self._reclaims:
            part = min(extents, self._ceil(reclaim.remaining))
            reclaim.returned += part * self._extent_bytes
            reclaim.remaining = max(0, reclaim.remaining - part * self._extent_bytes)
            extents -= part

    def pop_over(self, more_to_come: bool) -> list[OpenReclaim]:
        """Takes out the reclaims that are over: met, or done and no more is to come. `more_to_come`: released extents
        may still leave for them."""
        over = [r for r in self._reclaims if not r.remaining or (r.done and not more_to_come)]
        self._reclaims = [r for r in self._reclaims if r not in over]
        for reclaim in over:
            reclaim.done = True
        return over

    def pop_all(self) -> list[OpenReclaim]:
        """Takes out all reclaims."""
        reclaims, self._reclaims = self._reclaims, []
        return reclaims

    def _ceil(self, nbytes: int) -> int:
        """Number of whole extents that hold these bytes."""
        return -(-nbytes // self._extent_bytes)
