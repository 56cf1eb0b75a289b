"""Moore-Hodgson: the largest set of requests that all meet their deadlines on one machine (the group's prefill turn).

Moore 1968, in Hodgson's form; Algorithm 2 of the Prism paper. Take the requests by deadline; whenever one would end
after its deadline, drop the longest of those taken so far. The requests kept are a largest possible set S, and running
S in order of deadline makes all of it on time.

O(n log n) with a heap. `late_indices` works on arrays that are sorted already, so that a queue that keeps itself in
order pays neither for sorting nor for objects. If few of many requests have to be dropped, as in a queue that grows too
long, it looks at no others: the work that has to be dropped by each deadline is a running maximum, so that the next
request that would be late is found by bisection, and the longest before it by one pass in numpy. The heap is used if
many have to be dropped.

Ties are settled the same way every time: equal deadlines by the order given; of equally long requests the one with the
earliest deadline is dropped, because that leaves the others the most slack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappush, heappushpop
from itertools import accumulate, compress, count, islice
from math import inf
from operator import attrgetter, gt, neg

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
_FEW = 96
"""Most passes that `few_late` makes: over 10,000 requests so many cost a fifth of a heap."""
_MANY = 256
"""Least number of requests for which a pass in numpy is worth the cost of its calls."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the algorithm sees it: deadline (seconds on the caller's clock) and cost (seconds)."""

    request_id: str
    deadline: float
    cost: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The on-time set S and the requests that do not fit into it, each in order of deadline."""

    on_time: tuple[str, ...]
    late: tuple[str, ...]


def schedule(jobs: Iterable[Job], start: float) -> Plan:
    """The largest on-time set of `jobs` if the first may begin at `start`: now + what is dispatched and unfinished."""
    ordered = sorted(jobs, key=attrgetter("deadline"))
    ids = [job.request_id for job in ordered]
    deadlines, costs = (np.array([getattr(job, of) for job in ordered], float) for of in ("deadline", "cost"))
    late = late_indices(deadlines, costs, start)
    in_s = np.ones(len(ids), bool)
    in_s[late] = False
    return Plan(on_time=tuple(compress(ids, in_s.tolist())), late=tuple([ids[i] for i in late]))


def late_indices(deadlines: Array, costs: Array, start: float) -> Indices:
    """Indices, ascending, of requests that are not in S. `deadlines` (seconds) ascend, and are finite where a cost is
    +inf: such a request is always late."""
    late = few_late(deadlines, costs, start) if len(costs) >= _MANY else None
    return many_late(deadlines, costs, start) if late is None else late


def few_late(deadlines: Array, costs: Array, start: float, most: int = _FEW) -> Indices | None:
    """Indices, ascending, of requests that are not in S; None if more than `most` have to be dropped of those that
    could be on time by themselves."""
    # A request whose deadline is before the start is late whatever is dropped, and must not cause others to be dropped.
    able = np.isfinite(costs) & (deadlines >= start)
    if not able.all():
        inside = np.flatnonzero(able)
        of_able = few_late(deadlines[inside], costs[inside], start, most)
        if of_able is None:
            return None
        able[inside[of_able]] = False
        return np.flatnonzero(~able)
    if not len(costs):
        return np.zeros(0, np.intp)
    needed = np.maximum.accumulate(ends(costs, start) - deadlines)
    """Seconds of work that have to be dropped by each deadline, out of what comes before it."""
    if needed[-1] > most * costs.max():
        return None
    left, gone = costs.copy(), 0.0
    late: list[int] = []
    while (i := int(needed.searchsorted(gone, "right"))) < len(costs):
        if len(late) == most:
            return None
        longest = int(left[: i + 1].argmax())
        late.append(longest)
        # All requests before it were on time, so that without its longest this one is too. This is not read off the
        # sums, which are rounded.
        gone = max(gone + float(left[longest]), float(needed[i]))
        left[longest] = -inf
    return np.array(sorted(late), np.intp)


def ends(costs: Array, start: float) -> Array:
    """The end of each request if all of them ran in this order."""
    return start + costs.cumsum()


def many_late(deadlines: Array, costs: Array, start: float) -> Indices:
    """Indices, ascending, of requests that are not in S, however many there are."""
    gone = np.array(dropped(deadlines.tolist(), costs.tolist(), start))
    if not len(gone):
        return np.zeros(0, np.intp)
    # The heap holds costs only. Of equally long requests it dropped the earliest first, so the dropped ones are the
    # first.
    gone.sort()
    by_cost = ascending(costs)
    number, _ = runs(gone)
    late = by_cost[costs[by_cost].searchsorted(gone) + number]
    late.sort()
    return late


def ascending(values: Array) -> Indices:
    """`argsort(kind="stable")`, for many values in half its time: for the other kind numpy uses vector instructions."""
    if len(values) < _MANY:
        return values.argsort(kind="stable")
    order = values.argsort()
    _, run = runs(values[order])
    # Equal values are put in order of their indices.
    run *= len(run)
    run += order
    run.sort()
    run %= len(run)
    return run


def runs(ordered: Array) -> tuple[Indices, Indices]:
    """For each element of `ordered`: its number among the elements equal to it, and the index of the first of these."""
    index = np.arange(len(ordered))
    first = np.zeros_like(index)
    np.multiply(ordered[1:] != ordered[:-1], index[1:], out=first[1:])
    np.maximum.accumulate(first, out=first)
    return index - first, first


def dropped(deadlines: Sequence[float], costs: Sequence[float], start: float) -> list[float]:
    """The costs of the requests that are dropped, as a heap finds them."""
    starts = list(accumulate(costs, initial=start))
    begin = next(compress(count(), map(gt, islice(starts, 1, None), deadlines)), None)
    if begin is None:
        return []
    # The heap holds bare numbers: a heap of pairs, which would tell equally long requests apart, takes longer.
    end, longest_first = starts[begin], list(map(neg, costs))
    heap = longest_first[:begin]
    heapify(heap)
    gone: list[float] = []
    for negative, deadline in zip(longest_first[begin:], deadlines[begin:], strict=True):
        after = end - negative
        if after <= deadline:
            heappush(heap, negative)
            end = after
            continue
        longest = heappushpop(heap, negative)
        gone.append(-longest)
        if longest != negative:
            end = after + longest
    return gone
