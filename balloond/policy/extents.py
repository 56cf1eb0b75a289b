"""Sizes of extents."""

from __future__ import annotations


def whole_pages(nbytes: int, page_bytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // page_bytes) * page_bytes


LARGE = 8
"""Size of a large extent of KV, in usual ones; it is used for what fills it."""
LARGE_WEIGHTS = 12
"""Size of a large extent of weights, in usual ones; all of a model's weights leave together."""


def cut(total_bytes: int, extent_bytes: int, page_bytes: int) -> list[int]:
    """Sizes in bytes of extents that hold `total_bytes` in a row: large ones, then full ones, then one of the pages
    that are left. Raises ValueError if `extent_bytes` is not whole pages.

    Weights are cut like this: few large extents map fast (the cost is per extent, whatever its size), and the last one
    wastes less than a page.
    """
    if extent_bytes <= 0 or extent_bytes % page_bytes:
        raise ValueError(f"an extent of {extent_bytes} bytes is not whole pages of {page_bytes}")
    large, rest = divmod(max(0, total_bytes), LARGE_WEIGHTS * extent_bytes)
    full, rest = divmod(rest, extent_bytes)
    tail = [whole_pages(rest, page_bytes)] if rest else []
    return [LARGE_WEIGHTS * extent_bytes] * large + [extent_bytes] * full + tail


def count_up(nbytes: int, extent_bytes: int) -> int:
    """Number of extents that hold `nbytes`."""
    return max(0, -(-nbytes // extent_bytes))


def count_down(nbytes: int, extent_bytes: int) -> int:
    """Number of whole extents that fit into `nbytes`."""
    return max(0, nbytes // extent_bytes)
