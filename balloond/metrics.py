"""Gauges of the ledger, for Prometheus."""

from __future__ import annotations

from prometheus_client import Gauge

from balloond.daemon import Daemon

_EVERY_S = 1.0
_BYTES = Gauge("prism_device_memory_bytes", "Memory of a device by what became of it", ["device", "state"])
_KV = Gauge("prism_model_kv_bytes", "KV that a model holds on a device", ["device", "model"])
_LIMIT = Gauge("prism_model_kv_limit_bytes", "The most KV that a model may hold on a device", ["device", "model"])


async def publish(daemon: Daemon) -> None:
    """Follows the ledger, for ever."""
    async for _ in daemon.changed.follow(_EVERY_S):
        for device in daemon.devices.values():
            ledger = device.ledger
            for state in ("leased", "free", "booked", "stranded", "capacity"):
                _BYTES.labels(device.name, state).set(getattr(ledger, state))
            for model in ledger.bookings:
                _KV.labels(device.name, model).set(ledger.kv_of(model))
                _LIMIT.labels(device.name, model).set(device.limits.bytes_of(model))
