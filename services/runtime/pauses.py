"""Growing pauses between attempts at what has failed."""

from __future__ import annotations

from collections.abc import Container


class Pauses:
    """Pauses by the name of what fails: the first pause, then twice as long each time, up to the longest."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._now: dict[str, float] = {}

    def failed(self, name: str) -> float:
        """Counts a failure of `name`. Returns the seconds until the next attempt."""
        pause = min(2 * self._now.get(name, self._first_s / 2), self._longest_s)
        self._now[name] = pause
        return pause

    def present_s(self, name: str) -> float:
        """Seconds of the pause after the last failure of `name`; 0 if it has not failed."""
        return self._now.get(name, 0.0)

    def forget(self, name: str) -> None:
        """Forgets the failures of `name`, because it succeeded or is another thing by now: its next pause is a first
        one."""
        self._now.pop(name, None)

    def keep_only(self, names: Container[str]) -> None:
        """Forgets all names but these."""
        self._now = {name: pause for name, pause in self._now.items() if name in names}
