"""Output of answers: to a terminal, a pipe, or as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Iterable, Sequence
from typing import Annotated, Any, TypeVar

import typer

from prismctl.views.tables import Column, Row, TableSection, render
from services.runtime.progress import aside

T = TypeVar("T")
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def show_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=True))


def show(value: Any, as_json: bool, text: str) -> None:
    """Prints the value for a script, or the text for a person."""
    if as_json:
        show_json(value)
    else:
        typer.echo(text)


def tell(line: str) -> None:
    """Prints a line that is no answer, on stderr."""
    with aside():
        typer.echo(f"prismctl: {line}", err=True)


async def told_meanwhile(work: Awaitable[T], line: str, after_s: float = 1.0) -> T:
    """The result of `work`; if that takes longer than `after_s` seconds, prints `line` on stderr meanwhile."""
    telling = asyncio.get_running_loop().call_later(after_s, tell, line)
    try:
        return await work
    finally:
        telling.cancel()


def show_table(value: Any, as_json: bool, columns: Sequence[Column], lines: Iterable[Row | TableSection]) -> None:
    if as_json:
        show_json(value)
    else:
        typer.echo(render(columns, lines, width()))


def width() -> int:
    """Columns of the terminal. Lines are not wrapped for a pipe."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return shutil.get_terminal_size().columns if known else sys.maxsize
