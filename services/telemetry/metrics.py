"""Prometheus text over HTTP. Metrics are prometheus_client objects in the modules that count; names are
`prism_<what>_<unit>`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.errors import Unavailable
from services.wording import addresses

QUICK_BUCKETS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
"""Bucket bounds in seconds, for histograms of durations that are microseconds when all is well."""
SLOW_BUCKETS_S = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2, 3, 5, 10, 20, 60, 120, 600)
"""Bucket bounds in seconds, for histograms of durations of a part of a second, or minutes."""

_blocks = prometheus_client.Gauge(
    "prism_python_blocks",
    "What Python's allocator has given out: with a leak it grows, with holes in memory it does not.",
)
_blocks.set_function(sys.getallocatedblocks)


def serve(address: str) -> None:
    """Serves this process's metrics on "host:port" from a thread of its own. Raises Unavailable if the port is
    taken."""
    host, port = addresses.host_and_port(address)
    try:
        prometheus_client.start_http_server(port, host)
    except OSError as error:
        raise Unavailable(f"metrics address {address}: {error.strerror}") from None


class Published(Collector):
    """Metric families that are replaced as a whole, by code that knows all of them at one moment: a thing that is gone
    leaves no series behind, and a scrape, which comes in a thread of its own, never sees half of them."""

    def __init__(self) -> None:
        self._families: Sequence[Metric] = ()
        prometheus_client.REGISTRY.register(self)

    def publish(self, families: Iterable[Metric]) -> None:
        self._families = tuple(families)

    def collect(self) -> Sequence[Metric]:
        return self._families


Values = Iterable[tuple[Sequence[str], float]]
"""(values of the labels, value) of each series of a family."""


def gauge(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    """A family of values that rise and fall."""
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def counter(name: str, text: str, labels: Sequence[str], values: Values) -> Metric:
    """A family of values that only grow; `_total` is added to the name."""
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for key, value in values:
        family.add_metric(key, value)
    return family
