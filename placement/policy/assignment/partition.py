"""A cluster that is divided once, for systems that plan ahead: each model has one place, and a part of the KV memory
there.

Places are Algorithm 1's (`assign.py`), with local search, for models that are nowhere yet, by the paper's KVPR (devices
have no `load` here: these systems did no better with it, nor with the models of two places divided anew). A model's
demand is the one that it is expected to have on average. The bytes that a device has left after weights and engine
quotas are divided among its models in proportion to demand, and none gets less than its floor. Prism itself never uses
this: the systems that it is compared with do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.policy.assignment.assign import AssignRules, Candidate, assign
from placement.policy.kvpr import Group, Model, Place, share


@dataclass(frozen=True, slots=True)
class Part:
    """One model's place and share of KV memory, which never change."""

    place: Place
    kv_bytes: int
    """Bytes of KV on each of the model's devices; its floor or more."""


def partition(groups: Sequence[Group], models: Sequence[Model]) -> dict[str, Part]:
    """Model -> its part; models that find no room are left out."""
    places = assign(groups, [Candidate(model) for model in models], 0.0, AssignRules(divide=False)).places
    by_name = {model.name: model for model in models}
    shares: dict[str, int] = {}
    for group in groups:
        for device in group.devices:
            here = [by_name[name] for name, place in places.items() if device.name in place.devices]
            left = device.capacity - sum(model.fixed for model in here)
            wants = {model.name: (share(model.floor, model.parts), model.part_demand) for model in here}
            for name, kv_bytes in divided(left, wants).items():
                # A tensor-parallel model can use no more on one device than it has on every other.
                shares[name] = min(shares.get(name, kv_bytes), kv_bytes)
    return {name: Part(place, shares[name]) for name, place in places.items()}


def divided(total: int, wants: Mapping[str, tuple[int, float]]) -> dict[str, int]:
    """Bytes for each model, in proportion to demand where that gives more than the floor. `wants`: name -> (floor,
    demand)."""
    shares: dict[str, int] = {}
    open_ = dict(wants)
    while open_:
        weight = sum(demand for _, demand in open_.values())
        below = [name for name, (floor, demand) in open_.items() if total * demand / weight < floor]
        if not below:
            return shares | {name: int(total * demand / weight) for name, (_, demand) in open_.items()}
        for name in below:
            shares[name] = open_.pop(name)[0]
            total -= shares[name]
    return shares
