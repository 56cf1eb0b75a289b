"""A staircase of rates: one replay whose requests come at a growing rate, and what each step of it says of a system.

Pure: what comes in are samples of requests, what goes out are percentages by step and the rates at which a system falls
under the marks. `gpu/stairs.py` measures, `stairs_sim.py` simulates the same seconds, `figures.py` draws both.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks._search import first_crossing

RATES = (0.5, 0.7, 0.9, 1.25, 1.75, 2.4, 3.2, 4.4, 6.0)
"""Requests for each of the trace, step by step: each a third more than the one before."""
STEP_S = 55.0
SEED = 1
MARKS = (99.0, 95.0, 90.0)
SHARES = ("ttft", "tpot", "both")
LEAST_REQUESTS = 10
"""A model with fewer moments of arrival in a step is not taken for its worst one: copies of one moment are late
together, so that they are no requests more."""


class StairRow(NamedTuple):
    """A request of the slice; seconds count from its beginning."""

    arrival: float
    model: str
    prompt_tokens: int
    output_tokens: int


class StairSample(NamedTuple):
    """One request of a staircase and its times; None for a first or second token that did not come."""

    arrival: float
    model: str
    ttft_s: float | None
    tpot_s: float | None
    failed: bool


def climb(rows: Sequence[StairRow], step_s: float, rates: Sequence[float] = RATES) -> list[StairRow]:
    """The requests of a staircase: every step has the first `step_s` of the slice again, each request as often as the
    step's rate says, by a seeded draw as `sim/inputs/trace.py` has it. Each step has the same bursts, so that nothing
    but the rate is another: with traffic that goes on, a step of 145 requests at rate 1.25 was on time where one of 152
    at 0.9 was not. Below rate 1 a step has all requests of lower ones."""
    found = []
    for number, rate in enumerate(rates):
        draw = random.Random(SEED)
        for row in rows:
            if row.arrival < step_s:
                copies = int(rate) + (draw.random() < rate % 1)
                found += [row._replace(arrival=row.arrival + number * step_s)] * copies
    return found


def steps(
    samples: Iterable[StairSample],
    slos: Mapping[str, Mapping[str, float]],
    step_s: float,
    count: int = len(RATES),
    pulse: Sequence[Sequence[float]] = (),
) -> list[dict[str, Any]]:
    """Figures of each of the first `count` steps that has requests: percent of first tokens (ttft), of times per token
    (tpot) and of both on time, and percent of both for the worst model. `slos`: milliseconds by model; `pulse`:
    `by_time` of `host_pulse`, of which each step gets the median of the host's work."""
    by_step: dict[int, list[StairSample]] = defaultdict(list)
    for sample in samples:
        by_step[int(sample.arrival // step_s)].append(sample)
    return [
        _step(RATES[number], by_step[number], slos, [row for row in pulse if number == int(row[0] // step_s)])
        for number in range(min(count, len(RATES)))
        if by_step[number]
    ]


def _step(
    rate: float,
    samples: Sequence[StairSample],
    slos: Mapping[str, Mapping[str, float]],
    pulse: Sequence[Sequence[float]],
) -> dict[str, Any]:
    of_model: dict[str, list[bool]] = defaultdict(list)
    moments: dict[str, set[float]] = defaultdict(set)
    ttft = tpot = both = 0
    for sample in samples:
        slo = slos.get(sample.model, {})
        first = not sample.failed and _within(sample.ttft_s, slo.get("ttft_ms"))
        rest = not sample.failed and (sample.tpot_s is None or _within(sample.tpot_s, slo.get("tpot_ms")))
        ttft, tpot, both = ttft + first, tpot + rest, both + (first and rest)
        of_model[sample.model].append(first and rest)
        moments[sample.model].add(sample.arrival)
    percents = {name: 100 * count / len(samples) for name, count in zip(SHARES, (ttft, tpot, both), strict=True)}
    models = {name: 100 * sum(met) / len(met) for name, met in of_model.items() if len(moments[name]) >= LEAST_REQUESTS}
    worst = min(models, key=lambda name: models[name], default=None)
    return {
        "rate": rate,
        "requests": len(samples),
        **{name: round(percent, 2) for name, percent in percents.items()},
        "worst": None if worst is None else round(models[worst], 2),
        "worst_model": worst,
        "host_ms": round(median(row[1] for row in pulse), 3) if pulse else None,
    }


def _within(seconds: float | None, target_ms: float | None) -> bool:
    return seconds is not None and (target_ms is None or 1e3 * seconds <= target_ms)


def falls_under(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Rates at which the steps' percentages first fall under each mark, by share and mark, linear between steps:
    "2.31"; ">6.00" where they never do, "<0.50" where they are under it from the first step on. Steps below rate 1,
    where a request or two decide, count only where the first one above it is under the mark already."""
    return {
        share: {f"{mark:g}": str(first_crossing({step["rate"]: step[share] for step in found}, mark)) for mark in MARKS}
        for share in SHARES
    }


def table(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each step of each run, then its marks."""
    rows = []
    for run in runs:
        for step in run["steps"]:
            shares = [f"{step[name]:.1f}" for name in SHARES]
            worst = "-" if step["worst"] is None else f"{step['worst']:.1f} ({step['worst_model']})"
            host = "-" if step["host_ms"] is None else f"{step['host_ms']:.2f}"
            rows.append([run["name"], f"{step['rate']:g}", str(step["requests"]), *shares, worst, host])
        for share, marks in run["falls_under"].items():
            told = ", ".join(f"{mark} % at {rate}" for mark, rate in marks.items())
            rows.append([run["name"], f"{share} under", told, "", "", "", "", ""])
    return rows


HEADER = ("run", "rate", "requests", "TTFT", "TPOT", "both", "worst model", "host ms")
