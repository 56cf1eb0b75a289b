"""Places by size alone, for an operator who knows which models there are and not how often each is asked for.

The largest model goes first, each to where the fewest bytes are, in an order among equals that is drawn; the memory
that is left on a device is divided equally. The authors' public configurations have such equal pools.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from placement.policy.assignment.partition import Part, divided
from placement.policy.kvpr import Group, Model, Place, share


def by_size(groups: Sequence[Group], models: Sequence[Model], seed: int) -> dict[str, Part]:
    """Model -> its part; models that find no room are left out. Every model has as many parts as a group has
    devices."""
    drawn = random.Random(seed).sample(sorted(models, key=lambda model: model.name), len(models))
    here: dict[str, list[Model]] = {group.name: [] for group in groups}
    for model in sorted(drawn, key=lambda model: -model.fixed):
        for group in sorted(groups, key=lambda group: sum(each.fixed for each in here[group.name])):
            if sum(each.needed for each in here[group.name]) + model.needed <= _capacity(group):
                here[group.name].append(model)
                break
    parts: dict[str, Part] = {}
    for group in groups:
        placed = here[group.name]
        left = _capacity(group) - sum(model.fixed for model in placed)
        place = Place(group.name, tuple(device.name for device in group.devices))
        equal = divided(left, {model.name: (share(model.floor, model.parts), 1.0) for model in placed})
        parts.update({name: Part(place, kv_bytes) for name, kv_bytes in equal.items()})
    return parts


def _capacity(group: Group) -> int:
    return min(device.capacity for device in group.devices)
