"""The traffic before a replay, as placement would remember it."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from gpu_scheduler.policy.group_facts import RETURN_S
from placement.policy.traffic import ExpectedTraffic
from sim.inputs.request import SimulatedRequest


def expected(requests: Iterable[SimulatedRequest], seconds: float) -> dict[str, ExpectedTraffic]:
    """What each model is expected to be asked for after `seconds` with these requests, which are in order of time. A
    model returns when none of its requests came for a second: how long they would have run is not known."""
    tokens: dict[str, int] = {}
    returns: dict[str, int] = {}
    last: dict[str, float] = {}
    for request in requests:
        name = request.model
        tokens[name] = tokens.get(name, 0) + request.prompt_tokens + request.output_tokens
        returns[name] = returns.get(name, 0) + (request.arrival - last.get(name, -inf) >= RETURN_S)
        last[name] = request.arrival
    return {name: ExpectedTraffic(count / seconds, returns[name] / seconds) for name, count in tokens.items()}
