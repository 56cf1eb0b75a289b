"""What each model was asked for in each hour of the last two days: what a placement that starts expects.

An hour also has the seconds for which it was observed, so that an hour in which placement was away for a while is not
taken for a quiet one. Seconds are of the calendar (since 1970), because the counts outlive the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

HOUR_S = 3600.0
KEPT_HOURS = 48
"""Hours that are kept beside the present one: the same hour of yesterday with a day to spare."""
_DAY_HOURS = 24
_LEAST_OBSERVED_S = 300.0
"""Seconds for which an hour has to have been observed to say anything: less may be one burst."""


@dataclass(slots=True)
class TrafficCounts:
    """What one model was asked for."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    returns: int = 0
    """Requests that found the model without any for a second or longer."""

    def add(self, other: TrafficCounts) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens
        self.returns += other.returns


@dataclass(slots=True)
class TrafficHour:
    """One hour of the calendar."""

    observed_s: float = 0.0
    """Seconds of the hour in which placement ran."""
    models: dict[str, TrafficCounts] = field(default_factory=dict)
    """Models that were asked for, by name."""


@dataclass(frozen=True, slots=True)
class ExpectedTraffic:
    """What a model is expected to be asked for, each second."""

    tokens_per_s: float
    """Prompt and output tokens."""
    returns_per_s: float
    """Requests that find the model without any for a second or longer."""


class TrafficHours:
    """The counts of KEPT_HOURS hours and the present one, by number of the hour since 1970."""

    def __init__(self, hours: Mapping[int, TrafficHour] | None = None) -> None:
        self.hours = dict(hours or {})

    def observe(self, model: str, at: float, counts: TrafficCounts) -> None:
        """Adds what the model was asked for to the hour of second `at`."""
        self._hour(at).models.setdefault(model, TrafficCounts()).add(counts)

    def observed(self, since: float, until: float) -> None:
        """Adds the seconds from `since` to `until` to the hours that they are in; nothing if the clock was set back.
        Forgets hours that are too old, and those that are yet to come: the clock was wrong then."""
        at = max(since, until - KEPT_HOURS * HOUR_S)
        while at < until:
            ends = min(until, (at // HOUR_S + 1) * HOUR_S)
            hour = self._hour(at)
            hour.observed_s = min(HOUR_S, hour.observed_s + ends - at)
            at = ends
        present = _number(until)
        self.hours = {n: hour for n, hour in self.hours.items() if present - KEPT_HOURS <= n <= present}

    def expected(self, at: float) -> dict[str, ExpectedTraffic]:
        """What each model is expected to be asked for from second `at` on: as in what is known of its hour and the one
        before, since nothing is more like the next minutes than the last ones. If placement was away then, as in the
        same hour of the day before, which is more like it than whatever hour was the last. If that is not known either,
        nothing is expected."""
        present = _number(at)
        for numbers in ((present, present - 1), (present - _DAY_HOURS,)):
            hours = [self.hours[number] for number in numbers if number in self.hours]
            observed_s = sum(hour.observed_s for hour in hours)
            if observed_s >= _LEAST_OBSERVED_S:
                return {name: _expected(counts, observed_s) for name, counts in _summed(hours)}
        return {}

    def _hour(self, at: float) -> TrafficHour:
        return self.hours.setdefault(_number(at), TrafficHour())


def _number(at: float) -> int:
    return int(at // HOUR_S)


def _summed(hours: Iterable[TrafficHour]) -> Iterator[tuple[str, TrafficCounts]]:
    total: dict[str, TrafficCounts] = {}
    for hour in hours:
        for name, counts in hour.models.items():
            total.setdefault(name, TrafficCounts()).add(counts)
    yield from total.items()


def _expected(counts: TrafficCounts, seconds: float) -> ExpectedTraffic:
    return ExpectedTraffic((counts.prompt_tokens + counts.output_tokens) / seconds, counts.returns / seconds)
