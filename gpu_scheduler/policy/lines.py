"""Where the requests of the shared queue wait: those with a deadline, those that missed it, best effort."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from heapq import merge
from math import inf

import numpy as np

from gpu_scheduler.policy.line import Array, Key, Line
from gpu_scheduler.policy.slack import Waiting


class State(Enum):
    """Where a request is; `backlog.py` has the transitions."""

    WAITING = "waiting"
    LATE = "late"
    DISPATCHED = "dispatched"
    RUNNING = "running"


@dataclass(slots=True)
class Entry:
    """One request, in any state. `seq` tells those apart that are equal in all else."""

    request: Waiting
    seq: int
    state: State = State.WAITING
    done_tokens: int = 0
    missed: bool = False
    """It waits, and its deadline has passed."""

    @property
    def key(self) -> Key:
        if self.missed:
            return (self.request.arrival, self.request.deadline, self.seq)
        return (self.request.deadline, self.request.arrival, self.seq)

    @property
    def tokens_left(self) -> int:
        return max(0, self.request.uncached_tokens - self.done_tokens)


Entries = Mapping[str, Entry]
"""By request id."""
ClassOf = Callable[[Waiting], int]
"""The index of a request's rate (`models.py`)."""


class Lines:
    """The three of them. A request is in one from `insert` to `remove`."""

    def __init__(self) -> None:
        self.timed = Line()
        self.missed = Line()
        """By arrival: those whose deadlines have passed. They are late whatever else waits, so that no plan has to find
        that out again."""
        self.best_effort = Line()
        self._missed_costs: tuple[Array, Array] | None = None
        """The rates that these were last costed by, and their least and most; None: they are others since."""

    def __len__(self) -> int:
        return len(self.timed) + len(self.missed) + len(self.best_effort)

    def insert(self, entry: Entry, class_: int) -> None:
        request = entry.request
        self._of(entry).insert(entry.key, request.request_id, request.uncached_tokens, class_)

    def remove(self, entry: Entry) -> None:
        self._of(entry).remove(entry.key)
        if entry.missed:
            entry.missed, self._missed_costs = False, None

    def miss(self, now: float, entries: Entries, class_of: ClassOf) -> list[str]:
        """Puts those whose deadlines have passed where no plan looks for S any more. Returns them, by deadline."""
        passed = self.timed.before(now)
        if passed:
            self._missed_costs = None
        for request_id in passed:
            entry = entries[request_id]
            self.timed.remove(entry.key)
            entry.missed = True
            self.insert(entry, class_of(entry.request))
        return passed

    def costs_of_missed(self, rates: Array) -> Array:
        """The least and the most of them; nothing of none. Other rates are another array."""
        if self._missed_costs is None or self._missed_costs[0] is not rates:
            costs = self.missed.costs(rates)
            self._missed_costs = rates, np.array([costs.min(), costs.max()]) if len(costs) else costs
        return self._missed_costs[1]

    def by_deadline(self, entries: Entries) -> Iterator[Waiting]:
        """All of them, best effort last."""
        missed = sorted((entries[request_id] for request_id in self.missed.ids), key=_by_deadline)
        timed = (entries[request_id] for request_id in self.timed.ids)
        # One that came late is among those in time until the next plan.
        yield from (entry.request for entry in merge(missed, timed, key=_by_deadline))
        yield from (entries[request_id].request for request_id in self.best_effort.ids)

    def by_age(self, late: list[str], arrivals: Array, yield_s: float) -> tuple[str, ...]:
        """Those that are `late` (`arrivals` are theirs), missed and best effort, oldest first; of equals the late one
        with the earlier deadline. Best effort counts as younger by `yield_s`."""
        if not late and not len(self.best_effort):
            return tuple(self.missed.ids)
        ids = self.missed.ids + late + self.best_effort.ids
        came = np.concatenate((self.missed.times(), arrivals, self.best_effort.seconds() + yield_s))
        return tuple(map(ids.__getitem__, came.argsort(kind="stable").tolist()))

    def _of(self, entry: Entry) -> Line:
        if entry.missed:
            return self.missed
        return self.best_effort if entry.request.deadline == inf else self.timed


def _by_deadline(entry: Entry) -> tuple[float, float, int]:
    return entry.request.deadline, entry.request.arrival, entry.seq
