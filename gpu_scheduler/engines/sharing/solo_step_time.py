"""How long a decode step of an engine takes alone with the requests that decode now, estimated from steps that
neighbours mostly did not disturb. It decides which engine's decodes go first (`decode_arbitration.py`,
`tpot_slack.py`).

The first measurement is the engine's own when its model comes up, with one request; more requests take longer. Beside
neighbours the time from one step to the next is a measurement only if they do nothing meanwhile. An engine can know
that they make no bid, not that they do nothing: an engine without a bid may be decoding all the same, a step that was
decided before goes on, a prefill begins. So the quickest of several counts.

**Never a single step, and never more than the mean of the last steps of all kinds.** If few steps are undisturbed, the
quickest of them may be five times the truth; an engine that thereby believes its target out of reach makes no bid
(`tpot_slack.py`), never has the devices to itself, and learns nothing better for as long as it remembers; by then its
requests may be past recovery. A 3B engine on an H200 believed in 14 ms instead of 2.8 for half of its steps, of which
it made one each 4 ms (docs/lab/gpu-runs.md).

Seconds, on the caller's clock.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import NamedTuple

MOST = 16
"""Number of undisturbed steps of which the quickest counts, and of steps of all kinds whose mean bounds it."""
ENOUGH = 2
"""Undisturbed steps that have to be known."""
LASTS_S = 2.0
"""Seconds for which an undisturbed step counts: requests come and go."""


class DecodeStep(NamedTuple):
    """How long a decode step takes alone with the requests that decode now."""

    seconds: float = 0.0
    """Seconds of a decode step alone; 0: unknown."""
    measured: bool = False
    """True if it was observed; False if it is the value for one request, and more may take longer."""


class SoloStepTime:
    """Estimates the solo step time of one engine."""

    def __init__(self) -> None:
        self._given_undisturbed: float | None = None
        """When the last decode step was given to the device, if it had the device to itself and nothing was begun or
        waited for since; else None."""
        self._steps: deque[tuple[float, float]] = deque(maxlen=MOST)
        """(end, seconds) from a step that had the device to itself to the next step."""
        self._given_at: deque[float] = deque(maxlen=MOST + 1)
        """Times at which the last steps of all kinds were given to the device."""

    def given(self, now: float, undisturbed: bool) -> None:
        """A decode step was given to the device. `undisturbed`: as far as is known, no other engine uses the device
        meanwhile."""
        if self._given_undisturbed is not None:
            self._steps.append((now, now - self._given_undisturbed))
        self._given_undisturbed = now if undisturbed else None
        self._given_at.append(now)

    def disturbed(self) -> None:
        """A prefill step was begun, or a decode step that was due was not made."""
        self._given_undisturbed = None

    def forget(self) -> None:
        """Forgets all steps: the engine has another model now."""
        self._steps.clear()
        self._given_at.clear()
        self._given_undisturbed = None

    @property
    def at_most_s(self) -> float:
        """Upper bound for a decode step alone: the mean over the last steps, whatever else came between them; +inf if
        there were too few. One interval is not counted as a step: a step may have been under way when the first of them
        was given to the device."""
        given_at = self._given_at
        return (given_at[-1] - given_at[0]) / (MOST - 1) if len(given_at) > MOST else inf

    def seen(self, least_s: float, now: float) -> DecodeStep:
        """The solo step time now. `least_s`: seconds of a step with one request (0: unknown)."""
        took = [took_s for at, took_s in self._steps if now - at < LASTS_S]
        if len(took) < ENOUGH:
            return DecodeStep(least_s)
        return DecodeStep(max(least_s, min(*took, self.at_most_s)), True)
