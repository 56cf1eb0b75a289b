"""Long lists that are worked through in parts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


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
