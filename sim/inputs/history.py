"""The traffic before a replay, as placement would remember it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path

from gpu_scheduler.policy.group_facts import RETURN_S
from placement.policy.traffic import HOUR_S, ExpectedTraffic
from sim.inputs.catalogue import ModelSet
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Slice, rows


def before(path: Path, catalogue: ModelSet, part: Slice) -> Mapping[str, ExpectedTraffic]:
    """What each model was asked for in the hour before the slice of a trace file, at the rate of the slice; nothing if
    the file has no whole hour before it. Raises TraceError, OSError."""
    start_s = part.start_s - HOUR_S
    if start_s < 0:
        return {}
    requests = (
        SimulatedRequest("", model, arrival, prompt, output)
        for _, arrival, model, prompt, output in rows(path)
        if start_s <= arrival < part.start_s and catalogue.find(model) is not None
    )
    found = expected(requests, HOUR_S)
    return {name: replace(each, tokens_per_s=each.tokens_per_s * part.rate) for name, each in found.items()}


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
