"""How the models of a trace share their time: the analysis of the Prism paper (section 3 and its appendix on traces).

    active     a model that received a request in the past ACTIVE_S seconds
    switch     a change of the set of active models
    gap        time between two requests of a model that is longer than GAP_S seconds
    CV         standard deviation of a model's requests per minute, over their mean
    r(day)     Pearson correlation of a model's requests per DAY_BIN_S seconds on two consecutive days

Shares of time, and switches, begin ACTIVE_S seconds after the trace does, when it is known who is active. The paper's
figures, over four private traces, are in `PAPER`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

ACTIVE_S = 120.0
GAP_S = 10.0
MANY_GAPS = 40.0
"""Gaps per hour from which on the paper speaks of many."""
MINUTE_S, HOUR_S, DAY_S = 60.0, 3600.0, 86400.0
DAY_BIN_S = 600.0
BUSIEST = 0.2
"""Share of the models, the busiest ones, whose share of the requests is told."""
PAPER = {
    "models": "16-129",
    "active_share": "23-50 %",
    "switches_per_hour": "54-766",
    "idle_share": "above 70 % (one trace)",
    "gaps_per_hour": "40-100 for many models",
    "cv": "above 1 for many models",
    "day_correlation": "near 0",
}
Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Three figures of a distribution, named by the field that has them; nan where there is nothing to take them of."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True)
class ModelActivity:
    """One model's figures."""

    requests: int
    requests_per_s: float
    active_share: float
    """Share of the time in which it is active."""
    silent_share: float
    """Share of the time without a request of it in the past GAP_S seconds."""
    gaps_per_hour: float
    cv: float
    """nan for a trace of less than two whole minutes, and for a model without a request in them."""
    day_correlations: tuple[float, ...]
    """One for each two consecutive whole days on both of which its requests vary."""
    prompt_tokens: float
    """Mean of a request, as the next."""
    output_tokens: float


@dataclass(frozen=True, slots=True)
class TraceActivity:
    """A whole trace's figures; `models` has the busiest first."""

    seconds: float
    requests: int
    requests_per_s: float
    peak_requests_per_s: float
    """Of the busiest minute."""
    active_share: float
    """Mean share of the models that are active at once."""
    silent_share: float
    """Mean of the models'."""
    switches_per_hour: float
    busiest_share: float
    """Share of the requests that ask the busiest fifth of the models."""
    gaps_per_hour: Quantiles
    """Median, 90th percentile and most of the models."""
    many_gaps: float
    """Share of the models with MANY_GAPS gaps per hour or more."""
    cv: Quantiles
    """Quartiles of the models, as the next."""
    cv_above_one: float
    """Share of the models."""
    day_correlation: Quantiles
    prompt_tokens: Quantiles
    """Mean, median and 99th percentile of the requests, as the next."""
    output_tokens: Quantiles
    models: Mapping[str, ModelActivity]


