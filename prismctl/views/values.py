"""What prismctl shows, as plain values: what --json prints and tables are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kv_kinds import messages
from kv_kinds import wording as kv_wording
from protos import balloond_pb2, common_pb2, gpu_scheduler_pb2, loader_pb2, placement_pb2
from services.wording import enums


def residency(value: common_pb2.Residency) -> str:
    return enums.name(common_pb2.Residency, value).replace("_", " ")


def models(routes: placement_pb2.Routes) -> list[dict[str, Any]]:
    return [
        {
            "model": route.model.name,
            "aliases": list(route.model.aliases),
            "state": residency(route.residency),
            "places": [place.group for place in route.places],
            "weights_bytes": route.measured_weights_bytes or route.model.weights_bytes,
            "kv_bytes_per_token": route.model.kv_bytes_per_token,
            "kv_kinds": kv_wording.listed(messages.layout(route.model)),
            "floor_bytes": route.model.floor_bytes,
            "quota_bytes": route.model.quota_bytes,
            "context_tokens": route.model.context_tokens,
            "pinned": route.model.pinned,
            "unverified": route.model.unverified,
            "error": route.error,
            "retry_s": route.retry_s,
            "no_image": route.no_image,
            "base": route.model.adapter.base,
            "adapters": sorted(
                each.model.name for each in routes.routes if each.model.adapter.base == route.model.name
            ),
            "path": route.model.adapter.path or route.model.path,
        }
        for route in routes.routes
    ]


def spec(model: common_pb2.ModelSpec) -> dict[str, Any]:
    return {
        "model": model.name,
        "aliases": list(model.aliases),
        "path": model.adapter.path or model.path,
        "base": model.adapter.base,
        "rank": model.adapter.rank,
        "architecture": model.architecture,
        "quantisation": model.quantisation,
        "unverified": model.unverified,
        "active_bytes": model.active_bytes,
        "context_tokens": model.context_tokens,
        "weights_bytes": model.weights_bytes,
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "kv_kinds": kv_wording.listed(messages.layout(model)),
        "floor_bytes": model.floor_bytes,
        "quota_bytes": model.quota_bytes,
        "pinned": model.pinned,
        "engine": model.engine,
        "ttft_ms": model.default_slo.ttft_ms,
        "tpot_ms": model.default_slo.tpot_ms,
    }


def inspection(seen: loader_pb2.Inspection) -> dict[str, Any]:
    return {
        **spec(seen.model),
        "in_memory": seen.entry.has_image,
        "on_disk": seen.entry.on_disk,
        "image_bytes": seen.entry.image_bytes,
        "image_pinned": seen.entry.image_pinned,
        "no_image": seen.entry.no_image,
        "under_way": [
            {
                "kind": each.kind,
                "lease": each.lease_id,
                "rank": each.rank,
                "callers": each.callers,
                "step": each.progress.step,
                "done_bytes": each.progress.done,
                "total_bytes": each.progress.total,
                "bytes_per_s": each.progress.per_s if each.progress.HasField("per_s") else None,
                "left_s": each.progress.left_s if each.progress.HasField("left_s") else None,
            }
            for each in seen.under_way
        ],
    }


def group(
    name: str,
    address: str,
    told: placement_pb2.Group | None,
    state: gpu_scheduler_pb2.GroupState | None,
    ledger: Mapping[str, balloond_pb2.DeviceState],
) -> dict[str, Any]:
    """A group as placement reports it and as it reports itself; None: that report could not be had. If the group does
    not answer, its memory is that of `ledger`, balloond's devices by name (a group's name is made of theirs), or what
    placement last heard."""
    seen = {model.model: model for model in told.models} if told is not None else {}
    residents = state.residents if state is not None else seen.values()
    if state is not None:
        memory = list(state.memory)
    else:
        memory = [ledger[each] for each in name.split("+") if each in ledger] or list(told.memory if told else ())
    return {
        "group": name,
        "address": address,
        "answers": state is not None,
        "drained": state.drained if state is not None else told is not None and told.drained,
        "error": state.balloond_error if state is not None else "",
        "engines_error": state.engines_error if state is not None else "",
        "pressure": told.pressure if told is not None else None,
        "capacity_bytes": sum(device.capacity_bytes for device in memory),
        "free_bytes": sum(device.free_bytes for device in memory),
        "devices": [device_memory(device) for device in memory],
        "models": [_resident(each, seen.get(each.model)) for each in residents],
    }


def _resident(
    resident: gpu_scheduler_pb2.Resident | placement_pb2.GroupModel, seen: placement_pb2.GroupModel | None
) -> dict[str, Any]:
    return {
        "model": resident.model,
        "state": residency(resident.residency),
        "waiting": resident.waiting,
        "late": getattr(resident, "late", None),
        "running": resident.running,
        "idle_s": round(resident.idle_s, 1),
        "weights_bytes": resident.weights_bytes,
        "kv_held_bytes": resident.kv_held_bytes,
        "kv_limit_bytes": resident.kv_limit_bytes,
        "kv_lacking_bytes": getattr(resident, "kv_lacking_bytes", None),
        "tokens_per_s": round(seen.tokens_per_s, 1) if seen is not None else None,
        "demand": seen.demand if seen is not None else None,
    }


def device_memory(device: balloond_pb2.DeviceState) -> dict[str, Any]:
    """The owners of a device's bytes: leased + private + stranded + free = capacity."""
    leases = {lease.model: lease for lease in device.leases}
    bookings = {booking.model: booking for booking in device.bookings}
    return {
        "device": device.device,
        "capacity_bytes": device.capacity_bytes,
        "leased_bytes": device.leased_bytes,
        "private_bytes": device.booked_bytes,
        "stranded_bytes": device.stranded_bytes,
        "free_bytes": device.free_bytes,
        "owners": [
            _owner(model, leases.get(model, balloond_pb2.LeaseState()), bookings.get(model, balloond_pb2.Booking()))
            for model in sorted(leases.keys() | bookings.keys())
        ],
    }


