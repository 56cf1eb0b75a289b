"""Packed bodies, in the encodings that `content-encoding` names: gzip, deflate, or one inside another.

They are unpacked piece by piece as they arrive, so that a body which would be large beyond measure ends where any body
ends that is too long, and takes no more memory than that.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from gateway.errors import BadField, BodyTooLarge, OtherEncoding

_HEADER = "content-encoding"
_PIECE_BYTES = 64 << 10
_MOST_LAYERS = 2
"""The most encodings inside one another; each takes memory and time of its own."""
_MOST_MEMBERS = 1024
"""The most members of a gzip body, each of which has a head; many of them take time although they are empty."""
_NAMES = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_UNSUPPORTED = "unsupported_encoding"
_GZIP, _ZLIB, _RAW = 31, 15, -15
"""Formats as zlib's `wbits`."""


def encodings(headers: Headers) -> tuple[str, ...]:
    """Names of the encodings of a body, in the order in which they were applied; empty: it is not packed."""
    given = headers.getlist(_HEADER)
    if not given:
        return ()
    names = (name.strip().lower() for name in ",".join(given).split(","))
    return tuple(name for name in names if name not in ("", "identity"))


class Unpacked:
    """An ASGI `receive` for a packed body that returns the unpacked body, in pieces. Raises OtherEncoding for an
    unknown encoding before it receives anything, BadField for a body that is damaged or cut off, and BodyTooLarge."""

    def __init__(self, receive: Receive, names: Sequence[str], most_bytes: int) -> None:
        """`names`: the encodings, as `encodings` returns them. `most_bytes`: the most bytes of the unpacked body."""
        self._receive = receive
        self._names = names
        self._most = most_bytes
        self._packed = 0
        self._layers: list[_Layer] = []
        self._pieces: Iterator[bytes] | None = None
        """Unpacked pieces of the last message that were not returned yet."""
        self._more = True

    async def __call__(self) -> Message:
        if not self._layers:
            self._layers = _layers(self._names, self._most)
        while True:
            if self._pieces is not None:
                piece = next(self._pieces, None)
                if piece is not None:
                    await asyncio.sleep(0)  # a long body must not hold up other requests' streams
                    return {"type": "http.request", "body": piece, "more_body": True}
                self._pieces = None
                if not self._more:
                    for layer in self._layers:
                        layer.end()
                    return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            data = message.get("body", b"")
            self._packed += len(data)
            if self._packed > self._most + (self._most >> 8) + 1024:  # data that cannot be compressed grows by less
                raise too_large(self._most)
            self._more = message.get("more_body", False)
            self._pieces = _through(self._layers, data)


class _Layer:
    """One encoding of a body."""

    def __init__(self, name: str, most_bytes: int) -> None:
        self._name = name
        self._most = most_bytes
        self._size = 0
        self._members = 0
        self._stream: zlib._Decompress | None = None
        self._ended = True
        """Whether the data so far may be the whole body: it is empty, or ends with a member."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The pieces that `data` unpacks to."""
        while True:
            if self._stream is None:
                if self._members:
                    data = data.lstrip(b"\0")  # some tools fill up the last block with zeros
                if not data:
                    return
                self._members += 1
                if self._members > _MOST_MEMBERS:
                    raise self._damaged(f"it has more than {_MOST_MEMBERS} members")
                self._stream = zlib.decompressobj(self._format(data[0]))
                self._ended = False
            elif self._stream.eof and data:
                raise self._damaged("something follows its end")
            try:
                piece = self._stream.decompress(data, _PIECE_BYTES)
            except zlib.error as error:
                raise self._damaged(str(error)) from None
            data = self._stream.unconsumed_tail
            if self._stream.eof:
                self._ended = True
                data = self._stream.unused_data
                if self._name == "gzip":  # several members may follow each other
                    self._stream = None
            self._size += len(piece)
            if self._size > self._most:
                raise too_large(self._most)
            if piece:
                yield piece
            if not data and len(piece) < _PIECE_BYTES:
                return

    def end(self) -> None:
        """Raises BadField if the body is cut off."""
        if not self._ended:
            raise self._damaged("it is cut off")

    def _format(self, first: int) -> int:
        if self._name == "gzip":
            return _GZIP
        # "deflate" is zlib's format. Some clients send it without zlib's head, whose first byte has an 8 in these bits.
        return _ZLIB if first & 0x0F == 8 else _RAW

    def _damaged(self, why: str) -> BadField:
        return BadField(f"The body cannot be unpacked as {self._name}: {why}.", _HEADER, "invalid_encoding")


def _layers(names: Sequence[str], most_bytes: int) -> list[_Layer]:
    """A layer for each encoding, the outermost first. Raises OtherEncoding."""
    for name in names:
        if name not in _NAMES:
            raise OtherEncoding(
                f"The content-encoding '{name[:40]}' is not supported, only gzip and deflate.", _HEADER, _UNSUPPORTED
            )
    if len(names) > _MOST_LAYERS:
        raise OtherEncoding(f"{len(names)} content-encodings, at most {_MOST_LAYERS} are taken.", _HEADER, _UNSUPPORTED)
    return [_Layer(_NAMES[name], most_bytes) for name in reversed(names)]


def _through(layers: Sequence[_Layer], data: bytes) -> Iterator[bytes]:
    if not layers:
        yield data
        return
    for piece in layers[0].feed(data):
        yield from _through(layers[1:], piece)


def too_large(most_bytes: int) -> BodyTooLarge:
    """The error for a body that is longer than `most_bytes`."""
    return BodyTooLarge(f"The body is longer than {most_bytes} bytes.", None, "body_too_large")
