"""The pause between the prefill steps of one engine."""

from __future__ import annotations

from collections import deque
from math import inf


class Pacer:
    """Knows when the last prefill step ended and how long it took. Seconds, on the caller's clock; ranks that agree on
    what they say to `look` pause alike.

    SGLang may form the next step while one still runs; the pause counts from that one's end and is as many times as
    long as that one took, so until its end is known there is no next one.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._under_way: deque[float] = deque()
        """When each step was given to the device. They end in this order."""
        self._results: float | None = None
        """When a step began whose end is the next `look`."""
        self._ended_at = -inf
        self._took_s = 0.0

    def began(self) -> None:
        """A prefill step was given to the device."""
        self._under_way.append(self._now)

    def ended(self) -> None:
        """Its results are here."""
        self._results = self._under_way.popleft()

    def look(self, now: float) -> None:
        """It is `now`."""
        self._now = now
        if self._results is not None:
            # Behind another step it began when that one ended.
            self._took_s = now - max(self._results, self._ended_at)
            self._ended_at = now
            self._results = None

    def rest(self, pause_ratio: float, now: float) -> float:
        """Seconds until the next step may begin; +inf while that cannot be said."""
        if pause_ratio <= 0:
            return 0.0
        if self._under_way or self._results is not None:
            return inf
        return max(0.0, self._ended_at + pause_ratio * self._took_s - now)
