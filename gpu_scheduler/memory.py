"""What a group knows of its device's memory, from balloond's stream, in the terms of admission."""

from __future__ import annotations

from collections.abc import Mapping

from gpu_scheduler.policy.admission import Memory, ModelMemory
from protos import balloond_pb2

UNBOUNDED = 1 << 60


class DeviceMemory:
    """The newest state of one device. Until balloond was heard, or without one, memory binds nobody."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.state = balloond_pb2.DeviceState(device=device)
        self.node = ""
        self.known = False
        self.away = ""
        """Not empty while balloond is away: what is known is old."""

    def update(self, state: balloond_pb2.DeviceState, node: str = "") -> None:
        self.state, self.node, self.known, self.away = state, node, True, ""

    def lost(self, why: str) -> None:
        self.away = why

    def lease(self, model: str) -> balloond_pb2.LeaseState | None:
        return next((lease for lease in self.state.leases if lease.model == model), None)

    def for_admission(self, kv_bytes_per_token: Mapping[str, int], committed: Mapping[str, int]) -> Memory:
        """For models with these envelopes. `committed`: bytes that each one's started requests were admitted with.

        What models hold and nobody runs on (reserves, cached prefixes) counts as free: balloond takes it back, from
        whoever has it, before a growth is refused. What of it is under a floor only the model itself may use.
        """
        if not self.known:
            return Memory({model: ModelMemory(UNBOUNDED, 0, token_bytes=n) for model, n in kv_bytes_per_token.items()})
        limits = {booking.model: booking.limit_bytes for booking in self.state.bookings}
        floors = {booking.model: booking.floor_bytes for booking in self.state.bookings}
        free = self.state.free_bytes
        kept: dict[str, int] = {}
        for lease in self.state.leases:
            idle = lease.kv_reserve_bytes + lease.kv_cached_bytes
            offered = max(0, min(idle, lease.kv_bytes - floors.get(lease.model, 0)))
            free += offered
            kept[lease.model] = idle - offered
        models = {}
        for model, token_bytes in kv_bytes_per_token.items():
            lease = self.lease(model)
            used = lease.kv_used_bytes if lease is not None else 0
            models[model] = ModelMemory(
                limit=limits.get(model, self.state.capacity_bytes),
                held=used + kept.get(model, 0),
                reclaimable=kept.get(model, 0),
                growth=max(0, committed.get(model, 0) - used),
                token_bytes=token_bytes,
                devices=(self.device,),
            )
        return Memory(models, {self.device: free})
