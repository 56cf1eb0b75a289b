"""How the C library keeps what a process has freed."""

from __future__ import annotations

import contextlib
import ctypes

_M_ARENA_MAX = -8
_ARENAS = 2


def few_arenas() -> None:
    """Makes threads that come from now on share the heap. By default glibc gives each of them, up to eight for each
    core, one of its own, which keeps the most that was ever used in it: a loader had 16 of 1 MiB after an hour. What
    our threads do at the same time is I/O and copying, not allocating. Nothing happens with another C library."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)
