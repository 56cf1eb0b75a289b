"""What of a group decides whether a model could come up there, and for how long that stays the same by itself.

A group reports something new several times a second: tokens, requests that wait, bytes of KV. None of that changes the
answer to a model that waits for room. Its place is looked for again when the footing of a group changes: which models
are there with how many bytes, which may leave, and which have had their quantum.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import inf

from placement.policy.kvpr import Group
from placement.policy.lifecycle.decisions import LifecycleRules, PlacedModel
from placement.policy.lifecycle.model_eviction import least_stay_s, may_leave


def eligibility_fingerprint(group: Group, here: Sequence[PlacedModel], rules: LifecycleRules) -> Hashable:
    """The group's state as far as it decides the answer to a model that waits: equal values give equal answers."""
    return group, tuple(
        (
            r.model.name,
            r.place,
            r.model.fixed,
            r.model.needed,
            r.model.kept,
            r.model.pinned,
            r.hibernating,
            may_leave(r, rules),
            r.stay_s >= rules.quantum_s,
        )
        for r in here
    )


def holds_s(here: Sequence[PlacedModel], rules: LifecycleRules) -> float:
    """Seconds until one of the models has been idle, or awake, for so long that it may leave; +inf if that never
    happens by itself."""
    return min((left for r in here for left in _ripens_s(r, rules) if left > 0.0), default=inf)


def _ripens_s(resident: PlacedModel, rules: LifecycleRules) -> Sequence[float]:
    if resident.model.pinned or resident.hibernating:
        return ()
    awake = (least_stay_s(resident, rules) - resident.stay_s, rules.quantum_s - resident.stay_s)
    if resident.idle_s <= 0.0:
        return awake
    return (*awake, rules.idle_s - resident.idle_s, rules.kv_idle_s - resident.idle_s)
