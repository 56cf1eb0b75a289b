"""Report coalescing: changes on which decisions rest are reported at once, bulk figures as often as a follower wants
them.

Engines count tokens with every step, so that a busy group has something new ten times a second. A placement of a
thousand groups would do nothing but read reports.
"""

from __future__ import annotations

from collections.abc import Hashable

from balloond.client import booked
from protos import gpu_scheduler_pb2
from services.rpc.watch import ThrottledFollower

SOONEST_S, FIGURES_S, LONGEST_S = 0.02, 0.1, 1.0
"""Seconds between reports to one follower: the least between any two; and the least and the most between two that
differ in figures alone, whatever the follower requested."""
_SIGNS_S = 0.5
"""Least seconds between two reports for a model that was idle at both but has served requests in between: placement
counts how long models are idle."""
_PARTS = 10
"""Parts of a group's memory in which KV of running and waiting requests is urgent: a report follows at once when it
moves by one."""


def least_s(figures_s: float) -> float:
    """Least seconds between two reports to one follower, whatever has changed: a follower of many groups requests
    figures seldom, and would not keep up with every report of each at once."""
    return min(FIGURES_S, max(SOONEST_S, figures_s))


def telling(figures_s: float) -> ThrottledFollower[gpu_scheduler_pb2.GroupState]:
    """The rate limit for one follower. `figures_s`: least seconds between two reports that differ in figures alone."""
    return ThrottledFollower(facts, min(max(FIGURES_S, figures_s), LONGEST_S), signs, _SIGNS_S)


def facts(state: gpu_scheduler_pb2.GroupState) -> Hashable:
    """The urgent part of a report: where models are and why, what they and others have booked, which have requests,
    which lack memory. Equal if nothing urgent has changed."""
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
    """The activity part of a report: tokens that idle models have served so far."""
    idle = (r for r in state.residents if not r.waiting + r.running)
    return tuple((r.model, r.prefill_tokens, r.decode_tokens) for r in idle)
