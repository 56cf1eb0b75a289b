"""Sizes of extents."""

from __future__ import annotations


def whole_pages(nbytes: int, page_bytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // page_bytes) * page_bytes


def cut(total_bytes: int, extent_bytes: int, page_bytes: int) -> list[int]:
    """The sizes of extents that hold `total_bytes` in a row: full ones, then one of the pages that are left.

    Weights are cut like this: few large extents map fast (28 us each on CUDA, whatever the size), and the last one
    wastes less than a page.
    """
    if extent_bytes <= 0 or extent_bytes % page_bytes:
        raise ValueError(f"an extent of {extent_bytes} bytes is not whole pages of {page_bytes}")
    full, rest = divmod(max(0, total_bytes), extent_bytes)
    return [extent_bytes] * full + ([whole_pages(rest, page_bytes)] if rest else [])


def count_up(nbytes: int, extent_bytes: int) -> int:
    """How many extents hold `nbytes`."""
    return max(0, -(-nbytes // extent_bytes))


def count_down(nbytes: int, extent_bytes: int) -> int:
    """How many whole extents fit `nbytes`."""
    return max(0, nbytes // extent_bytes)
