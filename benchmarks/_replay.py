"""What a replay (`replay.py`) does: the systems that are asked, requests on the wire, the schedule, the report."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks import _report
from benchmarks.http_load import Connections, Stream, completion
from sim.inputs.request import SimulatedRequest
from sim.report import quantile, summary

_AHEAD_S = 0.5
"""Prompts are made so long before they are due."""
_READY = 64
"""Connections opened before the first request."""
_WORDS = ("time", "list", "open", "file", "a", "the", "value", "of", "for", "print")


class ReplayError(ValueError):
    """What is wrong with what was given, in one line."""


@dataclass
class System:
    """One that is asked, and what became of its requests."""

    url: str
    requests: list[SimulatedRequest] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    """Of each request that was sent, in the order of sending."""
    other_length: int = 0

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise ReplayError(f"{self.url!r} is not http://HOST:PORT")
        return parts.hostname, parts.port or 80

    def contexts(self) -> dict[str, int | None]:
        """The models that it serves, with their contexts where it tells. Raises ReplayError."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=30) as answer:
                return {model["id"]: model.get("max_model_len") for model in json.load(answer)["data"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReplayError(f"{self.url} does not say what it serves: {error}") from None


class Wire:
    """Requests as they go over the wire, the same for every system."""

    def __init__(self, seed: int, ids: tuple[int, int], text: bool = False) -> None:
        """Prompts of token ids from `ids[0]` on and below `ids[1]`, or of words."""
        self._seed, self._ids, self._text = seed, ids, text

    def of(self, request: SimulatedRequest, host: str) -> bytes:
        draw = np.random.default_rng([self._seed, int(request.id)])
        prompt: str | list[int]
        if self._text:
            prompt = " ".join(_WORDS[i] for i in draw.integers(len(_WORDS), size=request.prompt_tokens))
        else:
            prompt = draw.integers(*self._ids, size=request.prompt_tokens).tolist()
        targets = {"x-slo-ttft-ms": request.ttft_s, "x-slo-tpot-ms": request.tpot_s}
        headers = {name: max(1, round(1e3 * value)) for name, value in targets.items() if value < inf}
        more = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        return completion(host, request.model, prompt, request.output_tokens, headers, **more)


# --- the replay


async def run(systems: Sequence[System], wire: Wire, *, connections: int, time_out_s: float) -> None:
    """All systems at once, each with its requests, from the same moment on; at most so many connections to each.
    `time_out_s`: from when a request is due to its last token."""
    pools = [Connections(*system.address, connections) for system in systems]
    for pool in pools:
        await pool.prepare(min(_READY, connections))
    start = time.monotonic() + _AHEAD_S
    pairs = zip(systems, pools, strict=True)
    await asyncio.gather(*(_drive(system, pool, wire, time_out_s, start) for system, pool in pairs))
    for pool in pools:
        pool.close()


async def _drive(system: System, pool: Connections, wire: Wire, time_out_s: float, start: float) -> None:
    async with asyncio.TaskGroup() as group:
        for request in system.requests:
            due = start + request.arrival
            await asyncio.sleep(max(0.0, due - _AHEAD_S - time.monotonic()))
            message = wire.of(request, pool.host)
            group.create_task(_one(system, pool, request, message, due, time_out_s), name=request.id)


async def _one(
    system: System, pool: Connections, request: SimulatedRequest, message: bytes, due: float, time_out_s: float
) -> None:
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    try:
        async with asyncio.timeout(max(0.0, due + time_out_s - time.monotonic())), pool.one() as client:
            system.late_s.append(time.monotonic() - due)
            stream = await client.send(message)
    except TimeoutError:
        request.failed = "timed out"
    except OSError as error:
        request.failed = f"no connection: {error.strerror}"
    else:
        _take(system, request, stream, due)


def _take(system: System, request: SimulatedRequest, stream: Stream, due: float) -> None:
    tokens = stream.told_tokens or len(stream.token_s)
    if stream.error or not stream.finish or not tokens:
        request.failed = stream.error or "the stream ended without an end"
        return
    system.other_length += tokens != request.output_tokens
    request.output_tokens = tokens
    # Of some servers the only token of an answer comes with its end.
    request.first_at = request.arrival + (stream.token_s[0] if stream.token_s else stream.ended_s) - due
    request.ended_at = request.arrival + stream.ended_s - due


# --- the report


def report(system: System, seconds: float, late_ms: float) -> dict[str, Any]:
    by_model: dict[str, list[SimulatedRequest]] = {}
    for request in system.requests:
        by_model.setdefault(request.model, []).append(request)
    late = sorted(system.late_s)
    unsent = len(system.requests) - len(late)
    late_p99 = quantile(late + [inf] * unsent, 0.99)
    assert late_p99 is not None
    return {
        "url": system.url,
        "valid": late_p99 <= late_ms / 1e3,
        "sent_late_s": {"p50": quantile(late, 0.5), "p99": quantile(late, 0.99), "max": quantile(late, 1.0)},
        "never_sent": unsent,
        "all": summary(system.requests, seconds),
        "models": {name: summary(of, seconds) for name, of in sorted(by_model.items())},
        "failures": Counter(_kind(request.failed) for request in system.requests if request.failed),
        "other_length": system.other_length,
        "samples": {
            "columns": ["arrival_s", "model", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s", "failed"],
            "rows": [_sample(request) for request in system.requests],
        },
    }


def _kind(failed: str) -> str:
    """A failure without what is of the one request."""
    status, _, body = failed.partition(" {")
    try:
        return f"{status}: {json.loads('{' + body)['error']['code']}" if body else failed[:80]
    except (ValueError, KeyError, TypeError):
        return status[:80]


def _sample(request: SimulatedRequest) -> list[Any]:
    what = [round(request.arrival, 4), request.model, request.prompt_tokens, request.output_tokens]
    times = [None if isnan(value) else round(value, 5) for value in (request.ttft, request.tpot)]
    return [*what, *times, request.failed]


def show(found: Sequence[dict[str, Any]]) -> None:
    """The systems beside each other, overall and by model."""
    rows = []
    for name in ("all", *found[0]["models"]):
        for each in found:
            part = each["all"] if name == "all" else each["models"][name]
            shares = [part[key] for key in ("attainment", "ttft_attainment", "tpot_attainment")]
            times = [part[at][key] for at in ("ttft_s", "tpot_s") for key in ("p50", "p99")]
            shown = ["-" if value is None else f"{1e3 * value:.1f}" for value in times]
            counts = [part["requests"], part["served"], *shares, *shown, part["output_tokens_per_s"]]
            rows.append([name, each["url"], *counts])
    header = ["model", "system", "requests", "served", "both", "TTFT", "TPOT"]
    _report.table([*header, "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "tokens/s"], rows)
    for each in found:
        failures = ", ".join(f"{count} {why}" for why, count in each["failures"].most_common())
        print(f"{each['url']}: failures: {failures or 'none'}; sent late, s: {each['sent_late_s']}")
