"""The ageing rule: how many seconds of prefill the second queue (late and best-effort requests) may take from S, the
on-time set.

While the second queue is not empty it earns one second of credit for each second in which no prefill is under way, and
`share` of a second for each in which one is. Only its oldest request that can start may spend the credit, and pays its
prefill cost.

This bounds starvation: a request of the second queue whose model is active and whose memory is granted starts at the
latest after (its cost + the costs of those before it) / share seconds and, for each of these, the prefill that happens
to be under way, whatever arrives in S. S loses at most `share` of the prefill time. Idle time earns credit in
full: where S cannot use the prefill turn, because its requests wait for memory or a wake-up, a request of the second
queue starts once the turn has been idle for as long as its prefill takes. A wrong guess never costs more than that.
"""

from __future__ import annotations


class Ageing:
    """Credit of the second queue, in seconds. It never exceeds the cost of the dearest request that could spend it."""

    def __init__(self, share: float) -> None:
        """`share`: credit earned per second of prefill under way, from 0 (the second queue gets idle time alone) to 1.
        Raises ValueError outside of that."""
        if not 0 <= share <= 1:
            raise ValueError(f"the second queue's share has to be between 0 and 1, not {share}")
        self.seconds = 0.0
        self._share = share
        self._at: float | None = None

    def __repr__(self) -> str:
        return f"Ageing({self.seconds:.3f}s, share={self._share})"

    def earn(self, now: float, *, waiting: bool, busy: bool) -> None:
        """Adds the credit earned since the last call. `waiting`: the second queue was not empty; `busy`: a prefill was
        under way."""
        elapsed = now - self._at if self._at is not None and now > self._at else 0.0
        self._at = now if self._at is None else max(now, self._at)
        if waiting:
            self.seconds += elapsed * (self._share if busy else 1.0)

    def pay(self, cost: float) -> None:
        """Takes off the cost of an aged request that starts."""
        self.seconds = max(0.0, self.seconds - cost)

    def cap(self, dearest: float) -> None:
        """Limits the credit to `dearest`, the cost of the dearest request of the second queue in seconds (0 if that is
        empty)."""
        self.seconds = min(self.seconds, dearest)
