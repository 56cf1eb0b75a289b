"""The cluster as it stands, kept between decisions: one model at a time is decided in a row's passes over the devices.

`assign` builds its arrays anew each time, which is most of what it costs when a single model came, left or has another
demand. Here they stay, and each decision is Algorithm 1's step for that model with all others booked where they are:
the least resulting pressure, tau and cool-down. What only a look at all models finds (packing, local search) is left to
the next `assign`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from placement.policy.assign import AssignRules, Candidate, Reason, greedy, held
from placement.policy.field import Field
from placement.policy.kvpr import Group, Model, Place


class Standing:
    """What is booked where, by name. A place is of the cluster, or KeyError."""

    def __init__(self, groups: Sequence[Group], booked: Iterable[tuple[Model, Place]] = ()) -> None:
        self._field = Field(groups, {})
        self._where: dict[str, Place] = {}
        self._on: dict[str, dict[str, Model]] = {device.name: {} for group in groups for device in group.devices}
        for model, place in booked:
            self.put(model, place)

    def place(self, name: str) -> Place | None:
        """Where a model is booked."""
        return self._where.get(name)

    def put(self, model: Model, place: Place) -> None:
        """Book a model here, and no longer where it was; or with other facts."""
        self.remove(model.name)
        for device in place.devices:
            self._on[device][model.name] = model
        self._where[model.name] = place
        self._rebook(place)

    def remove(self, name: str) -> None:
        """It holds nothing any more; nothing if it never did."""
        place = self._where.pop(name, None)
        if place is not None:
            for device in place.devices:
                del self._on[device][name]
            self._rebook(place)

    def decide(self, candidate: Candidate, now: float, rules: AssignRules | None = None) -> Reason:
        """Where a model with a new demand, or a new model, belongs; it is booked there from now on."""
        rules = rules or AssignRules()
        name = candidate.model.name
        self.remove(name)
        reason = held(candidate, now, rules) if self._stands(candidate) else None
        if reason is None:
            reason = greedy(self._field.copy(), [candidate], rules)[name]
        if reason.place is not None:
            self.put(candidate.model, reason.place)
        return reason

    def _stands(self, candidate: Candidate) -> bool:
        return candidate.current is not None and self._field.has(candidate.current)

    def _rebook(self, place: Place) -> None:
        for device in place.devices:
            self._field.rebook(device, self._on[device].values())
