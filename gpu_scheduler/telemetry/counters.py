"""Counters of a group's events, nearly all of them by model; its other metrics are read from its report
(`report/metrics.py`)."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from services.telemetry.metrics import SLOW_BUCKETS_S

STARTED = Counter("prism_requests_started_total", "sent to an engine", ["model", "why"])
TTFT_TARGETS = Counter(
    "prism_ttft_targets_total", "First tokens (or results, which have none) with a TTFT target", ["model", "met"]
)
STALLED = Counter("prism_engines_stalled_total", "Engines that had requests, stood still and were killed", ["model"])
COMPILED = Counter(
    "prism_kernels_compiled_total", "Kernels that engines compiled, because no cache had them", ["compiler"]
)
COMPILING_S = Counter("prism_kernel_compile_seconds_total", "What compiling these took", ["compiler"])
COMPILERS = ("nvcc", "triton")
for _compiler in COMPILERS:  # exported from the start: zero compilations are a result too
    COMPILED.labels(_compiler)
    COMPILING_S.labels(_compiler)
ACTIVATION = Histogram(
    "prism_activation_seconds",
    "What bringing a model up took: from hibernation, or in a fresh or warm engine",
    ["model", "source"],
    buckets=SLOW_BUCKETS_S,
)


def forget(model: str) -> None:
    """Removes the model's series: names may come and go for ever."""
    for metric in (STARTED, TTFT_TARGETS, STALLED, ACTIVATION):
        metric.remove_by_labels({"model": model})
