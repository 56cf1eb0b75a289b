"""Stop strings: found wherever chunks happen to end, cut exactly, and nothing given out that may turn out to be the
beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one answer's text. The match that is complete first ends it; of several complete at the same character
    the longest. So the result does not depend on how the text was cut into chunks."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._longest = max(map(len, self._stops), default=1)
        self._beginnings = {stop[:length] for stop in self._stops for length in range(1, len(stop))}

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be given out after `text` came, and whether a stop string ended the answer: then nothing
        follows."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        keep = min(self._longest - 1, len(text))
        while keep and text[-keep:] not in self._beginnings:
            keep -= 1
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """The held text, when the answer ended without a match."""
        held, self._held = self._held, ""
        return held
