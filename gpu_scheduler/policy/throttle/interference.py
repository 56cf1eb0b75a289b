"""Decode interference as observed: how long a model's decode steps take alone, and what share of them is lost beside a
neighbour's prefill.

That share is the `loss` of `throttle.py`: N steps that took W seconds, of which a neighbour prefilled M, would have
taken N s alone (s: seconds of a step alone), so that loss = (W - N s) / M. It is a property of the two models and the
device, not of the throttle, so that observing it while the throttle follows it makes no loop that could oscillate. An
outdated s (contexts grow while a neighbour prefills all the time) is compensated too: the loss then computed is the one
at which the mean step comes out at what the throttle aims for.
"""

from __future__ import annotations

from collections import deque

from gpu_scheduler.engines.sharing.throttle import LOSS

WINDOW = 64
"""Steps beside a prefill that make one observation of the loss: several cycles of prefill step and pause."""
FOLLOW = 0.25
"""Share of the way that the loss moves towards a window's observation: a window may hold one prefill step more or less
than its share."""
MOST_LOSS = 2.0
"""Greatest loss that an observation counts as. More than 1 is an artefact of an s that is too short by now."""
MOST_SLOWDOWN = 8.0
"""Multiple of a step alone that a step counts as at most: one that takes longer had another reason."""
_ALONE = 32
"""Durations of steps alone that are remembered."""
_FEW = 8
"""Number of observed steps alone from which on their median replaces the measured duration."""


class DecodeInterference:
    """Decode steps of one model beside its neighbours' prefills. Seconds, on the caller's clock."""

    def __init__(self, measured_s: float) -> None:
        self.loss = LOSS
        self.measured_s = measured_s
        """Seconds of a step alone with one request, as measured at activation; 0 if unknown."""
        self._alone: deque[float] = deque(maxlen=_ALONE)
        self._median_s: float | None = None
        """Median of `_alone`, cached; None if it has to be computed again."""
        self._last: tuple[float, float] | None = None
        """End of the last step, and seconds that other models had prefilled by then."""
        self._own = self._own_seen = False
        """Whether the model itself prefills now, and whether it did at any time since the last step."""
        self._forget()

    def __repr__(self) -> str:
        return f"DecodeInterference(step={1e3 * self.step_s:.1f} ms, loss={self.loss:.2f})"

    @property
    def step_s(self) -> float:
        """Seconds of a step alone: the median of those seen lately, or the measured one until enough were seen."""
        if len(self._alone) < _FEW:
            return self.measured_s
        if self._median_s is None:
            self._median_s = sorted(self._alone)[len(self._alone) // 2]
        return self._median_s

    def prefills(self, own: bool) -> None:
        """Notes whether the model itself prefills from now on: its own prefills hold its steps up as on any server."""
        self._own = own
        self._own_seen = own or self._own_seen

    def stopped(self) -> None:
        """The model decodes nothing any more: its next step will be the first of another load."""
        self._last = None

    def step(self, now: float, others_s: float, steps: int = 1) -> None:
        """Notes that tokens of `steps` steps came since the last call. `others_s`: seconds that other models have
        prefilled ever, summed over the models."""
        last, self._last = self._last, (now, others_s)
        own, self._own_seen = self._own_seen, self._own
        if last is None or own:
            return
        took_s, met_s = (now - last[0]) / steps, (others_s - last[1]) / steps
        if met_s == 0:
            self._alone.extend([took_s] * min(steps, _ALONE))
            self._median_s = None
        elif self.step_s > 0:
            for _ in range(min(steps, WINDOW)):
                self._beside(took_s, met_s)

    def _beside(self, took_s: float, met_s: float) -> None:
        self._steps += 1
        self._took_s += min(took_s, MOST_SLOWDOWN * self.step_s)
        self._met_s += met_s
        if self._steps == WINDOW:
            self._learn()
            self._forget()

    def _learn(self) -> None:
        seen = (self._took_s - self._steps * self.step_s) / self._met_s
        self.loss += FOLLOW * (min(MOST_LOSS, max(0.0, seen)) - self.loss)

    def _forget(self) -> None:
        self._steps = 0
        self._took_s = self._met_s = 0.0
