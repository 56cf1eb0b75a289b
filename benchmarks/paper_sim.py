"""The paper's experiments in the paper's own set-up, in the simulator: how many requests, and how few GPUs.

    python benchmarks/paper_sim.py --traces FOLDER                  # all that the file does not have yet
    python benchmarks/paper_sim.py --traces FOLDER --quick          # a part of it, Prism from one start
    python benchmarks/paper_sim.py --traces FOLDER --only tight     # one fleet
    python benchmarks/paper_sim.py --show [--corrected]             # the tables of what it has, as Markdown
    python benchmarks/paper_sim.py --figure                         # its figures, into docs/lab/figures

`_paper.py` has the set-up. Two searches: the largest rate at which eight models on two GPUs have so many percent of
first tokens on time, and the fewest GPUs for eighteen and fifty-eight models at a fixed rate. Rates are searched in
steps of STEP and then by halves; between points attainment is taken to be linear, and the first crossing counts.

Rivals are S-Partition and MuxServe++, in rounds as in its paper or with a queue for each engine as GPUs ran it, each
planned from sizes alone (blind: mean of three draws), from other traffic (before), or from the very load (slice). The
two short traces are replayed whole, so that eight and eighteen models have nothing that comes before: their "before" is
the load's own first half. For fifty-eight it is servegen48's hour before, and the later part of the two short traces.
Prism's figures are means over orders in which the models come up.

A series is one system in one setting; those that the file has from the same commit are not run again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _command_line, _paper, _series, sim_bias
from benchmarks._paper import CONTENDERS, PaperLoad, Targets
from benchmarks._paper_tables import (
    GPUS_OF_EIGHT,
    GRID,
    MARKS,
    MODEL_MARK,
    Bias,
    Enough,
    Found,
    PaperSeries,
    corrected,
    in_time,
    read,
    show,
    suffices,
    value,
)
from benchmarks._search import Aim, fewest, locate
from benchmarks._series import Done

SOURCES = (
    "sim",
    "placement/policy",
    "placement/config.py",
    "gpu_scheduler/policy",
    "gpu_scheduler/engines/sharing",
    "gpu_scheduler/config.py",
    "balloond/policy",
    "loader/policy/floor.py",
    "benchmarks/_fleets.py",
    "benchmarks/_paper.py",
    "benchmarks/_search.py",
)
"""Files and folders whose last commit a series is valid for."""
STEP = 1.5
BEGIN = {"arena27": 2.0, "hyperbolic7": 1.0}
LEAST_RATE, MOST_RATE = 0.25, 40.0
FINE, COARSE = 1.08, 1.25
FIRST_GPUS = {"eighteen": 3, "fifty-eight": 12}
MOST_GPUS = {"eighteen": 16, "fifty-eight": 40}
QUICK = (
    ("tight", "arena27", 5.0, 0.0),
    ("tight", "hyperbolic7", 5.0, 0.0),
    ("eighteen", "arena27", 5.0, 4.0),
    ("fifty-eight", "mixed", 10.0, 4.0),
)
SPARE = 1 - MARKS[0] / 100
"""Share of first tokens that may be late before a run that can only fail is given up."""
STARTS = 3
"""Orders in which Prism's models come up; one in what --quick runs."""


def series(quick: bool = False, only: str = "") -> Iterator[PaperSeries]:
    for fleet, trace, scale, rate in QUICK if quick else GRID:
        if only in ("", fleet):
            for name, contender in CONTENDERS.items():
                starts = 1 if quick or contender.plan else STARTS
                yield PaperSeries(fleet, trace, scale, rate, name, starts)


# --- one series


@cache
def _load(fleet: str, trace: str, traces: Path) -> tuple[PaperLoad, Targets]:
    given = _paper.load(fleet, trace, traces)
    return given, _paper.alone(given)