def analyse(
    rows: Iterable[tuple[float, str, int, int]], start_s: float | None = None, seconds: float | None = None
) -> TraceActivity:
    """The figures of a trace's rows (arrival in seconds, model, prompt tokens, output tokens), in order of time.

    The figures are of so many seconds (None: to the last request) from `start_s` on (None: from the first request).
    Raises ValueError for a part without requests, or one that is not longer than ACTIVE_S."""
    taken: list[tuple[float, str, int, int]] = []
    for row in rows:
        start_s = row[0] if start_s is None else start_s
        if start_s <= row[0] < start_s + (inf if seconds is None else seconds):
            taken.append(row)
    if start_s is None or not taken:
        raise ValueError("no request in this part of the trace")
    length = seconds if seconds is not None else taken[-1][0] - start_s
    if length <= ACTIVE_S:
        raise ValueError(f"{length:g} s are too short: who is active is known {ACTIVE_S:g} s after the beginning")
    arrivals, prompts, outputs = (np.array([row[column] for row in taken], dtype=float) for column in (0, 2, 3))
    arrivals -= start_s
    names = np.array([row[1] for row in taken])
    of_model = {str(name): np.flatnonzero(names == name) for name in np.unique(names)}
    busiest = sorted(of_model, key=lambda name: (-len(of_model[name]), name))
    models = {
        name: _of_model(arrivals[at], length, float(prompts[at].mean()), float(outputs[at].mean()))
        for name in busiest
        for at in [of_model[name]]
    }
    each = list(models.values())
    cvs = [model.cv for model in each]
    gaps = [model.gaps_per_hour for model in each]
    first = max(1, round(BUSIEST * len(each)))
    return TraceActivity(
        seconds=length,
        requests=len(taken),
        requests_per_s=len(taken) / length,
        peak_requests_per_s=float(_counts(arrivals, MINUTE_S, -(-length // MINUTE_S)).max()) / MINUTE_S,
        active_share=float(np.mean([model.active_share for model in each])),
        silent_share=float(np.mean([model.silent_share for model in each])),
        switches_per_hour=_switches({name: arrivals[at] for name, at in of_model.items()}, length),
        busiest_share=sum(model.requests for model in each[:first]) / len(taken),
        gaps_per_hour=Quantiles(*_quantiles(gaps, (0.5, 0.9, 1.0))),
        many_gaps=float(np.mean([count >= MANY_GAPS for count in gaps])),
        cv=Quantiles(*_quantiles(cvs, (0.25, 0.5, 0.75))),
        cv_above_one=float(np.mean([cv > 1 for cv in cvs])),
        day_correlation=Quantiles(
            *_quantiles([r for model in each for r in model.day_correlations], (0.25, 0.5, 0.75))
        ),
        prompt_tokens=_tokens(prompts),
        output_tokens=_tokens(outputs),
        models=models,
    )


def _of_model(arrivals: Times, length: float, prompt_tokens: float, output_tokens: float) -> ModelActivity:
    gaps = np.count_nonzero(np.diff(arrivals) > GAP_S)
    minutes = _counts(arrivals, MINUTE_S, length // MINUTE_S)
    mean = minutes.mean() if len(minutes) > 1 else 0.0
    return ModelActivity(
        requests=len(arrivals),
        requests_per_s=len(arrivals) / length,
        active_share=_covered(arrivals, ACTIVE_S, length),
        silent_share=1 - _covered(arrivals, GAP_S, length),
        gaps_per_hour=float(gaps / length * HOUR_S),
        cv=float(minutes.std() / mean) if mean else nan,
        day_correlations=tuple(_day_correlations(arrivals, length)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )


def _covered(arrivals: Times, window_s: float, length: float) -> float:
    """Share of the time from ACTIVE_S on that lies at most `window_s` after a request."""
    until = np.minimum(np.append(arrivals[1:], length), arrivals + window_s)
    return float(np.maximum(0.0, np.minimum(until, length) - np.maximum(arrivals, ACTIVE_S)).sum()) / (
        length - ACTIVE_S
    )


def _switches(of_model: Mapping[str, Times], length: float) -> float:
    """Changes of the set of active models per hour. Models that change at the same moment change it once."""
    moments: set[float] = set()
    for arrivals in of_model.values():
        ends = arrivals + ACTIVE_S
        begins_anew = np.append(True, arrivals[1:] > ends[:-1])
        ends_for_now = np.append(arrivals[1:] > ends[:-1], True)
        moments.update(arrivals[begins_anew].tolist(), ends[ends_for_now].tolist())
    return sum(ACTIVE_S < at < length for at in moments) / (length - ACTIVE_S) * HOUR_S


def _counts(arrivals: Times, bin_s: float, bins: float) -> Times:
    """Requests in each of so many bins."""
    return (
        np.histogram(arrivals, bins=int(bins), range=(0.0, int(bins) * bin_s))[0].astype(float) if bins else np.zeros(0)
    )


def _day_correlations(arrivals: Times, length: float) -> Iterable[float]:
    days = int(length // DAY_S)
    counts = _counts(arrivals, DAY_BIN_S, days * DAY_S / DAY_BIN_S).reshape(days, -1) if days else np.zeros((0, 0))
    for day, following in zip(counts, counts[1:], strict=False):
        if day.std() > 0 and following.std() > 0:
            yield float(np.corrcoef(day, following)[0, 1])


def _quantiles(values: Sequence[float], shares: Sequence[float]) -> list[float]:
    known = [value for value in values if value == value]
    return [float(each) for each in np.quantile(known, shares)] if known else [nan] * len(shares)


def _tokens(values: Times) -> Quantiles:
    return Quantiles(float(values.mean()), *(float(each) for each in np.quantile(values, (0.5, 0.99))))
