"""What a group knows of its devices' memory, from balloond's stream, in the terms of admission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_scheduler.policy.memory import holdings
from gpu_scheduler.policy.memory.holdings import DeviceMemory, Holding
from gpu_scheduler.policy.queue.admission import AdmissionMemory, ModelKv
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

    def for_admission(self, kv_bytes_per_token: Mapping[str, int], committed: Mapping[str, int]) -> AdmissionMemory:
        """For models with these envelopes on each device (`policy/memory/holdings.py`). `committed`: bytes that each
        one's started requests were admitted with, on a device."""
        if not self.known:
            return AdmissionMemory(
                {model: ModelKv(UNBOUNDED, 0, token_bytes=n) for model, n in kv_bytes_per_token.items()}
            )
        return holdings.for_admission([_device(state) for state in self.states], kv_bytes_per_token, committed)


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
