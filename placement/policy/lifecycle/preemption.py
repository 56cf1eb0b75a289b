"""Which busy models make way, on a group that is reserved for a model that waits (`reservations.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from placement.policy.kvpr import Books, Group, Model
from placement.policy.lifecycle.activation_plan import GroupOption, attempt, engines_lacking
from placement.policy.lifecycle.decisions import GoCold, Hibernate, LifecycleRules, PlacedModel

_A_MOMENT_S = 1e-3
"""Least idle seconds of a model that counts as idle: 0 would mean busy."""


def holds(model: Model, group: Group, here: Sequence[PlacedModel]) -> bool:
    """Whether the group could hold the model once all but its pinned models have left."""
    books = Books([group])
    for resident in here:
        if resident.model.pinned:
            books.book(resident.booked, resident.place.devices)
    stay = [r for r in here if r.model.pinned and r.model.name != model.name]
    return books.best(model, group)[0] < inf and not engines_lacking(group, stay)


def preempt(
    model: Model, group: Group, here: Sequence[PlacedModel], waited_s: float, rules: LifecycleRules
) -> GroupOption | None:
    """The model's option on the group if models hibernate there that have been awake for their quantum; None if that
    would make no room."""
    others = [r for r in here if r.model.name != model.name]
    busy = [r for r in others if not r.hibernating and not r.model.pinned and r.stay_s >= rules.quantum_s]
    busy.sort(key=lambda r: (not r.elsewhere, r.claims, -r.stay_s, r.model.name))
    for count in range(1, len(busy) + 1):
        yielding = {r.model.name: r for r in busy[:count]}
        pretended = [_as_if_idle(r, rules) if r.model.name in yielding else r for r in here]
        found = attempt(model, group, pretended, rules)
        if found is not None:
            evictions = tuple(_told(e, yielding, waited_s, rules) for e in found.evictions)
            return replace(found, evictions=evictions, idle_s=0.0)
    return None


def _as_if_idle(resident: PlacedModel, rules: LifecycleRules) -> PlacedModel:
    return replace(resident, idle_s=max(resident.idle_s, rules.idle_s, _A_MOMENT_S), stay_s=inf)


def _told(
    eviction: Hibernate | GoCold, yielding: dict[str, PlacedModel], waited_s: float, rules: LifecycleRules
) -> Hibernate | GoCold:
    resident = yielding.get(eviction.model)
    if resident is None or 0.0 < resident.idle_s >= rules.idle_s:
        return eviction
    frees = eviction.reason.partition("; ")[2]
    reason = f"awake for {resident.stay_s:.0f} s while another waited for {waited_s:.1f} s; {frees}"
    return replace(eviction, reason=reason)
