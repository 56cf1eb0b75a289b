"""What a decode step of an engine takes alone, of those that decode now, seen from steps that neighbours were mostly
not in the way of. Whose decodes go first is decided by it (`decode_arbitration.py`, `tpot_slack.py`).

The first measure of it is an engine's own when its model comes up, with one request; more requests take longer. Beside
neighbours the time from one step to the next says more than that only if they do nothing meanwhile. An engine can know
that they want nothing, not that they do nothing: of those in whose favour nobody waits some decode all the same, a step
that was decided before goes on, a prefill begins. So it is the quickest of several that counts.

**Never one alone, and never more than the mean of the last ones of all kinds.** Where few are undisturbed the quickest
of them may be five times the truth, and who believes to be out of its target's reach wants nothing (`tpot_slack.py`),
has the devices never for itself, and learns nothing better for as long as it remembers; by then its requests may be
lost. A 3B engine on an H200 believed in 14 ms instead of 2.8 for half of its steps, of which it made one each 4 ms
(docs/lab/gpu-runs.md).

Seconds, on the caller's clock.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import NamedTuple

MOST = 16
"""Undisturbed steps that the quickest is looked for among, and steps of all kinds whose mean bounds it."""
ENOUGH = 2
"""Of the first, that have to be there."""
LASTS_S = 2.0
"""How long one says something: requests come and go."""


class DecodeStep(NamedTuple):
    """What a decode step takes alone, of those that decode."""

    seconds: float = 0.0
    """0: not known."""
    measured: bool = False
    """False: it is what one request takes, and more may take longer."""


class SoloStepTime:
    """One engine's."""

    def __init__(self) -> None:
        self._given_undisturbed: float | None = None
        """The last decode step, if it had the device for itself, and nothing was begun or waited for since."""
        self._steps: deque[tuple[float, float]] = deque(maxlen=MOST)
        """(when, seconds) from one that had the device for itself to the next."""
        self._given_at: deque[float] = deque(maxlen=MOST + 1)
        """When the last ones of all kinds were given to the device."""

    def given(self, now: float, undisturbed: bool) -> None:
        """A decode step was given to the device; `undisturbed`: which, as far as is known, no other engine uses
        meanwhile."""
        if self._given_undisturbed is not None:
            self._steps.append((now, now - self._given_undisturbed))
        self._given_undisturbed = now if undisturbed else None
        self._given_at.append(now)

    def disturbed(self) -> None:
        """A prefill step was begun, or a decode step that was due was not."""
        self._given_undisturbed = None

    def forget(self) -> None:
        """They were another model's."""
        self._steps.clear()
        self._given_at.clear()
        self._given_undisturbed = None

    @property
    def at_most_s(self) -> float:
        """What one takes at most, by the last ones, whatever else came between them; +inf: there were too few. One may
        have been under way when the first of them was given to the device."""
        given_at = self._given_at
        return (given_at[-1] - given_at[0]) / (MOST - 1) if len(given_at) > MOST else inf

    def seen(self, least_s: float, now: float) -> DecodeStep:
        """`least_s`: what one takes with one request (0: not known)."""
        took = [took_s for at, took_s in self._steps if now - at < LASTS_S]
        if len(took) < ENOUGH:
            return DecodeStep(least_s)
        return DecodeStep(max(least_s, min(*took, self.at_most_s)), True)
