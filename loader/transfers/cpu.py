"""Copies for devices whose memory is the host's: extents are memfds.

An extent is read and written through its descriptor instead of being mapped: the engine's mapping shows the same pages,
the kernel copies without page faults on our side, and an extent that is shorter than was said is an error here where
touching a mapping of it would kill the process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence

from loader.policy.chunks import Chunk
from loader.transfers.base import Borrowed


class CpuTransfer:
    """See Transfer."""

    def out_of(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> None:
        _check_sizes(extents)
        for chunk in plan:
            at, end, offset = chunk.at, chunk.at + chunk.nbytes, chunk.offset
            while at < end:
                count = os.preadv(extents[chunk.extent].fd, [image[at:end]], offset)
                if count == 0:
                    raise OSError(errno.EIO, f"extent {extents[chunk.extent].id} ended at {offset}")
                at += count
                offset += count
            done(chunk)

    def into(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> None:
        _check_sizes(extents)
        for chunk in plan:
            at, end, offset = chunk.at, chunk.at + chunk.nbytes, chunk.offset
            while at < end:
                count = os.pwrite(extents[chunk.extent].fd, image[at:end], offset)
                at += count
                offset += count
            done(chunk)


def _check_sizes(extents: Sequence[Borrowed]) -> None:
    for extent in extents:
        size = os.fstat(extent.fd).st_size
        if size < extent.nbytes:
            raise OSError(errno.EIO, f"extent {extent.id} has {size} bytes where {extent.nbytes} were granted")
