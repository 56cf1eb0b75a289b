"""How long prefills would have taken alone, from when they began and ended among others.

Engines that prefill at the same time share the device, so each runs at a part of its speed; requests of one engine run
one after the other. The time from a request's dispatch to its first token therefore contains time of the requests
before it and beside it, and a queue that adds such times up counts them twice. This module runs a clock that is divided
among the models that have prefills under way, as under processor sharing; a request's service time is what passed on
that clock since the request was dispatched or, if that is later, since its engine finished the request before it.

Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter
from math import inf


class ServiceTime:
    """Service times of the prefills under way on one group."""

    def __init__(self) -> None:
        self._now = -inf
        self._shared = 0.0
        """The divided clock, in seconds."""
        self._under_way: dict[str, tuple[str, float]] = {}
        """By request id: its model, and the divided clock when it began."""
        self._of_model: Counter[str] = Counter()
        self._last: dict[str, float] = {}
        """By model with prefills under way: the divided clock when its last request ended."""

    def begin(self, request_id: str, model: str, now: float) -> None:
        """The request is sent to its engine."""
        self._pass(now)
        self._under_way[request_id] = model, self._shared
        self._of_model[model] += 1

    def end(self, request_id: str, now: float) -> float:
        """The request's first token is out. Returns its service time in seconds; 0 if it ended in the same step as
        another of its model, never began, or began at an unknown time (`give_up`)."""
        self._pass(now)
        if request_id not in self._under_way:
            return 0.0
        model, began = self._under_way.pop(request_id)
        seconds = max(0.0, self._shared - max(began, self._last.get(model, began)))
        self._last[model] = self._shared
        self._gone(model)
        return seconds

    def give_up(self, request_id: str, now: float) -> None:
        """The request leaves without a token: it was cancelled or parked. A request that is behind others of its engine
        has taken none of their time; if it was the first, its engine may have been at the next one for any time
        already."""
        self._pass(now)
        if request_id not in self._under_way:
            return
        model, _ = self._under_way[request_id]
        of_model = (name for name, (of, _) in self._under_way.items() if of == model)
        if next(of_model) == request_id and (second := next(of_model, None)) is not None:
            self._under_way[second] = model, inf
        del self._under_way[request_id]
        self._gone(model)

    def _gone(self, model: str) -> None:
        self._of_model[model] -= 1
        if not self._of_model[model]:
            del self._of_model[model]
            self._last.pop(model, None)

    def _pass(self, now: float) -> None:
        if self._of_model and now > self._now:
            self._shared += (now - self._now) / len(self._of_model)
        self._now = max(self._now, now)
