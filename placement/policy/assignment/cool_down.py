"""Which models no move is for, because they moved lately or could not. Pure: the time is the caller's."""

from __future__ import annotations

from collections.abc import Mapping

_AGAIN_S = 5.0
"""After a move that came to nothing. Building a model costs its target two to five seconds of its links and devices."""
_MOST_DOUBLINGS = 20
_FORGOTTEN_S = 3600.0
"""After a model's rest: longer than any attempt takes, so that those that fail in a row are known as such."""


class CoolDowns:
    """Of all models. Seconds on any clock."""

    def __init__(self, cool_down_s: float) -> None:
        self._cool_down_s = cool_down_s
        self._until: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        """Of moves of a model in a row."""

    def moved_at(self) -> Mapping[str, float]:
        """When each moved, as the rules of a move have it: what is left of a shorter rest as well."""
        return {model: until - self._cool_down_s for model, until in self._until.items()}

    def moved(self, model: str, now: float) -> None:
        """The cool-down begins."""
        self._failures.pop(model, None)
        self._rest(model, now, self._cool_down_s)

    def not_moved(self, model: str, now: float) -> None:
        """What stood in its way may be gone soon, and may be there for long: it is tried again, each time after twice
        as long, up to the cool-down."""
        self._failures = {name: n for name, n in self._failures.items() if now <= self._until[name] + _FORGOTTEN_S}
        failures = self._failures[model] = self._failures.get(model, 0) + 1
        self._rest(model, now, min(self._cool_down_s, _AGAIN_S * 2.0 ** min(failures - 1, _MOST_DOUBLINGS)))

    def _rest(self, model: str, now: float, seconds: float) -> None:
        self._until = {name: until for name, until in self._until.items() if until > now or name in self._failures}
        self._until[model] = now + seconds
