"""Counts in sentences."""

from __future__ import annotations


def counted(count: int, what: str, several: str = "") -> str:
    """A count with its noun: "1 model", "2 models". `several`: plural of a noun that takes no s."""
    return f"{count} {what if count == 1 else several or what + 's'}"


def agreeing(count: int, one: str, several: str) -> str:
    """The verb that goes with a count: one model "leaves", two "leave"."""
    return one if count == 1 else several
