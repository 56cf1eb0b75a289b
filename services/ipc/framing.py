"""Protobuf messages on a stream socket: a 4-byte little-endian length, then the message.

`FramedChannel` is for asyncio, `BlockingChannel` for a thread that looks in between other work. Both buffer what the
peer does not take at once, so that sending never waits.
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
"""Longest frame in bytes; a longer one is the peer's fault."""
_RECEIVED_TOGETHER = 64 << 10
"""Bytes received at a time; a buffer of this size is made with every look, mostly for nothing."""
_LENGTH = struct.Struct("<I")


class ProtoMessage(Protocol):
    """A protobuf message."""

    def SerializeToString(self) -> bytes: ...


M = TypeVar("M")


class _Unframe(Generic[M]):
    """Turns received bytes into messages."""

    def __init__(self, kind: type[M]) -> None:
        self._parse: Callable[[bytes], M] = kind.FromString  # type: ignore[attr-defined]
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Returns the messages that `data` completes. Raises Unavailable for bytes that are no frame, and for a frame
        that is no message."""
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
    """One end of a framed stream in a running loop; `kind` is the type of received messages.

    Messages go to `on_message` as they arrive, in the loop, or wait for `recv` if no callback was given. `on_close` is
    called once, when the peer has gone or sent something that is no message. `on_writable` is called whenever the peer
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
        """Whether the peer reads more slowly than this end sends."""

    async def open(self, sock: socket.socket) -> FramedChannel[M]:
        """Opens the channel over a connected socket, which belongs to the channel from then on."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)
        return self

    async def connect(self, path: str) -> FramedChannel[M]:
        """Connects to the Unix socket at `path`. Raises OSError."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, path)
        return self

    def send(self, message: ProtoMessage) -> None:
        """Sends or buffers a message. It is dropped if the peer has gone, which `on_close` or `recv` reports."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(frame(message))

    async def recv(self) -> M | None:
        """The next message; None once the peer has closed."""
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
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's transport has the methods

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
    """One end of a framed stream in a thread that has other work: nothing here ever waits, except `flush`."""

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
        """Whether bytes wait to be sent; if so, poll for writing too, and call `flush_ready`."""
        return bool(self._outgoing)

    def send(self, message: ProtoMessage) -> None:
        """Sends or buffers a message; it is dropped if the peer has gone."""
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
        """Waits until everything is sent or the peer has gone."""
        self._sock.setblocking(True)
        self.flush_ready()
        self._sock.setblocking(False)

    def recv_ready(self) -> list[M]:
        """The messages that have arrived, possibly none. Sets `closed` if the peer has closed, or sends something that
        is no message."""
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
