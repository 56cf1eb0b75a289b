"""Groups and models in placement's terms."""

from __future__ import annotations

from collections.abc import Sequence

from placement.policy import kvpr
from placement.policy.lifecycle.refusal import LongestRequest, refusal
from services.wording.plurals import counted
from sim.group.node import SimulatedGroup
from sim.inputs.catalogue import Spec
from sim.system import FleetError


def group_of(group: SimulatedGroup, load_weight: float = 0.0) -> kvpr.Group:
    capacity = group.hardware.capacity_bytes
    devices = (
        kvpr.Device(f"{group.name}/{i}", capacity, kvpr.load(load_weight, capacity)) for i in range(group.devices)
    )
    return kvpr.Group(group.name, tuple(devices))


def model_of(spec: Spec, group: SimulatedGroup, demand: float = 0.0) -> kvpr.Model:
    """The model as a group of its size books it."""
    parts, hardware = spec.parts, group.hardware
    return kvpr.Model(
        name=spec.name,
        demand=demand,
        weights=parts * group.own_bytes(spec),
        floor=parts * group.floor(spec),
        quota=parts * hardware.quota_bytes,
        kept=parts * hardware.kept_bytes,
        parts=parts,
        pinned=spec.pinned,
    )


def suitable(spec: Spec, groups: Sequence[SimulatedGroup]) -> list[SimulatedGroup]:
    """The groups that have as many devices as the model. Raises FleetError with the arithmetic if it fits on none of
    them even alone."""
    found = [group for group in groups if group.devices == spec.parts]
    if not found:
        have = ", ".join(f"{group.name} has {group.devices}" for group in groups)
        raise FleetError(f"{spec.name} is for a group of {counted(spec.parts, 'device')}: {have}")
    longest = LongestRequest(spec.context_tokens, spec.shape.kv.share(spec.parts))
    refused = refusal(model_of(spec, found[0]), [group_of(group) for group in found], longest)
    if refused is not None:
        raise FleetError(f"no group can hold {spec.name}: {refused.reason}")
    return found
