"""What the devices of a group hold, converted into the terms of admission.

Memory that models hold and no running request uses (reserves, cached prefixes) counts as free: a model's own is evicted
for its own requests, and balloond reclaims other models' before it refuses a growth. The part of it under a model's
floor only that model may use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpu_scheduler.policy.queue.admission import AdmissionMemory, ModelKv
from kv_kinds.layout import KvLayout


@dataclass(frozen=True, slots=True)
class Holding:
    """KV that a model's lease holds on one device, in bytes."""

    model: str
    held: int
    used: int = 0
    """Bytes used by running requests."""
    idle: int = 0
    """Bytes of reserve and cached prefixes."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device, in bytes."""

    device: str
    capacity: int
    free: int
    """Bytes that no lease holds."""
    holdings: Sequence[Holding] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    """KV limits by model; a model that is not named may have the whole device."""
    floors: Mapping[str, int] = field(default_factory=dict)


UNBOUNDED = 1 << 60
"""Limit, in bytes, of models on devices of which nothing is known."""


def for_admission(
    devices: Sequence[DeviceMemory], layouts: Mapping[str, KvLayout], committed: Mapping[str, int]
) -> AdmissionMemory:
    """Memory for admission, over all devices of the group; unbounded if `devices` is empty. `layouts`: by model,
    on each device. `committed`: bytes on a device by model that its started requests were admitted with."""
    if not devices:
        return AdmissionMemory({model: ModelKv(UNBOUNDED, 0, kv=kv) for model, kv in layouts.items()})
    by_device = [_on_one(device, layouts, committed) for device in devices]
    models = {model: _smallest([on.models[model] for on in by_device]) for model in layouts}
    return AdmissionMemory(models, {name: bytes for on in by_device for name, bytes in on.free.items()})


def _on_one(device: DeviceMemory, layouts: Mapping[str, KvLayout], committed: Mapping[str, int]) -> AdmissionMemory:
    free = device.free
    used: dict[str, int] = {}
    kept: dict[str, int] = {}
    for holding in device.holdings:
        offered = max(0, min(holding.idle, holding.held - device.floors.get(holding.model, 0)))
        free += offered
        used[holding.model] = holding.used
        kept[holding.model] = holding.idle - offered
    models = {
        model: ModelKv(
            limit=device.limits.get(model, device.capacity),
            held=used.get(model, 0) + kept.get(model, 0),
            reclaimable=kept.get(model, 0),
            growth=max(0, committed.get(model, 0) - used.get(model, 0)),
            kv=kv,
            devices=(device.device,),
        )
        for model, kv in layouts.items()
    }
    return AdmissionMemory(models, {device.device: free})


def _smallest(parts: Sequence[ModelKv]) -> ModelKv:
    """One model's memory over all of its devices: the values that hold on each of them."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        limit=min(part.limit for part in parts),
        held=max(part.held for part in parts),
        reclaimable=min(part.reclaimable for part in parts),
        growth=max(part.growth for part in parts),
        devices=tuple(device for part in parts for device in part.devices),
    )
