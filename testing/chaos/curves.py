"""What processes hold, sampled for a long time, and whether it grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_KB = 1024
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_ENDS = 10
"""Samples whose mean is the first, or the last, value of a curve."""


def sample(pid: int) -> dict[str, float]:
    """Of one process. Raises FileNotFoundError and ProcessLookupError when it has gone."""
    process = Path(f"/proc/{pid}")
    rollup = _fields(process / "smaps_rollup")
    status = _fields(process / "status")
    # The name in the second field may have blanks; after it the times are fields 14 and 15 of the whole.
    stat = (process / "stat").read_text().rpartition(")")[2].split()
    return {
        "rss_bytes": rollup["Rss"] * _KB,
        "own_bytes": rollup["Pss_Anon"] * _KB,
        "heap_bytes": _heap(process / "smaps") * _KB,
        "shared_memory_bytes": rollup["Pss_Shmem"] * _KB,
        "descriptors": len(os.listdir(process / "fd")),
        "threads": status["Threads"],
        "cpu_s": (int(stat[11]) + int(stat[12])) * _TICK_S,
    }


def _heap(path: Path) -> int:
    """KiB of what malloc has by brk: of the own bytes what is not Python's small objects, stacks, or other arenas."""
    inside = False
    for line in path.read_text().splitlines():
        if line.endswith("[heap]"):
            inside = True
        elif inside and line.startswith("Anonymous:"):
            return int(line.split()[1])
    return 0


def _fields(path: Path) -> dict[str, int]:
    """The numbers of "name: number ..." lines."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if (value := rest.split()[:1]) and value[0].isdigit():
            found[name] = int(value[0])
    return found


@dataclass(frozen=True)
class Fit:
    """A straight line through a curve, by least squares."""

    slope_per_hour: float
    error_per_hour: float
    """Standard error of the slope, if samples were independent: they are not quite."""
    first: float
    last: float
    least: float
    most: float


def fit(times_s: Sequence[float], values: Sequence[float]) -> Fit:
    """Of three samples or more."""
    slope, intercept = statistics.linear_regression(times_s, values)
    off = sum((value - slope * at - intercept) ** 2 for at, value in zip(times_s, values, strict=True))
    middle = statistics.fmean(times_s)
    spread = sum((at - middle) ** 2 for at in times_s)
    return Fit(
        slope_per_hour=3600 * slope,
        error_per_hour=3600 * (off / (len(values) - 2) / spread) ** 0.5,
        first=statistics.fmean(values[:_ENDS]),
        last=statistics.fmean(values[-_ENDS:]),
        least=min(values),
        most=max(values),
    )
