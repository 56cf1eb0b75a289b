"""The slices of the simulated comparison (`slices_sim.py`), and which of them policies are made on.

Traces are split once, by hours, so that nobody tunes a policy on what judges it. All policies so far were chosen on the
even hours of servegen48 and on its hours 6 and 11, on the first 240 s of hyperbolic7 and arena27, and with one dealing
of a trace's names to the eight models (`gpu.slices.deal`): that is the half for tuning. The unseen half has the other
eleven hours, the second halves of the short traces, and another dealing, drawn by a seed, which gives every model other
tenants to share the hour with. It is looked at when a policy is finished, and no hour is left out for its result.

Rates are requests for each of the trace. They begin at 1, where every system is to be on time, and end where the best
one is late; the traces that are busier to begin with have fewer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from benchmarks.gpu.slices import SLICES, deal

HOURLY_RATE = 4.0
SECONDS = 240.0
HOUR_S = 3600.0


@dataclass(frozen=True)
class Part:
    """A slice at a rate."""

    name: str
    file: str
    from_s: float
    rate: float
    seconds: float = SECONDS
    start: int = 0
    """In which order the models come up before: 0 as they are listed, else drawn with this seed."""
    half: str = ""
    dealing: int = 0
    """Which names of the trace ask which model: 0 as in `gpu.slices`, else drawn with this seed."""
    before_s: float = 0.0
    """How long before the slice the traffic is that placement remembers, and a plan may be made of; 0: the trace has
    none."""

    cold: bool = False
    """Whether placement begins without the traffic before the slice."""

    @property
    def cell(self) -> str:
        return f"{self.half} {self.name}, {self.rate:g}".strip()


EIGHTEEN = [
    Part(f"{name}, {rate:g}", part.trace, part.from_s, rate, before_s=min(HOUR_S, part.from_s))
    for name, part in SLICES.items()
    for rate in part.rates
] + [
    Part(f"{hour} h", "servegen48.csv.gz", HOUR_S * hour, HOURLY_RATE, before_s=HOUR_S if hour else 0.0)
    for hour in range(0, 24, 2)
]
"""The slices of `benchmarks.gpu.compare`, and twelve more of servegen48, one from every second hour."""

HALVES = ("tuning", "unseen")
UNSEEN_DEALING = 49
TUNING_HOURS = (*range(0, 12, 2), 11, *range(12, 24, 2))
UNSEEN_HOURS = tuple(hour for hour in range(24) if hour not in TUNING_HOURS)
RATES = {
    "servegen48.csv.gz": (1.0, 2.0, 4.0, 6.0),
    "hyperbolic7.csv.gz": (2.0, 4.0, 8.0, 16.0),
    "arena27.csv.gz": (4.0, 8.0, 16.0, 24.0),
    "azure2023.csv.gz": (1.0, 2.0),
}
BURST_HOUR, BURST_RATES = 21, (0.5, 1.0)
"""22 requests a second at rate 1, more than all other hours at 4."""
_HALF_S = {"hyperbolic7.csv.gz": 300.0, "arena27.csv.gz": 300.0, "azure2023.csv.gz": 1764.0}
QUICK = {
    "tuning": {"6 h": (1.0, 4.0), "11 h": (2.0,)},
    "unseen": {"5 h": (1.0, 4.0), "17 h": (2.0, 4.0), "19 h": (1.0, 2.0), "hyperbolic7": (4.0,)},
}
"""Cells that `--quick` runs: a calm hour and a lively one of each half, chosen by their numbers of requests and models
and not by any result; of the unseen half also the hour with the most requests, bursts aside."""


def parts(half: str, quick: bool = False, seconds: float = SECONDS) -> Iterator[Part]:
    """The half's slices at all their rates, in the order of the traces. A slice has so many seconds, or those of its
    half of a short trace."""
    for part in _slices(half):
        rates = BURST_RATES if part.name == f"{BURST_HOUR} h" else RATES[part.file]
        for rate in QUICK[half].get(part.name, ()) if quick else rates:
            most_s = _HALF_S.get(part.file, HOUR_S)
            yield replace(part, rate=rate, seconds=min(seconds, most_s))


def dealt(names: Sequence[str], models: Sequence[str], dealing: int) -> dict[str, str]:
    """Name of the trace -> model."""
    if not dealing:
        return deal(names, models)
    drawn = random.Random(dealing).sample(sorted(names), len(names))
    return dict(zip(drawn, cycle(models), strict=False))


def _slices(half: str) -> Iterator[Part]:
    unseen = half == "unseen"
    dealing = UNSEEN_DEALING if unseen else 0
    for hour in UNSEEN_HOURS if unseen else TUNING_HOURS:
        before_s = HOUR_S if hour else 0.0
        yield Part(f"{hour} h", "servegen48.csv.gz", HOUR_S * hour, 1.0, half=half, dealing=dealing, before_s=before_s)
    for file, from_s in _HALF_S.items():
        from_s = from_s if unseen else 0.0
        yield Part(file.split(".")[0], file, from_s, 1.0, half=half, dealing=dealing, before_s=from_s)
