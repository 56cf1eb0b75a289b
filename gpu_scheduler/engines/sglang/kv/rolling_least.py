"""The least value of a quantity over the last while, kept in two numbers. Pure."""

from __future__ import annotations

from math import inf


class RollingLeast:
    """Least of the values seen during the last `period_s` to twice that; 0 until a period has passed."""

    def __init__(self, period_s: float, now: float) -> None:
        """`now`: monotonic seconds."""
        self._period_s = period_s
        self._since = self._seen_at = now
        """Monotonic seconds at which the current period began, and of the last value."""
        self._before: float = 0
        """Least value of the period before the current one."""
        self._current = inf
        """Least value of the current period; infinite if nothing was seen in it."""

    @property
    def least(self) -> int:
        return int(min(self._before, self._current))

    def see(self, value: int, now: float) -> None:
        """Counts the value that the quantity has at `now`, in monotonic seconds. Between two calls it is taken to have
        been no lower than at the second."""
        if now - self._seen_at >= self._period_s:
            self._before, self._current, self._since = value, value, now
        elif now - self._since >= self._period_s:
            self._before, self._current, self._since = self._current, value, now
        else:
            self._current = min(self._current, value)
        self._seen_at = now

    def lower(self, by: int) -> None:
        """Lowers all that was seen by so much, because the quantity has lost it for good; the least stays 0 or more."""
        self._before, self._current = max(0, self._before - by), max(0, self._current - by)
