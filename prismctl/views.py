"""What prismctl shows, as plain values: what --json prints and tables are made of."""

from __future__ import annotations

from typing import Any

from protos import balloond_pb2, common_pb2, loader_pb2, placement_pb2


def residency(value: common_pb2.Residency) -> str:
    return str(common_pb2.Residency.Name(value)).lower().replace("_", " ")


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def models(routes: placement_pb2.Routes) -> list[dict[str, Any]]:
    return [
        {
            "model": route.model.name,
            "state": residency(route.residency),
            "places": [place.group for place in route.places],
            "weights_bytes": route.measured_weights_bytes or route.model.weights_bytes,
            "kv_bytes_per_token": route.model.kv_bytes_per_token,
            "floor_bytes": route.model.floor_bytes,
            "quota_bytes": route.model.quota_bytes,
            "context_tokens": route.model.context_tokens,
            "pinned": route.model.pinned,
            "error": route.error,
            "path": route.model.path,
        }
        for route in routes.routes
    ]


def spec(model: common_pb2.ModelSpec) -> dict[str, Any]:
    return {
        "model": model.name,
        "path": model.path,
        "architecture": model.architecture,
        "context_tokens": model.context_tokens,
        "weights_bytes": model.weights_bytes,
        "kv_bytes_per_token": model.kv_bytes_per_token,
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


def cluster(state: placement_pb2.Cluster) -> list[dict[str, Any]]:
    return [
        {
            "group": group.group,
            "address": group.address,
            "reachable": group.reachable,
            "pressure": group.pressure,
            "capacity_bytes": group.capacity_bytes,
            "free_bytes": group.free_bytes,
            "models": [
                {
                    "model": model.model,
                    "state": residency(model.residency),
                    "waiting": model.waiting,
                    "running": model.running,
                    "idle_s": round(model.idle_s, 1),
                    "demand": model.demand,
                    "tokens_per_s": round(model.tokens_per_s, 1),
                    "weights_bytes": model.weights_bytes,
                    "kv_held_bytes": model.kv_held_bytes,
                    "kv_limit_bytes": model.kv_limit_bytes,
                }
                for model in group.models
            ],
        }
        for group in state.groups
    ]


def decisions(list_: list[placement_pb2.Decision]) -> list[dict[str, Any]]:
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
