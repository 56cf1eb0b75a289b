"""HTTP connections with bounds: they end if the client takes too much room or time for a request, or does not read what
is written to it, and an offer to speak another protocol changes nothing.

uvicorn bounds neither what comes before a body and after it, nor how long that takes; bodies are bounded by
`http.Bodies`. Its parser ends a request with an `Upgrade` at the end of its head, and the body is lost: clients offer
HTTP/2 in that way.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway import errors
from gateway.http import paths
from gateway.http.messages import JSON
from gateway.metrics import Count

MOST_HEAD_BYTES = 64 << 10
"""The most bytes of a request line with its headers, and of trailers; nginx takes 32 KiB."""
HEAD_TIME_OUT_S = 30.0
"""Seconds from a connection, or from a request's first byte on a kept connection, to the end of its headers. The rest
of a body that has been answered may take as long."""
READ_TIME_OUT_S = 60.0
"""Seconds within which a client has to read some of what is written. A client that reads nothing would keep places of
requests, and memory."""


@dataclass(frozen=True)
class _Refusal:
    """The last response on a connection."""

    status: int
    phrase: bytes
    code: str
    text: str

    @property
    def response(self) -> bytes:
        body = orjson.dumps(errors.envelope(self.text, "invalid_request_error", self.code))
        head = b"HTTP/1.1 %d %s\r\ncontent-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        return head % (self.status, self.phrase, JSON, len(body)) + body

    def count(self) -> None:
        count = Count(paths.OTHER)
        count.answered(self.status, self.code)
        count.end()


_TOO_LARGE = _Refusal(
    431,
    b"Request Header Fields Too Large",
    "head_too_large",
    f"The path and headers are longer than {MOST_HEAD_BYTES} bytes.",
)
_TOO_SLOW = _Refusal(
    408, b"Request Timeout", "head_time_out", f"The headers did not come within {HEAD_TIME_OUT_S:.0f} s."
)
_NO_TUNNEL = _Refusal(405, b"Method Not Allowed", "method_not_allowed", "Not allowed: CONNECT.")
_NO_HTTP = _Refusal(400, b"Bad Request", "no_http", "This is no HTTP request, or its method is none that is known.")
_NO_HTTP2 = _Refusal(505, b"HTTP Version Not Supported", "http_version", "HTTP/2 is not spoken here: use HTTP/1.1.")
_PREFACE = b"PRI"
"""Method of the first line from a client that expects HTTP/2."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._aside = 0
        """Bytes received since the last byte of a body, or the last end of a request."""
        self._in_message = False
        self._refused = False
        self._answered: RequestResponseCycle | None = None
        """The request whose answer is being made; not the last one received if a client sends several in a row."""
        self._head_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, error: Exception | None) -> None:
        self._head_came()
        self._stop_looking()
        self._leave_all()
        super().connection_lost(error)

    def _leave_all(self) -> None:
        """Ends all requests of the connection: the client takes no answer any more. uvicorn itself ends only the last
        request, and goes on writing for the others."""
        for cycle in (self._answered, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_again()

    def resume_writing(self) -> None:
        self._stop_looking()
        super().resume_writing()

    def _look_again(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(READ_TIME_OUT_S, self._look, unread)

    def _look(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() < unread:
            self._look_again()
        else:
            self._leave_all()
            self.transport.abort()

    def _stop_looking(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._aside += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._aside > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(_TOO_LARGE)
        else:
            self._await_next()

    def _parse(self, data: bytes | memoryview) -> None:
        head = b""
        while True:
            try:
                if head:
                    self.parser.feed_data(head)
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                if self._refused:
                    return
                head, data = self._head_without_offer(), memoryview(data)[stopped.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                if self._refused:
                    return
                self._refuse(_NO_HTTP2 if self.parser.get_method() == _PREFACE else _NO_HTTP)
                return

    def _head_without_offer(self) -> bytes:
        """The head that was just parsed, without its `Upgrade`, for a new parser: a server may ignore that header (RFC
        9110, 7.8)."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_came()
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MOST_HEAD_BYTES:
            self._refuse(_TOO_LARGE)
        elif self.parser.get_method() == b"CONNECT":
            self._refuse(_NO_TUNNEL)
        elif not self.parser.should_upgrade():
            super().on_headers_complete()
        # Otherwise the parser stops here, and a new one gets the head without the offer, and everything behind it.

    def on_body(self, body: bytes) -> None:
        self._aside = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._aside = 0
        self._in_message = False
        self._head_came()
        if not self._refused:
            super().on_message_complete()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIME_OUT_S, self._refuse, _TOO_SLOW)

    def _await_next(self) -> None:
        """Bounds the wait for a next request. uvicorn ends its own wait with whatever comes, even the rest of a body
        that it has answered or empty lines, and would wait for ever then."""
        waits = self._head_timer is not None or self.timeout_keep_alive_task is not None
        if waits or self.transport.is_closing() or self.cycle is None or not self.cycle.response_complete:
            return
        if self._in_message or self._aside:
            self._await_head()
        else:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, refusal: _Refusal) -> None:
        """Ends the connection with `refusal`. If a response to an earlier request is under way, that is cut off
        instead, since nothing can be sent beside it."""
        self._refused = True
        self._head_came()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(refusal.response)
            refusal.count()
        self._leave_all()
        self.transport.close()
