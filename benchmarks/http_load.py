"""A light HTTP client that streams completions and notes when each token came: raw asyncio protocols, no JSON, no HTTP
library, so that on few cores it measures the server and not itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

_TOKEN = b'"finish_reason":null'
"""In every event that carries a token, and in no other (of some servers, not in the last of an answer)."""
_END = b"0\r\n\r\n"
_KEPT_BYTES = 4096
"""Of the end of an answer: what tells how it ended."""
_FINISH = re.compile(rb'"finish_reason":"(\w+)"')
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_FAULT = re.compile(rb'data: (\{"error".*)')
_SHOWN = 400
"""Characters of an error."""
_IDLE_S = 2.0
"""Servers close connections that nothing came over for a few seconds, perhaps while a request is on its way."""


@dataclass(slots=True)
class Stream:
    """What one request saw. Times are time.monotonic's: uvloop's own clock counts whole milliseconds."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    """When the answer was whole; 0: never."""
    finish: str = ""
    """Why the answer ended, in the server's word."""
    told_tokens: int = 0
    """How many tokens it had, by a usage that was asked for: one event may carry the text of several."""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stream: Stream | None = None
        self._done: asyncio.Future[None] | None = None
        self._tail = self._kept = b""
        self._refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def ask(self, request: bytes) -> Stream:
        stream = self._stream = Stream(time.monotonic())
        done = self._done = self._loop.create_future()
        self._tail = self._kept = b""
        self._refused = False
        self._transport.write(request)
        await done
        return stream

    def data_received(self, data: bytes) -> None:
        stream, done = self._stream, self._done
        if stream is None or done is None or done.done():
            return
        now = time.monotonic()
        if not self._kept and not data.startswith(b"HTTP/1.1 200"):
            self._refused = True
        self._kept = (self._kept + data)[-_KEPT_BYTES:]
        if self._refused:
            self._take_refusal(stream, done)
            return
        # An event may be cut anywhere: what might be the beginning of the mark is looked at again.
        data = self._tail + data
        count = data.count(_TOKEN)
        if count:
            stream.token_s.extend([now] * count)
            data = data[data.rfind(_TOKEN) + len(_TOKEN) :]
        self._tail = data[-len(_TOKEN) :]
        if data.endswith(_END):
            stream.ended_s = now
            if finish := _FINISH.search(self._kept):
                stream.finish = finish[1].decode()
            if usage := _USAGE.search(self._kept):
                stream.told_tokens = int(usage[1])
            if fault := _FAULT.search(self._kept):
                stream.error = "in the stream " + fault[1][:_SHOWN].decode(errors="replace")
            done.set_result(None)

    def _take_refusal(self, stream: Stream, done: asyncio.Future[None]) -> None:
        """The whole of an answer that is no stream: its status and body."""
        head, _, body = self._kept.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if length is not None and len(body) < int(length[1]):
            return
        status = head.partition(b"\r\n")[0].partition(b" ")[2]
        stream.error = (status + b" " + body)[:_SHOWN].decode(errors="replace")
        done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            assert self._stream is not None
            self._stream.error = f"connection lost: {error}"
            self._done.set_result(None)

    def close(self) -> None:
        self._transport.close()


def completion(
    host: str,
    model: str,
    prompt: str | list[int],
    tokens: int,
    headers: Mapping[str, object] | None = None,
    **more: Any,
) -> bytes:
    """A greedy streamed completion as it goes over the wire. `more`: further fields of the body."""
    body = json.dumps(
        {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **more}
    ).encode()
    fields = {"content-type": "application/json", "content-length": len(body), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\n{lines}\r\n".encode() + body


class HttpClient:
    """One kept connection."""

    def __init__(self, host: str, port: int, model: str = "") -> None:
        self._host, self._port, self._model = host, port, model

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_connection(_Connection, self._host, self._port)

    async def ask(self, prompt: str, tokens: int) -> Stream:
        return await self.send(completion(self._host, self._model, prompt, tokens))

    async def send(self, request: bytes) -> Stream:
        """One request after another: what `completion` made."""
        return await self._connection.ask(request)

    def close(self) -> None:
        self._connection.close()


class Connections:
    """As many as are needed at once, kept, and not more than `most`."""

    def __init__(self, host: str, port: int, most: int) -> None:
        self.host, self._port = host, port
        self._idle: list[tuple[float, HttpClient]] = []
        """With when each was used last, the latest at the end."""
        self._free = asyncio.Semaphore(most)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[HttpClient]:
        """A connection, once there is one. One whose block is left by an exception is closed. Raises OSError."""
        async with self._free:
            self._drop_stale()
            client = self._idle.pop()[1] if self._idle else await self._opened()
            try:
                yield client
            except BaseException:
                client.close()
                raise
            self._idle.append((time.monotonic(), client))

    def _drop_stale(self) -> None:
        while self._idle and self._idle[0][0] < time.monotonic() - _IDLE_S:
            self._idle.pop(0)[1].close()

    async def _opened(self) -> HttpClient:
        client = HttpClient(self.host, self._port)
        await client.open()
        return client

    async def prepare(self, count: int) -> None:
        """Has so many ready."""
        opened = await asyncio.gather(*(self._opened() for _ in range(count - len(self._idle))))
        self._idle += [(time.monotonic(), client) for client in opened]

    def close(self) -> None:
        """Those that nobody uses."""
        for _, client in self._idle:
            client.close()
        self._idle.clear()
