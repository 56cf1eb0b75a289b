"""What a process takes of a device beside its leases."""

from __future__ import annotations

import os

from balloond import backends


def counted(device: str) -> int:
    """The device's own figure of bytes for this process, which leaves imported extents out; 0 where it tells none."""
    try:
        processes = backends.look(device).processes
    except OSError:
        return 0
    return dict(processes).get(os.getpid(), 0)


def set_stack(nbytes: int) -> int:
    """Of each thread of the GPU whose context is the calling thread's; what it was before. Nothing may run there.
    Raises OSError."""
    from balloond.backends import cuda

    return cuda.set_stack(nbytes)
