"""How many extents to keep mapped ahead: between a low and a high mark, following the growth that is seen. Pure:
`now` in seconds."""

from __future__ import annotations

import math

_MEMORY_S = 0.5
"""Growth longer ago than a few of these is forgotten."""
_AHEAD_S = 0.25
"""The reserve should last this long. A growth through balloond takes a millisecond, one that others have to give back
for, tens; but prompts come in bursts, and the one that finds the reserve empty waits for its first token."""
IDLE_S = 1.0
"""Without growth for this long, what is above the low mark goes back."""


class Watermarks:
    """Counts extents."""

    def __init__(self, low: int, high: int) -> None:
        if not 0 <= low <= high:
            raise ValueError(f"marks of {low} and {high} extents")
        self.low = low
        self.high = high
        self._rate = 0.0
        self._at = 0.0

    def took(self, count: int, now: float) -> None:
        """The engine took this many."""
        self._rate = self._rate_at(now) + count / _MEMORY_S
        self._at = now

    def _rate_at(self, now: float) -> float:
        """Extents per second, older growth counting less."""
        return self._rate * math.exp(-max(0.0, now - self._at) / _MEMORY_S)

    def target(self, now: float) -> int:
        if self.idle(now):
            # As `surplus`: what one would fetch and the other give back would go to and fro.
            return self.low
        return min(self.high, max(self.low, self.low + math.ceil(self._rate_at(now) * _AHEAD_S - 1e-3)))

    def missing(self, reserve: int, now: float) -> int:
        """How many to map, once the reserve has fallen to half of what it should be."""
        target = self.target(now)
        return target - reserve if reserve < self.low or 2 * reserve <= target else 0

    def surplus(self, reserve: int, now: float) -> int:
        """How many to give back."""
        return max(0, reserve - (self.low if self.idle(now) else self.high))

    def idle(self, now: float) -> bool:
        return now - self._at >= IDLE_S
