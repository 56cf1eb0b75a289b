"""Datagrams with descriptors on Unix SEQPACKET sockets: ordered, message by message, and each end sees the other close.

There are blocking functions for threads, and `SeqpacketServer` and `SeqpacketConnection` for asyncio.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.errors import Unavailable
from services.ipc import sockets
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
MAX_DESCRIPTORS = 253
"""The kernel's limit of descriptors on one message (SCM_MAX_FD)."""
MAX_BYTES = 128 * 1024
"""Longest message in bytes; below the default socket buffer of 208 KiB, so that a single message always fits."""
_ACCEPT_AGAIN_S = 0.2
_ANCILLARY = socket.CMSG_SPACE(MAX_DESCRIPTORS * 4)


@dataclass(frozen=True)
class Peer:
    """The process at the other end, by the kernel's word. `pidfd` becomes readable when that process is dead; the
    receiver of the Peer closes it."""

    pid: int
    uid: int
    gid: int
    pidfd: int


def new() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def connect(path: str, timeout_s: float | None = None) -> socket.socket:
    """A blocking connection to the socket at `path`; connecting takes `timeout_s` seconds at most. Raises OSError."""
    there = new()
    there.settimeout(timeout_s)
    try:
        there.connect(path)
    except OSError:
        there.close()
        raise
    there.settimeout(None)
    return there


def listen(path: str) -> socket.socket:
    """A listening socket; a stale file is removed first. Raises Unavailable with one line if another process serves the
    path."""
    here = sockets.bound(new, path, 0o600)
    here.listen(64)
    return here


def send(sock: socket.socket, message: bytes, fds: Sequence[int] = (), *, wait: bool = True) -> None:
    """Sends one message. Raises ValueError if it is too large, OSError, and BlockingIOError if the buffer is full and
    the socket, or this call, does not wait."""
    if len(message) > MAX_BYTES or len(fds) > MAX_DESCRIPTORS:
        raise ValueError(f"{len(message)} bytes with {len(fds)} descriptors do not fit one message")
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([message], ancillary, 0 if wait else socket.MSG_DONTWAIT)


def recv(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receives one message with its descriptors, which the caller has to close. Empty bytes: the other end has closed.
    Raises OSError, also for a message that the kernel cut."""
    message, ancillary, flags, _ = sock.recvmsg(MAX_BYTES, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % 4])
            fds.extend(numbers)
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        for fd in fds:
            os.close(fd)
        raise OSError("a message was cut: too many descriptors or bytes for this process's limits")
    return message, fds


def peer(sock: socket.socket) -> Peer:
    """The process at the other end. Raises Unavailable if its pid is not visible here (no shared pid namespace) or it
    has gone."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if pid == 0:
        raise Unavailable("the peer's pid is not visible here: both ends must share a pid namespace")
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise Unavailable(f"peer {pid}: {error.strerror}") from None
    return Peer(pid, uid, gid, pidfd)


class SeqpacketConnection:
    """One connection in a running loop. `send` never blocks: messages that the socket does not take at once wait in a
    queue."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._loop = asyncio.get_running_loop()
        self._outgoing: deque[tuple[bytes, list[int]]] = deque()
        self._writing = False
        self._readable = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._closed = False
        self._loop.add_reader(sock.fileno(), self._readable.set)

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        """Sends or queues one message. Descriptors are duplicated if they have to wait. The message is dropped if the
        connection is closed."""
        if self._closed:
            return
        if not self._outgoing:
            try:
                send(self.sock, message, fds)
                return
            except BlockingIOError:
                pass
            except OSError:
                self.close()
                return
        self._outgoing.append((message, [os.dup(fd) for fd in fds]))
        self._drained.clear()
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self.sock.fileno(), self._flush)

    def _flush(self) -> None:
        while self._outgoing:
            message, fds = self._outgoing[0]
            try:
                send(self.sock, message, fds)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            for fd in fds:
                os.close(fd)
            self._outgoing.popleft()
        self._loop.remove_writer(self.sock.fileno())
        self._writing = False
        self._drained.set()

    async def drained(self) -> None:
        """Returns when the peer has taken everything that was sent, or has gone. A server that waits for this between
        requests holds one answer for a peer that does not read, instead of answers to everything that it sends."""
        await self._drained.wait()

    async def recv(self) -> tuple[bytes, list[int]] | None:
        """The next message with its descriptors; None once the connection is closed."""
        while not self._closed:
            try:
                message, fds = recv(self.sock)
            except BlockingIOError:
                self._readable.clear()
                await self._readable.wait()
                continue
            except OSError:
                break
            if not message and not fds:
                break
            return message, fds
        self.close()
        return None

    def close(self) -> None:
        """Closes the connection; safe to repeat. A pending `recv` returns None."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self.sock.fileno())
        if self._writing:
            self._loop.remove_writer(self.sock.fileno())
        self.sock.close()
        for _, fds in self._outgoing:
            for fd in fds:
                os.close(fd)
        self._outgoing.clear()
        self._drained.set()
        self._readable.set()


async def connect_async(path: str) -> SeqpacketConnection:
    """A connection in the running loop. Raises OSError. (Connecting to a Unix socket does not wait for the peer.)"""
    return SeqpacketConnection(connect(path, timeout_s=5.0))


class SeqpacketServer:
    """Accepts connections on `path` and runs `on_connect(connection)` for each in a task of its own."""

    def __init__(self, path: str, on_connect: Callable[[SeqpacketConnection], Awaitable[None]]) -> None:
        self.path = path
        self._on_connect = on_connect
        self._connections: dict[SeqpacketConnection, asyncio.Task[None]] = {}
        self._sock: socket.socket | None = None
        self._again: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts to listen. Raises Unavailable if another process serves the path."""
        self._sock = listen(self.path)
        self._sock.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        assert self._sock is not None
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        assert self._sock is not None
        while True:
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory: connections wait in the kernel's queue, and would wake this loop for
                # ever.
                _log.warning("connections wait", path=self.path, why=error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._sock.fileno())
                self._again = loop.call_later(_ACCEPT_AGAIN_S, self._listen)
                return
            connection = SeqpacketConnection(sock)
            self._connections[connection] = tasks.spawn(self._serve(connection), f"connection on {self.path}")

    async def _serve(self, connection: SeqpacketConnection) -> None:
        try:
            await self._on_connect(connection)
        finally:
            connection.close()
            self._connections.pop(connection, None)

    async def stop(self) -> None:
        if self._again is not None:
            self._again.cancel()
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
            try:
                os.unlink(self.path)
            except FileNotFoundError:
                pass
        await tasks.cancel(*self._connections.values())
