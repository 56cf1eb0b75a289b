"""How many extents to keep mapped ahead: between a low and a high mark, following the growth that is seen. Pure:
`now` in seconds."""

from __future__ import annotations

import math

_MEMORY_S = 0.5
"""Time constant in seconds: growth longer ago than a few of these is forgotten."""
_AHEAD_S = 0.25
"""Seconds that the reserve should last. Growth through balloond takes a millisecond, growth that others have to give
back for, tens; but prompts come in bursts, and the one that finds the reserve empty waits for its first token."""
IDLE_S = 1.0
"""Seconds without growth after which what is above the low mark goes back."""


class Watermarks:
    """The marks of a reserve and the growth that it follows, in extents."""

    def __init__(self, low: int, high: int) -> None:
        if not 0 <= low <= high:
            raise ValueError(f"marks of {low} and {high} extents")
        self.low = low
        self.high = high
        self._rate = 0.0
        self._at = 0.0

    def took(self, count: int, now: float) -> None:
        """Counts extents that the engine took at the time `now`."""
        self._rate = self._rate_at(now) + count / _MEMORY_S
        self._at = now

    def _rate_at(self, now: float) -> float:
        """Extents per second, older growth counting less."""
        return self._rate * math.exp(-max(0.0, now - self._at) / _MEMORY_S)

    def target(self, now: float) -> int:
        if self.idle(now):
            # This agrees with `surplus`: otherwise extents would be requested and given back in turn.
            return self.low
        return min(self.high, max(self.low, self.low + math.ceil(self._rate_at(now) * _AHEAD_S - 1e-3)))

    def missing(self, reserve: int, now: float) -> int:
        """Number of extents to map, once the reserve is below the low mark or has fallen to half of what it should
        be."""
        target = self.target(now)
        return target - reserve if reserve < self.low or 2 * reserve <= target else 0

    def surplus(self, reserve: int, now: float) -> int:
        """Number of extents to give back."""
        return max(0, reserve - (self.low if self.idle(now) else self.high))

    def idle(self, now: float) -> bool:
        return now - self._at >= IDLE_S
