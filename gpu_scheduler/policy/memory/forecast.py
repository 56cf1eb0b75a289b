"""How many tokens the next request of a model will generate: a moving average over its last requests.

A request starts only if its prompt and that many tokens fit (admission.py). The paper does not say what this number is;
docs/lab/tuning.md measures what the choice is worth.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForecastRules:
    first: int = 128
    """Output tokens expected of a model's request before any of its requests has ended."""
    weight: float = 0.1
    """Weight of one ended request in the average, from 0 to 1. 0: `first` stays; 1: only the last request counts."""


class OutputForecast:
    """Forecast of the output tokens of one model's requests."""

    def __init__(self, rules: ForecastRules | None = None) -> None:
        self._rules = rules or ForecastRules()
        self._tokens = float(self._rules.first)

    def observe(self, tokens: int) -> None:
        """Records that a request ended after `tokens` output tokens."""
        self._tokens += self._rules.weight * (tokens - self._tokens)

    @property
    def tokens(self) -> int:
        return round(self._tokens)
