"""What a group counts by model as it happens; the rest of its metrics are read from its report (`metrics.py`)."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from services.metrics import SLOW_BUCKETS_S

STARTED = Counter("prism_requests_started_total", "sent to an engine", ["model", "why"])
TTFT = Counter("prism_ttft_targets_total", "first tokens with a target", ["model", "met"])
STALLED = Counter("prism_engines_stalled_total", "Engines that had requests, stood still and were killed", ["model"])
ACTIVATION = Histogram(
    "prism_activation_seconds",
    "What bringing a model up took: from hibernation, or in a fresh or warm engine",
    ["model", "source"],
    buckets=SLOW_BUCKETS_S,
)


def forget(model: str) -> None:
    """Its series: names may come and go for ever."""
    for metric in (STARTED, TTFT, STALLED, ACTIVATION):
        metric.remove_by_labels({"model": model})
