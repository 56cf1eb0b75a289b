"""When a silent engine is pinged, and when it is given up.

An engine with requests sends a message with each step: tokens, statistics, or how far a prompt is. An engine that may
not step (other engines have the prefill turn, or it waits for memory) still reads its socket and answers a ping. So an
engine that has work but neither sends nor answers anything hangs: it is stopped, deadlocked, or in a kernel that never
ends. The one good reason not to read its socket is a forward pass, and the longest is a prompt's: the timeout grows by
the expected prefill time, times the factor by which that estimate may be too short.

Only time in which the gpu_scheduler was listening counts: if it stood still itself, the engine's messages lie unread.
"""

from __future__ import annotations

from enum import Enum

LOOK_S = 1.0
"""Seconds between two looks at an engine."""
SLOWER = 4.0
"""Factor by which prompts under way may take longer than expected: beside other engines' prefills, or at a length not
seen before."""
_ASK_AFTER = 1 / 3
"""Share of the timeout after which a silent engine is pinged."""


class HangVerdict(Enum):
    """What the caller has to do about an engine."""

    NOTHING = "nothing"
    ASK = "ask"
    GIVE_UP = "give up"


class HangDetector:
    """How long one engine has been silent, in seconds on the caller's clock."""

    def __init__(self, timeout_s: float, *, ask_after: float = _ASK_AFTER) -> None:
        """`timeout_s`: seconds of silence after which the engine is given up; 0: never. `ask_after`: share of them
        after which it is pinged."""
        self.silent_s = 0.0
        self._timeout_s = timeout_s
        self._ask_after = ask_after
        self._looked_at: float | None = None
        self._heard = 0
        self._asked = False

    def __repr__(self) -> str:
        return f"HangDetector({self.silent_s:.1f} of {self._timeout_s:.1f} s{', asked' if self._asked else ''})"

    def look(self, now: float, *, works: bool, heard: int, prefill_s: float) -> HangVerdict:
        """What to do now. `works`: the engine has requests, and no command with a timeout of its own that keeps it from
        its steps. `heard`: messages that the engine has sent since it started. `prefill_s`: expected seconds of prefill
        of the prompts sent to it."""
        since = 0.0 if self._looked_at is None else max(0.0, now - self._looked_at)
        self._looked_at = now
        if not works or heard != self._heard or not self._timeout_s:
            self._heard, self.silent_s, self._asked = heard, 0.0, False
            return HangVerdict.NOTHING
        self.silent_s += min(since, 2 * LOOK_S)
        if not self._asked:
            self._asked = self.silent_s >= self._timeout_s * self._ask_after
            return HangVerdict.ASK if self._asked else HangVerdict.NOTHING
        return HangVerdict.GIVE_UP if self.silent_s >= self._timeout_s + SLOWER * prefill_s else HangVerdict.NOTHING
