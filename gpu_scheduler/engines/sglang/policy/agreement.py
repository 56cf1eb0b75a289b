"""What the ranks of one engine agree on between two steps. Pure.

Each rank runs SGLang's scheduler for itself, so what it decides by must be the same everywhere. What differs (memory
comes and goes on each device in its own time) is told, and the least of it holds for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankFacts:
    """What one rank has to tell before a step."""

    news: bool = False
    """Memory came, or a limit changed."""
    wanted: int = 0
    """Bytes that its balloond wants back."""
    limit: int | None = None
    """Bytes of KV that it may hold; None: it has no range yet."""
    arrived: int = 0
    """How many copies of freed numbers have reached its host, since the start."""
    slow: frozenset[str] = frozenset()
    """Names of requests whose grammars have taken too much of its time."""
    mark: Hashable = None
    """Of the state of its scheduler, where the ranks are watched: must be the same."""


@dataclass(frozen=True)
class StepAgreement:
    """What holds for all in the step to come."""

    news: bool = False
    wanted: int = 0
    limit: int | None = None
    arrived: int = 0
    slow: frozenset[str] = frozenset()


class RanksDisagree(Exception):
    """Ranks have decided differently: nothing that they compute together makes sense any more."""


def agree(facts: Sequence[RankFacts]) -> StepAgreement:
    """The smallest rank decides what there is, the neediest what has to leave; what any of them finds slow is. Raises
    Parted."""
    marks = [one.mark for one in facts]
    if any(mark != marks[0] for mark in marks):
        raise RanksDisagree(f"the ranks have parted: {marks}")
    return StepAgreement(
        news=any(one.news for one in facts),
        wanted=max(one.wanted for one in facts),
        limit=min((one.limit for one in facts if one.limit is not None), default=None),
        arrived=min(one.arrived for one in facts),
        slow=frozenset().union(*(one.slow for one in facts)),
    )


def common(offers: Sequence[Sequence[int]], count: int) -> list[int]:
    """At most `count` of the extents that every rank has on offer, the lowest addresses first."""
    return sorted(set(offers[0]).intersection(*offers[1:]))[: max(0, count)]
