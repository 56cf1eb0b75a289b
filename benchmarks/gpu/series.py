"""Arithmetic of what is sampled over time: tokens as they arrive, memory as it grows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.gpu import report


def gaps(arrived_s: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """Seconds between the tokens of one stream, of those gaps that touch the window: one that began before it counts
    whole, as its reader waited."""
    pairs = zip(arrived_s, arrived_s[1:], strict=False)
    return [after - before for before, after in pairs if after > begin_s and before < end_s]


def gaps_of(streams: Iterable[Sequence[float]], begin_s: float, end_s: float) -> list[float]:
    """The same of several streams."""
    return [gap for arrived_s in streams for gap in gaps(arrived_s, begin_s, end_s)]


def fastest(samples: Sequence[tuple[float, float]], least_s: float) -> float:
    """The steepest rise per second over any stretch of at least `least_s`; `samples` are (seconds, value) in order. NaN
    if there is none so long."""
    best = math.nan
    begin = 0
    for at, value in samples:
        while begin + 1 < len(samples) and samples[begin + 1][0] <= at - least_s:
            begin += 1
        since, before = samples[begin]
        if at - since >= least_s:
            rate = (value - before) / (at - since)
            best = rate if math.isnan(best) else max(best, rate)
    return best


@dataclass(frozen=True)
class Held:
    """An engine's KV at one moment, in bytes."""

    at_s: float
    held: int
    used: int
    cached: int
    reserve: int

    @property
    def live(self) -> int:
        """Of running requests and of prefixes that can still be used."""
        return self.used + self.cached

    @property
    def ratio(self) -> float:
        """Bytes mapped for each that is live, the reserve left out; NaN while nothing is live."""
        return (self.held - self.reserve) / self.live if self.live else math.nan

    @property
    def ratio_with_reserve(self) -> float:
        return self.held / self.live if self.live else math.nan


def ratios(samples: Iterable[Held], least_live: int) -> dict[str, dict[str, float]]:
    """Spread of both ratios over the samples with at least `least_live` bytes live: below, one extent is the ratio."""
    counted = [sample for sample in samples if sample.live >= max(1, least_live)]
    return {
        "without reserve": report.spread([sample.ratio for sample in counted]),
        "with reserve": report.spread([sample.ratio_with_reserve for sample in counted]),
    }


@dataclass(frozen=True)
class Account:
    """A device's ledger and what NVML says of the device, at one moment, in bytes."""

    at_s: float
    leased: int
    booked: int
    """For engines' private memory."""
    set_aside: int
    """Extents that balloond made ahead."""
    used: int | None
    """NVML's, less what was used before; None without a GPU."""
    still: bool
    """Nothing was granted or returned while it was asked."""

    @property
    def private(self) -> int:
        """What is used beyond leases and spares: the engines' own, which bookings are for."""
        assert self.used is not None
        return self.used - self.leased - self.set_aside

    @property
    def difference(self) -> float:
        """What the ledger says beyond what is used, as a share of that."""
        assert self.used is not None
        return (self.leased + self.booked + self.set_aside) / self.used - 1


def drift(accounts: Iterable[Account]) -> int:
    """How far what is used beyond leases and spares moves, over the moments when nothing was on its way: 0 if each byte
    of the ledger is one of the device. Bytes."""
    private = [account.private for account in accounts if account.still and account.used is not None]
    return max(private) - min(private) if private else 0
