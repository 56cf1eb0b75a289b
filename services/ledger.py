"""What decisions rest on of a device's state: it is told at once, all else as often as a follower wants it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from protos import balloond_pb2


def booked(devices: Iterable[balloond_pb2.DeviceState]) -> Hashable:
    """Their sizes and bookings. Free bytes are others with every page."""
    return tuple(
        (
            device.device,
            device.capacity_bytes,
            tuple((b.model, b.weights_bytes, b.floor_bytes, b.quota_bytes) for b in device.bookings),
        )
        for device in devices
    )
