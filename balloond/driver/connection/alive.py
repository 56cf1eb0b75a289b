"""A file that says whether processes hold memory, for a balloond whose keeper died with its predecessor.

The file lies beside the handoff socket. A process with a lease holds a shared lock on it, which the kernel drops with
the process; balloond keeps in it what each device had to give out (`balloond.node.saved_capacity`).
"""

from __future__ import annotations

import fcntl
import os


def path_of(handoff: str) -> str:
    return f"{handoff}.alive"


def hold(handoff: str) -> int:
    """Takes the lock and returns the descriptor that holds it. balloond has made the file before any process has a
    lease."""
    fd = os.open(path_of(handoff), os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def anybody(handoff: str) -> bool:
    """Whether a process with a lease lives."""
    try:
        fd = os.open(path_of(handoff), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
