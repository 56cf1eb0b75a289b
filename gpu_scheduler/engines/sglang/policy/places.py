"""Byte ranges of KV blocks (envelopes) within the extents of a range. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def runs(envelopes: Sequence[int], envelope_bytes: int, extent_bytes: int) -> list[tuple[int, int, int]]:
    """(extent, offset, bytes) runs of these envelopes, in their order, each within one extent. Neighbours that follow
    each other are joined into one run as far as the extent reaches."""
    found: list[tuple[int, int, int]] = []
    for envelope in envelopes:
        at, end = envelope * envelope_bytes, (envelope + 1) * envelope_bytes
        while at < end:
            extent, offset = divmod(at, extent_bytes)
            nbytes = min(end, (extent + 1) * extent_bytes) - at
            if found and found[-1][0] == extent and found[-1][1] + found[-1][2] == offset:
                found[-1] = (extent, found[-1][1], found[-1][2] + nbytes)
            else:
                found.append((extent, offset, nbytes))
            at += nbytes
    return found
