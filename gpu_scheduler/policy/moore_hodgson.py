"""Moore-Hodgson: the largest set of requests that all meet their deadlines on one machine (the group's prefill turn).

Moore 1968, in Hodgson's form; Algorithm 2 of the Prism paper. Take the requests by deadline; whenever one would end
after its deadline, drop the longest of those taken so far. What is kept is a largest possible set S, and running S in
order of deadline makes all of it on time.

O(n log n). `late_indices` works on parallel lists that are sorted already, so that a queue that keeps itself in order
pays neither for sorting nor for objects: the requests before the first that would be late are only summed, and a heap
exists only from there on.

Ties are settled the same way every time: equal deadlines by the order given; of equally long requests the one with the
earliest deadline is dropped, because that leaves the others the most slack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappush, heappushpop
from itertools import accumulate, compress, count, islice
from operator import attrgetter, gt


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the algorithm sees it: deadline (seconds on the caller's clock) and cost (seconds)."""

    request_id: str
    deadline: float
    cost: float


@dataclass(frozen=True, slots=True)
class Plan:
    """S in order of deadline, and what does not fit into it, by deadline too."""

    on_time: tuple[str, ...]
    late: tuple[str, ...]


def schedule(jobs: Iterable[Job], start: float) -> Plan:
    """The largest on-time set of `jobs` if the first may begin at `start`: now + what is dispatched and unfinished."""
    ordered = sorted(jobs, key=attrgetter("deadline"))
    ids = [job.request_id for job in ordered]
    late = late_indices([job.deadline for job in ordered], [job.cost for job in ordered], start)
    in_s = [True] * len(ids)
    for i in late:
        in_s[i] = False
    return Plan(on_time=tuple(compress(ids, in_s)), late=tuple([ids[i] for i in late]))


def late_indices(deadlines: Sequence[float], costs: Sequence[float], start: float) -> list[int]:
    """Indices that are not in S, ascending. `deadlines` ascend and are finite where a cost is
    +inf: such a request is always late."""
    starts = list(accumulate(costs, initial=start))
    first = next(compress(count(), map(gt, islice(starts, 1, None), deadlines)), None)
    if first is None:
        return []
    end = starts[first]
    heap = [(-cost, i) for i, cost in enumerate(costs[:first])]
    heapify(heap)
    late: list[int] = []
    for i, cost, deadline in zip(range(first, len(costs)), costs[first:], deadlines[first:], strict=True):
        after = end + cost
        if after <= deadline:
            heappush(heap, (-cost, i))
            end = after
            continue
        longest, dropped = heappushpop(heap, (-cost, i))
        late.append(dropped)
        if dropped != i:
            end = after + longest
    late.sort()
    return late
