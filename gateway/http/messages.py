"""The parts of HTTP that every endpoint needs: bodies, headers, clients that go away, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import uuid
from types import TracebackType

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway import errors, metrics
from gateway.errors import BadField, NoRoomForBody, TooSlow
from gateway.http import decompression, dialects
from gateway.http.decompression import Unpacked
from gateway.http.dialects import Dialect
from protos import common_pb2
from services.errors import PrismError
from services.runtime import tasks

JSON = b"application/json"
CALLER = "prism.caller"
"""Key of the request's Caller in its ASGI scope."""
COUNT = "prism.count"
"""Key of the request's Count in its ASGI scope."""
ANSWER_HEADERS = "prism.answer_headers"
"""Key, in a request's ASGI scope, of the headers that every answer to it has beside its own."""
BODY_TIME_OUT_S = 300.0
"""Seconds that a whole body may take: 8 MiB at a quarter of a megabit a second."""
SMALL_BODY_BYTES = 64 << 10
"""Bytes of a body that always have room: a client that sends many large bodies slowly does not keep out others'
prompts."""
_LONGEST_ID = 128
_MOST_MILLISECONDS = 10**9


class ClientGone(Exception):
    """The client closed its connection before its request was complete."""


class Bodies:
    """Reads bodies, and counts the bytes of those that are still arriving."""

    def __init__(self, most_bytes: int, most_together_bytes: int) -> None:
        """`most_bytes`: the most of one body. `most_together_bytes`: the most of what all arriving bodies have beyond
        SMALL_BODY_BYTES."""
        self._most = most_bytes
        self._most_together = most_together_bytes
        self._held = 0

    def unpacked(self, headers: Headers, receive: Receive) -> Receive:
        """A `receive` that returns the unpacked body of a request with these headers."""
        encodings = decompression.encodings(headers)
        return Unpacked(receive, encodings, self._most) if encodings else receive

    async def read(self, receive: Receive) -> bytes:
        """A whole body. Raises BodyTooLarge, TooSlow, NoRoomForBody, ClientGone. The rest of the body is not waited for
        then: such an answer ends the connection."""
        try:
            async with asyncio.timeout(BODY_TIME_OUT_S):
                return await self._read(receive)
        except TimeoutError:
            raise TooSlow(f"The body did not come within {BODY_TIME_OUT_S:.0f} s.") from None

    async def _read(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = counted = 0
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > self._most:
                    raise decompression.too_large(self._most)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
                beyond = max(0, size - SMALL_BODY_BYTES)
                self._held += beyond - counted
                counted = beyond
                if self._held > self._most_together:
                    raise NoRoomForBody(f"{self._most_together} bytes of large bodies are on their way already")
        finally:
            self._held -= counted


def request_id(headers: Headers) -> str:
    """The client's own request id, if it can be echoed, or a new one."""
    given = headers.get("x-request-id", "")
    return given if 0 < len(given) <= _LONGEST_ID and given.isascii() and given.isprintable() else uuid.uuid4().hex


def slo(headers: Headers) -> common_pb2.Slo:
    """The targets in the headers; with `x-priority: batch` none. Raises BadField that names the header."""
    drop = headers.get("x-slo-drop", "")
    if drop not in ("", "late"):
        raise BadField(f"'x-slo-drop' is '{drop[:40]}': only 'late' has a meaning.", "x-slo-drop")
    priority = headers.get("x-priority", "")
    if priority not in ("", "interactive", "batch"):
        raise BadField(f"'x-priority' is '{priority[:40]}': it can be 'interactive' or 'batch'.", "x-priority")
    if priority == "batch":
        if given := next((name for name in ("x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-drop") if name in headers), None):
            raise BadField(f"'{given}' is a target, and 'x-priority: batch' has none.", given)
        return common_pb2.Slo(best_effort=True)
    return common_pb2.Slo(
        ttft_ms=_milliseconds(headers, "x-slo-ttft-ms"),
        tpot_ms=_milliseconds(headers, "x-slo-tpot-ms"),
        drop_late=drop == "late",
    )


def _milliseconds(headers: Headers, name: str) -> int:
    given = headers.get(name)
    if given is None:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) <= 12 and 0 < int(given) < _MOST_MILLISECONDS):
        raise BadField(f"'{name}' is '{given[:40]}': it must be a whole number of milliseconds above 0.", name)
    return int(given)


class WhileConnected:
    """A context that is cancelled when the client goes away. Afterwards `gone` says whether it did, and the
    cancellation has been absorbed. Enter it after the body was read."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.gone = False

    async def __aenter__(self) -> WhileConnected:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watcher = tasks.spawn(self._watch(), "watch a client")
        return self

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._watcher.cancel()
        if not self.gone:
            return False
        absorbed = self._task.uncancel() == 0
        return absorbed and kind is not None and issubclass(kind, asyncio.CancelledError)


async def respond(
    send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None, kind: bytes = JSON
) -> None:
    """Sends a whole response."""
    fields = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *(headers or ())]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def respond_empty(send: Send, headers: errors.Headers) -> None:
    """Sends a response without a body, with status 204."""
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body"})


async def respond_error(
    send: Send,
    error: PrismError,
    headers: list[tuple[bytes, bytes]] | None = None,
    dialect: Dialect = dialects.OPENAI,
) -> None:
    fields = [*(headers or ()), *errors.headers(error)]
    await respond(send, errors.shape(error).status, dialect.body(error), fields)


def headers_of(scope: Scope) -> Headers:
    return Headers(scope=scope)


def answer_headers(scope: Scope, request_id: str) -> errors.Headers:
    """Headers that every answer to the request has beside its own."""
    return [(b"x-request-id", request_id.encode()), *scope[ANSWER_HEADERS]]


def count_of(scope: Scope) -> metrics.Count:
    """The Count of the request."""
    count = scope[COUNT]
    assert isinstance(count, metrics.Count)
    return count
