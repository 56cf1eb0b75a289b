"""Places in a buffer that is filled in order and emptied in about the same order. Pure."""

from __future__ import annotations

from collections import deque

ALIGN_BYTES = 256


class Ring:
    """Places of a ring buffer of `nbytes`. Each is one piece that starts at a multiple of `ALIGN_BYTES`. Places are
    given back in any order, and reused once all that were taken before them are back too."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._taken: deque[tuple[int, int]] = deque()
        """(start, end) of each place in use, in the order of taking; the oldest is never one that was given back."""
        self._back: set[int] = set()
        """Starts of places that were given back before an older one."""

    def take(self, nbytes: int) -> int | None:
        """Start of a new place of at least `nbytes` (at least one); None if there is no room now."""
        nbytes = -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        start = self._start_of(nbytes)
        if start is not None:
            self._taken.append((start, start + nbytes))
        return start

    def _start_of(self, nbytes: int) -> int | None:
        """Start of `nbytes` free bytes in one piece behind the newest place, or at the start of the buffer; None if
        there are none."""
        if not self._taken:
            return 0 if nbytes <= self.nbytes else None
        oldest, newest = self._taken[0][0], self._taken[-1][1]
        if newest <= oldest:  # the ring has wrapped around
            return newest if newest + nbytes <= oldest else None
        if newest + nbytes <= self.nbytes:
            return newest
        return 0 if nbytes <= oldest else None

    def give(self, start: int) -> None:
        """Gives back the place that starts at `start`."""
        self._back.add(start)
        while self._taken and self._taken[0][0] in self._back:
            self._back.remove(self._taken.popleft()[0])
