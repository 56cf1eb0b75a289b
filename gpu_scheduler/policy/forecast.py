"""How many tokens the next request of a model will generate: a moving average of what its last ones did."""

from __future__ import annotations

FIRST = 128
"""Output tokens expected of a model's request before any of its requests has ended."""
WEIGHT = 0.1
"""Of one request that ended."""


class OutputForecast:
    """Of one model."""

    def __init__(self) -> None:
        self._tokens = float(FIRST)

    def observe(self, tokens: int) -> None:
        """A request ended after so many."""
        self._tokens += WEIGHT * (tokens - self._tokens)

    @property
    def tokens(self) -> int:
        return round(self._tokens)
