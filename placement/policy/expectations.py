"""What a placement that has just started takes the models' traffic to be, until it has seen enough of it.

At the start the rates are those of earlier hours (`traffic.py`). They count less and less, and not at all once
placement has observed for WORTH_S seconds: places are decided by what models are asked for now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

from placement.policy.outcomes import Outcomes
from placement.policy.traffic import ExpectedTraffic

WORTH_S = 600.0
"""Seconds of observation after which nothing is expected any more."""
_STEPS = 20
"""Steps in which what is expected falls: demands change at each, and the groups' facts are made anew."""


class Expectations:
    """What was expected at the start. Times are seconds on the caller's clock."""

    def __init__(self, expected: Mapping[str, ExpectedTraffic] | None = None, since: float = 0.0) -> None:
        """`expected`: by name of the model. `since`: second of the start."""
        self._expected = dict(expected or {})
        self._since = since

    def __iter__(self) -> Iterator[str]:
        """Names of the models of which anything was expected."""
        return iter(self._expected)

    def any(self, now: float) -> bool:
        """Whether anything is expected still."""
        return bool(self._expected) and self._share(now) > 0.0

    def rate(self, model: str, observed: float, now: float) -> float:
        """Tokens per second by which the model is placed: those that were observed, or are expected if that is more."""
        expected = self._expected.get(model)
        return observed if expected is None else max(observed, expected.tokens_per_s * self._share(now))

    def returns_s(self, model: str, now: float) -> float:
        """Seconds from one return of the model to the next; 0 if that is not known, and less and less as time passes,
        since what is seen of the model says it better then."""
        expected = self._expected.get(model)
        return self._share(now) / expected.returns_per_s if expected is not None and expected.returns_per_s else 0.0

    def tell(self, outcomes: Outcomes) -> None:
        """Has `outcomes` know how often models returned before the start."""
        for name, expected in self._expected.items():
            outcomes.expect(name, self._since, expected.returns_per_s)

    def _share(self, now: float) -> float:
        left = 1.0 - max(0.0, now - self._since) / WORTH_S
        return max(0.0, ceil(left * _STEPS) / _STEPS)
