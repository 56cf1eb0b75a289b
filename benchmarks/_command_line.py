"""The command line of searches whose results are kept by series (`_series.py`)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks import _report, figures
from benchmarks._series import Done, ResultsError


def arguments(benchmark: str, description: str, traces: str, quick: str) -> argparse.ArgumentParser:
    """A parser of the options that all such searches take. `traces` and `quick`: help texts of these options."""
    parser = _report.arguments(benchmark, description)
    parser.add_argument("--traces", type=Path, help=traces)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--show", action="store_true", help="runs nothing")
    parser.add_argument("--dollars", type=float, default=2.5, help="for a GPU and hour (default: %(default)s)")
    parser.add_argument("--figure", action="store_true", help="draws what the file has; runs nothing")
    return parser


def carry_out(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    read: Callable[[Path], Done],
    measure: Callable[[], Done],
    show: Callable[[Done], object],
) -> None:
    """Draws the figure, or shows what the file has: as it is, or with what `measure` adds. Ends the program with one
    line where the command line or the file cannot be used."""
    try:
        if given.figure:
            read(given.out)
            figures.draw([given.out.stem], given.out.parent, figures.OUT)
            return
        if not given.show and given.traces is None:
            parser.error("--traces is needed")
        done = read(given.out) if given.show else measure()
    except ResultsError as error:
        raise SystemExit(str(error)) from None
    show(done)
