"""A trace drawn from mean rates, for users who have no trace: CSV, perhaps gzipped, with the columns
`model,requests_per_s,prompt_tokens,output_tokens`.

Requests of a model come at random (Poisson); their tokens are lognormal around the given means, with the spreads that
servegen48 has (`synthetic.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, log
from pathlib import Path

from sim.inputs.catalogue import ModelSet, Spec
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import MOST, MOST_REQUESTS, TraceError, Workload, listed, rows_of

COLUMNS = ["model", "requests_per_s", "prompt_tokens", "output_tokens"]
_SPREADS = (1.0, 1.4)
"""Spreads of the logarithms of prompt and output tokens."""


@dataclass(frozen=True, slots=True)
class Rate:
    """One line of the file; tokens are means."""

    spec: Spec
    requests_per_s: float
    prompt_tokens: float
    output_tokens: float


def read(path: Path, catalogue: ModelSet) -> list[Rate]:
    """The rates of a file. Raises TraceError with the line, OSError."""
    found: dict[str, Rate] = {}
    for where, row in rows_of(path, COLUMNS):
        if not row[0]:
            raise TraceError(f"{where}: model is empty")
        spec = listed(row[0], catalogue, where)
        if row[0] in found:
            raise TraceError(f"{where}: model {row[0]!r} again")
        found[row[0]] = Rate(spec, *(_positive(*cell, where) for cell in zip(row[1:], COLUMNS[1:], strict=True)))
    if not found:
        raise TraceError(f"{path}: no model in it")
    return list(found.values())


def draw(rates: list[Rate], seconds: float, scale: float = 1.0, seed: int = 0) -> Workload:
    """A drawn workload of so many seconds. `scale` multiplies the rates. Raises TraceError if it would have no
    request, or more than MOST_REQUESTS."""
    if (many := seconds * scale * sum(rate.requests_per_s for rate in rates)) > MOST_REQUESTS:
        raise TraceError(f"at these rates {many:,.0f} requests come in {seconds:g} s, over {MOST_REQUESTS:,}")
    rows = sorted(
        (at, number, rest) for number, rate in enumerate(rates) for at, *rest in _of(rate, seconds, scale, seed)
    )
    if not rows:
        raise TraceError(f"at these rates no request comes in {seconds:g} s")
    requests: list[SimulatedRequest] = []
    for at, number, (prompt, output) in rows:
        spec = rates[number].spec
        requests.append(SimulatedRequest(str(len(requests)), spec.name, at, prompt, output, spec.ttft_s, spec.tpot_s))
    return Workload(requests, seconds)


def _of(rate: Rate, seconds: float, scale: float, seed: int) -> Iterator[tuple[float, int, int]]:
    """(arrival in seconds, (prompt tokens, output tokens)) of a model's requests, in order of time."""
    chance = random.Random(f"{rate.spec.name} {seed}")
    at = 0.0
    while (at := at + chance.expovariate(rate.requests_per_s * scale)) < seconds:
        prompt, output = (
            max(1, round(chance.lognormvariate(log(mean) - spread * spread / 2, spread)))
            for mean, spread in zip((rate.prompt_tokens, rate.output_tokens), _SPREADS, strict=True)
        )
        prompt = min(prompt, rate.spec.context_tokens - 1)
        yield at, prompt, min(output, rate.spec.context_tokens - prompt)


def _positive(text: str, column: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise TraceError(f"{where}: {column} is {text!r}, not a number") from None
    if not (isfinite(value) and value > 0):
        raise TraceError(f"{where}: {column} is {text}; it has to be above zero")
    if value > MOST:
        raise TraceError(f"{where}: {column} is above {MOST:,}")
    return value
