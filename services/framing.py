"""Protobuf messages on a stream socket: a 4-byte little-endian length, then the message.

`FramedChannel` for asyncio, `BlockingChannel` for a thread that looks in between other work. Both buffer what the other
side does not take at once, so that sending never waits.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from services.errors import Unavailable

MAX_BYTES = 64 << 20
"""A longer frame is a fault of the other side."""
_LENGTH = struct.Struct("<I")


class Message(Protocol):
    """A protobuf message."""

    def SerializeToString(self) -> bytes: ...


M = TypeVar("M")


class _Unframe(Generic[M]):
    """Bytes in, messages out."""

    def __init__(self, kind: type[M]) -> None:
        self._parse: Callable[[bytes], M] = kind.FromString  # type: ignore[attr-defined]
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        self._buffer += data
        messages: list[M] = []
        start = 0
        while len(self._buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_BYTES:
                raise Unavailable(f"a frame of {length} bytes: the other side does not speak this protocol")
            if len(self._buffer) - start - 4 < length:
                break
            # type: ignore[attr-defined]
            message = self._parse(bytes(self._buffer[start + 4 : start + 4 + length]))
            messages.append(message)
            start += 4 + length
        del self._buffer[:start]
        return messages


def frame(message: Message) -> bytes:
    data = message.SerializeToString()
    return _LENGTH.pack(len(data)) + data


class FramedChannel(Generic[M]):
    """One end in a running loop; `kind` is what is received."""

    def __init__(self, sock: socket.socket, kind: type[M]) -> None:
        self._sock = sock
        self._unframe = _Unframe(kind)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ready: list[M] = []

    async def open(self) -> FramedChannel[M]:
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._sock)
        return self

    def send(self, message: Message) -> None:
        """Queues a message. Dropped when the other side is gone: `recv` tells."""
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def recv(self) -> M | None:
        """The next message, None when the other side closed."""
        assert self._reader is not None
        while not self._ready:
            try:
                data = await self._reader.read(1 << 18)
            except OSError:
                return None
            if not data:
                return None
            self._ready = self._unframe.feed(data)
            self._ready.reverse()
        return self._ready.pop()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        else:
            self._sock.close()


class BlockingChannel(Generic[M]):
    """One end in a thread that has other work: nothing here ever waits, except `flush`."""

    def __init__(self, fd: int, kind: type[M]) -> None:
        self._sock = socket.socket(fileno=fd)
        self._sock.setblocking(False)
        self._unframe = _Unframe(kind)
        self._outgoing = bytearray()
        self.closed = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def pending(self) -> bool:
        """Whether something waits to be sent: then poll for writing too, and call `flush_ready`."""
        return bool(self._outgoing)

    def send(self, message: Message) -> None:
        """Sends or buffers. Dropped when the other side is gone."""
        self._outgoing += frame(message)
        self.flush_ready()

    def flush_ready(self) -> None:
        while self._outgoing and not self.closed:
            try:
                sent = self._sock.send(self._outgoing)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            del self._outgoing[:sent]

    def flush(self) -> None:
        """Waits until everything is sent or the other side is gone."""
        self._sock.setblocking(True)
        self.flush_ready()
        self._sock.setblocking(False)

    def recv_ready(self) -> list[M]:
        """The messages that are here now, possibly none. Sets `closed` when the other side closed."""
        messages: list[M] = []
        while not self.closed:
            try:
                data = self._sock.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            messages += self._unframe.feed(data)
        return messages
