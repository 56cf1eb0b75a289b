"""Growing pauses between attempts at what has failed."""

from __future__ import annotations

from collections.abc import Container


class Pauses:
    """By name of what fails: a first pause, and each time twice as long a one, up to the longest."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._now: dict[str, float] = {}

    def failed(self, name: str) -> float:
        """It has, once more: seconds until the next attempt."""
        pause = min(2 * self._now.get(name, self._first_s / 2), self._longest_s)
        self._now[name] = pause
        return pause

    def present_s(self, name: str) -> float:
        """The pause after its last failure; 0: it has not failed."""
        return self._now.get(name, 0.0)

    def forget(self, name: str) -> None:
        """It did not fail, or is another by now: the next pause is a first one."""
        self._now.pop(name, None)

    def keep_only(self, names: Container[str]) -> None:
        """There are no others any more."""
        self._now = {name: pause for name, pause in self._now.items() if name in names}
