"""When an engine that says nothing is asked whether it goes on, and when it is given up.

An engine with requests says something with each step: tokens, statistics, how far a prompt is. One that may not step
(others have the turn, memory is awaited) still reads its socket, and answers when it is asked. So one that has work and
neither says nor answers anything stands still: stopped, in a lock, or in a kernel that never ends. What keeps it from
its socket with good reason is a forward pass, and the longest is that of a prompt: it has as many times longer as it
may be slower than was thought.

Only time in which somebody listened counts: when the listener itself stood still, what the engine said lies unread.
"""

from __future__ import annotations

from enum import Enum

LOOK_S = 1.0
"""How often an engine is looked at."""
SLOWER = 4.0
"""So many times as long as expected may prompts on their way take: beside prefills of others, or at a new length."""
_ASK_AFTER = 1 / 3
"""Of the time after which it is given up."""


class HangVerdict(Enum):
    """What to do about an engine."""

    NOTHING = "nothing"
    ASK = "ask"
    GIVE_UP = "give up"


class HangDetector:
    """Of one engine. Seconds, on the caller's clock."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: 0: it is never given up."""
        self.silent_s = 0.0
        self._timeout_s = timeout_s
        self._looked_at: float | None = None
        self._heard = 0
        self._asked = False

    def __repr__(self) -> str:
        return f"Silence({self.silent_s:.1f} of {self._timeout_s:.1f} s{', asked' if self._asked else ''})"

    def look(self, now: float, *, works: bool, heard: int, prefill_s: float) -> HangVerdict:
        """`works`: it has requests, and no command that keeps it from its steps and has a time of its own. `heard`: how
        many messages came from it ever. `prefill_s`: what the prompts on their way to it should take."""
        since = 0.0 if self._looked_at is None else max(0.0, now - self._looked_at)
        self._looked_at = now
        if not works or heard != self._heard or not self._timeout_s:
            self._heard, self.silent_s, self._asked = heard, 0.0, False
            return HangVerdict.NOTHING
        self.silent_s += min(since, 2 * LOOK_S)
        if not self._asked:
            self._asked = self.silent_s >= self._timeout_s * _ASK_AFTER
            return HangVerdict.ASK if self._asked else HangVerdict.NOTHING
        return HangVerdict.GIVE_UP if self.silent_s >= self._timeout_s + SLOWER * prefill_s else HangVerdict.NOTHING
