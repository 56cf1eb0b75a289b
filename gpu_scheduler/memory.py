"""What a group knows of its devices' memory, from balloond's stream, in the terms of admission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpu_scheduler.policy.admission import Memory, ModelMemory
from protos import balloond_pb2

UNBOUNDED = 1 << 60


class GroupMemory:
    """The newest state of each device of a group. Until balloond was heard, or without one, memory binds nobody."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._states = {device: balloond_pb2.DeviceState(device=device) for device in devices}
        self.node = ""
        self.known = False
        self.away = ""
        """Not empty while balloond is away: what is known is old."""

    @property
    def states(self) -> list[balloond_pb2.DeviceState]:
        return list(self._states.values())

    def update(self, states: Sequence[balloond_pb2.DeviceState], node: str = "") -> None:
        """Of a node's devices; those of other groups are passed over."""
        self._states.update({state.device: state for state in states if state.device in self._states})
        self.node, self.known, self.away = node, True, ""

    def lost(self, why: str) -> None:
        self.away = why

    def limit_bytes(self, model: str) -> int:
        """Of all devices; 0 where it is not booked."""
        return sum(b.limit_bytes for state in self.states for b in state.bookings if b.model == model)

    @property
    def free_bytes(self) -> int:
        return sum(state.free_bytes for state in self.states)

    def for_admission(self, kv_bytes_per_token: Mapping[str, int], committed: Mapping[str, int]) -> Memory:
        """For models with these envelopes on each device. `committed`: bytes that each one's started requests were
        admitted with, on a device.

        What models hold and nobody runs on (reserves, cached prefixes) counts as free: balloond takes it back, from
        whoever has it, before a growth is refused. What of it is under a floor only the model itself may use.
        """
        if not self.known:
            return Memory({model: ModelMemory(UNBOUNDED, 0, token_bytes=n) for model, n in kv_bytes_per_token.items()})
        by_device = [_for_admission(state, kv_bytes_per_token, committed) for state in self.states]
        models = {model: _smallest([on.models[model] for on in by_device]) for model in kv_bytes_per_token}
        return Memory(models, {device: on.free[device] for device, on in zip(self._states, by_device, strict=True)})


def _for_admission(
    state: balloond_pb2.DeviceState, kv_bytes_per_token: Mapping[str, int], committed: Mapping[str, int]
) -> Memory:
    """Of one device."""
    limits = {booking.model: booking.limit_bytes for booking in state.bookings}
    floors = {booking.model: booking.floor_bytes for booking in state.bookings}
    used = {lease.model: lease.kv_used_bytes for lease in state.leases}
    free = state.free_bytes
    kept: dict[str, int] = {}
    for lease in state.leases:
        idle = lease.kv_reserve_bytes + lease.kv_cached_bytes
        offered = max(0, min(idle, lease.kv_bytes - floors.get(lease.model, 0)))
        free += offered
        kept[lease.model] = idle - offered
    models = {
        model: ModelMemory(
            limit=limits.get(model, state.capacity_bytes),
            held=used.get(model, 0) + kept.get(model, 0),
            reclaimable=kept.get(model, 0),
            growth=max(0, committed.get(model, 0) - used.get(model, 0)),
            token_bytes=token_bytes,
            devices=(state.device,),
        )
        for model, token_bytes in kv_bytes_per_token.items()
    }
    return Memory(models, {state.device: free})


def _smallest(parts: Sequence[ModelMemory]) -> ModelMemory:
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
