"""Which cores the processes of a comparison run on, and how much of them they use. Linux only.

Two sides that take turns are pinned to the same cores: where cores differ in speed, or a neighbour of the machine has
one of them, both sides meet it alike. The main thread of an engine, which sets the pace, gets a core of its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

LEAST = 8
"""Cores; with fewer nothing is pinned."""


@dataclass(frozen=True)
class Plan:
    """Sets of cores that share none."""

    main: tuple[int, ...]
    """One for the main thread of each engine of a side."""
    others: frozenset[int]
    """For the engines' other threads and processes."""
    rest: frozenset[int]
    """For everything else: the client, balloond, the keeper."""


def plan(engines: int, cores: Sequence[int]) -> Plan | None:
    """For sides of `engines` each; None where there are too few cores."""
    if len(cores) < LEAST:
        return None
    ordered = sorted(cores)
    # Neighbouring numbers are often the two halves of one core: main threads have every other.
    main = tuple(ordered[2 * number + 2] for number in range(engines))
    halves = {*main, *(core + 1 for core in main)}
    left = [core for core in ordered if core not in halves]
    middle = len(left) // 2
    return Plan(main, frozenset(left[middle:]), frozenset(left[:middle]))


def apply(made: Plan, sides: Sequence[Sequence[int]], *, main_thread: bool) -> None:
    """Pins this process and the engines of each side, by process id. Without `main_thread` an engine's threads and
    processes share its core and the others', for fronts whose busiest thread is not the first."""
    for pid in (os.getpid(), *descendants(os.getpid())):
        _pin(pid, made.rest)
    for side in sides:
        for root, core in zip(side, made.main, strict=True):
            for pid in (root, *descendants(root)):
                _pin(pid, made.others if main_thread else made.others | set(made.main))
            if main_thread:
                os.sched_setaffinity(root, {core})


def _pin(pid: int, cores: frozenset[int] | set[int]) -> None:
    for thread in threads(pid):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)


def threads(pid: int) -> list[int]:
    """Of a process; none if it is gone."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except FileNotFoundError:
        return []


def descendants(pid: int) -> Iterator[int]:
    """Children, and theirs."""
    for thread in threads(pid):
        with contextlib.suppress(OSError):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield int(child)
                yield from descendants(int(child))


def used_s(roots: Sequence[int]) -> tuple[float, float]:
    """Seconds on a core, and seconds of waiting for one, of these processes and all below them since they began."""
    ran = waited = 0
    for root in roots:
        for pid in (root, *descendants(root)):
            for thread in threads(pid):
                with contextlib.suppress(OSError):
                    fields = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
                    ran += int(fields[0])
                    waited += int(fields[1])
    return ran / 1e9, waited / 1e9
