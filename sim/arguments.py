"""Command-line arguments for fleets and settings. Errors are argparse's, with a line for the person."""

from __future__ import annotations

import argparse

MOST_GPUS = 10_000
"""Most GPUs of a simulated fleet: a larger number is a mistake, and would take days."""


def group_sizes(text: str) -> list[int]:
    """Sizes of groups, from text: "24x1,2x4" is twenty-four groups of one GPU and two of four. Raises ArgumentTypeError
    for another form, and for more than MOST_GPUS in all."""
    sizes: list[int] = []
    total = 0
    for part in text.split(","):
        count, _, size = part.partition("x")
        if not (count.isdecimal() and size.isdecimal() and int(count) and int(size)):
            raise argparse.ArgumentTypeError(f"{part!r} is not a number of groups, an x, and their size: 8x1,2x4")
        total += int(count) * int(size)
        if total > MOST_GPUS:
            raise argparse.ArgumentTypeError(f"{text!r} is more than {MOST_GPUS:,} GPUs")
        sizes += [int(size)] * int(count)
    return sizes


def setting(text: str) -> tuple[str, str]:
    """Name and value of a setting, from "name=value"."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    return name, value
