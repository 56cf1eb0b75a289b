"""Counts in sentences."""

from __future__ import annotations


def counted(count: int, what: str, several: str = "") -> str:
    """As "1 model" and "2 models"; `several`: what is more than one of a word that takes no s."""
    return f"{count} {what if count == 1 else several or what + 's'}"


def agreeing(count: int, one: str, several: str) -> str:
    """The word that goes with so many: a model "leaves", two "leave"."""
    return one if count == 1 else several
