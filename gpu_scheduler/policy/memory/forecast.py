"""How many tokens the next request of a model will generate: a moving average of what its last ones did.

A request starts only if its prompt and so many tokens fit (admission.py). The paper leaves open what stands there; what
the choice is worth is in docs/lab/tuning.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForecastRules:
    first: int = 128
    """Output tokens expected of a model's request before any of its requests has ended."""
    weight: float = 0.1
    """Of one request that ended, from 0 to 1. 0: `first` stays; 1: the last one alone counts."""


class OutputForecast:
    """Of one model."""

    def __init__(self, rules: ForecastRules | None = None) -> None:
        self._rules = rules or ForecastRules()
        self._tokens = float(self._rules.first)

    def observe(self, tokens: int) -> None:
        """A request ended after so many."""
        self._tokens += self._rules.weight * (tokens - self._tokens)

    @property
    def tokens(self) -> int:
        return round(self._tokens)
