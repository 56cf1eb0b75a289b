"""How long prefills would have taken alone, from when they began and ended among others.

Engines that prefill at the same time share the device, so each goes at a part of its speed; requests of one engine go
one after the other. What a request took since its dispatch holds the time of those before and beside it too, and a
queue that adds such times up counts them twice. Here a clock runs that is divided among the models that have prefills
under way, as under processor sharing; a request's part is what passed on it since the request, or its turn in its
engine, began.

Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter
from math import inf


class ServiceTime:
    """Of the prefills under way on one group."""

    def __init__(self) -> None:
        self._now = -inf
        self._shared = 0.0
        """The divided clock."""
        self._under_way: dict[str, tuple[str, float]] = {}
        """Request -> its model, and the divided clock when it began."""
        self._of_model: Counter[str] = Counter()
        self._last: dict[str, float] = {}
        """The divided clock when a request of the model, of those that have some under way, ended."""

    def begin(self, request_id: str, model: str, now: float) -> None:
        """It goes to its engine."""
        self._pass(now)
        self._under_way[request_id] = model, self._shared
        self._of_model[model] += 1

    def end(self, request_id: str, now: float) -> float:
        """Its first token is out: its seconds. 0 for one that ended in the same step as another of its model, never
        began, or began nobody knows when (`give_up`)."""
        self._pass(now)
        if request_id not in self._under_way:
            return 0.0
        model, began = self._under_way.pop(request_id)
        seconds = max(0.0, self._shared - max(began, self._last.get(model, began)))
        self._last[model] = self._shared
        self._gone(model)
        return seconds

    def give_up(self, request_id: str, now: float) -> None:
        """It goes without a token: cancelled, or parked. Behind others of its engine it took nothing of their time;
        if it was the first, its engine may have been at the next one for any time already."""
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
