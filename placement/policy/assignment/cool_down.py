"""Models that no move is planned for, because they moved lately or could not. Pure: the time is the caller's."""

from __future__ import annotations

from collections.abc import Container, Mapping

_AGAIN_S = 5.0
"""Seconds before a failed move is tried again. Building a model costs its target two to five seconds of its links and
devices."""
_MOST_DOUBLINGS = 20
_FORGOTTEN_S = 3600.0
"""Seconds for which a failure is remembered after the model's rest: longer than any attempt takes, so that failures in
a row are known as such."""


class CoolDowns:
    """The cool-downs of all models, in seconds of any clock."""

    def __init__(self, cool_down_s: float) -> None:
        self._cool_down_s = cool_down_s
        self._until: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        """Model -> number of its moves that failed in a row."""
        self.moved_once: set[str] = set()
        """Models that have moved since the start."""

    def moved_at(self) -> Mapping[str, float]:
        """Model -> second at which it counts as moved, for the rules of moves. After a failure it is set back, so that
        only the shorter rest is left."""
        return {model: until - self._cool_down_s for model, until in self._until.items()}

    def moved(self, model: str, now: float) -> None:
        """Begins the model's cool-down."""
        self.moved_once.add(model)
        self._failures.pop(model, None)
        self._rest(model, now, self._cool_down_s)

    def keep(self, models: Container[str]) -> None:
        """Forgets that a model has moved unless it is among `models`: another one may come under the name."""
        self.moved_once = {name for name in self.moved_once if name in models}

    def not_moved(self, model: str, now: float) -> None:
        """Has the model rest after a failed move. The obstacle may be gone soon, or may be there for long: the move is
        tried again after twice as long each time, up to the cool-down."""
        self._failures = {name: n for name, n in self._failures.items() if now <= self._until[name] + _FORGOTTEN_S}
        failures = self._failures[model] = self._failures.get(model, 0) + 1
        self._rest(model, now, min(self._cool_down_s, _AGAIN_S * 2.0 ** min(failures - 1, _MOST_DOUBLINGS)))

    def _rest(self, model: str, now: float, seconds: float) -> None:
        self._until = {name: until for name, until in self._until.items() if until > now or name in self._failures}
        self._until[model] = now + seconds
