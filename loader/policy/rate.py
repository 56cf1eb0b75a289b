"""How fast something is, and how long it will take, from what was seen of it lately."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 1.0
"""Seconds of samples that count: older ones say little about now."""
_APART_S = 0.05
"""Least seconds between two samples, so that a window has few."""

Sample = tuple[float, float]
"""(seconds on any clock, amount done by then)"""


@dataclass(frozen=True)
class TransferRate:
    """The samples of the last second and one older, oldest first."""

    samples: tuple[Sample, ...] = ()

    def seen(self, now: float, done: float) -> TransferRate:
        """This rate with one sample more; `now` does not fall from call to call."""
        # A sample that follows the one before the last too closely replaces the last.
        close = len(self.samples) > 1 and now - self.samples[-2][0] < _APART_S
        samples = (*(self.samples[:-1] if close else self.samples), (now, done))
        recent = next(i for i, (then, _) in enumerate(samples) if now - then <= WINDOW_S)
        return TransferRate(samples[max(0, recent - 1) :])

    def per_s(self) -> float | None:
        """Amount per second; None while it is not known."""
        if len(self.samples) < 2:
            return None
        (began, before), (now, done) = self.samples[0], self.samples[-1]
        return (done - before) / (now - began) if now > began else None

    def left_s(self, total: float) -> float | None:
        """Seconds until `total` is done at this rate; None where nothing moves or nothing is known."""
        left = total - self.samples[-1][1] if self.samples else total
        if left <= 0:
            return 0.0
        rate = self.per_s()
        return left / rate if rate else None
