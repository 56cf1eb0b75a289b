"""Tables as text. If there is not enough room, the least important columns are left out; no cell is cut or wrapped.
Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_GAP = "  "


@dataclass(frozen=True)
class Column:
    """A column. `rank` 0 is always shown; of the others the highest rank is left out first."""

    title: str
    rank: int = 0
    right: bool = False


@dataclass(frozen=True)
class Row:
    """A row of a table, with one cell for each column. `note` is a sentence that follows on lines of its own."""

    cells: Sequence[str]
    note: str = ""


@dataclass(frozen=True)
class TableSection:
    """A line above its rows."""

    text: str


def render(columns: Sequence[Column], lines: Iterable[Row | TableSection], width: int) -> str:
    """The table with at most `width` characters in a line, unless the columns that always stay need more."""
    lines = list(lines)
    indent = _GAP if any(isinstance(line, TableSection) for line in lines) else ""
    rows = [line for line in lines if isinstance(line, Row)]
    sizes = [
        max(len(cell) for cell in cells)
        for cells in zip(*(row.cells for row in [_titles(columns), *rows]), strict=True)
    ]
    shown = _fitting(columns, sizes, width - len(indent))

    def told(row: Row) -> str:
        cells = (row.cells[i].rjust(sizes[i]) if columns[i].right else row.cells[i].ljust(sizes[i]) for i in shown)
        return (indent + _GAP.join(cells)).rstrip()

    out = [told(_titles(columns))]
    for line in lines:
        if isinstance(line, TableSection):
            out.append(line.text)
            continue
        out.append(told(line))
        out += textwrap.wrap(line.note, width, initial_indent=indent + _GAP, subsequent_indent=indent + _GAP)
    return "\n".join(out)


def _titles(columns: Sequence[Column]) -> Row:
    return Row([column.title for column in columns])


def _fitting(columns: Sequence[Column], sizes: Sequence[int], width: int) -> list[int]:
    """Indices of the columns that are shown."""
    shown = list(range(len(columns)))
    while sum(sizes[i] for i in shown) + len(_GAP) * (len(shown) - 1) > width:
        worst = max(shown, key=lambda i: columns[i].rank)
        if not columns[worst].rank:
            break
        shown.remove(worst)
    return shown
