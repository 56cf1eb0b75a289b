"""The ledger as Prometheus metrics, and a histogram of how long growth waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import Histogram
from prometheus_client.core import Metric

from services.telemetry.metrics import QUICK_BUCKETS_S, Published, gauge

if TYPE_CHECKING:
    from balloond.node.daemon import Daemon

_EVERY_S = 1.0
_STATES = ("leased", "free", "booked", "stranded", "capacity")
GROWTH = Histogram(
    "prism_growth_seconds",
    "From an engine's request for extents until it is granted or refused",
    ["kind", "outcome"],
    buckets=QUICK_BUCKETS_S,
)


async def publish(daemon: Daemon) -> None:
    """Publishes the ledger's metrics as it changes, for ever."""
    published = Published()
    async for _ in daemon.changed.follow(_EVERY_S):
        published.publish(_families(daemon))


def _families(daemon: Daemon) -> Iterator[Metric]:
    ledgers = {name: device.ledger for name, device in daemon.devices.items()}
    yield gauge(
        "prism_device_memory_bytes",
        "Memory of a device by what became of it",
        ["device", "state"],
        (((name, state), getattr(ledger, state)) for name, ledger in ledgers.items() for state in _STATES),
    )
    yield gauge(
        "prism_model_memory_bytes",
        "Memory of a device that a model holds; `private` is what its engine may take for itself",
        ["device", "model", "kind"],
        (
            ((name, model, kind), nbytes)
            for name, ledger in ledgers.items()
            for model in ledger.bookings
            for kind, nbytes in (
                ("weights", ledger.weights_of(model)),
                ("kv", ledger.kv_of(model)),
                ("private", ledger.quota(model)),
            )
        ),
    )
    yield gauge(
        "prism_model_kv_limit_bytes",
        "The most KV that a model may hold on a device",
        ["device", "model"],
        (
            ((name, model), device.limits.bytes_of(model))
            for name, device in daemon.devices.items()
            for model in device.ledger.bookings
        ),
    )
