"""The pause between the prefill steps of one engine, and the decode steps that come before the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

from gpu_scheduler.engines.sharing import decode_arbitration
from gpu_scheduler.engines.sharing.solo_step_time import DecodeStep, SoloStepTime
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from gpu_scheduler.engines.sharing.tpot_slack import DecodeWindow, Stream, lead_s

_LOOK_S = 0.05
"""How long what was seen of each request is good for, while none has a first token: every step gives each one more."""


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
        self._decodes_under_way = 0
        """Decode steps whose results are not here."""
        self._results: float | None = None
        """When a step began whose end is the next `look`."""
        self._ended_at = -inf
        self._took_s = 0.0
        self._hold = DecodeWindow()
        self._lead_s = inf
        """Of those that decode, as if it were `_lead_at` still: with what was begun since."""
        self._lead_at = -inf
        self.step = DecodeStep()
        """Of them alone."""
        self._pace = FREE
        self._alone = SoloStepTime()

    def began(self) -> None:
        """A prefill step was given to the device."""
        self._under_way.append(self._now)
        self._alone.disturbed()

    def decodes(self, undisturbed: bool) -> None:
        """A decode step was given to the device; `undisturbed`: which no other engine uses meanwhile."""
        self._alone.given(self._now, undisturbed)
        self._decodes_under_way += 1
        self._lead_s += self._pace.step_s

    def decoded(self) -> None:
        """The results of a decode step are here."""
        self._decodes_under_way = max(0, self._decodes_under_way - 1)

    def stood_still(self) -> None:
        """A decode step that was due was not begun."""
        self._alone.disturbed()

    def ended(self) -> None:
        """Its results are here."""
        self._results = self._under_way.popleft()

    def look(self, now: float, pace: PrefillThrottle | None = None) -> None:
        """It is `now`, and that is the pace. None: another engine has the turn, and decode steps may take what they
        could."""
        self._now = now
        if pace is not None:
            if pace.step_s != self._pace.step_s:
                self._lead_at = -inf
            self._pace = pace
        if self._results is not None:
            # Behind another step it began when that one ended.
            self._took_s = now - max(self._results, self._ended_at)
            self._ended_at = now
            self._results = None
            self._lead_at = -inf
            self._hold.prefilled(now, self._took_s)

    def is_blind(self, now: float) -> bool:
        """Whether it has to be told again what decodes."""
        return now - self._lead_at > _LOOK_S

    @property
    def at_most_s(self) -> float:
        """As of `SoloStepTime`."""
        return self._alone.at_most_s

    def forget_steps(self) -> None:
        """They were another model's."""
        self._alone.forget()

    def step_alone(self, least_s: float, now: float) -> DecodeStep:
        """As of `SoloStepTime.seen`."""
        return self._alone.seen(least_s, now)

    def decoding(self, streams: Iterable[Stream], now: float, step: DecodeStep) -> None:
        """These decode, and have so many tokens, those of steps under way left out. A step alone takes `step`."""
        self._lead_s, self._lead_at, self.step = inf, now, step
        if self._pace.step_s > 0:
            coming = self._decodes_under_way
            streams = (Stream(first_at, tokens + coming) for first_at, tokens in streams)
            self._lead_s = lead_s(streams, now, step.seconds, self._pace.step_s)

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
        if self._lead(now) >= 0:
            return False
        # Who is behind has a target. What may need more than it seems to is not cheap.
        need = decode_arbitration.need(self.step.seconds, self._pace.step_s) if self.step.measured else 1.0
        return bool(self._under_way) or self._hold.left_s(now, need) > 0

    def wants(self, now: float) -> bool:
        """Whether decode steps, where there are any, are to be made before those of neighbours."""
        return self._pace.urgent or decode_arbitration.wants(self._lead(now), self.step.seconds)

    @property
    def need(self) -> float | None:
        """Share of the devices that keeps the target of those that decode; None without one."""
        return decode_arbitration.need(self.step.seconds, self._pace.step_s) if self._pace.step_s > 0 else None

    def _lead(self, now: float) -> float:
        """The next step begins when those under way have ended, and these may have just begun."""
        if self._lead_at == -inf:
            return inf
        return self._lead_s - (now - self._lead_at) - self._decodes_under_way * self.step.seconds

    def rest(self, pause_ratio: float, now: float) -> float:
        """Seconds until the next step may begin; +inf while that cannot be said."""
        if pause_ratio <= 0:
            return 0.0
        if self._under_way or self._results is not None:
            return inf
        return max(0.0, self._ended_at + pause_ratio * self._took_s - now)
