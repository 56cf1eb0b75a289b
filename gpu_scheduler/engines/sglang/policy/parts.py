"""Long lists that are worked through in parts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SLOTS_TOGETHER = 1 << 20
"""Slots of prefixes of which a copy is made on the device at a time, 8 MiB of them in its private memory. With pages of
one token, those of all cached tokens are tens of millions, and no quota has room for a copy."""


def slices(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Slices of a list, in order and as few as can be, whose elements have `most` in all, or one element that has more.
    `sizes`: the size of each element."""
    start = total = 0
    for index, size in enumerate(sizes):
        if total + size > most and index > start:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))
