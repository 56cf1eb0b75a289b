"""/v1/chat/completions and /v1/completions: one endpoint in two forms.

The response begins with the first token: until then an error still has its own status, a model that does not wake in
time among them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

import orjson
from starlette.types import Receive, Scope, Send

from gateway import errors, http, openai, sse, traces
from gateway.access import Caller
from gateway.answer import Scored
from gateway.openai import ChatRequest, CompletionRequest
from gateway.request import Request
from gateway.serving import Choice, Served, Serving
from gateway.tokenizer import Tokenizer
from gateway.tools.formats import Call
from protos import common_pb2
from services import log
from services.errors import PrismError
from services.tracing import Span

_log = log.get(__name__)
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies that collect a response first would deliver a stream all at once
]
_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


class Body(Protocol):
    """A checked body of either form."""

    @property
    def streams(self) -> bool: ...

    @property
    def usage_asked(self) -> bool: ...

    def request(self, request_id: str, slo: common_pb2.Slo, arrival_s: float) -> Request: ...


class Form(Protocol):
    """How one of the two APIs writes its answers."""

    path: str
    operation: str
    """In GenAI's words."""

    def parse(self, body: bytes) -> Body: ...

    def head(self, request_id: str, model: str, stream: bool) -> dict[str, Any]:
        """What every object of a response begins with."""

    def events(self, head: dict[str, Any], index: int, with_usage: bool) -> sse.Events: ...

    def choice(self, index: int, text: str, calls: Sequence[Call], logprobs: Any, reason: str | None) -> dict[str, Any]:
        """One whole answer."""

    def logprobs(self, tokenizer: Tokenizer, scored: Sequence[Scored]) -> Any: ...

    def echoes(self, body: Any) -> bool:
        """Whether each answer begins with its prompt."""


