"""The part that the APIs with one answer in blocks (reasoning, text, calls of tools) have in common: OpenAI's Responses
and Anthropic's Messages. A request of theirs becomes a chat request, and is served as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import orjson

from gateway.access.access import Caller
from gateway.http.messages import Bodies
from gateway.openai import endpoint
from gateway.openai.endpoint import Endpoint, Reply
from gateway.openai.waking import Comments
from gateway.request import Request
from gateway.served import Choice, Served
from gateway.serving import Serving
from gateway.tools.formats import Call, CallPart, joined
from protos import common_pb2


@dataclass(frozen=True, slots=True)
class Blocks:
    """A whole answer."""

    reasoning: str
    text: str
    calls: Sequence[Call]


@dataclass(frozen=True, slots=True)
class End:
    """How an answer ended, and its counts."""

    reason: str
    """OpenAI's finish reason: "stop", "length" or "tool_calls"."""
    stop: str | None
    """The stop string that ended it."""
    prompt_tokens: int
    cached_tokens: int
    """Number of the prompt's tokens whose KV was cached."""
    tokens: int
    reasoning_tokens: int

    @classmethod
    def of(cls, served: Served, choice: Choice) -> End:
        answer = choice.answer
        return cls(
            choice.finish_reason or "stop",
            answer.matched_stop,
            sum(map(len, served.prompts)),
            answer.cached_tokens,
            answer.tokens,
            choice.reasoning_tokens,
        )


class BlockEvents(Protocol):
    """The events of one streamed answer, as bytes of server-sent events."""

    def opening(self, prompt_tokens: int) -> bytes: ...

    def reasoning(self, text: str) -> bytes: ...

    def text(self, text: str) -> bytes: ...

    def calls(self, parts: Sequence[CallPart]) -> bytes: ...

    def ending(self, end: End) -> bytes: ...


B = TypeVar("B", bound=endpoint.Body)


class BlocksEndpoint(Endpoint[B]):
    """The ASGI app of one such API."""

    operation = "chat"

    def __init__(self, serving: Serving, bodies: Bodies, waking_comment_s: float) -> None:
        super().__init__(serving, bodies)
        self._waking_comment_s = waking_comment_s

    def _events(self, body: B, request: Request, sampling: common_pb2.Sampling) -> BlockEvents:
        """The events of an answer that is sampled so."""
        raise NotImplementedError

    def _whole(
        self, body: B, request: Request, sampling: common_pb2.Sampling, blocks: Blocks, end: End
    ) -> dict[str, Any]:
        """The response to a request that is not streamed."""
        raise NotImplementedError

    async def _answer(self, body: B, request: Request, reply: Reply, caller: Caller) -> None:
        with await self._serving.begin(request, reply.span, caller) as served:
            reply.add(await caller.headers())
            (choice,) = served.choices
            if body.streams:
                with Comments(reply, self._waking_comment_s, lambda: self._serving.wakes(request.model)):
                    await self._stream(self._events(body, request, choice.sampling), served, choice, reply)
            else:
                blocks = await _collected(choice)
                end = End.of(served, choice)
                await reply.whole(orjson.dumps(self._whole(body, request, choice.sampling, blocks, end)))

    async def _stream(self, events: BlockEvents, served: Served, choice: Choice, reply: Reply) -> None:
        before = events.opening(sum(map(len, served.prompts)))
        while True:
            text = await choice.next()
            event = b""
            if reasoning := choice.take_reasoning():
                event += events.reasoning(reasoning)
            if text:
                event += events.text(text)
            if calls := choice.take_calls():
                event += events.calls(calls)
            if choice.finish_reason is not None:
                break
            if event:
                await reply.events(before + event)
                before = b""
        await reply.events(before + event + events.ending(End.of(served, choice)), more=False)


async def _collected(choice: Choice) -> Blocks:
    reasoning: list[str] = []
    texts: list[str] = []
    parts: list[CallPart] = []
    while choice.finish_reason is None:
        texts.append(await choice.next())
        reasoning.append(choice.take_reasoning())
        parts += choice.take_calls()
    return Blocks("".join(reasoning), "".join(texts), joined(parts))
