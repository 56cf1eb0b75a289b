"""How a copy between an image and the extents of a lease, or between two leases, is cut into steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Chunk:
    """One step of a copy: `nbytes` at `offset` of an extent and at `at` of the image. `extent` is the extent's place in
    the range."""

    extent: int
    offset: int
    at: int
    nbytes: int


@dataclass(frozen=True)
class Pair:
    """One step from extents to other extents: the same bytes of the range, where they lie in either."""

    source: Chunk
    target: Chunk

    @property
    def nbytes(self) -> int:
        return self.source.nbytes


def plan(extents: Sequence[int], total_bytes: int, chunk_bytes: int) -> tuple[Chunk, ...]:
    """The steps that cover the image's bytes [0, total_bytes) in ascending order, each at most `chunk_bytes` long and
    within one extent. `extents` are the sizes of the range's extents, back to back. Raises ValueError with the
    arithmetic when they are too small together; what they have beyond `total_bytes` is padding and left alone."""
    if chunk_bytes <= 0:
        raise ValueError(f"chunks of {chunk_bytes} bytes")
    if sum(extents) < total_bytes:
        raise ValueError(f"{len(extents)} extents of {sum(extents)} bytes do not hold {total_bytes}")
    chunks: list[Chunk] = []
    at = 0
    for number, size in enumerate(extents):
        offset = 0
        end = min(size, total_bytes - at)
        while offset < end:
            nbytes = min(chunk_bytes, end - offset)
            chunks.append(Chunk(number, offset, at, nbytes))
            offset += nbytes
            at += nbytes
    return tuple(chunks)


def pairs(sources: Sequence[int], targets: Sequence[int], total_bytes: int, chunk_bytes: int) -> tuple[Pair, ...]:
    """The steps from extents of sizes `sources` to extents of sizes `targets`, each within one extent of either side.
    The limits and the error are those of `plan`."""
    found: list[Pair] = []
    waiting = deque(plan(targets, total_bytes, chunk_bytes))
    for source in plan(sources, total_bytes, chunk_bytes):
        while source.nbytes:
            target = waiting.popleft()
            nbytes = min(source.nbytes, target.nbytes)
            found.append(Pair(replace(source, nbytes=nbytes), replace(target, nbytes=nbytes)))
            source = _after(source, nbytes)
            if nbytes < target.nbytes:
                waiting.appendleft(_after(target, nbytes))
    return tuple(found)


def _after(chunk: Chunk, nbytes: int) -> Chunk:
    return Chunk(chunk.extent, chunk.offset + nbytes, chunk.at + nbytes, chunk.nbytes - nbytes)
