"""Memory that a process takes of a device beside its leases."""

from __future__ import annotations

import os

from balloond import backends


def counted(device: str) -> int:
    """Bytes that the device itself counts for this process, imported extents left out; 0 where it reports none."""
    try:
        processes = backends.look(device).processes
    except OSError:
        return 0
    return dict(processes).get(os.getpid(), 0)


def set_stack(nbytes: int) -> int:
    """Sets the bytes of stack of each thread of the GPU whose context is the calling thread's, and returns what they
    were before. Nothing may run there. Raises OSError."""
    from balloond.backends import cuda

    return cuda.set_stack(nbytes)
