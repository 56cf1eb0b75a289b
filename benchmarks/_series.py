"""Searches in the simulator whose results are kept by series: series that are valid still, series to run, and their
file.

A series is one system in one setting. The file has, by key of the series, its arguments, the commit that it is from,
and what was found; it is replaced as a whole after each series, so that a run that ends early loses one at most.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks import _report
from benchmarks._pool import pool, results

Done = dict[str, Any]
"""Series by key."""


class ResultsError(ValueError):
    """A file of results cannot be used."""


class KeyedSeries(Protocol):
    """A dataclass of a series' arguments."""

    @property
    def key(self) -> str: ...


_S = TypeVar("_S", bound=KeyedSeries)


def read(out: Path, benchmark: str, check: Callable[[dict[str, Any]], object]) -> Done:
    """Series by key; none where there is no file. `check` raises ValueError, KeyError, TypeError or AttributeError for
    a series that is not what it should be. Raises ResultsError."""
    if not out.exists():
        return {}
    try:
        kept = json.loads(out.read_text())
        if kept["benchmark"] != benchmark:
            raise ValueError(f"of the benchmark {kept['benchmark']}")
        found: Done = kept["series"]
        for one in found.values():
            check(one)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(
            f"{out} is damaged, or no result of {benchmark} ({type(error).__name__}: {error}): "
            "put it right, or move it away to begin anew"
        ) from None
    return found


def commit(sources: Sequence[str]) -> str:
    """The last commit that touched these files and folders; with "+changes" if they differ from it."""
    last = _report.git("log", "-1", "--format=%H", "--", *sources)
    changed = _report.git("status", "--porcelain", "--untracked-files=no", "--", *sources)
    return last + ("+changes" if changed else "")


def keep(out: Path, benchmark: str, result: dict[str, Any]) -> None:
    """Replaces the file, so that at any time it is the old one or the new one."""
    unfinished = out.with_suffix(".partial")
    _report.write(unfinished, benchmark, result)
    unfinished.replace(out)


def measure(
    out: Path,
    benchmark: str,
    seed: int,
    done: Done,
    todo: Sequence[_S],
    now: str,
    search: Callable[[_S], dict[str, Any]],
    prepare: Callable[[_S], object],
    workers: int,
) -> Done:
    """Searches the series `todo`, each in a process, and adds what is found to `done` and to the file, as of the commit
    `now`.
    `search` returns the points of a series among what is found. `prepare` is called for each series before processes
    are forked, so that each of them has what it loads."""
    for one in todo:
        prepare(one)
    with pool(workers) as processes:
        running = {processes.submit(search, one): one for one in todo}
        for count, (one, found) in enumerate(results(processes, running), start=1):
            arguments = asdict(one)  # type: ignore[call-overload]  # a series is a dataclass
            done[one.key] = {"arguments": arguments, "commit": now, **found}
            keep(out, benchmark, {"seed": seed, "series": dict(sorted(done.items()))})
            cpu_s = sum(point["cpu_s"] for point in found["points"].values())
            print(f"{count} of {len(todo)}: {one.key}: {len(found['points'])} points, {cpu_s:.1f} s", flush=True)
    return done
