"""The facts that the ranks of one engine agree on between two steps. Pure.

Each rank runs SGLang's scheduler for itself, so the facts that it decides by must be the same everywhere. Where they
differ (memory comes and goes on each device in its own time), each rank reports its own, and the smallest holds for
all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankFacts:
    """Facts that one rank reports before a step."""

    news: bool = False
    """True if memory came or a limit changed."""
    wanted: int = 0
    """Bytes that the rank's balloond wants back."""
    limit: int | None = None
    """Bytes of KV that the rank may hold; None: it has no range yet."""
    arrived: int = 0
    """Copies of freed slot numbers that have reached its host since the start."""
    slow: frozenset[str] = frozenset()
    """Names of requests whose grammars have taken too much of the rank's time."""
    mark: Hashable = None
    """Digest of the state of the rank's scheduler, where the ranks are watched: it must be the same on all."""


@dataclass(frozen=True)
class StepAgreement:
    """Facts that hold for all ranks in the next step; the fields are those of `RankFacts`."""

    news: bool = False
    wanted: int = 0
    limit: int | None = None
    arrived: int = 0
    slow: frozenset[str] = frozenset()


class RanksDisagree(Exception):
    """The ranks have decided differently: nothing that they compute together makes sense any more."""


def agree(facts: Sequence[RankFacts]) -> StepAgreement:
    """Joins the facts of all ranks: the least memory and the most that has to leave hold for all, and a request is slow
    if any rank finds it slow. Raises RanksDisagree if their marks differ."""
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
    """At most `count` of the extents that every rank offers, the lowest addresses first."""
    return sorted(set(offers[0]).intersection(*offers[1:]))[: max(0, count)]
