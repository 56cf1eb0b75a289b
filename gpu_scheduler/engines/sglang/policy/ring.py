"""Room in a buffer that is filled in order and emptied in about the same order."""

from __future__ import annotations

from collections import deque

ALIGN_BYTES = 256


class Ring:
    """What is taken lies in one piece, at a multiple of `ALIGN_BYTES`. Room is given back in any order, and used again
    once all that was taken before it has come back too."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: deque[tuple[int, int]] = deque()
        """(start, end) in the order of taking; the oldest is never one that came back."""
        self._back: set[int] = set()
        """Starts of those that came back before an older one."""

    def take(self, nbytes: int) -> int | None:
        """Where there is room for so many bytes, at least one; None: nowhere now."""
        nbytes = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        start = self._room(nbytes)
        if start is not None:
            self._taken.append((start, start + nbytes))
        return start

    def _room(self, nbytes: int) -> int | None:
        if not self._taken:
            return 0 if nbytes <= self.nbytes else None
        oldest, newest = self._taken[0][0], self._taken[-1][1]
        if newest <= oldest:  # it has come round
            return newest if newest + nbytes <= oldest else None
        if newest + nbytes <= self.nbytes:
            return newest
        return 0 if nbytes <= oldest else None

    def give(self, start: int) -> None:
        """Back what was taken there."""
        self._back.add(start)
        while self._taken and self._taken[0][0] in self._back:
            self._back.remove(self._taken.popleft()[0])
