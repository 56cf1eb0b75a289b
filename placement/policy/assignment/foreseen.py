"""Where models belong that are on no group yet, by the traffic that is expected of all of them.

A model that comes up goes where the pressure is least then, which depends on the order in which models are asked for
first. This is Algorithm 1 with local search over all models at once, before any of them has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from placement.policy.assignment.assign import AssignRules, Candidate, assign
from placement.policy.kvpr import Group, Model
from placement.policy.lifecycle.decisions import PlacedModel


def foreseen(
    groups: Sequence[Group], residents: Iterable[PlacedModel], models: Iterable[Model], rules: AssignRules
) -> dict[str, str]:
    """Name of the group that each of the models belongs on; those that are on a group, and those for which there is no
    room beside the others, are left out. `models`: with the demand that is expected of them."""
    expected = {model.name: model for model in models}
    booked = []
    here = set()
    for resident in residents:
        here.add(resident.model.name)
        model = expected.get(resident.model.name)
        awake = resident.model if model is None else resident.model.wanted(model.demand)
        booked.append((awake.asleep() if resident.hibernating else awake, resident.place))
    candidates = [Candidate(model) for name, model in expected.items() if name not in here]
    return {name: place.group for name, place in assign(groups, candidates, 0.0, rules, booked).places.items()}
