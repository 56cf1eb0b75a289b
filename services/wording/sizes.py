"""Bytes as people read them."""

from __future__ import annotations


def size(count: float) -> str:
    """The count in the largest binary unit that it fills, up to GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
