"""Metrics of a group for Prometheus, updated once a second from the same report that placement gets; events are counted
in `counters.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import Metric

from gpu_scheduler.report.report import GroupReport
from protos import common_pb2, gpu_scheduler_pb2
from services.telemetry.metrics import Published, counter, gauge

_EVERY_S = 1.0
_LABELS = ["model", "device"]
_STATES = [name for name in common_pb2.Residency.keys() if name != "RESIDENCY_UNSPECIFIED"]
_GAUGES = {
    "waiting": ("prism_requests_waiting", "In the shared queue"),
    "late": ("prism_requests_late", "Of those that wait"),
    "running": ("prism_requests_running", "Sent to the engine"),
    "weights_bytes": ("prism_weights_bytes", "Measured"),
    "kv_held_bytes": ("prism_kv_held_bytes", "Mapped: used, cached and reserve"),
    "kv_used_bytes": ("prism_kv_used_bytes", "By running requests"),
    "kv_cached_bytes": ("prism_kv_cached_bytes", "Cached prefixes that no running request uses"),
    "kv_limit_bytes": ("prism_kv_limit_bytes", "Most that may be held"),
    "kv_lacking_bytes": ("prism_kv_lacking_bytes", "KV that a waiting request has lacked for longer than a moment"),
    "idle_s": ("prism_idle_seconds", "Since the last request arrived or ended"),
    "wake_s": ("prism_last_wake_seconds", "What the last wake-up from hibernation took"),
    "cold_s": ("prism_last_cold_start_seconds", "What the last start in a fresh engine took"),
    "decode_step_s": ("prism_decode_step_alone_seconds", "What its engine thinks a decode step takes alone"),
}
"""Gauges of a resident: (metric, help text) by field of the report."""
_COUNTERS = {
    "retractions": ("prism_retractions", "Running requests put back"),
    "evicted_tokens": ("prism_evicted_tokens", "Cached tokens dropped"),
    "hibernations": ("prism_hibernations", "Times that the model fell asleep"),
    "prefill_tokens": ("prism_prefill_tokens", "Prompt tokens computed"),
    "decode_tokens": ("prism_decode_tokens", "Output tokens computed"),
    "decode_steps": ("prism_decode_steps", "Steps that computed them"),
    "urgent_steps": ("prism_decode_steps_urgent", "Of these, begun with less than a step's time in hand"),
    "stood_still_s": ("prism_decode_stood_still_seconds", "That decodes waited for steps of other models"),
}
_FIELD_STANDARD = {
    "waiting": ("vllm:num_requests_waiting", "In the shared queue"),
    "running": ("vllm:num_requests_running", "Sent to the engine"),
}
"""Gauges under the names that llm-d and Kubernetes' inference gateway read of a model server; KV usage is the third."""


async def keep(report: GroupReport) -> None:
    """Publishes the group's metrics once a second, for ever."""
    published = Published()
    while True:
        published.publish(_families(report.build()))
        await asyncio.sleep(_EVERY_S)


def _families(state: gpu_scheduler_pb2.GroupState) -> Iterator[Metric]:
    device = "+".join(state.devices)
    residents = state.residents
    for make, fields in ((gauge, _GAUGES), (counter, _COUNTERS)):
        for field, (name, text) in fields.items():
            yield make(name, text, _LABELS, (((each.model, device), getattr(each, field)) for each in residents))
    for field, (name, text) in _FIELD_STANDARD.items():
        yield gauge(name, text, ["model_name"], (((each.model,), getattr(each, field)) for each in residents))
    use = {each.model: each.kv_used_bytes / max(1, each.kv_limit_bytes) for each in residents}
    text = "Used bytes of the limit, 0 to 1"
    yield gauge("prism_kv_use_ratio", text, _LABELS, (((model, device), value) for model, value in use.items()))
    yield gauge("vllm:kv_cache_usage_perc", text, ["model_name"], (((model,), value) for model, value in use.items()))
    yield gauge(
        "prism_residency",
        "1 for the state that a model is in",
        [*_LABELS, "state"],
        (
            ((each.model, device, name.lower()), float(common_pb2.Residency.Value(name) == each.residency))
            for each in residents
            for name in _STATES
        ),
    )
    yield gauge("prism_warm_engines", "Engines without a model", ["device"], [((device,), state.warm_engines)])
    here = float(not state.balloond_error)
    yield gauge("prism_balloond_reachable", "Whether balloond is there", ["device"], [((device,), here)])
