"""/v1/messages and /v1/messages/count_tokens: chats in the form of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.anthropic import bodies
from gateway.anthropic.bodies import MessagesRequest
from gateway.http import sse
from gateway.openai.blocks import BlockEvents, Blocks, BlocksEndpoint, End
from gateway.request import Request
from gateway.tools.formats import CallPart

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesEndpoint(BlocksEndpoint[MessagesRequest]):
    """The ASGI app of /v1/messages."""

    path = "/v1/messages"

    def _parse(self, data: bytes) -> MessagesRequest:
        return bodies.parse_messages(data)

    def _events(self, body: MessagesRequest, request: Request) -> BlockEvents:
        return MessageEvents(_head(request))

    def _whole(self, body: MessagesRequest, request: Request, blocks: Blocks, end: End) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if blocks.reasoning:
            content.append({"type": "thinking", "thinking": blocks.reasoning, "signature": ""})
        if blocks.text or not (blocks.reasoning or blocks.calls):
            content.append({"type": "text", "text": blocks.text})
        for call in blocks.calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)})
        return {**_head(request), "content": content, **_stopped(end), "usage": _usage(end)}


def _head(request: Request) -> dict[str, Any]:
    return {"id": f"msg_{request.request_id}", "type": "message", "role": "assistant", "model": request.model}


def _object(arguments: str) -> Any:
    """Arguments of a call as JSON; an object that has them as text where they are none."""
    try:
        return orjson.loads(arguments or "{}")
    except ValueError:
        return {"arguments": arguments}


def _stopped(end: End) -> dict[str, Any]:
    reason = "stop_sequence" if end.stop is not None else _REASONS.get(end.reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": end.stop}


def _usage(end: End) -> dict[str, int]:
    """Anthropic's counts: tokens that were cached are not among the input's."""
    return {
        "input_tokens": end.prompt_tokens - end.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": end.cached_tokens,
        "output_tokens": end.tokens,
    }


class MessageEvents:
    """The events of one streamed message: its blocks one after the other, each with a number."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = head
        self._block = -1
        self._kind = ""
        """Kind of the block that is open: "thinking", "text" or "tool_use"; empty: none is."""

    def opening(self, prompt_tokens: int) -> bytes:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return sse.named("message_start", {"type": "message_start", "message": message})

    def reasoning(self, text: str) -> bytes:
        begun = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        return begun + self._delta({"type": "thinking_delta", "thinking": text})

    def text(self, text: str) -> bytes:
        return self._open("text", {"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": text})

    def calls(self, parts: Sequence[CallPart]) -> bytes:
        events = b""
        for part in parts:
            if part.name:
                events += self._close()
                events += self._open("tool_use", {"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
            if part.arguments:
                events += self._delta({"type": "input_json_delta", "partial_json": part.arguments})
        return events

    def ending(self, end: End) -> bytes:
        events = b"" if self._block >= 0 else self._open("text", {"type": "text", "text": ""})
        delta = {"type": "message_delta", "delta": _stopped(end), "usage": _usage(end)}
        return (
            events
            + self._close()
            + sse.named("message_delta", delta)
            + sse.named("message_stop", {"type": "message_stop"})
        )

    def _open(self, kind: str, block: dict[str, Any]) -> bytes:
        """Opens a block, after closing that of another kind; nothing if one of the kind is open."""
        if self._kind == kind:
            return b""
        closed = self._close()
        self._kind = kind
        self._block += 1
        said = {"type": "content_block_start", "index": self._block, "content_block": block}
        return closed + sse.named("content_block_start", said)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return sse.named("content_block_delta", {"type": "content_block_delta", "index": self._block, "delta": delta})

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return sse.named("content_block_stop", {"type": "content_block_stop", "index": self._block})
