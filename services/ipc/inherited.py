"""Listening sockets that the service manager opened and handed over: sd_listen_fds(3), without its C library.

The manager's socket outlives every process that listens on it: while one is started again, a client that connects
waits, or is taken by another process that has the same socket, and is not refused.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

_FIRST_FD = 3


def listeners(environment: MutableMapping[str, str] = os.environ) -> list[socket.socket]:
    """The sockets for this process, in the manager's order. Removes the variables from the environment, since child
    processes have no such sockets."""
    process = environment.pop("LISTEN_PID", "")
    count = environment.pop("LISTEN_FDS", "")
    environment.pop("LISTEN_FDNAMES", None)
    if process != str(os.getpid()) or not count.isdigit():
        return []
    found = [socket.socket(fileno=fd) for fd in range(_FIRST_FD, _FIRST_FD + int(count))]
    for listener in found:
        listener.set_inheritable(False)
    return found
