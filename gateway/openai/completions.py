"""/v1/chat/completions and /v1/completions: one endpoint in two forms.

The response begins with the first token, or with a comment that the model wakes: until then an error still has its own
status.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from gateway.access.access import Caller
from gateway.http import sse
from gateway.http.messages import Bodies
from gateway.openai import bodies, endpoint
from gateway.openai.bodies import ChatRequest, CompletionRequest
from gateway.openai.endpoint import Endpoint, Reply, each
from gateway.openai.waking import Comments
from gateway.request import Request
from gateway.served import Choice, Served
from gateway.serving import Serving
from gateway.text.answer import Scored
from gateway.text.echo import Echo
from gateway.tools.formats import Call, CallPart, joined
from tokenization.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0
"""Logprob that stands for minus infinity, which JSON does not have."""


def _told(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _LEAST_LOGPROB)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole answer, taken apart."""

    text: str
    reasoning: str
    calls: Sequence[Call]


class CompletionBody(endpoint.Body, Protocol):
    """A checked body of either form."""

    @property
    def usage_asked(self) -> bool: ...


class Form(Protocol):
    """The form in which one of the two APIs writes its answers."""

    path: str
    operation: str
    """Operation name in OpenTelemetry's GenAI conventions."""

    def parse(self, body: bytes) -> CompletionBody: ...

    def head(self, request_id: str, model: str, stream: bool) -> dict[str, Any]:
        """The fields that every object of a response begins with."""

    def events(self, head: dict[str, Any], index: int, with_usage: bool) -> sse.Events: ...

    def choice(self, index: int, whole: Whole, logprobs: Any, reason: str | None) -> dict[str, Any]:
        """One whole answer as a choice of the response."""

    def logprobs(self, tokenizer: Tokenizer, scored: Sequence[Scored]) -> dict[str, list[Any]]:
        """Lists with an entry for each token, by the API's names."""

    def echoes(self, body: Any) -> bool:
        """Whether each answer begins with its prompt."""


class ChatForm:
    path = "/v1/chat/completions"
    operation = "chat"

    def parse(self, body: bytes) -> ChatRequest:
        return bodies.parse(ChatRequest, body)

    def head(self, request_id: str, model: str, stream: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": f"chatcmpl-{request_id}", "object": kind, "created": int(time.time()), "model": model}

    def events(self, head: dict[str, Any], index: int, with_usage: bool) -> sse.Events:
        return sse.ChatEvents(head, index, with_usage)

    def choice(self, index: int, whole: Whole, logprobs: Any, reason: str | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None, "annotations": []}
        if whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        if whole.calls:
            message |= {"content": whole.text or None, "tool_calls": [call.whole() for call in whole.calls]}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokenizer: Tokenizer, scored: Sequence[Scored]) -> dict[str, list[Any]]:
        def entry(token: int, logprob: float | None) -> dict[str, Any]:
            data = tokenizer.token_bytes(token)
            written = data.decode(errors="replace")
            return {"token": written, "logprob": _told(logprob), "bytes": list(data)}

        return {
            "content": [
                {**entry(one.token, one.logprob), "top_logprobs": [entry(*best) for best in one.top or ()]}
                for one in scored
            ]
        }

    def echoes(self, body: ChatRequest) -> bool:
        return False


