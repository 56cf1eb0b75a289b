"""Copies for devices whose memory is the host's: extents are memfds, and a link is a thread that copies.

An extent is read and written through its descriptor instead of being mapped: the engine's mapping shows the same pages,
the kernel copies without page faults on our side, and an extent that is shorter than was said is an error here where
touching a mapping of it would kill the process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from loader.policy.chunks import Chunk, Pair
from loader.transfers.base import Borrowed, Busy, Tidy, nobody, nothing
from loader.transfers.lanes import Lanes, Move
from services.errors import Unmet

_ONE_AT_A_TIME = 0
"""Window of a link in bytes: a thread does not begin the next part before it has done one."""
_BUFFER_BYTES = 1 << 20
"""Bytes of the buffer between two extents, which stays in a processor's cache."""


class CpuTransfer:
    """Copies for a device in host memory; see Transfer."""

    def __init__(self, links: Sequence[str] = ("cpu:0",), lanes: Lanes | None = None) -> None:
        """`lanes`: those of other transfers, to share links with them; by default its own."""
        self._links = links
        self._lanes = lanes or _lanes()

    def out_of(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> Tidy:
        return self._carry(_read, extents, image, plan, done)

    def into(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> Tidy:
        return self._carry(_write, extents, image, plan, done)

    def _carry(
        self,
        act: Callable[[Borrowed, int, memoryview], None],
        extents: Sequence[Borrowed],
        image: memoryview,
        plan: Sequence[Chunk],
        done: Callable[[Chunk], None],
    ) -> Tidy:
        """Has the links `act` on the part of the image of each chunk."""

        def move(chunk: Chunk, stream: object) -> None:
            act(extents[chunk.extent], chunk.offset, image[chunk.at : chunk.at + chunk.nbytes])

        _check_sizes(extents)
        self._lanes.carry(self._links, plan, move=move, done=done)
        return nothing

    def between(
        self,
        sources: Sequence[Borrowed],
        targets: Sequence[Borrowed],
        plan: Sequence[Pair],
        done: Callable[[Pair], None],
    ) -> Tidy:
        def move(pair: Pair, stream: object) -> None:
            buffer = memoryview(bytearray(min(pair.nbytes, _BUFFER_BYTES)))
            for at in range(0, pair.nbytes, _BUFFER_BYTES):
                part = buffer[: pair.nbytes - at]
                _read(sources[pair.source.extent], pair.source.offset + at, part)
                _write(targets[pair.target.extent], pair.target.offset + at, part)

        if not targets[0].device.startswith("cpu:"):
            raise Unmet(f"there is no way from {sources[0].device} to {targets[0].device}")
        _check_sizes(sources)
        _check_sizes(targets)
        self._lanes.carry(self._links, plan, move=move, done=done)
        return nothing


class _Lane:
    """A link that copies at once, in its thread."""

    def open(self) -> None:
        pass

    def begin(self, move: Move) -> None:
        move(None)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


def _lanes(busy: Busy = nobody) -> Lanes:
    return Lanes(lambda link: _Lane(), _ONE_AT_A_TIME, busy)


class Cpus:
    """The devices in host memory; see TransferKind. Every thread reaches all of the memory."""

    def __init__(self, busy: Busy = nobody) -> None:
        self._lanes = _lanes(busy)

    def reaching(self, device: str, others: Sequence[str]) -> tuple[str, ...]:
        return tuple(others)

    def transfer(self, device: str, links: Sequence[str]) -> CpuTransfer:
        return CpuTransfer(links, self._lanes)

    def forget(self, weights: memoryview) -> None:
        pass


def _read(extent: Borrowed, offset: int, into: memoryview) -> None:
    while into:
        count = os.preadv(extent.fd, [into], offset)
        if count == 0:
            raise OSError(errno.EIO, f"extent {extent.id} ended at {offset}")
        into, offset = into[count:], offset + count


def _write(extent: Borrowed, offset: int, part: memoryview) -> None:
    while part:
        count = os.pwrite(extent.fd, part, offset)
        part, offset = part[count:], offset + count


def _check_sizes(extents: Sequence[Borrowed]) -> None:
    for extent in extents:
        size = os.fstat(extent.fd).st_size
        if size < extent.nbytes:
            raise OSError(errno.EIO, f"extent {extent.id} has {size} bytes where {extent.nbytes} were granted")
