"""What the devices of a group hold, in the terms of admission.

What models hold and nobody runs on (reserves, cached prefixes) counts as free: a model's own gives way to its requests,
and others' balloond takes back before a growth beyond that is refused. What of it is under a floor only the model
itself may use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpu_scheduler.policy.queue.admission import AdmissionMemory, ModelKv


@dataclass(frozen=True, slots=True)
class Holding:
    """KV that a model's lease has on a device. Bytes."""

    model: str
    held: int
    used: int = 0
    """Of running requests."""
    idle: int = 0
    """Reserve and cached prefixes."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """One device. Bytes."""

    device: str
    capacity: int
    free: int
    """Leased to nobody."""
    holdings: Sequence[Holding] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    """By model; one that is not named may have the whole device."""
    floors: Mapping[str, int] = field(default_factory=dict)


def for_admission(
    devices: Sequence[DeviceMemory], kv_bytes_per_token: Mapping[str, int], committed: Mapping[str, int]
) -> AdmissionMemory:
    """For models with these envelopes on each device. `committed`: bytes that each one's started requests were
    admitted with, on a device."""
    by_device = [_on_one(device, kv_bytes_per_token, committed) for device in devices]
    models = {model: _smallest([on.models[model] for on in by_device]) for model in kv_bytes_per_token}
    return AdmissionMemory(models, {name: bytes for on in by_device for name, bytes in on.free.items()})


def _on_one(
    device: DeviceMemory, kv_bytes_per_token: Mapping[str, int], committed: Mapping[str, int]
) -> AdmissionMemory:
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
            token_bytes=token_bytes,
            devices=(device.device,),
        )
        for model, token_bytes in kv_bytes_per_token.items()
    }
    return AdmissionMemory(models, {device.device: free})


def _smallest(parts: Sequence[ModelKv]) -> ModelKv:
    """One model on all of its devices: what holds on each of them."""
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
