"""Arithmetic of comparisons in pairs of windows: when requests arrive, and what the ratios say."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t at 97.5 % for 1 to 30 degrees of freedom."""


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % confidence interval: mean - half to mean + half."""

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.4f} ± {self.half:.4f}"


def student_t(freedom: int) -> float:
    """At 97.5 %: the half-width of a 95 % interval in standard errors."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def interval(samples: Sequence[float]) -> Interval:
    """Of the mean of independent samples; infinitely wide for a single one, NaN for none."""
    n = len(samples)
    if n == 0:
        return Interval(math.nan, math.nan, 0)
    mean = sum(samples) / n
    if n == 1:
        return Interval(mean, math.inf, 1)
    deviation = math.sqrt(sum((sample - mean) ** 2 for sample in samples) / (n - 1))
    return Interval(mean, student_t(n - 1) * deviation / math.sqrt(n), n)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Pair by pair."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Arrival times within [0, seconds) of a Poisson process, ascending: the same for the same seed."""
    chance = random.Random(seed)
    times: list[float] = []
    now = chance.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += chance.expovariate(rate)
    return times
