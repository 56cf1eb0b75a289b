"""Which of a group's reports one follower gets: what decisions rest on at once, figures as often as it wants them.

Engines count tokens with every step, so that a busy group has something new ten times a second. Placement of a thousand
groups would read nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

from protos import gpu_scheduler_pb2

LONGEST_S = 1.0
"""Between two reports, whatever was asked for."""


class Telling:
    """One follower's."""

    def __init__(self, figures_s: float) -> None:
        """`figures_s`: at least so long between two reports that differ in figures alone."""
        self._figures_s = min(figures_s, LONGEST_S)
        self._facts: Hashable = None
        self._told_at = -inf

    def wants(self, state: gpu_scheduler_pb2.GroupState, now: float) -> bool:
        """Whether it is told this, at `now` (seconds on a clock that does not go back)."""
        facts = _facts(state)
        if facts == self._facts and now - self._told_at < self._figures_s:
            return False
        self._facts, self._told_at = facts, now
        return True


def _facts(state: gpu_scheduler_pb2.GroupState) -> Hashable:
    """Where models are and why, who has requests, who lacks memory."""
    models = tuple(
        (r.model, r.residency, r.reason, r.outdated, r.waiting > 0, r.waiting + r.running > 0, r.kv_lacking_bytes > 0)
        for r in state.residents
    )
    sizes = tuple((device.device, device.capacity_bytes) for device in state.memory)
    return models, sizes, state.drained, state.stopping, state.balloond_error, state.address
