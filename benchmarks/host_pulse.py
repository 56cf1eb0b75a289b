"""How fast the host is while something runs on it: the same small piece of work, again and again, on the same cores.

    python -m benchmarks.host_pulse [--every-s 0.25]        # until its standard input ends; then a line of JSON

Steps of small models take as long as their host takes to launch them, and hosts differ, and so do halves of one: a 1B
model's decode step of six requests took 1.6 ms on one host, and 1.8 and 2.1 on the halves of another
(docs/lab/gpu-runs.md). A result that carries this can be told from one of another host. It costs a few
thousandths of a core.

`work_ms` is by the wall clock and `cpu_ms` by the process's own: what the first has more, others had the core for. A
slow clock, or somebody on the core's other thread, shows in both. `late_ms` is how late it woke. Quantiles.

A host may be as quick as ever at one time and half as quick at another, by whoever else is on it: `by_time` has a row
for each ten seconds, of when it began, the median of `work_ms`, and of the time of all cores the share that was worked
and the share that the hypervisor gave to others ("steal" of proc_stat(5)).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import select
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple, Self

from sim.report import quantile

_QUANTILES = (0.05, 0.5, 0.95)
_KEYS = 4000
_WINDOW_S = 10.0
_STAT = Path("/proc/stat")


class Cores(NamedTuple):
    """Time of all cores since the machine started, in whatever unit."""

    worked: int
    stolen: int
    total: int

    @classmethod
    def now(cls) -> Cores:
        user, nice, system, idle, waiting, hard, soft, stolen = map(int, _STAT.read_text().split(maxsplit=9)[1:9])
        worked = user + nice + system + hard + soft
        return cls(worked, stolen, worked + idle + waiting + stolen)

    def shares_since(self, earlier: Cores) -> tuple[float, float]:
        """(worked, stolen) of the time since then; 0 where none has passed."""
        total = max(1, self.total - earlier.total)
        return (self.worked - earlier.worked) / total, (self.stolen - earlier.stolen) / total


@dataclass
class _Window:
    """A few seconds of it."""

    began_s: float
    cores: Cores
    work_s: list[float] = field(default_factory=list)

    def row(self) -> list[float]:
        worked, stolen = Cores.now().shares_since(self.cores)
        return [round(self.began_s, 1), round(1e3 * median(self.work_s), 3), round(worked, 3), round(stolen, 4)]


def work() -> int:
    """What an engine's host does: looking up, counting, comparing. Half a millisecond."""
    counts: dict[int, int] = {}
    for key in range(_KEYS):
        counts[key * 7919 % 509] = counts.get(key * 7919 % 509, 0) + key
    return max(counts.values())


def beat() -> tuple[float, float]:
    """Seconds of one piece by the wall clock and by the process's."""
    wall, own = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - own


def summary(rows: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    """Of rows of seconds late, and at work by both clocks; milliseconds."""
    found: dict[str, Any] = {"beats": len(rows)}
    for name, column in zip(("late_ms", "work_ms", "cpu_ms"), zip(*rows, strict=True), strict=False):
        ascending = sorted(1e3 * seconds for seconds in column)
        found[name] = {f"p{100 * at:g}": quantile(ascending, at) for at in _QUANTILES}
    return found


def until_input_ends(every_s: float, window_s: float = _WINDOW_S) -> dict[str, Any]:
    rows: list[tuple[float, float, float]] = []
    by_time: list[list[float]] = []
    began = time.perf_counter()
    window = _Window(0.0, Cores.now())
    due = began + every_s
    while not select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))[0]:
        late = time.perf_counter() - due
        rows.append((late, *beat()))
        window.work_s.append(rows[-1][1])
        now = time.perf_counter()
        if now - began >= window.began_s + window_s:
            by_time.append(window.row())
            window = _Window(now - began, Cores.now())
        # Not what was missed: a host that stood still is seen once, as late.
        due = max(due, now) + every_s
    if window.work_s:
        by_time.append(window.row())
    return summary(rows) | {"by_time": by_time}


class HostPulse:
    """A process of its own that measures while the block runs; `found` afterwards, empty where it told nothing."""

    def __init__(self, every_s: float = 0.25) -> None:
        self._every_s = every_s
        self.found: dict[str, Any] = {}

    async def __aenter__(self) -> Self:
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-m", "benchmarks.host_pulse", "--every-s", str(self._every_s)]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        told, _ = await self._process.communicate(b"")  # the end of its input
        with suppress(ValueError):  # it died: the result that it goes with is worth keeping
            self.found = json.loads(told)


def main() -> None:
    parser = argparse.ArgumentParser(
        "host_pulse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every-s", type=float, default=0.25)
    print(json.dumps(until_input_ends(parser.parse_args().every_s)))


if __name__ == "__main__":
    main()
