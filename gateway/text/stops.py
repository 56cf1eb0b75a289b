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

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be given out after `text` came, and whether a stop string ended the answer: then nothing
        follows."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        given = min((_begins(stop, text) for stop in self._stops), default=len(text))
        self._held = text[given:]
        return text[:given], False

    def finish(self) -> str:
        """The held text, when the answer ended without a match."""
        held, self._held = self._held, ""
        return held


def _begins(stop: str, text: str) -> int:
    """Where in `text`, which does not contain it, what may become `stop` begins; its end, if nowhere."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