def searched(one: PaperSeries, traces: Path) -> dict[str, dict[str, Found]]:
    """The points of a series, by rate or number of GPUs."""
    given, targets = _load(one.fleet, one.trace, traces)
    contender = CONTENDERS[one.contender]
    if not one.rate:

        def measured(rate: float) -> Found:
            return _paper.run(given, targets, one.scale, contender, rate, (1,) * GPUS_OF_EIGHT, one.starts)

        points = locate(measured, list(_aims(one.contender)), BEGIN[one.trace], STEP, LEAST_RATE, MOST_RATE)
        return {"points": {f"{rate:.4g}": point for rate, point in points.items()}}
    tried: dict[int, Found] = {}

    def point(gpus: int) -> Found:
        if gpus not in tried:
            each = list[Found]()
            for sizes in layouts(one.fleet, gpus):
                found = _paper.run(given, targets, one.scale, contender, one.rate, sizes, one.starts, SPARE)
                each.append({**found, "groups": [sizes.count(size) for size in (1, 4)]})
                if suffices(each[-1]):
                    break
            none = {"refused": "too few GPUs for a group of four and one of one", "cpu_s": 0.0}
            tried[gpus] = max(each, key=lambda found: (suffices(found), value(found, "ttft")), default=none)
        return tried[gpus]

    for enough in (in_time, suffices):
        for bias in ({}, _bias()):

            def holds(gpus: int, enough: Enough = enough, bias: Bias = bias) -> bool:
                return enough(corrected(point(gpus), one.contender, bias))

            fewest(holds, FIRST_GPUS[one.fleet], MOST_GPUS[one.fleet])
    return {"points": {str(gpus): found for gpus, found in sorted(tried.items())}}


def layouts(fleet: str, gpus: int) -> list[tuple[int, ...]]:
    """Ways of dividing so many GPUs into groups. Of fifty-eight models four need four GPUs each, which one or two
    groups have."""
    if fleet != "fifty-eight":
        return [(1,) * gpus]
    return [(1,) * (gpus - 4 * groups) + (4,) * groups for groups in (1, 2) if gpus > 4 * groups]


def _aims(contender: str) -> Iterator[Aim[Found]]:
    """All that tables show, as it is simulated and corrected for bias."""
    for bias in ({}, _bias()):
        for name, marks, width in (
            ("ttft", MARKS[:1], FINE),
            ("both", MARKS[:1], FINE),
            ("ttft", MARKS[1:], COARSE),
            ("worst", (MODEL_MARK,), COARSE),
        ):
            for mark in marks:
                yield Aim(_reader(name, contender, bias), mark, width)


def _reader(name: str, contender: str, bias: Bias) -> Callable[[Found], float]:
    return lambda point: value(corrected(point, contender, bias), name)


@cache
def _bias() -> Bias:
    return sim_bias.kept()


# --- all of them


def measure(out: Path, traces: Path, wanted: Iterable[PaperSeries], workers: int) -> Done:
    """Runs what `out` lacks, and writes it after each series."""
    done, now = read(out), _series.commit(SOURCES)
    todo = [one for one in wanted if not _is_done(one, done.get(one.key), now)]
    todo.sort(key=lambda one: CONTENDERS[one.contender].plan != "")  # the long ones first

    def load(one: PaperSeries) -> None:
        _load(one.fleet, one.trace, traces)

    search = partial(searched, traces=traces)
    return _series.measure(out, "paper_sim", _paper.SEED, done, todo, now, search, load, workers)


def _is_done(one: PaperSeries, kept: Mapping[str, Any] | None, now: str) -> bool:
    """Whether the file has the series from this commit, of as many starts at least."""
    if kept is None or kept["commit"] != now:
        return False
    had = PaperSeries(**kept["arguments"])
    return had == replace(one, starts=had.starts) and had.starts >= one.starts


def main() -> None:
    quick = "under ten minutes of a core"
    parser = _command_line.arguments("paper_sim", __doc__ or "", "the folder with the trace files", quick)
    parser.add_argument("--only", default="", choices=["", *dict.fromkeys(fleet for fleet, *_ in GRID)], help="a fleet")
    parser.add_argument("--corrected", action="store_true", help="what is shown has each system's bias taken off")
    given = parser.parse_args()

    def lacking() -> Done:
        return measure(given.out, given.traces, series(given.quick, given.only), given.workers)

    def shown(done: Done) -> None:
        show(done, sim_bias.kept() if given.corrected else {}, given.dollars)

    _command_line.carry_out(parser, given, read, lacking, shown)


if __name__ == "__main__":
    main()
