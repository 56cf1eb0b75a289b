"""The page's JSON, made of what was heard: pure. Units are bytes and seconds; what is not known is null."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from prometheus_client.metrics_core import Metric

from gateway.routing.routes import Route
from gateway.ui.look import ServiceReply
from protos import balloond_pb2, common_pb2, gpu_scheduler_pb2, placement_pb2
from services.wording import enums

_RUNNING, _LATE = "running", "second"
"""Beginnings of a place in a queue for requests that run, and for requests that wait in the second queue."""


def document(
    told: ServiceReply | None, away: str, now: float, routes: Iterable[Route], slo: Iterable[Metric]
) -> dict[str, Any]:
    """The whole document. `away`: why placement is away, or empty; while it is, groups and decisions are those last
    heard, `age_s` seconds old."""
    groups = told.cluster.groups if told is not None else []
    queues = told.queues if told is not None else {}
    decisions = told.decisions if told is not None else []
    age_s = max(0.0, now - told.at) if told is not None else None
    return {
        "placement": {"away": away or None, "age_s": age_s},
        "models": list(map(_model, routes)),
        "groups": [_group(group, queues.get(group.group)) for group in groups],
        "decisions": [_decision(each, age_s or 0.0) for each in decisions],
        "attainment": attainment(slo),
    }


def attainment(slo: Iterable[Metric]) -> dict[str, dict[str, dict[str, int]]]:
    """Model -> target ("ttft", "tpot") -> how many of this gateway's requests "met" and "missed" it since its start."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for sample in (sample for metric in slo for sample in metric.samples if sample.name.endswith("_total")):
        labels = sample.labels
        counts = found.setdefault(labels["model"], {}).setdefault(labels["target"], {"met": 0, "missed": 0})
        counts["met" if labels["met"] == "true" else "missed"] = int(sample.value)
    return found


def residency(value: common_pb2.Residency) -> str:
    return enums.name(common_pb2.Residency, value).replace("_", " ")


def _model(route: Route) -> dict[str, Any]:
    return {
        "model": route.model.name,
        "aliases": list(route.model.aliases),
        "state": residency(route.residency),
        "error": route.error or None,
        "pinned": route.model.pinned,
        "image_pinned": route.image_pinned,
        "generates": not (route.model.HasField("embedding") or route.model.HasField("reranker")),
        "unverified": route.model.unverified,
        "base": route.model.adapter.base or None,
    }


def _group(group: placement_pb2.Group, queue: gpu_scheduler_pb2.QueueState | None) -> dict[str, Any]:
    waiting = _waiting(queue)
    return {
        "group": group.group,
        "reachable": group.reachable,
        "drained": group.drained,
        # Infinite if there is demand for KV and nothing is left for it: JSON has no such number.
        "pressure": group.pressure if isfinite(group.pressure) else "infinite",
        "devices": list(map(_device, group.memory)),
        "models": [_resident(model, queue is not None, waiting.get(model.model, [])) for model in group.models],
    }


def _waiting(queue: gpu_scheduler_pb2.QueueState | None) -> Mapping[str, list[gpu_scheduler_pb2.QueuedRequest]]:
    """Model -> its waiting requests."""
    found: dict[str, list[gpu_scheduler_pb2.QueuedRequest]] = {}
    for request in queue.requests if queue is not None else ():
        if not request.place.startswith(_RUNNING):
            found.setdefault(request.model, []).append(request)
    return found


def _resident(
    model: placement_pb2.GroupModel, heard: bool, waiting: list[gpu_scheduler_pb2.QueuedRequest]
) -> dict[str, Any]:
    slacks = [request.slack_s for request in waiting if isfinite(request.slack_s)]
    late = sum(request.place.startswith(_LATE) for request in waiting)
    return {
        "model": model.model,
        "state": residency(model.residency),
        "waiting": model.waiting,
        "late": late if heard or not model.waiting else None,
        "least_slack_s": round(min(slacks), 3) if slacks else None,
        "running": model.running,
        "idle_s": round(model.idle_s, 1),
        "tokens_per_s": round(model.tokens_per_s, 1),
        "kv_bytes": model.kv_held_bytes,
        "kv_limit_bytes": model.kv_limit_bytes,
        "weights_bytes": model.weights_bytes,
        "waking": _waking(model),
    }


def _waking(model: placement_pb2.GroupModel) -> dict[str, Any] | None:
    """The step under way of a model that comes up. A total of 0 is not known."""
    if not model.waking_s:
        return None
    at = model.progress
    return {
        "step": at.step,
        "done": at.done,
        "total": at.total,
        "unit": at.unit,
        "per_s": at.per_s if at.HasField("per_s") else None,
        "left_s": at.left_s if at.HasField("left_s") else None,
        "seconds": round(model.waking_s, 1),
        "kernels": model.kernels_compiled,
    }


def _device(device: balloond_pb2.DeviceState) -> dict[str, Any]:
    """A device's memory. Owners' weights and KV, and private + stranded + free, add up to the capacity."""
    quotas = {booking.model: booking.quota_bytes for booking in device.bookings}
    leases = {lease.model: lease for lease in device.leases}
    return {
        "device": device.device,
        "capacity_bytes": device.capacity_bytes,
        "free_bytes": device.free_bytes,
        "private_bytes": device.booked_bytes,
        "stranded_bytes": device.stranded_bytes,
        "owners": [
            _owner(model, leases.get(model, balloond_pb2.LeaseState()), quotas.get(model, 0))
            for model in sorted(leases.keys() | quotas.keys())
        ],
    }


def _owner(model: str, lease: balloond_pb2.LeaseState, quota: int) -> dict[str, Any]:
    """One model's memory on a device. The parts of the KV are the model's own last report, the whole is balloond's:
    what the report does not name is reserve."""
    used = min(lease.kv_used_bytes, lease.kv_bytes)
    cached = min(lease.kv_cached_bytes, lease.kv_bytes - used)
    return {
        "model": model,
        "weights_bytes": lease.weights_bytes,
        "kv_used_bytes": used,
        "kv_cached_bytes": cached,
        "kv_reserve_bytes": lease.kv_bytes - used - cached,
        "private_bytes": quota,
    }


def _decision(decision: placement_pb2.Decision, told_s: float) -> dict[str, Any]:
    """A decision. `told_s`: seconds since it was heard."""
    return {
        "age_s": round(decision.age_s + told_s, 3),
        "model": decision.model,
        "action": decision.action,
        "group": decision.group,
        "reason": decision.reason,
        "outcome": decision.outcome,
        "took_s": decision.took_s or None,
    }
