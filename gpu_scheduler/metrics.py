"""A group's gauges, brought up to date once a second from the same report that placement gets."""

from __future__ import annotations

import asyncio

import prometheus_client

from gpu_scheduler.report import Report
from protos import common_pb2

_EVERY_S = 1.0
_LABELS = ["model", "device"]
_STATES = [name for name in common_pb2.Residency.keys() if name != "RESIDENCY_UNSPECIFIED"]


def _gauge(name: str, text: str) -> prometheus_client.Gauge:
    return prometheus_client.Gauge(f"prism_{name}", text, _LABELS)


_GAUGES = {
    "waiting": _gauge("requests_waiting", "in the shared queue"),
    "late": _gauge("requests_late", "of those that wait"),
    "running": _gauge("requests_running", "sent to the engine"),
    "weights_bytes": _gauge("weights_bytes", "measured"),
    "kv_held_bytes": _gauge("kv_held_bytes", "mapped: used, cached and reserve"),
    "kv_used_bytes": _gauge("kv_used_bytes", "by running requests"),
    "kv_cached_bytes": _gauge("kv_cached_bytes", "prefixes nobody runs on"),
    "kv_limit_bytes": _gauge("kv_limit_bytes", "most that may be held"),
    "ttft_met": _gauge("ttft_met_requests", "first tokens in time, since start"),
    "ttft_missed": _gauge("ttft_missed_requests", "first tokens too late, since start"),
    "retractions": _gauge("retractions_requests", "running requests put back, since start"),
    "evicted_tokens": _gauge("evicted_tokens", "cached tokens dropped, since start"),
    "hibernations": _gauge("hibernations_count", "since start"),
    "wake_s": _gauge("wake_seconds", "what the last wake-up from hibernation took"),
    "cold_s": _gauge("cold_start_seconds", "what the last start in a fresh engine took"),
}
_KV_USE = _gauge("kv_use_ratio", "used bytes of the limit")
_RESIDENCY = prometheus_client.Gauge("prism_residency", "1 for the state that a model is in", [*_LABELS, "state"])
_WARM = prometheus_client.Gauge("prism_warm_engines", "engines without a model", ["device"])
_BALLOOND = prometheus_client.Gauge("prism_balloond_reachable", "whether balloond is there", ["device"])


async def keep(report: Report) -> None:
    """For ever. A model that left shows no state any more, and zeros."""
    seen: set[tuple[str, str]] = set()
    while True:
        state = report.build()
        device = "+".join(state.devices)
        now = set()
        for resident in state.residents:
            now.add((resident.model, device))
            for field, gauge in _GAUGES.items():
                gauge.labels(resident.model, device).set(getattr(resident, field))
            _KV_USE.labels(resident.model, device).set(resident.kv_used_bytes / max(1, resident.kv_limit_bytes))
            for name in _STATES:
                value = common_pb2.Residency.Value(name) == resident.residency
                _RESIDENCY.labels(resident.model, device, name.lower()).set(value)
        for gone in seen - now:
            for gauge in (*_GAUGES.values(), _KV_USE):
                gauge.labels(*gone).set(0)
            for name in _STATES:
                _RESIDENCY.labels(*gone, name.lower()).set(0)
        seen |= now
        _WARM.labels(device).set(state.warm_engines)
        _BALLOOND.labels(device).set(not state.balloond_error)
        await asyncio.sleep(_EVERY_S)
