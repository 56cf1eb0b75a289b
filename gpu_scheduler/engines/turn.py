"""The prefill turn: one word of shared memory between a gpu_scheduler and its engines (design, section 6).

0 means that anybody may prefill; otherwise only the engine with that index may start a prefill chunk. Engines read the
word between two steps, which costs nothing; a message would wait for the step.
"""

from __future__ import annotations

import mmap
import os
import struct

ANYBODY = 0
_WORD = struct.Struct("<I")


def create() -> int:
    """A descriptor of a fresh word that says ANYBODY; engines inherit it."""
    fd = os.memfd_create("prism-turn")
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd


class Turn:
    """The word, mapped. A 4-byte aligned store is seen whole."""

    def __init__(self, fd: int) -> None:
        self._word = mmap.mmap(fd, mmap.PAGESIZE)

    def give(self, index: int) -> None:
        """Lets only the engine with `index` prefill (ANYBODY: everyone)."""
        _WORD.pack_into(self._word, 0, index)

    @property
    def holder(self) -> int:
        return int(_WORD.unpack_from(self._word, 0)[0])

    def mine(self, index: int) -> bool:
        """Whether the engine with `index` may start a prefill chunk now."""
        return self.holder in (ANYBODY, index)
