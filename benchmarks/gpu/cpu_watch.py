"""Which processes and threads have the cores, and which compilers run, by /proc alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from services.runtime import tasks

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
COMPILERS = frozenset(
    ("nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink", "ninja", "c++", "g++", "gcc", "cc1plus", "as", "ld")
)
"""Programs that run only while a kernel is compiled."""
_LEAST_CORES = 0.01
_PROC = Path("/proc")
_GONE = (OSError, IndexError, ValueError)
"""Of a process that ends while it is read, or whose files are other ones than Linux has."""


@dataclass(frozen=True)
class Task:
    """A process or a thread, as /proc/.../stat has it."""

    name: str
    parent: int
    ticks: int
    """That it had a core, in user and kernel mode."""
    ended_ticks: int
    """The same of its children that have ended."""
    started: int
    """When it was started, in ticks of the machine: with the number it says who this is."""


@dataclass(frozen=True)
class Seen:
    """A process at one moment."""

    task: Task
    called: str
    """What it runs, in a word or two."""
    threads: Mapping[int, Task] = field(default_factory=dict)


Snapshot = Mapping[int, Seen]
"""All processes of the machine, by number."""


def parse(stat: str) -> Task:
    """The line of a process or a thread; its name may hold anything."""
    before, _, after = stat.rpartition(")")
    fields = after.split()
    user, kernel, ended_user, ended_kernel = map(int, fields[11:15])
    return Task(
        before.partition("(")[2], int(fields[1]), user + kernel, ended_user + ended_kernel, started=int(fields[19])
    )


def called(command: Sequence[str], name: str) -> str:
    """What a process runs: the module for Python's -m, what it calls itself, or the `name` of its program."""
    if not command or not command[0]:
        return name
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    joined = " ".join(command)
    if "compile_worker" in joined:
        return "torch compile_worker"
    if "multiprocessing" in joined:
        return "multiprocessing " + ("resource_tracker" if "resource_tracker" in joined else "child")
    return command[0] if "::" in command[0] else name


def snapshot(threads: bool = False) -> dict[int, Seen]:
    """What there is now; those that end meanwhile are left out."""
    found = {}
    for each in os.listdir(_PROC):
        if each.isdecimal():
            with contextlib.suppress(*_GONE):
                of = _PROC / each
                task = parse((of / "stat").read_text(errors="replace"))
                command = (of / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
                found[int(each)] = Seen(task, called(command, task.name), _threads(of) if threads else {})
    return found


def _threads(of: Path) -> dict[int, Task]:
    found = {}
    for each in os.listdir(of / "task"):
        with contextlib.suppress(*_GONE):
            found[int(each)] = parse((of / "task" / each / "stat").read_text(errors="replace"))
    return found


def side_of(pid: int, seen: Snapshot, roots: Mapping[str, Iterable[int]]) -> str:
    """The side below one of whose `roots` a process is, or which it is; empty for none."""
    of_root = {root: side for side, some in roots.items() for root in some}
    while pid in seen:
        if pid in of_root:
            return of_root[pid]
        pid = seen[pid].task.parent
    return ""


def busy(
    before: Snapshot, after: Snapshot, seconds: float, roots: Mapping[str, Iterable[int]], least: float = _LEAST_CORES
) -> list[dict[str, Any]]:
    """Processes that had at least so much of a core between two snapshots, the busiest first: cores of its own, of
    children that ended meanwhile, and of its threads, by number and name."""
    rows: list[dict[str, Any]] = []
    for pid, now in after.items():
        was = before.get(pid)
        known = was if was is not None and was.task.started == now.task.started else None
        cores = _cores(None if known is None else known.task, now.task, seconds)
        ended = (now.task.ended_ticks - (known.task.ended_ticks if known is not None else 0)) / TICKS_PER_S / seconds
        if cores + ended < least:
            continue
        threads = [
            [tid, thread.name, round(share, 3)]
            for tid, thread in now.threads.items()
            if (share := _cores(None if known is None else known.threads.get(tid), thread, seconds)) >= least
        ]
        rows.append(
            {
                "side": side_of(pid, after, roots),
                "process": now.called,
                "pid": pid,
                "cores": round(cores, 3),
                "ended_children_cores": round(ended, 3),
                "threads": sorted(threads, key=lambda row: -row[2]),
            }
        )
    return sorted(rows, key=lambda row: -row["cores"])


def _cores(was: Task | None, now: Task, seconds: float) -> float:
    before = was.ticks if was is not None and was.started == now.started else 0
    return (now.ticks - before) / TICKS_PER_S / seconds


def compilers(seen: Snapshot, roots: Mapping[str, Iterable[int]]) -> dict[tuple[int, int], dict[str, Any]]:
    """Compilers that run, and for whom, by number and start."""
    return {
        (pid, each.task.started): {"compiler": each.task.name, "side": side_of(pid, seen, roots)}
        for pid, each in seen.items()
        if each.task.name in COMPILERS
    }


def files(folders: Mapping[str, Path]) -> dict[str, list[int]]:
    """How many files lie in each of these folders and below, and their bytes; [0, 0] where it does not exist."""
    found = {}
    for name, folder in folders.items():
        count = nbytes = 0
        for at, _, names in os.walk(folder):
            for each in names:
                with contextlib.suppress(OSError):
                    nbytes += os.stat(os.path.join(at, each)).st_size
                    count += 1
        found[name] = [count, nbytes]
    return found


class Watch:
    """Looks about so often while the block runs: who was busy, and every compiler that it saw. A look takes some
    milliseconds of a core; a compiler that ends between two of them is in its parent's `ended_children_cores` alone.
    Times are seconds since the epoch."""

    def __init__(self, roots: Mapping[str, list[int]], every_s: float = 0.5) -> None:
        self._roots = roots
        """Filled in as sides start."""
        self._every_s = every_s
        self.rows: list[dict[str, Any]] = []
        self.compilers: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        self._looking = tasks.spawn(self._look(), "cpu watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await tasks.cancel(self._looking)

    async def _look(self) -> None:
        known: set[tuple[int, int]] = set()
        before, began = snapshot(), time.monotonic()
        while True:
            await asyncio.sleep(self._every_s)
            after, now = snapshot(), time.monotonic()
            rows = busy(before, after, now - began, self._roots, least=0.05)
            shown = [[row["side"], row["process"], row["cores"], row["ended_children_cores"]] for row in rows]
            at_s = round(time.time(), 2)
            self.rows.append({"at_s": at_s, "busy": shown})
            for who, row in compilers(after, self._roots).items():
                if who not in known:
                    known.add(who)
                    self.compilers.append({"at_s": at_s, **row})
            before, began = after, now
