"""Protobuf messages on a stream socket: a 4-byte little-endian length, then the message.

`FramedChannel` for asyncio, `BlockingChannel` for a thread that looks in between other work. Both buffer what the other
side does not take at once, so that sending never waits.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

from google.protobuf.message import DecodeError

from services.errors import Unavailable

MAX_BYTES = 64 << 20
"""A longer frame is a fault of the other side."""
_RECEIVED_TOGETHER = 64 << 10
"""Bytes; a buffer of so many is made with every look, mostly for nothing."""
_LENGTH = struct.Struct("<I")


class ProtoMessage(Protocol):
    """A protobuf message."""

    def SerializeToString(self) -> bytes: ...


M = TypeVar("M")


class _Unframe(Generic[M]):
    """Bytes in, messages out."""

    def __init__(self, kind: type[M]) -> None:
        self._parse: Callable[[bytes], M] = kind.FromString  # type: ignore[attr-defined]
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Raises Unavailable for what is no frame, or no message in one."""
        self._buffer += data
        messages: list[M] = []
        start = 0
        while len(self._buffer) - start >= 4:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_BYTES:
                raise Unavailable(f"a frame of {length} bytes: the other side does not speak this protocol")
            if len(self._buffer) - start - 4 < length:
                break
            try:
                messages.append(self._parse(bytes(self._buffer[start + 4 : start + 4 + length])))
            except DecodeError as error:
                raise Unavailable(f"not understood: {error}") from None
            start += 4 + length
        del self._buffer[:start]
        return messages


def frame(message: ProtoMessage) -> bytes:
    data = message.SerializeToString()
    return _LENGTH.pack(len(data)) + data


class FramedChannel(asyncio.Protocol, Generic[M]):
    """One end in a running loop; `kind` is what is received.

    Messages go to `on_message` as they arrive, in the loop, or wait for `recv` where none was given. `on_close` is
    called once, when the other side is gone or spoke something else. `on_writable` is called whenever the other side
    has caught up with what `send` had to buffer (`congested`).
    """

    def __init__(
        self,
        kind: type[M],
        on_message: Callable[[M], None] | None = None,
        on_close: Callable[[], None] | None = None,
        on_writable: Callable[[], None] | None = None,
    ) -> None:
        self._unframe = _Unframe(kind)
        self._on_message = on_message or self._keep
        self._on_close = on_close
        self._on_writable = on_writable
        self._transport: asyncio.WriteTransport | None = None
        self._kept: deque[M | None] = deque()
        self._arrived = asyncio.Event()
        self.congested = False
        """The other side reads more slowly than we send."""

    async def open(self, sock: socket.socket) -> FramedChannel[M]:
        """Over a connected socket, which is ours from now on."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)
        return self

    async def connect(self, path: str) -> FramedChannel[M]:
        """To whoever listens on a Unix socket. Raises OSError."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, path)
        return self

    def send(self, message: ProtoMessage) -> None:
        """Sends or buffers a message. Dropped when the other side is gone: `on_close` or `recv` tells."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(frame(message))

    async def recv(self) -> M | None:
        """The next message, None when the other side closed."""
        while not self._kept:
            self._arrived.clear()
            await self._arrived.wait()
        if self._kept[0] is None:
            return None
        return self._kept.popleft()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _keep(self, message: M | None) -> None:
        self._kept.append(message)
        self._arrived.set()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._unframe.feed(data)
        except Unavailable:
            self.close()
            return
        for message in messages:
            self._on_message(message)

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
        if self._on_writable is not None:
            self._on_writable()

    def connection_lost(self, error: Exception | None) -> None:
        self._keep(None)
        if self._on_close is not None:
            self._on_close()


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

    def send(self, message: ProtoMessage) -> None:
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
        """The messages that are here now, possibly none. Sets `closed` when the other side closed, or speaks
        something else."""
        messages: list[M] = []
        while not self.closed:
            try:
                data = self._sock.recv(_RECEIVED_TOGETHER)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            try:
                messages += self._unframe.feed(data)
            except Unavailable:
                self.closed = True
        return messages
