"""Stop strings: found wherever chunks happen to end, cut exactly, and no text is sent that may turn out to be the
beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches one answer's text for stop strings. The match that is complete first ends it; of several complete at the
    same character the longest. So the result does not depend on how the text was cut into chunks."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the answer."""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be sent after `text` came, whether a stop string ended the answer; nothing follows then)."""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start], True
        given = min((_begins(stop, text) for stop in self._stops), default=len(text))
        self._held = text[given:]
        return text[:given], False

    def finish(self) -> str:
        """The text that is held back, when the answer has ended without a match."""
        held, self._held = self._held, ""
        return held


def _begins(stop: str, text: str) -> int:
    """Index in `text`, which does not contain `stop`, at which a beginning of `stop` begins; the length of `text` if
    there is none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
