"""When a folder that could not be served is looked at again: soon at first, then ever less often, and soon again once
something of it has changed."""

from __future__ import annotations

from math import inf

from services.runtime.pauses import Pauses

FIRST_S, LONGEST_S = 1.0, 30.0
"""Shortest and longest time from one look to the next, in seconds. A look at files that are as they were costs a few
system calls."""


class LookSchedule:
    """Times of the next look at each model that has an error, by name, in seconds on any clock."""

    def __init__(self) -> None:
        self._pauses = Pauses(FIRST_S, LONGEST_S)
        self._due: dict[str, float] = {}

    def failed(self, name: str, now: float, anew: bool = False) -> None:
        """Schedules the next look at a model that cannot be served. `anew`: its files are not what they were at the
        last look."""
        if anew:
            self._pauses.forget(name)
        self._due[name] = now + self._pauses.failed(name)

    def forget(self, name: str) -> None:
        """Ends the looks at a model that can be served, or is gone."""
        self._pauses.forget(name)
        self._due.pop(name, None)

    def take_due(self, now: float) -> list[str]:
        """Names whose time has come. They are looked at now, and scheduled again if that fails."""
        due = [name for name, at in self._due.items() if at <= now]
        for name in due:
            del self._due[name]
        return due

    def next_at(self) -> float:
        """Time of the first look that is due; +inf if none will be."""
        return min(self._due.values(), default=inf)

    def pause_s(self, name: str) -> float:
        """Seconds within which the model is looked at again; 0: it is not, as it has no error."""
        return self._pauses.present_s(name)
