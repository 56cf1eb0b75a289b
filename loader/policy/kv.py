"""Which bytes go where when the KV of some tokens moves from one engine's extents to another's. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loader.policy.chunks import Chunk, Pair


@dataclass(frozen=True)
class KvPiece:
    """Some bytes of one extent, which is named by its place among those that are borrowed."""

    extent: int
    offset: int
    nbytes: int


def pairs(sources: Sequence[KvPiece], targets: Sequence[KvPiece], skip_bytes: int, chunk_bytes: int) -> list[Pair]:
    """The steps that bring what the sources hold, back to back and without its first `skip_bytes`, to the targets, each
    at most `chunk_bytes` long and within one piece of either side. The targets may be too small for all of it: then its
    beginning comes. Raises ValueError when they are larger than what there is."""
    left = deque(_cut(_behind(sources, skip_bytes), chunk_bytes))
    found: list[Pair] = []
    at = 0
    for target in targets:
        while target.nbytes:
            if not left:
                raise ValueError(f"there is room for more than the {at} bytes that there are")
            source = left.popleft()
            nbytes = min(source.nbytes, target.nbytes)
            found.append(
                Pair(Chunk(source.extent, source.offset, at, nbytes), Chunk(target.extent, target.offset, at, nbytes))
            )
            at += nbytes
            target = _after(target, nbytes)
            if nbytes < source.nbytes:
                left.appendleft(_after(source, nbytes))
    return found


def _behind(pieces: Sequence[KvPiece], skip_bytes: int) -> Iterator[KvPiece]:
    for piece in pieces:
        skipped = min(skip_bytes, piece.nbytes)
        skip_bytes -= skipped
        if skipped < piece.nbytes:
            yield _after(piece, skipped)


def _cut(pieces: Iterator[KvPiece], chunk_bytes: int) -> Iterator[KvPiece]:
    for piece in pieces:
        while piece.nbytes > chunk_bytes:
            yield KvPiece(piece.extent, piece.offset, chunk_bytes)
            piece = _after(piece, chunk_bytes)
        yield piece


def _after(piece: KvPiece, nbytes: int) -> KvPiece:
    return KvPiece(piece.extent, piece.offset + nbytes, piece.nbytes - nbytes)
