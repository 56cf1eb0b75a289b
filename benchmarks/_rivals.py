"""Prism beside its rivals, cell by cell: what each cell's line says, and in how many Prism is below the best rival.

A cell is a slice at a rate; a rival is a system with what its places were planned from. The best rival of a cell is
chosen by the cell's result and for each measure anew, which no operator could do: to be level with it is much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

MEASURES = {"both": "both targets", "ttft": "TTFT"}
"""Figures by which Prism and its rivals are compared, in percent of requests on time, each with its name in reports."""
HOLDS = 95.0
"""Percent of requests on time from which on a system still serves an hour; below it all of them fail somebody."""

Figures = Mapping[str, float | None]
"""Figures of one system in one cell: percent of requests on time (both, ttft, tpot; worst is that of the model with the
least, None where no model has enough requests), number of moves, number of activations."""
Cell = Mapping[str, Figures]
"""Figures of all systems in one cell, by name of the system; Prism is "prism"."""


def mean(each: list[Figures]) -> dict[str, float | None]:
    """Mean figures of one system over several starts or draws."""
    return {key: _mean([figures[key] for figures in each]) for key in each[0]}


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


@dataclass(frozen=True)
class Gap:
    """Prism beside the best rival of a cell, by one measure."""

    cell: str
    rival: str
    best: float
    prism: float

    @property
    def points(self) -> float:
        return self.prism - self.best


def gap(cell: str, systems: Cell, measure: str) -> Gap | None:
    """None where Prism or all rivals are lacking."""
    found = {name: value for name, figures in systems.items() if (value := figures[measure]) is not None}
    prism = found.pop("prism", None)
    if prism is None or not found:
        return None
    rival = max(found, key=lambda name: found[name])
    return Gap(cell, rival, found[rival], prism)


def summary(half: str, cells: Mapping[str, Cell]) -> Iterator[str]:
    """Two lines for each measure: all cells, and those in which the best rival has HOLDS or more."""
    for measure, name in MEASURES.items():
        gaps = [found for cell, systems in cells.items() if (found := gap(cell, systems, measure))]
        if gaps:
            yield f"{half}, {name}: {_told(gaps)}"
            where = f"  where the best rival has {HOLDS:g} % or more"
            within = [each for each in gaps if each.best >= HOLDS]
            yield f"{where}: {_told(within)}" if within else f"{where}: no cell"


def _told(gaps: list[Gap]) -> str:
    below, above = [each for each in gaps if each.points < 0], [each for each in gaps if each.points > 0]
    parts = [f"Prism is below the best rival in {len(below)} of {len(gaps)} cells"]
    if below:
        worst = min(below, key=lambda each: each.points)
        parts[0] += f", by {-fmean(each.points for each in below):.2f} in the mean, {-worst.points:.2f} at most"
        parts[0] += f" ({worst.cell}: {worst.rival} {worst.best:.2f})"
    if above:
        parts.append(f"above in {len(above)}, by {fmean(each.points for each in above):.2f}")
    parts.append(f"{fmean(each.points for each in gaps):+.2f} over all")
    return "; ".join(parts)
