"""A light HTTP client that streams completions and notes when each token came: raw asyncio protocols, no JSON, no HTTP
library, so that on few cores it measures the server and not itself."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import cast

_TOKEN = b'"finish_reason":null'
"""In every event that carries a token, and in no other."""
_END = b"0\r\n\r\n"


@dataclass(slots=True)
class Stream:
    """What one request saw. Times are time.monotonic's: uvloop's own clock counts whole milliseconds."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self._done: asyncio.Future[None] | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> Stream:
        stream = self._stream = Stream(time.monotonic())
        done = self._done = self._loop.create_future()
        self._tail = b""
        self._transport.write(request)
        await done
        return stream

    def data_received(self, data: bytes) -> None:
        stream, done = self._stream, self._done
        if stream is None or done is None:
            return
        now = time.monotonic()
        if not stream.token_s and not data.startswith(b"HTTP/1.1 200") and data.startswith(b"HTTP/1.1"):
            stream.error = data[:400].decode(errors="replace")
            if not done.done():
                done.set_result(None)
            return
        # An event may be cut anywhere: what might be the beginning of the mark is looked at again.
        data = self._tail + data
        count = data.count(_TOKEN)
        if count:
            stream.token_s.extend([now] * count)
            data = data[data.rfind(_TOKEN) + len(_TOKEN) :]
        self._tail = data[-len(_TOKEN) :]
        if data.endswith(_END) and not done.done():
            done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            assert self._stream is not None
            self._stream.error = f"connection lost: {error}"
            self._done.set_result(None)

    def close(self) -> None:
        self._transport.close()


class HttpClient:
    """One kept connection."""

    def __init__(self, host: str, port: int, model: str) -> None:
        self._host, self._port, self._model = host, port, model

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_connection(_Connection, self._host, self._port)

    async def ask(self, prompt: str, tokens: int) -> Stream:
        body = json.dumps(
            {"model": self._model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return await self._connection.ask(head.encode() + body)

    def close(self) -> None:
        self._connection.close()
