"""What a group knows of its devices' memory, from balloond's stream, converted into the terms of admission."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_scheduler.policy.memory.holdings import DeviceMemory, Holding
from protos import balloond_pb2


class GroupMemory:
    """The newest state of each device of a group. Until balloond's first report, or without a balloond, memory is
    unbounded."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._states = {device: balloond_pb2.DeviceState(device=device) for device in devices}
        self.node = ""
        self.known = False
        self.devices: Sequence[DeviceMemory] = ()
        """The devices in the terms of admission; empty until balloond's first report."""
        self.away = ""
        """Why balloond is away; empty while it is there. What is known is old meanwhile."""

    @property
    def states(self) -> list[balloond_pb2.DeviceState]:
        return list(self._states.values())

    def update(self, states: Sequence[balloond_pb2.DeviceState], node: str = "") -> None:
        """Takes the states of a node's devices; those of other groups are ignored."""
        self._states.update({state.device: state for state in states if state.device in self._states})
        self.node, self.known, self.away = node, True, ""
        self.devices = [_device(state) for state in self.states]

    def lost(self, why: str) -> None:
        self.away = why

    def limit_bytes(self, model: str) -> int:
        """The model's KV limit in bytes, over all devices; 0 if it is not booked."""
        return sum(b.limit_bytes for state in self.states for b in state.bookings if b.model == model)

    @property
    def free_bytes(self) -> int:
        return sum(state.free_bytes for state in self.states)


def _device(state: balloond_pb2.DeviceState) -> DeviceMemory:
    return DeviceMemory(
        device=state.device,
        capacity=state.capacity_bytes,
        free=state.free_bytes,
        holdings=[
            Holding(
                model=lease.model,
                held=lease.kv_bytes,
                used=lease.kv_used_bytes,
                idle=lease.kv_reserve_bytes + lease.kv_cached_bytes,
            )
            for lease in state.leases
        ],
        limits={booking.model: booking.limit_bytes for booking in state.bookings},
        floors={booking.model: booking.floor_bytes for booking in state.bookings},
    )
