"""What is seen of a decoding model's steps: how long they take alone, and whether they keep their target beside a
neighbour's prefill.

The second is a loop around `pace`, made to come to rest. Of each window of steps beside a prefill the worst is looked
at. Over the target: the ease falls so far that a step would have taken `AFTER_MISS` of it, at least by one growth, at
most by half. Under `CALM` of it: the ease grows by `GROWTH`, which is too little to pass the target from there as long
as a step grows no faster than what it meets. In between nothing moves. Where that does not hold (the bound is lifted as
a whole when the slices allow it), each miss doubles the calm windows that have to come before the next growth, up to
`MOST_PATIENCE`: misses become rare instead of periodic.
"""

from __future__ import annotations

from collections import deque

WINDOW = 32
"""Steps that are judged together."""
_WORST = 2
"""The second worst of them counts: one alone may be a pause of another kind."""
AFTER_MISS = 0.95
CALM = 0.75
GROWTH = 1.25
LEAST_EASE = 1 / 64
MOST_PATIENCE = 64
_FEW = 8
"""Steps alone that have to be seen before they count more than what was measured."""


class Beat:
    """The steps of one model. Seconds, on the caller's clock."""

    def __init__(self, measured_s: float) -> None:
        self.ease = 1.0
        self.measured_s = measured_s
        """A step alone with one request; 0 if it is not known."""
        self._alone: deque[float] = deque(maxlen=WINDOW)
        self._beside: list[float] = []
        self._calm = 0
        self._patience = 1
        self._last: float | None = None
        self._around = self._seen = (False, False)
        """(own prefill, others' prefill) now, and at any time since the last step."""

    def __repr__(self) -> str:
        return f"Beat(step={1e3 * self.step_s:.1f} ms, ease={self.ease:.3f})"

    @property
    def step_s(self) -> float:
        """A step alone: the median of those seen lately, and the one measured before there are any."""
        if len(self._alone) < _FEW:
            return self.measured_s
        return sorted(self._alone)[len(self._alone) // 2]

    def prefills(self, own: bool, others: bool) -> None:
        """Who prefills from now on: the model itself, others."""
        self._around = (own, others)
        self._seen = (own or self._seen[0], others or self._seen[1])

    def stopped(self) -> None:
        """Nothing of it decodes any more: the next step is the first of another load."""
        self._last = None
        self._patience = 1

    def step(self, now: float, target_s: float) -> None:
        """Tokens came. `target_s` is the tightest target of those that wait for them."""
        last, self._last = self._last, now
        (own, others), self._seen = self._seen, self._around
        if last is None or own:
            return
        if not others:
            self._alone.append(now - last)
            return
        self._beside.append(now - last)
        if len(self._beside) == WINDOW:
            worst = sorted(self._beside)[-_WORST]
            self._beside.clear()
            self._judge(worst, target_s)

    def _judge(self, worst_s: float, target_s: float) -> None:
        if worst_s > target_s:
            alone_s = min(self.step_s, target_s)
            fall = (AFTER_MISS * target_s - alone_s) / (worst_s - alone_s)
            self.ease = max(LEAST_EASE, self.ease * min(1 / GROWTH, max(0.5, fall)))
            self._patience = min(MOST_PATIENCE, 2 * self._patience)
            self._calm = 0
        elif worst_s < CALM * target_s and self.ease < 1:
            self._calm += 1
            if self._calm >= self._patience:
                self.ease = min(1.0, self.ease * GROWTH)
                self._calm = 0
