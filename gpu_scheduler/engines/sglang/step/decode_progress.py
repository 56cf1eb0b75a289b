"""Progress of an engine's decode steps: how long its requests can wait for the next one, and how long one takes alone.
Pure: seconds on the caller's clock."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from gpu_scheduler.engines.sharing.solo_step_time import DecodeStep, SoloStepTime
from gpu_scheduler.engines.sharing.step_gate import Decodes
from gpu_scheduler.engines.sharing.tpot_slack import Stream, slack_s

_LOOK_S = 0.05
"""Seconds for which the observed streams are good, while none gets its first token: every step gives each one more
token."""


class DecodeProgress:
    """The decode steps of one engine, and the streams that they serve. Steps overlap: results come later than the next
    step begins."""

    def __init__(self) -> None:
        self.step = DecodeStep()
        """Duration of a decode step of the present requests alone on the devices, as it was observed last."""
        self._under_way = 0
        """Number of decode steps whose results are not here."""
        self._begin_by = inf
        """Second by which the next step would have to begin if none were under way."""
        self._target_s = 0.0
        self._observed_at = -inf
        """Second at which the streams were observed last; -inf: what was observed does not count any more."""
        self._solo = SoloStepTime()

    # --- events

    def began(self, now: float, undisturbed: bool) -> None:
        """A decode step was given to the devices. `undisturbed`: no other engine uses them meanwhile."""
        self._solo.given(now, undisturbed)
        self._under_way += 1
        self._begin_by += self._target_s

    def ended(self) -> None:
        """The results of a decode step are here."""
        self._under_way = max(0, self._under_way - 1)

    def disturbed(self) -> None:
        """A prefill step was begun, or a decode step that was due was not begun."""
        self._solo.disturbed()

    def forget_steps(self) -> None:
        """Forgets the durations seen so far: they were another model's."""
        self._solo.forget()

    def mark_stale(self) -> None:
        """Drops the streams as they were observed last: they have to be observed again."""
        self._observed_at = -inf

    def observe(self, streams: Iterable[Stream], now: float, step: DecodeStep, target_s: float) -> None:
        """Takes the streams that decode now; their tokens exclude those of steps under way. `step`: duration of a
        decode step alone; `target_s`: mean duration that the TPOT target allows, 0 without one."""
        self._begin_by, self._observed_at, self._target_s, self.step = inf, now, target_s, step
        if target_s > 0:
            coming = self._under_way
            streams = (Stream(first_at, tokens + coming) for first_at, tokens in streams)
            self._begin_by = now + slack_s(streams, now, step.seconds, target_s)

    # --- what is known

    def is_stale(self, now: float) -> bool:
        """Whether the streams have to be observed again."""
        return now - self._observed_at > _LOOK_S

    def decodes(self, requests: int) -> Decodes:
        """The requests as the step gate weighs them. The next step begins when the steps under way have ended, and
        each of these may have just begun."""
        if self._observed_at == -inf:
            return Decodes(requests, inf, self.step)
        return Decodes(requests, self._begin_by - self._under_way * self.step.seconds, self.step)

    def solo_step(self, least_s: float, now: float) -> DecodeStep:
        """Duration of a decode step alone, as `SoloStepTime.seen`. `least_s`: its duration with one request."""
        return self._solo.seen(least_s, now)

    @property
    def at_most_s(self) -> float:
        """Most seconds that a decode step takes alone, as `SoloStepTime.at_most_s`."""
        return self._solo.at_most_s