def _owner(model: str, lease: balloond_pb2.LeaseState, booking: balloond_pb2.Booking) -> dict[str, Any]:
    return {
        "model": model,
        "weights_bytes": lease.weights_bytes,
        "kv_bytes": lease.kv_bytes,
        "kv_used_bytes": lease.kv_used_bytes,
        "kv_cached_bytes": lease.kv_cached_bytes,
        "kv_reserve_bytes": lease.kv_reserve_bytes,
        "private_bytes": booking.quota_bytes,
        "floor_bytes": booking.floor_bytes,
        "limit_bytes": booking.limit_bytes,
        "overage_bytes": lease.overage_bytes,
        "suspended": lease.suspended,
        "engine_pid": lease.pid,
    }


def decisions(list_: Iterable[placement_pb2.Decision]) -> list[dict[str, Any]]:
    return [
        {
            "age_s": round(decision.age_s, 1),
            "model": decision.model,
            "action": decision.action,
            "group": decision.group,
            "reason": decision.reason,
            "outcome": decision.outcome,
            "candidates": [
                {"group": candidate.group, "pressure": candidate.pressure} for candidate in decision.candidates
            ],
        }
        for decision in list_
    ]


def limit(answer: balloond_pb2.SetLimitResponse) -> dict[str, Any]:
    return {
        "state": str(balloond_pb2.LimitState.Name(answer.state)).lower(),
        "revision": answer.revision,
        "held_bytes": answer.held_bytes,
        "overage_bytes": answer.overage_bytes,
    }


def prospect(answer: placement_pb2.Prospect) -> dict[str, Any]:
    return {
        "group": answer.group or None,
        "reason": answer.reason,
        "candidates": [{"group": each.group, "pressure": each.pressure} for each in answer.candidates],
        "leaving": [
            {"model": each.model, "to": residency(each.target), "reason": each.reason} for each in answer.leaving
        ],
        "waiting_s": round(answer.waiting_s, 1),
    }


def request(each: gpu_scheduler_pb2.QueuedRequest, group: str) -> dict[str, Any]:
    return {
        "request": each.request_id,
        "group": group,
        "place": each.place,
        "waiting_s": round(each.waiting_s, 2),
        "slack_s": each.slack_s,
        "cost_s": each.cost_s,
    }


def place(name: str, resident: gpu_scheduler_pb2.Resident) -> dict[str, Any]:
    """A model on a group, as the group reports it."""
    return {
        "group": name,
        "answers": True,
        "state": residency(resident.residency),
        "reason": resident.reason,
        "waiting": resident.waiting,
        "late": resident.late,
        "running": resident.running,
        "idle_s": round(resident.idle_s, 1),
        "active_s": round(resident.active_s, 1),
        "came_s": resident.came_s,
        "wake_s": resident.wake_s,
        "weights_from": list(resident.weights_from),
        "weights_bytes": resident.weights_bytes,
        "kv_held_bytes": resident.kv_held_bytes,
        "kv_used_bytes": resident.kv_used_bytes,
        "kv_limit_bytes": resident.kv_limit_bytes,
        "kv_lacking_bytes": resident.kv_lacking_bytes,
        "no_image": resident.no_image,
        "compiling": resident.compiling,
        "kernels_compiled": resident.kernels_compiled,
    }
