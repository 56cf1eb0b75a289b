"""Messages to balloond: sent at once while the socket takes them, and from the loop's thread where it does not.

No thread waits. A balloond that hangs (stopped, in a debugger, on a machine out of memory) reads nothing, and the
kernel takes some 270 messages of those that come ten times a second. A thread that waited here to give memory back
would hold up a step of its engine, and the lease's own thread could not read what balloond says.
"""

from __future__ import annotations

import socket
import threading
from collections import deque

from balloond.driver.connection.loop import DescriptorLoop
from services.ipc import seqpacket


class Outbox:
    """Messages of one lease. All methods but `_watch` and `_flush` need the lease's `lock` held, and may run on any
    thread."""

    def __init__(self, loop: DescriptorLoop, lock: threading.Lock) -> None:
        self._loop = loop
        self._lock = lock
        self._sock: socket.socket | None = None
        self._unsent: deque[bytes] = deque()

    def connected(self, sock: socket.socket) -> None:
        self._sock = sock

    def disconnected(self) -> None:
        """Drops what was not sent: what matters is sent again after the next connection."""
        self._sock = None
        self._unsent.clear()

    def send(self, message: bytes) -> None:
        """Sends a message, or queues it where the socket takes none; without a connection it is dropped."""
        if self._sock is None:
            return
        if not self._unsent and self._sent(message):
            return
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._loop.call(self._watch)

    def _sent(self, message: bytes) -> bool:
        """Whether the message needs no more care: it was sent, or the connection is lost."""
        assert self._sock is not None
        try:
            seqpacket.send(self._sock, message, wait=False)
        except BlockingIOError:
            return False
        except OSError:
            pass  # the reading side sees it, and connects again
        return True

    # --- on the loop's thread

    def _watch(self) -> None:
        with self._lock:
            sock = self._sock if self._unsent else None
        # Only this thread closes the socket.
        if sock is not None:
            self._loop.add_writer(sock.fileno(), self._flush)

    def _flush(self) -> None:
        """Sends queued messages, as many as the socket takes."""
        with self._lock:
            while self._unsent and self._sent(self._unsent[0]):
                self._unsent.popleft()
            done = self._sock if not self._unsent else None
        if done is not None:
            self._loop.remove_writer(done.fileno())
