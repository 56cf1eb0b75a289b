"""Whether a move brings more than it costs, both in requests that miss their targets, each second.

What it can bring at most is all that misses its target on the groups that it touches. What it costs are the wake-ups of
the models that it puts to sleep: each has a request late when it returns, or a part of one where waking takes a part of
its TTFT target.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from placement.policy.assignment.moves import Move
from placement.policy.lifecycle.decisions import PlacedModel
from placement.policy.outcomes import Outcomes


def is_worth(
    move: Move, leaving: Collection[str], residents: Iterable[PlacedModel], outcomes: Outcomes, now: float
) -> bool:
    """Whether the move is worth it. `leaving`: names of the models that make way at its target. A move off a group
    where nobody misses a target is for memory that is lacking, and always worth it."""
    brings = costs = 0.0
    for resident in residents:
        name, group = resident.model.name, resident.place.group
        if resident.hibernating or group not in (move.source.group, move.target.group):
            continue
        brings += outcomes.missed_per_s(name, now, group if resident.elsewhere else None)
        if name in leaving and group == move.target.group:
            costs += outcomes.returns_per_s(name, now) * late_by_waking(resident)
    return costs <= brings or not brings


def late_by_waking(resident: PlacedModel) -> float:
    """Requests that are late because the model has to wake first: 1 if waking takes its TTFT target or longer."""
    if not resident.ttft_s:
        return 0.0
    return min(1.0, (resident.wake_s if resident.has_image else resident.cold_s) / resident.ttft_s)