class ChatForm:
    path = "/v1/chat/completions"
    operation = "chat"

    def parse(self, body: bytes) -> ChatRequest:
        return openai.parse(ChatRequest, body)

    def head(self, request_id: str, model: str, stream: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": f"chatcmpl-{request_id}", "object": kind, "created": int(time.time()), "model": model}

    def events(self, head: dict[str, Any], index: int, with_usage: bool) -> sse.Events:
        return sse.ChatEvents(head, index, with_usage)

    def choice(self, index: int, text: str, calls: Sequence[Call], logprobs: Any, reason: str | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message |= {"content": text or None, "tool_calls": [call.whole() for call in calls]}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokenizer: Tokenizer, scored: Sequence[Scored]) -> Any:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            data = tokenizer.token_bytes(token)
            written = data.decode(errors="replace")
            return {"token": written, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(data)}

        return {
            "content": [
                {**entry(one.token, one.logprob), "top_logprobs": [entry(*best) for best in one.top]} for one in scored
            ]
        }

    def echoes(self, body: ChatRequest) -> bool:
        return False


class CompletionForm:
    path = "/v1/completions"
    operation = "text_completion"

    def parse(self, body: bytes) -> CompletionRequest:
        return openai.parse(CompletionRequest, body)

    def head(self, request_id: str, model: str, stream: bool) -> dict[str, Any]:
        return {"id": f"cmpl-{request_id}", "object": "text_completion", "created": int(time.time()), "model": model}

    def events(self, head: dict[str, Any], index: int, with_usage: bool) -> sse.Events:
        return sse.CompletionEvents(head, index, with_usage)

    def choice(self, index: int, text: str, calls: Sequence[Call], logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokenizer: Tokenizer, scored: Sequence[Scored]) -> Any:
        def written(token: int) -> str:
            return tokenizer.token_bytes(token).decode(errors="replace")

        return {
            "tokens": [written(one.token) for one in scored],
            "token_logprobs": [max(one.logprob, _LEAST_LOGPROB) for one in scored],
            "top_logprobs": [
                {written(token): max(logprob, _LEAST_LOGPROB) for token, logprob in one.top} for one in scored
            ],
            "text_offset": [one.offset for one in scored],
        }

    def echoes(self, body: CompletionRequest) -> bool:
        return bool(body.echo)


class GenerateEndpoint:
    """The ASGI app of one form."""

    def __init__(self, serving: Serving, form: Form, *, most_body_bytes: int) -> None:
        self._serving = serving
        self._form = form
        self._most_body_bytes = most_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrival_s = time.monotonic()
        headers = http.headers_of(scope)
        request_id = http.request_id(headers)
        span = traces.of_http(self._form.path, headers, arrival_s)
        caller: Caller = scope[http.CALLER]
        log.bind(request_id=request_id, **caller.log_fields, **span.log_fields)
        reply = Reply(send, request_id, span)
        try:
            data = await http.read_body(receive, self._most_body_bytes)
            body = self._form.parse(data)
            request = body.request(request_id, http.slo(headers), arrival_s)
            traces.asked(span, request, self._form.operation, streams=body.streams)
            async with http.WhileConnected(receive) as client:
                await self._answer(body, request, reply, caller)
            if client.gone:
                span.fail("client_gone")
        except http.ClientGone:
            span.fail("client_gone")
        except PrismError as error:
            await reply.fail(error)
        except Exception:  # the outermost edge of a request: it gets an answer, the log the trace
            _log.exception("request failed")
            await reply.fault()
        finally:
            span.end()

    async def _answer(self, body: Body, request: Request, reply: Reply, caller: Caller) -> None:
        with await self._serving.begin(request, reply.span, caller) as served:
            reply.add(await caller.headers())
            echoes = await self._echoes(body, served)
            if body.streams:
                await self._stream(body, served, echoes, reply)
            else:
                await self._whole(served, echoes, reply)

    async def _echoes(self, body: Body, served: Served) -> list[str]:
        """What each choice begins with."""
        if not self._form.echoes(body):
            return [""] * len(served.choices)
        route = self._serving.routes.get(served.request.model)
        texts = [
            prompt.text if prompt.text is not None else await self._serving.text(route, ids)
            for prompt, ids in zip(served.request.prompts, served.prompts, strict=True)
        ]
        return [text for text in texts for _ in range(served.request.choices)]

    async def _whole(self, served: Served, echoes: list[str], reply: Reply) -> None:
        head = self._form.head(served.request.request_id, served.request.model, stream=False)
        wants_logprobs = served.request.sampling.logprobs
        choices: list[Any] = [None] * len(served.choices)

        async def collect(choice: Choice) -> None:
            texts = [echoes[choice.index]]
            while choice.finish_reason is None:
                texts.append(await choice.next())
            answer = choice.answer
            logprobs = self._form.logprobs(served.tokenizer, answer.take_scored()) if wants_logprobs else None
            calls = answer.take_calls()
            choices[choice.index] = self._form.choice(
                choice.index, "".join(texts), calls, logprobs, answer.finish_reason
            )

        await _each(collect, served.choices)
        await reply.whole(orjson.dumps({**head, "choices": choices, "usage": served.usage()}))

    async def _stream(self, body: Body, served: Served, echoes: list[str], reply: Reply) -> None:
        form = self._form
        head = form.head(served.request.request_id, served.request.model, stream=True)
        wants_logprobs = served.request.sampling.logprobs
        unfinished = len(served.choices)

        async def pass_on(choice: Choice) -> None:
            nonlocal unfinished
            events = form.events(head, choice.index, body.usage_asked)
            text = echoes[choice.index] + await choice.next()
            before = events.opening()
            called = 0
            while True:
                if wants_logprobs:
                    scored = choice.answer.take_scored()
                    event = events.scored(text, form.logprobs(served.tokenizer, scored)) if text or scored else b""
                else:
                    event = events.text(text) if text else b""
                if calls := choice.answer.take_calls():
                    event += events.calls([call.delta(called + number) for number, call in enumerate(calls)])
                    called += len(calls)
                if choice.finish_reason is not None:
                    break
                if before or event:
                    await reply.events(before + event)
                    before = b""
                text = await choice.next()
            last = before + event + events.finish(choice.finish_reason)
            unfinished -= 1
            if unfinished:
                await reply.events(last)
                return
            usage = sse.usage(head, served.usage()) if body.usage_asked else b""
            await reply.events(last + usage + sse.DONE, more=False)

        await _each(pass_on, served.choices)


class Reply:
    """The response to one request, in whichever form it turns out to need."""

    def __init__(self, send: Send, request_id: str, span: Span) -> None:
        self.span = span
        self._send = send
        self._headers = http.echo_id(request_id)
        self._streaming = False

    def add(self, headers: errors.Headers) -> None:
        """To those of a response that has not begun."""
        self._headers += headers

    async def whole(self, body: bytes) -> None:
        traces.replied(self.span, 200)
        await http.respond(self._send, 200, body, self._headers)

    async def events(self, events: bytes, more: bool = True) -> None:
        if not self._streaming:
            self._streaming = True
            traces.replied(self.span, 200)
            headers = [*_EVENT_STREAM, *self._headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": events, "more_body": more})

    async def fail(self, error: PrismError) -> None:
        """By its status, or as an event once the response has begun: OpenAI's clients raise that."""
        status = errors.shape(error).status
        if self._streaming or status >= 500:  # what its client did wrong is no failure of a server
            self.span.fail(type(error).__name__, str(error))
        if self._streaming:
            await self.events(sse.error(errors.encode(error)) + sse.DONE, more=False)
        else:
            traces.replied(self.span, status)
            await http.respond_error(self._send, error, self._headers)

    async def fault(self) -> None:
        """By a fault of ours."""
        self.span.fail("fault")
        body = orjson.dumps(errors.envelope("Internal error.", "server_error", None))
        if self._streaming:
            await self.events(sse.error(body) + sse.DONE, more=False)
        else:
            traces.replied(self.span, 500)
            await http.respond(self._send, 500, body, self._headers)


async def _each(work: Any, choices: Sequence[Choice]) -> None:
    """Does `work` for each choice at the same time; the first failure ends the others."""
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
