"""The three queues in which requests of the shared queue wait: those with a deadline, those that missed it, best
effort."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from heapq import merge
from math import inf

import numpy as np

from gpu_scheduler.policy.queue.request_columns import Array, Key, RequestColumns, Seqs
from gpu_scheduler.policy.queue.slack import WaitingRequest

_AT_ONCE = 256
"""Requests of an order whose sequence numbers are taken out of numpy at a time."""


class RequestState(Enum):
    """The state of a request; `backlog.py` has the transitions."""

    WAITING = "waiting"
    LATE = "late"
    DISPATCHED = "dispatched"
    RUNNING = "running"


@dataclass(slots=True)
class QueueEntry:
    """One request, in any state. `seq` tells apart requests that are equal in all else."""

    request: WaitingRequest
    seq: int
    state: RequestState = RequestState.WAITING
    done_tokens: int = 0
    missed: bool = False
    """True if the request waits and its deadline had passed at the last plan."""

    @property
    def key(self) -> Key:
        if self.missed:
            return (self.request.arrival, self.request.deadline, self.seq)
        return (self.request.deadline, self.request.arrival, self.seq)

    @property
    def tokens_left(self) -> int:
        return max(0, self.request.uncached_tokens - self.done_tokens)


ClassOf = Callable[[WaitingRequest], int]
"""A function from a request to its class, the index of its rate (`models.py`)."""


class Order:
    """Requests in the order of a plan, looked up only as they are read: of 10,000 the first few matter.

    It may be read after the queue has changed: a request that no longer waits is skipped, and one that was put back
    meanwhile is where it was.
    """

    __slots__ = ("_entries", "_seqs")

    def __init__(self, seqs: Seqs, entries: Mapping[int, QueueEntry]) -> None:
        self._seqs = seqs
        self._entries = entries

    def __len__(self) -> int:
        """The number of requests when the order was made."""
        return len(self._seqs)

    def __iter__(self) -> Iterator[str]:
        """The ids of those requests that still wait."""
        return (entry.request.request_id for entry in self.entries())

    def entries(self) -> Iterator[QueueEntry]:
        known = self._entries
        for begin in range(0, len(self._seqs), _AT_ONCE):
            for seq in self._seqs[begin : begin + _AT_ONCE].tolist():
                if entry := known.get(seq):
                    yield entry


class WaitQueues:
    """The three wait queues. A request is in one of them from `insert` to `remove`."""

    def __init__(self) -> None:
        self.timed = RequestColumns()
        self.missed = RequestColumns()
        """Requests whose deadlines have passed, by arrival. They are late whatever else waits, so that no plan has to
        find that out again."""
        self.best_effort = RequestColumns()
        self._entries: dict[int, QueueEntry] = {}
        """Waiting requests by sequence number."""
        self._missed_costs: tuple[Array, Array] | None = None
        """The rates by which the missed requests were last costed, and their least and greatest cost; None if the queue
        of missed requests has changed since."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def late(self) -> int:
        """Number of requests that missed their deadlines or were left out of S, the on-time set."""
        return len(self.missed) + self.timed.left_out

    def is_late(self, entry: QueueEntry) -> bool:
        """Whether the request waits, and has missed its deadline or was left out of S."""
        if entry.seq not in self._entries or entry.request.deadline == inf:
            return False
        return entry.missed or self.timed.is_left_out(entry.key)

    def insert(self, entry: QueueEntry, class_: int) -> None:
        self._entries[entry.seq] = entry
        self._of(entry).insert(entry.key, entry.request.uncached_tokens, class_)

    def remove(self, entry: QueueEntry) -> None:
        self._of(entry).remove(entry.key)
        del self._entries[entry.seq]
        if entry.missed:
            entry.missed, self._missed_costs = False, None

    def miss(self, now: float, class_of: ClassOf) -> list[QueueEntry]:
        """Moves the requests whose deadlines have passed to `missed`, where no plan considers them for S. Returns them,
        by deadline."""
        passed = [self._entries[seq] for seq in self.timed.before(now)]
        if passed:
            self._missed_costs = None
        for entry in passed:
            self.timed.remove(entry.key)
            entry.missed = True
            self.insert(entry, class_of(entry.request))
        return passed

    def in_order(self, seqs: Seqs) -> Order:
        """An order over the requests with these sequence numbers; yields those that wait."""
        return Order(seqs, self._entries)

    def costs_of_missed(self, rates: Array) -> Array:
        """The least and the greatest prefill cost of the missed requests; empty if there are none. The result is
        cached by identity of `rates`: pass a new array whenever rates change."""
        if self._missed_costs is None or self._missed_costs[0] is not rates:
            costs = self.missed.costs(rates)
            self._missed_costs = rates, np.array([costs.min(), costs.max()]) if len(costs) else costs
        return self._missed_costs[1]

    def by_deadline(self) -> Iterator[WaitingRequest]:
        """All waiting requests by deadline, best effort last."""
        missed = sorted(self.in_order(self.missed.seqs()).entries(), key=_by_deadline)
        # `timed` also has requests that were late when they came, until the next plan moves them to `missed`.
        for entry in merge(missed, self.in_order(self.timed.seqs()).entries(), key=_by_deadline):
            yield entry.request
        for entry in self.in_order(self.best_effort.seqs()).entries():
            yield entry.request

    def by_age(self, late: Seqs, arrivals: Array, yield_s: float) -> Order:
        """An order over the requests `late` (whose arrivals are `arrivals`), the missed ones and best effort, oldest
        first; of equals, the late one with the earlier deadline. Best effort counts as `yield_s` seconds younger."""
        seqs = self.missed.seqs()
        if len(late) or len(self.best_effort):
            came = np.concatenate((self.missed.times(), arrivals, self.best_effort.seconds() + yield_s))
            seqs = np.concatenate((seqs, late, self.best_effort.seqs()))[came.argsort(kind="stable")]
        return self.in_order(seqs)

    def _of(self, entry: QueueEntry) -> RequestColumns:
        if entry.missed:
            return self.missed
        return self.best_effort if entry.request.deadline == inf else self.timed


def _by_deadline(entry: QueueEntry) -> tuple[float, float, int]:
    return entry.request.deadline, entry.request.arrival, entry.seq
