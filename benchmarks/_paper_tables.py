"""Results of `paper_sim.py`: reading the file, and tables of the rates and of the fewest GPUs at 99 %. Cells that Prism
loses are bold.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import _series, sim_bias
from benchmarks._paper import CONTENDERS, PLANS
from benchmarks._search import Crossing, first_crossing
from benchmarks._series import Done

EIGHT = ("light", "tight")
TRACES_OF_EIGHT = ("arena27", "hyperbolic7")
GPUS_OF_EIGHT = 2
MARKS = (99.0, 95.0, 90.0)
MODEL_MARK = 95.0
"""Percent of both targets that every model is to have."""
PRISM = "Prism"
Found = dict[str, Any]
"""A point as `_paper.run` returns it."""
Enough = Callable[[Found], bool]
Bias = Mapping[str, sim_bias.Row]
"""Real runs whose bias is taken off simulated figures; none: figures stay as they are."""


@dataclass(frozen=True, slots=True)
class PaperSeries:
    """A search. `rate` 0: the rate is searched, on two GPUs; else the number of GPUs is, at that rate. `starts`: orders
    in which Prism's models come up."""

    fleet: str
    trace: str
    scale: float
    rate: float
    contender: str
    starts: int

    @property
    def setting(self) -> str:
        return f"{self.fleet}, {self.trace}, scale {self.scale:g}" + (f", rate {self.rate:g}" if self.rate else "")

    @property
    def key(self) -> str:
        return f"{self.setting}: {self.contender}"


GRID = (
    *((fleet, trace, scale, 0.0) for fleet in EIGHT for trace in TRACES_OF_EIGHT for scale in (5.0, 10.0)),
    ("eighteen", "arena27", 5.0, 4.0),
    ("eighteen", "arena27", 5.0, 8.0),
    ("fifty-eight", "mixed", 10.0, 4.0),
)
"""Settings: fleet, trace, SLO scale, and the rate, or 0 where it is searched."""


# --- what is kept


def read(out: Path) -> Done:
    """Series by key; none where there is no file. Raises ResultsError."""
    return _series.read(out, "paper_sim", _check)


def _check(one: dict[str, Any]) -> None:
    PaperSeries(**one["arguments"])
    one["commit"], {float(at): dict(point) for at, point in one["points"].items()}


def value(point: Found, name: str) -> float:
    """A percentage; 0 where the system refused the fleet, or the run was given up."""
    return float(point.get(name, 0.0))


def in_time(point: Found) -> bool:
    """Whether 99 % of first tokens are on time."""
    return value(point, "ttft") >= MARKS[0]


def suffices(point: Found) -> bool:
    """Whether 99 % of either target are met, and 95 % of both for each model."""
    return in_time(point) and value(point, "tpot") >= MARKS[0] and value(point, "worst") >= MODEL_MARK


# --- tables


def corrected(point: Found, contender: str, bias: Bias) -> Found:
    """The point with its system's bias taken off, if there is one to take off. Both forms of MuxServe++ have that of
    the queues for each engine, the only form that GPUs ran."""
    measures = {"ttft": "ttft", "tpot": "tpot", "both": "both", "worst": "both"}
    system = CONTENDERS[contender].system
    shares = {
        name: sim_bias.corrected(point[name], system, bias, measure)
        for name, measure in measures.items()
        if bias and name in point
    }
    return {**point, **shares}


def crossings(points: Mapping[str, Found], name: str, marks: Sequence[float]) -> list[Crossing]:
    values = {float(rate): value(point, name) for rate, point in points.items()}
    return [first_crossing(values, mark) for mark in marks]


def gpus(points: Mapping[str, Found], enough: Enough) -> Crossing:
    """The fewest of the numbers tried that suffice, as do all above it that were tried; beyond ">" if the highest does
    not."""
    held = sorted((int(number), enough(point)) for number, point in points.items())
    late = max((number for number, holds in held if not holds), default=0)
    good = [number for number, holds in held if holds and number > late]
    return Crossing(good[0]) if good else Crossing(late, ">")


def cost(number: float, tokens_per_s: float, per_hour: float) -> str:
    """Dollars that so many GPUs cost for a million tokens."""
    return f"${number * per_hour / 3600 / tokens_per_s * 1e6:.3f}" if tokens_per_s else "-"


@dataclass(frozen=True, slots=True)
class PaperCell:
    """A cell: its text, and what systems are compared by, None where there is nothing to compare."""

    text: str
    compared: float | None


Columns = dict[str, dict[str, PaperCell]]
"""Cells by setting and contender."""


def rates_table(done: Mapping[str, Any], bias: Bias) -> Columns:
    """The largest rates with 99, 95 and 90 % of first tokens on time; systems are compared by the first of them."""
    columns: Columns = {}
    for one, points in _points(done, bias):
        if not one.rate:
            found = crossings(points, "ttft", MARKS)
            columns.setdefault(one.setting, {})[one.contender] = PaperCell("/".join(map(str, found)), _rank(found[0]))
    return columns