class CompletionForm:
    path = "/v1/completions"
    operation = "text_completion"

    def parse(self, body: bytes) -> CompletionRequest:
        return bodies.parse(CompletionRequest, body)

    def head(self, request_id: str, model: str, stream: bool) -> dict[str, Any]:
        return {"id": f"cmpl-{request_id}", "object": "text_completion", "created": int(time.time()), "model": model}

    def events(self, head: dict[str, Any], index: int, with_usage: bool) -> sse.Events:
        return sse.CompletionEvents(head, index, with_usage)

    def choice(self, index: int, whole: Whole, logprobs: Any, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": whole.text, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, tokenizer: Tokenizer, scored: Sequence[Scored]) -> dict[str, list[Any]]:
        def written(token: int) -> str:
            return tokenizer.token_bytes(token).decode(errors="replace")

        return {
            "tokens": [written(one.token) for one in scored],
            "token_logprobs": [_told(one.logprob) for one in scored],
            "top_logprobs": [
                None if one.top is None else {written(token): _told(logprob) for token, logprob in one.top}
                for one in scored
            ],
            "text_offset": [one.offset for one in scored],
        }

    def echoes(self, body: CompletionRequest) -> bool:
        return bool(body.echo)


class _Logprobs:
    """The log-probabilities of an answer that is sent as a whole. They are encoded as they come: those of a long
    answer, tens of megabytes, would hold up other requests' streams for a second."""

    def __init__(self) -> None:
        self._lists: dict[str, list[bytes]] = {}

    def add(self, more: dict[str, list[Any]]) -> None:
        for name, entries in more.items():
            written = self._lists.setdefault(name, [])
            if entries:
                written.append(orjson.dumps(entries)[1:-1])

    def whole(self) -> dict[str, orjson.Fragment]:
        return {name: orjson.Fragment(b"[" + b",".join(written) + b"]") for name, written in self._lists.items()}


class GenerateEndpoint(Endpoint[CompletionBody]):
    """The ASGI app of one form."""

    def __init__(self, serving: Serving, form: Form, bodies: Bodies, waking_comment_s: float) -> None:
        super().__init__(serving, bodies)
        self._waking_comment_s = waking_comment_s
        self.path, self.operation = form.path, form.operation
        self._form = form

    def _parse(self, data: bytes) -> CompletionBody:
        return self._form.parse(data)

    async def _answer(self, body: CompletionBody, request: Request, reply: Reply, caller: Caller) -> None:
        with await self._serving.begin(request, reply.span, caller) as served:
            reply.add(await caller.headers())
            echoes = await self._echoes(body, served)
            if body.streams:
                await self._stream(body, served, echoes, reply)
            else:
                await self._whole(served, echoes, reply)

    async def _echoes(self, body: CompletionBody, served: Served) -> list[Echo]:
        """For each choice the text that it begins with."""
        request = served.request
        if not self._form.echoes(body):
            return [Echo() for _ in served.choices]
        route = self._serving.routes.get(request.model)
        texts = [
            prompt.text if prompt.text is not None else await self._serving.text(route, ids)
            for prompt, ids in zip(request.prompts, served.prompts, strict=True)
        ]
        scored = served.prompts if request.sampling.logprobs else [()] * len(texts)
        places = await self._serving.offsets(served.tokenizer, scored, texts)
        parts = zip(texts, scored, places, strict=True)
        echoes = [Echo(*part) for part in parts for _ in range(request.choices)]
        for choice, echo in zip(served.choices, echoes, strict=True):
            choice.answer.follow(echo.text)
        return echoes

    async def _whole(self, served: Served, echoes: list[Echo], reply: Reply) -> None:
        head = self._form.head(served.request.request_id, served.request.model, stream=False)
        wants_logprobs = served.request.sampling.logprobs
        choices: list[Any] = [None] * len(served.choices)

        async def collect(choice: Choice) -> None:
            texts: list[str] = []
            reasoning: list[str] = []
            parts: list[CallPart] = []
            answer = choice.answer
            logprobs = _Logprobs() if wants_logprobs else None
            while choice.finish_reason is None:
                text = await choice.next()
                before, scored = echoes[choice.index].more(answer.take_prompt_scores())
                texts += before, text
                reasoning.append(choice.take_reasoning())
                parts += choice.take_calls()
                if logprobs is not None:
                    logprobs.add(self._form.logprobs(served.tokenizer, scored + answer.take_scored()))
            whole = Whole("".join(texts), "".join(reasoning), joined(parts))
            written = self._form.choice(choice.index, whole, logprobs and logprobs.whole(), answer.finish_reason)
            choices[choice.index] = orjson.Fragment(orjson.dumps(written))

        await each(collect, served.choices)
        await reply.whole(orjson.dumps({**head, "choices": choices, "usage": served.usage()}))

    async def _stream(self, body: CompletionBody, served: Served, echoes: list[Echo], reply: Reply) -> None:
        form = self._form
        head = form.head(served.request.request_id, served.request.model, stream=True)
        wants_logprobs = served.request.sampling.logprobs
        unfinished = len(served.choices)

        async def pass_on(choice: Choice) -> None:
            nonlocal unfinished
            events = form.events(head, choice.index, body.usage_asked)
            answer = choice.answer
            before = events.opening()
            while True:
                text = await choice.next()
                prompt, scored = echoes[choice.index].more(answer.take_prompt_scores())
                text = prompt + text
                if wants_logprobs:
                    scored += answer.take_scored()
                    event = events.scored(text, form.logprobs(served.tokenizer, scored)) if text or scored else b""
                else:
                    event = events.text(text) if text else b""
                if reasoning := choice.take_reasoning():
                    event = events.reasoning(reasoning) + event
                if calls := choice.take_calls():
                    event += events.calls([part.delta() for part in calls])
                if choice.finish_reason is not None:
                    break
                if before or event:
                    await reply.events(before + event)
                    before = b""
            last = before + event + events.finish(choice.finish_reason)
            unfinished -= 1
            if unfinished:
                await reply.events(last)
                return
            usage = sse.usage(head, served.usage()) if body.usage_asked else b""
            await reply.events(last + usage + sse.DONE, more=False)

        model = served.request.model
        with Comments(reply, self._waking_comment_s, lambda: self._serving.wakes(model)):
            await each(pass_on, served.choices)
