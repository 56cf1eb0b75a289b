"""Limits of a process: its heaps, and its descriptors."""

from __future__ import annotations

import contextlib
import ctypes
import resource

_M_ARENA_MAX = -8
_ARENAS = 2


def few_arenas() -> None:
    """Makes threads that are started from now on share the heap. By default glibc gives each of them, up to eight for
    each core, an arena of its own, which keeps the most that was ever used in it: a loader had 16 of 1 MiB after an
    hour. Our threads do I/O and copying at the same time, not allocating. With another C library this does nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)


def allow_descriptors() -> int:
    """Raises this process's limit of descriptors, and that of processes that it starts, as far as the system allows.
    Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
