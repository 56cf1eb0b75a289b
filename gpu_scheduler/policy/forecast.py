"""How many tokens the next request of a model will generate: a moving average of what its last ones did, and what
nearly all of them did at the least."""

from __future__ import annotations

from collections import deque

FIRST = 128
"""Output tokens expected of a model's request before any of its requests has ended."""
WEIGHT = 0.1
"""Of one request that ended."""
_LAST = 32
"""Requests of which all but `_FEWER` generated at least `least`: nine of ten."""
_FEWER = 2


class OutputForecast:
    """Of one model."""

    def __init__(self) -> None:
        self._tokens = float(FIRST)
        self._last: deque[int] = deque(maxlen=_LAST)
        self.least = 1
        """Tokens that nearly all requests come to; 1 until enough of them have ended."""

    def observe(self, tokens: int) -> None:
        """A request ended after so many."""
        self._tokens += WEIGHT * (tokens - self._tokens)
        self._last.append(tokens)
        if len(self._last) == _LAST:
            self.least = max(1, sorted(self._last)[_FEWER])

    @property
    def tokens(self) -> int:
        return round(self._tokens)
