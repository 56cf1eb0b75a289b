"""The part that requests to a model have in common: the body is read, checked, answered and traced, and any error is
answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from gateway import errors, metrics, traces
from gateway.access.access import Caller
from gateway.http import dialects, messages, sse
from gateway.http.dialects import Dialect
from gateway.metrics import Count
from gateway.openai import bodies
from gateway.openai.vectors import MOST_AT_ONCE
from gateway.request import Request
from gateway.served import Choice
from gateway.serving import Serving
from protos import common_pb2
from services.errors import PrismError
from services.telemetry import log
from services.telemetry.spans import Span

_log = log.get(__name__)
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that collect a response first would deliver a stream all at once
]


class Body(Protocol):
    """A checked body."""

    @property
    def model(self) -> str: ...

    @property
    def streams(self) -> bool: ...

    def request(self, request_id: str, slo: common_pb2.Slo, arrival_s: float) -> Request: ...


B = TypeVar("B", bound=Body)
T = TypeVar("T")


class Endpoint(Generic[B]):
    """The ASGI app of one path."""

    path: str
    operation: str
    """Operation name in OpenTelemetry's GenAI conventions."""

    def __init__(self, serving: Serving, bodies: messages.Bodies) -> None:
        self._serving = serving
        self._bodies = bodies

    def _parse(self, data: bytes) -> B:
        """The checked body. Raises BadField."""
        raise NotImplementedError

    async def _answer(self, body: B, request: Request, reply: Reply, caller: Caller) -> None:
        """Answers the request. A PrismError that it raises becomes the answer."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = time.monotonic()
        headers = messages.headers_of(scope)
        request_id = messages.request_id(headers)
        span = traces.of_http(self.path, headers, arrival_s)
        caller: Caller = scope[messages.CALLER]
        log.bind(request_id=request_id, **caller.log_fields, **span.log_fields)
        count = messages.count_of(scope)
        reply = Reply(send, messages.answer_headers(scope, request_id), span, count, dialects.of(self.path))
        try:
            data = await self._bodies.read(receive)
            try:
                body = self._parse(data)
            except PrismError:
                count.model = self._serving.known(bodies.model_of(data), caller)
                raise
            count.model = self._serving.known(body.model, caller)
            request = self._serving.resolve(body.request(request_id, messages.slo(headers), arrival_s))
            traces.asked(span, request, self.operation, streams=body.streams)
            async with messages.WhileConnected(receive) as client:
                await self._answer(body, request, reply, caller)
            if client.gone:
                reply.gone()
        except messages.ClientGone:
            reply.gone()
        except PrismError as error:
            await reply.fail(error)
        except Exception:  # the outermost edge of a request: it gets an answer, the log gets the trace
            _log.exception("request failed")
            await reply.fault()
        finally:
            span.end()


class Reply:
    """The response to one request, as a whole or as a stream."""

    def __init__(
        self, send: Send, headers: errors.Headers, span: Span, count: Count, dialect: Dialect = dialects.OPENAI
    ) -> None:
        """`headers`: those that the response has in either form. `dialect`: in which errors are written."""
        self.dialect = dialect
        self.span = span
        self._send = send
        self._headers = headers
        self._count = count
        self._streaming = False
        self._ended = False
        self.said = False
        """Whether there were events since this was last set to False."""

    def add(self, headers: errors.Headers) -> None:
        """Adds headers to a response that has not begun."""
        self._headers += headers

    async def whole(self, body: bytes) -> None:
        self._count.answered(200)
        self._ended = True
        traces.replied(self.span, 200)
        await messages.respond(self._send, 200, body, self._headers)

    async def events(self, events: bytes, more: bool = True) -> None:
        self.said = True
        if not more:
            self._ended = True
        if not self._streaming:
            await self._begin()
        await self._send({"type": "http.response.body", "body": events, "more_body": more})

    async def comment(self) -> None:
        """Sends the comment that the model wakes. It may begin the stream; once the answer has ended it does
        nothing."""
        if not self._ended and not self._streaming:
            await self._begin()
        if not self._ended:
            await self._send({"type": "http.response.body", "body": sse.WAKING, "more_body": True})

    async def _begin(self) -> None:
        self._streaming = True
        self._count.answered(200)
        traces.replied(self.span, 200)
        headers = [*_EVENT_STREAM, *self._headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def fail(self, error: PrismError) -> None:
        """Answers with the error: by its status, or as an event once the response has begun, which clients raise."""
        self._count.failed(error)
        status = errors.shape(error).status
        if self._streaming or status >= 500:  # an error of the client is no failure of the server
            self.span.fail(type(error).__name__, str(error))
        if self._streaming:
            await self.events(self.dialect.events(error), more=False)
        else:
            self._ended = True
            traces.replied(self.span, status)
            await messages.respond_error(self._send, error, self._headers, self.dialect)

    async def fault(self) -> None:
        """Answers with a fault of the gateway."""
        self._count.fault()
        self.span.fail("fault")
        if self._streaming:
            await self.events(self.dialect.events(None), more=False)
        else:
            self._ended = True
            traces.replied(self.span, 500)
            await messages.respond(self._send, 500, self.dialect.body(None), self._headers)

    def gone(self) -> None:
        """Records that the client has left; does nothing if it had the whole answer."""
        if not self._ended:
            self.span.fail(metrics.GONE)
            self._count.gone()


async def gathered(made: Callable[[Choice], T], choices: Sequence[Choice]) -> list[T]:
    """What is made of each choice when it has ended, in their order; MOST_AT_ONCE of them are under way together. The
    first failure ends the others. Raises that PrismError."""
    results: dict[int, T] = {}
    at_once = asyncio.Semaphore(MOST_AT_ONCE)

    async def collect(choice: Choice) -> None:
        async with at_once:
            while choice.finish_reason is None:
                await choice.next()
        results[choice.index] = made(choice)

    await each(collect, choices)
    return [results[choice.index] for choice in choices]


async def each(work: Callable[[Choice], Coroutine[Any, Any, None]], choices: Sequence[Choice]) -> None:
    """Does `work` for each choice at the same time; the first failure ends the others. Raises that PrismError."""
    if len(choices) == 1:
        await work(choices[0])
        return
    try:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(work(choice))
    except* PrismError as failures:
        first = failures.exceptions[0]
        assert isinstance(first, PrismError)  # no group inside a group: the tasks raise single errors
        raise first from None
