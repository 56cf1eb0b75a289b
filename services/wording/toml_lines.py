"""Finds the line of a TOML file on which a value stands. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any


def line_of(text: str, at: Sequence[str | int]) -> int | None:
    """The line, counted from 1, on which the value that `at` leads to begins, or the nearest value that is there and
    holds it; None: the whole file. `text` is TOML.

    The shortest beginning of the file that has the value ends on that line: tomllib reports no lines, and this needs
    nothing else.
    """
    at = _there(tomllib.loads(text), at)
    lines, whole = text.splitlines(), 0
    for count in range(1, len(lines) + 1):
        try:
            values = tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue  # in the middle of a value of several lines
        if at and _there(values, at) == at:
            return whole + 1
        whole = count
    return None


def _there(values: Any, at: Sequence[str | int]) -> tuple[str | int, ...]:
    """The longest beginning of `at` that the values have."""
    found: list[str | int] = []
    for step in at:
        try:
            values = values[step]
        except (KeyError, IndexError, TypeError):
            break
        found.append(step)
    return tuple(found)
