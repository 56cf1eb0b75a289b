"""The pause between the prefill steps of one engine, and the decode steps that come before the next one."""

from __future__ import annotations

from collections import deque
from math import inf

from gpu_scheduler.policy import decode_turn
from gpu_scheduler.policy.lead import Lead
from gpu_scheduler.policy.pace import FREE, Pace

_STEPS = 16
"""Decode steps that the quickest is looked for among: of the same requests, nearly."""


class Pacer:
    """Knows when the last prefill step ended and how long it took. Seconds, on the caller's clock; ranks that agree on
    what they say to `look` pause alike.

    SGLang may form the next step while one still runs; the pause counts from that one's end and is as many times as
    long as that one took, so until its end is known there is no next one.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._under_way: deque[float] = deque()
        """When each step was given to the device. They end in this order."""
        self._results: float | None = None
        """When a step began whose end is the next `look`."""
        self._ended_at = -inf
        self._took_s = 0.0
        self._lead = Lead()
        self._pace = FREE
        self._decoded_at: float | None = None
        """The last decode step, if it had the device for itself, and nothing was begun or waited for since."""
        self._steps: deque[float] = deque(maxlen=_STEPS)
        """From one decode step that had the device for itself to the next."""

    def began(self, alone: bool) -> None:
        """A prefill step was given to the device; `alone`: nothing waits to decode meanwhile."""
        self._under_way.append(self._now)
        self._decoded_at = None
        if alone:
            self._lead.alone()

    def decodes(self, undisturbed: bool) -> None:
        """A decode step was given to the device; `undisturbed`: which no other engine uses meanwhile."""
        if self._decoded_at is not None:
            self._steps.append(self._now - self._decoded_at)
        self._decoded_at = self._now if undisturbed else None
        self._lead.decoded(self._now, self._now, self._pace)

    def stood_still(self) -> None:
        """A decode step that was due was not begun."""
        self._decoded_at = None

    def ended(self) -> None:
        """Its results are here."""
        self._results = self._under_way.popleft()

    def look(self, now: float, pace: Pace | None = None) -> None:
        """It is `now`, and that is the pace. None: another engine has the turn, and decode steps may take what they
        could."""
        self._now = now
        if pace is not None:
            self._pace = pace
        if self._results is not None:
            # Behind another step it began when that one ended.
            self._took_s = now - max(self._results, self._ended_at)
            self._ended_at = now
            self._results = None
            self._lead.prefilled(now, self._took_s, self._pace)

    @property
    def under_way(self) -> bool:
        """Whether a prefill step is."""
        return bool(self._under_way)

    @property
    def holds(self) -> bool:
        """Whether decode steps, where there are any, come before the next prefill step. Behind one that still runs they
        do if they are behind already: for how long is known when it has ended."""
        return self.holds_at(self._now)

    def holds_at(self, now: float) -> bool:
        """The same at `now`, not before the last `look`."""
        return self._lead.hold_s(now) > 0 or (bool(self._under_way) and self._lead.ahead_s(now) < 0)

    def wants(self, now: float) -> bool:
        """Whether decode steps, where there are any, are to be made before those of neighbours."""
        return decode_turn.wants(self._lead.ahead_s(now), self._pace.lead_s)

    def need(self, least_s: float) -> float | None:
        """Share of the devices that keeps the target; None without one. A decode step alone takes `least_s` with one
        request, and with these what the quickest of the last undisturbed ones took."""
        if self._pace.step_s == 0:
            return None
        return decode_turn.need(max(least_s, min(self._steps, default=0.0)), self._pace.step_s)

    def rest(self, pause_ratio: float, now: float) -> float:
        """Seconds until the next step may begin; +inf while that cannot be said."""
        if pause_ratio <= 0:
            return 0.0
        if self._under_way or self._results is not None:
            return inf
        return max(0.0, self._ended_at + pause_ratio * self._took_s - now)
