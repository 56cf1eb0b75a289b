"""The pause between the prefill steps of one engine."""

from __future__ import annotations

from math import inf


class Pacer:
    """Knows when the last prefill step ended. Seconds, on the caller's clock.

    SGLang may form the next step while one still runs; that one's end is what the pause counts from, so until it is
    known there is no next one.
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._ended_at: float | None = -inf
        """None: since the caller last said what time it is."""

    def began(self) -> None:
        """A prefill step was given to the device."""
        self._under_way += 1

    def ended(self) -> None:
        """Its results are here."""
        self._under_way -= 1
        self._ended_at = None

    def look(self, now: float) -> None:
        """It is `now`; ranks that agreed on this say the same."""
        if self._ended_at is None:
            self._ended_at = now

    def rest(self, pause_s: float, now: float) -> float:
        """Seconds until the next step may begin; +inf while that cannot be said."""
        if pause_s <= 0:
            return 0.0
        if self._under_way or self._ended_at is None:
            return inf
        return max(0.0, self._ended_at + pause_s - now)