def targets_table(done: Mapping[str, Any], bias: Bias, per_hour: float) -> Columns:
    """The largest rates with 99 % of both targets, and with 95 % of both for each model, and the dollars at the first
    of them; systems are compared by the first."""
    columns: Columns = {}
    for one, points in _points(done, bias):
        if not one.rate:
            (both,), (worst,) = crossings(points, "both", MARKS[:1]), crossings(points, "worst", [MODEL_MARK])
            tokens = _between({float(at): value(point, "tokens_per_s") for at, point in points.items()}, both.rate)
            cell = PaperCell(f"{both}; {worst}; {cost(GPUS_OF_EIGHT, tokens, per_hour)}", _rank(both))
            columns.setdefault(one.setting, {})[one.contender] = cell
    return columns


def gpus_table(done: Mapping[str, Any], bias: Bias, per_hour: float) -> Columns:
    """The fewest GPUs with 99 % of first tokens, and with all that is asked, and the dollars with so many. Systems are
    compared by the reciprocal of the latter, so that more is better, as with rates."""
    columns: Columns = {}
    for one, points in _points(done, bias):
        if one.rate:
            first, number = gpus(points, in_time), gpus(points, suffices)
            paid = "" if number.beyond else cost(number.rate, value(points[f"{number.rate}"], "tokens_per_s"), per_hour)
            text = "; ".join(filter(None, (f"{first.beyond}{first.rate}", f"{number.beyond}{number.rate}", paid)))
            columns.setdefault(one.setting, {})[one.contender] = PaperCell(
                text, 0.0 if number.beyond else 1 / number.rate
            )
    return columns


def _rank(found: Crossing) -> float | None:
    """The rate by which systems are compared; 0 if it is below all rates that were tried, None if it is above them."""
    return {"": found.rate, "<": 0.0, ">": None}[found.beyond]


def _points(done: Mapping[str, Any], bias: Bias) -> Iterator[tuple[PaperSeries, dict[str, Found]]]:
    order = list(CONTENDERS)
    grid = {(fleet, trace, scale, rate): number for number, (fleet, trace, scale, rate) in enumerate(GRID)}
    every = [(PaperSeries(**kept["arguments"]), kept["points"]) for kept in done.values()]
    every.sort(
        key=lambda pair: (
            grid.get((pair[0].fleet, pair[0].trace, pair[0].scale, pair[0].rate), len(grid)),
            order.index(pair[0].contender),
        )
    )
    for one, points in every:
        yield one, {at: corrected(point, one.contender, bias) for at, point in points.items()}


def _between(values: Mapping[float, float], at: float) -> float:
    """Linear between neighbours."""
    rates = sorted(values)
    for low, high in zip(rates, rates[1:], strict=False):
        if low <= at <= high:
            return values[low] + (values[high] - values[low]) * (at - low) / (high - low)
    return values[min(rates, key=lambda rate: abs(rate - at))]


def marked(columns: Mapping[str, Mapping[str, PaperCell]]) -> list[list[str]]:
    """Rows of contenders. Rivals that are better than Prism are bold, and Prism where the best of its rivals is; below
    are its factors over the best rival of each plan."""
    rows = []
    for name in CONTENDERS:
        row = [name]
        for column in columns.values():
            entry, prism = column.get(name), column.get(PRISM)
            if entry is None:
                row.append("")
                continue
            if name == PRISM:
                lost = any(_better(rival, entry) for other, rival in column.items() if CONTENDERS[other].plan)
            else:
                lost = prism is not None and _better(entry, prism)
            row.append(f"**{entry.text}**" if lost else entry.text)
        rows.append(row)
    for plan in PLANS:
        rows.append([f"{PRISM} ÷ best {plan}", *(_factor(column, plan) for column in columns.values())])
    return rows


def _better(entry: PaperCell, other: PaperCell) -> bool:
    return entry.compared is not None and other.compared is not None and entry.compared > other.compared


def _factor(column: Mapping[str, PaperCell], plan: str) -> str:
    rivals = [entry.compared for name, entry in column.items() if CONTENDERS[name].plan == plan]
    prism = column[PRISM].compared if PRISM in column else None
    known = [rival for rival in rivals if rival is not None]
    if prism is None or not known or len(known) < len(rivals):
        return ""
    best = max(known)
    if not best:
        return "" if not prism else "∞"
    text = f"{prism / best:.2f}"
    return f"**{text}**" if prism < best else text


def markdown(head: str, columns: Mapping[str, Mapping[str, PaperCell]]) -> str:
    lines = [[head, *columns], ["---"] * (len(columns) + 1), *marked(columns)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(done: Mapping[str, Any], bias: Bias, per_hour: float) -> None:
    """Requests at 99 %, of first tokens and of both targets, and GPUs at 99 %."""
    money = f"dollars for a million tokens on time, at ${per_hour:g} for a GPU and hour"
    for head, title, columns in (
        ("requests", "Largest rate with 99/95/90 % of first tokens on time", rates_table(done, bias)),
        (
            "requests, both targets",
            f"Largest rate with 99 % of both targets; with 95 % of both for each model; {money}, at the first of them",
            targets_table(done, bias, per_hour),
        ),
        (
            "GPUs",
            "Fewest GPUs with 99 % of first tokens; also with 99 % of TPOT, and 95 % of both targets for each model; "
            f"{money}",
            gpus_table(done, bias, per_hour),
        ),
    ):
        if columns:
            print(f"{textwrap.fill(title, 119)}:\n\n{markdown(head, columns)}\n")
