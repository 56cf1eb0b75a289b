"""What is seen of a decoding model's steps: how long they take alone, and how many of them are lost beside a
neighbour's prefill.

The second is the `loss` of `throttle.py`: N steps that took W seconds, of which a neighbour prefilled M, would have
taken N s alone, so that loss = (W - N s) / M. It is a property of the two models and the device, not of the pace, so
observing it while the pace follows it makes no loop that could swing. An s that is out of date (contexts grow while a
neighbour prefills all the time) is made good too: the loss that then seems to be is the one under which the mean step
comes out at what the pace aims for.
"""

from __future__ import annotations

from collections import deque

from gpu_scheduler.engines.sharing.throttle import LOSS

WINDOW = 64
"""Steps beside a prefill that are looked at together: several cycles of prefill step and pause."""
FOLLOW = 0.25
"""How far the loss moves towards what a window says: a window may hold one prefill step more or less than its share."""
MOST_LOSS = 2.0
"""More than all of the steps can only seem to be lost: with an s that is too short by now."""
MOST_SLOWDOWN = 8.0
"""A step that takes longer than so many alone had another reason, and counts as that."""
_ALONE = 32
"""Steps alone that are remembered."""
_FEW = 8
"""Of them, that have to be seen before they count more than what was measured."""


class DecodeInterference:
    """The steps of one model. Seconds, on the caller's clock."""

    def __init__(self, measured_s: float) -> None:
        self.loss = LOSS
        self.measured_s = measured_s
        """A step alone with one request; 0 if it is not known."""
        self._alone: deque[float] = deque(maxlen=_ALONE)
        self._median_s: float | None = None
        """Of these, once it was asked for."""
        self._last: tuple[float, float] | None = None
        """The last step's end, and what others had prefilled by then."""
        self._own = self._own_seen = False
        """Whether the model itself prefills now, and did at any time since the last step."""
        self._forget()

    def __repr__(self) -> str:
        return f"Beat(step={1e3 * self.step_s:.1f} ms, loss={self.loss:.2f})"

    @property
    def step_s(self) -> float:
        """A step alone: the median of those seen lately, and the one measured before there are any."""
        if len(self._alone) < _FEW:
            return self.measured_s
        if self._median_s is None:
            self._median_s = sorted(self._alone)[len(self._alone) // 2]
        return self._median_s

    def prefills(self, own: bool) -> None:
        """Whether the model itself prefills from now on. Its own steps are held up by that as on any server."""
        self._own = own
        self._own_seen = own or self._own_seen

    def stopped(self) -> None:
        """Nothing of it decodes any more: the next step is the first of another load."""
        self._last = None

    def step(self, now: float, others_s: float, steps: int = 1) -> None:
        """Tokens came, of so many steps since the last call. `others_s`: seconds that others have prefilled, ever, each
        counted."""
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
