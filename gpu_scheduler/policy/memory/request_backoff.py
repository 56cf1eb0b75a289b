"""Which shortages of memory become requests to balloond: one at a time for each model, and no second one at once for a
request that lacked memory although there was room."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from gpu_scheduler.policy.queue.decisions import NeedMemory

AGAIN_S = 0.05
"""Seconds until memory is requested again for a request that lacks it although there was room (reservations for running
requests, or its model's limit, are in the way): without this pause the calls would follow one another without end."""


@dataclass(slots=True)
class _Granted:
    """Room that was made for a request a moment ago."""

    request_id: str
    until: float
    lacked_again: bool = False


class MemoryRequestBackoff:
    """The memory requests of a group's models. Seconds, on the caller's clock."""

    def __init__(self) -> None:
        self._under_way: set[str] = set()
        """Models that wait for an answer."""
        self._granted: dict[str, _Granted] = {}

    def take(self, need: NeedMemory, now: float) -> bool:
        """Whether memory is to be requested for `need`; if so, a request of its model is under way until
        `answered`."""
        if need.model in self._under_way:
            return False
        granted = self._granted.get(need.model)
        if granted is not None and granted.request_id == need.for_request and now < granted.until:
            granted.lacked_again = True
            return False
        self._under_way.add(need.model)
        return True

    def answered(self, model: str, request_id: str, granted: bool, now: float) -> None:
        """The memory request that was made for a request of the model was answered."""
        self._under_way.discard(model)
        if granted:
            self._granted[model] = _Granted(request_id, now + AGAIN_S)

    def next_deadline(self) -> float:
        """When a request that lacked memory once more may have it requested again; +inf: never."""
        return min((granted.until for granted in self._granted.values() if granted.lacked_again), default=inf)

    def expire(self, now: float) -> None:
        """Forgets what was granted longer than `AGAIN_S` ago."""
        if self._granted:
            self._granted = {model: granted for model, granted in self._granted.items() if now < granted.until}
