"""What of a group's reports decisions rest on: it is told at once, figures as often as a follower wants them.

Engines count tokens with every step, so that a busy group has something new ten times a second. Placement of a thousand
groups would read nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable

from balloond.client import booked
from protos import gpu_scheduler_pb2
from services.rpc.watch import ThrottledFollower

SOONEST_S, FIGURES_S, LONGEST_S = 0.02, 0.1, 1.0
"""Between any two reports, at least; between two that differ in figures alone, at least and at most, whatever was asked
for."""
_SIGNS_S = 0.5
"""The same where a model has served between two looks that both found it idle: placement counts how long it was."""
_PARTS = 10
"""Of a group's memory, in which the KV of running and waiting requests is told at once."""


def least_s(figures_s: float) -> float:
    """Between two reports to one follower, whatever has changed: who follows many groups asks for figures seldom, and
    would not read all that is said of each at once."""
    return min(FIGURES_S, max(SOONEST_S, figures_s))


def telling(figures_s: float) -> ThrottledFollower[gpu_scheduler_pb2.GroupState]:
    """For one follower. `figures_s`: at least so long between two reports that differ in figures alone."""
    return ThrottledFollower(facts, min(max(FIGURES_S, figures_s), LONGEST_S), signs, _SIGNS_S)


def facts(state: gpu_scheduler_pb2.GroupState) -> Hashable:
    """Where models are and why, what they and others have booked, who has requests, who lacks memory."""
    capacity = sum(device.capacity_bytes for device in state.memory) or 1
    models = tuple(
        (
            r.model,
            r.residency,
            r.reason,
            r.retry_s,
            r.compiling,
            r.no_image,
            r.outdated,
            r.weights_bytes,
            r.graph_bytes,
            r.quota_bytes,
            r.kept_bytes,
            r.waiting > 0,
            r.waiting + r.running > 0,
            r.kv_lacking_bytes > 0,
            _PARTS * (r.kv_used_bytes + r.kv_lacking_bytes) // capacity,
        )
        for r in state.residents
    )
    return models, booked(state.memory), state.drained, state.stopping, state.balloond_error, state.address


def signs(state: gpu_scheduler_pb2.GroupState) -> Hashable:
    """What idle models have served so far."""
    idle = (r for r in state.residents if not r.waiting + r.running)
    return tuple((r.model, r.prefill_tokens, r.decode_tokens) for r in idle)
