"""Virtual time: a queue of events. Seconds from the start of the replay.

Events of the same moment run in the order in which they were scheduled, so a run is the same every time.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

Call = Callable[..., None]


class Timer:
    """A scheduled event; `cancel` drops it."""

    __slots__ = ("args", "call", "when")

    def __init__(self, when: float, call: Call, args: tuple[Any, ...]) -> None:
        self.when = when
        self.call: Call | None = call
        self.args = args

    def cancel(self) -> None:
        self.call = None


class Clock:
    """The virtual clock; `now`, in seconds, moves only in `run`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Number of events that were run."""
        self._heap: list[tuple[float, int, Timer]] = []
        self._scheduled = 0

    def __repr__(self) -> str:
        return f"Clock({self.now:.6f}, {self.events} events run, {len(self._heap)} scheduled)"

    def at(self, when: float, call: Call, *args: Any) -> Timer:
        """Schedules a call at second `when`; a moment that has passed counts as now."""
        timer = Timer(max(when, self.now), call, args)
        self._scheduled += 1
        heappush(self._heap, (timer.when, self._scheduled, timer))
        return timer

    def after(self, seconds: float, call: Call, *args: Any) -> Timer:
        return self.at(self.now + seconds, call, *args)

    def run(self, until: float = inf) -> bool:
        """Runs the events up to `until`, that moment included. Returns whether any are left."""
        heap = self._heap
        while heap:
            when, _, timer = heap[0]
            if timer.call is None:
                heappop(heap)
                continue
            if when > until:
                self.now = max(self.now, until)
                return True
            heappop(heap)
            self.now = when
            self.events += 1
            call, timer.call = timer.call, None
            call(*timer.args)
        return False
