"""Pauses between the prefill steps of one engine, and decode steps that come before the next prefill step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf

from gpu_scheduler.engines.sharing import decode_arbitration
from gpu_scheduler.engines.sharing.solo_step_time import DecodeStep, SoloStepTime
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from gpu_scheduler.engines.sharing.tpot_slack import DecodeWindow, Stream, lead_s

_LOOK_S = 0.05
"""Seconds for which the observed streams are good, while none gets its first token: every step gives each one more
token."""


class Pacer:
    """Pauses of one engine, from when its last prefill step ended and how long it took. Times are seconds on the
    caller's clock; ranks that agree on the arguments of `look` pause alike.

    SGLang may form the next step while one still runs; the pause counts from the end of that one and is a multiple of
    its duration, so until its end is known the next one cannot begin.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._under_way: deque[float] = deque()
        """Time at which each prefill step under way was given to the device. They end in this order."""
        self._decodes_under_way = 0
        """Number of decode steps whose results are not here."""
        self._results: float | None = None
        """Time at which the prefill step began that ends with the next `look`; None: there is none."""
        self._ended_at = -inf
        self._took_s = 0.0
        self._hold = DecodeWindow()
        self._lead_s = inf
        """TPOT slack of the decoding requests as of `_lead_at`, with what was begun since; +inf: no bound."""
        self._lead_at = -inf
        self.step = DecodeStep()
        """Duration of a decode step of these requests alone on the device."""
        self._pace = FREE
        self._alone = SoloStepTime()

    def began(self) -> None:
        """Notes that a prefill step was given to the device."""
        self._under_way.append(self._now)
        self._alone.disturbed()

    def decodes(self, undisturbed: bool) -> None:
        """Notes that a decode step was given to the device. `undisturbed`: no other engine uses the device
        meanwhile."""
        self._alone.given(self._now, undisturbed)
        self._decodes_under_way += 1
        self._lead_s += self._pace.step_s

    def decoded(self) -> None:
        """Notes that the results of a decode step are here."""
        self._decodes_under_way = max(0, self._decodes_under_way - 1)

    def stood_still(self) -> None:
        """Notes that a decode step that was due was not begun."""
        self._alone.disturbed()

    def ended(self) -> None:
        """Notes that the results of the oldest prefill step are here; it counts as ended at the next `look`."""
        self._results = self._under_way.popleft()

    def look(self, now: float, pace: PrefillThrottle | None = None) -> None:
        """Sets the time and the throttle. `pace` None: another engine has the prefill turn, and decode steps keep the
        bound they had."""
        self._now = now
        if pace is not None:
            if pace.step_s != self._pace.step_s:
                self._lead_at = -inf
            self._pace = pace
        if self._results is not None:
            # A step behind another one began when that one ended.
            self._took_s = now - max(self._results, self._ended_at)
            self._ended_at = now
            self._results = None
            self._lead_at = -inf
            self._hold.prefilled(now, self._took_s)

    def is_blind(self, now: float) -> bool:
        """Whether the streams have to be observed again with `decoding`."""
        return now - self._lead_at > _LOOK_S

    @property
    def at_most_s(self) -> float:
        """Most seconds that a decode step takes alone, as `SoloStepTime.at_most_s`."""
        return self._alone.at_most_s

    def forget_steps(self) -> None:
        """Forgets the decode steps seen so far: they were another model's."""
        self._alone.forget()

    def step_alone(self, least_s: float, now: float) -> DecodeStep:
        """Duration of a decode step alone, as `SoloStepTime.seen`. `least_s`: its duration with one request."""
        return self._alone.seen(least_s, now)

    def decoding(self, streams: Iterable[Stream], now: float, step: DecodeStep) -> None:
        """Takes the streams that decode now; their tokens exclude those of steps under way. `step`: duration of a
        decode step alone."""
        self._lead_s, self._lead_at, self.step = inf, now, step
        if self._pace.step_s > 0:
            coming = self._decodes_under_way
            streams = (Stream(first_at, tokens + coming) for first_at, tokens in streams)
            self._lead_s = lead_s(streams, now, step.seconds, self._pace.step_s)

    @property
    def under_way(self) -> bool:
        """Whether a prefill step is under way."""
        return bool(self._under_way)

    @property
    def holds(self) -> bool:
        """Whether decode steps, if there are any, come before the next prefill step. While a prefill step still runs
        they do if they are behind already: for how long is known when it has ended."""
        return self.holds_at(self._now)

    def holds_at(self, now: float) -> bool:
        """Whether decode steps come before the next prefill step, at a time `now` not before the last `look`."""
        if self._lead(now) >= 0:
            return False
        # A stream can be behind only with a target. An engine that may need more than it seems to is not treated as
        # cheap.
        need = decode_arbitration.need(self.step.seconds, self._pace.step_s) if self.step.measured else 1.0
        return bool(self._under_way) or self._hold.left_s(now, need) > 0

    def wants(self, now: float) -> bool:
        """Whether decode steps, if there are any, are to be made before those of neighbour engines."""
        return self._pace.urgent or decode_arbitration.wants(self._lead(now), self.step.seconds)

    @property
    def need(self) -> float | None:
        """Share of the devices that the decoding requests need to meet their target; None without one."""
        return decode_arbitration.need(self.step.seconds, self._pace.step_s) if self._pace.step_s > 0 else None

    def _lead(self, now: float) -> float:
        """TPOT slack now, in seconds. The next step begins when those under way have ended, and these may have just
        begun."""
        if self._lead_at == -inf:
            return inf
        return self._lead_s - (now - self._lead_at) - self._decodes_under_way * self.step.seconds

    def rest(self, pause_ratio: float, now: float) -> float:
        """Seconds until the next prefill step may begin; +inf while that cannot be said."""
        if pause_ratio <= 0:
            return 0.0
        if self._under_way or self._results is not None:
            return inf
        return max(0.0, self._ended_at + pause_ratio * self._took_s - now)
