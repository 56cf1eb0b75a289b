"""Refusal: a model that no group could hold even if it were alone there, with the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from placement.policy.kvpr import Group, Model, share
from placement.policy.lifecycle.decisions import Refuse


def refusal(model: Model, groups: Sequence[Group]) -> Refuse | None:
    """Why no group could ever hold the model; None if one could. For `AddModel` and for `plan`."""
    if any(could_hold(model, group) for group in groups):
        return None
    if not groups:
        return Refuse(model.name, "no group is here")
    have = max(len(group.devices) for group in groups)
    if have < model.parts:
        return Refuse(model.name, f"it needs {model.parts} devices of one group, the largest group has {have}")
    capacity, largest = max((_nth_capacity(model, group), group.name) for group in groups)
    return Refuse(model.name, f"{arithmetic(model)}; the largest group, {largest}, has {capacity:,}")


def could_hold(model: Model, group: Group) -> bool:
    """Whether the group could hold the model if it were alone there."""
    return _nth_capacity(model, group) >= model.needed


def _nth_capacity(model: Model, group: Group) -> int:
    """Capacity of the worst of the devices that the model would take, in bytes; -1 if the group has too few devices."""
    capacities = sorted((device.capacity for device in group.devices), reverse=True)
    return capacities[model.parts - 1] if len(capacities) >= model.parts else -1


def arithmetic(model: Model) -> str:
    """The sum of bytes that one device has to hold, as text."""
    weights, quota = share(model.weights, model.parts), share(model.quota, model.parts)
    floor = share(model.floor, model.parts)
    total = f"weights {weights:,} + floor {floor:,} + engine quota {quota:,} = {model.needed:,} bytes"
    return total if model.parts == 1 else f"{total} on each of {model.parts} devices"
