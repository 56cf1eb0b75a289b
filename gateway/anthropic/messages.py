"""/v1/messages and /v1/messages/count_tokens: chats in the form of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson
import pydantic_core

from gateway.anthropic import bodies
from gateway.anthropic.bodies import MessagesRequest
from gateway.http import sse
from gateway.openai.blocks import BlockEvents, Blocks, BlocksEndpoint, End
from gateway.request import Request
from gateway.tools.formats import CallPart
from protos import common_pb2

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesEndpoint(BlocksEndpoint[MessagesRequest]):
    """The ASGI app of /v1/messages."""

    path = "/v1/messages"

    def _parse(self, data: bytes) -> MessagesRequest:
        return bodies.parse_messages(data)

    def _events(self, body: MessagesRequest, request: Request, sampling: common_pb2.Sampling) -> BlockEvents:
        return MessageEvents(_head(request))

    def _whole(
        self, body: MessagesRequest, request: Request, sampling: common_pb2.Sampling, blocks: Blocks, end: End
    ) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if blocks.reasoning:
            content.append({"type": "thinking", "thinking": blocks.reasoning, "signature": ""})
        if blocks.text or not (blocks.reasoning or blocks.calls):
            content.append(_text(blocks.text))
        for call in blocks.calls:
            content.append(_tool_use(call.id, call.name, _object(call.arguments)))
        usage = {**_TOLD_ONCE, **_usage(end)}
        return {**_head(request), "content": content, **_stopped(end), "usage": usage}


_TOLD_ONCE: dict[str, Any] = {"cache_creation": None, "inference_geo": None, "service_tier": "standard"}
"""Usage of a message that the counts at the end of a stream do not have."""


def _head(request: Request) -> dict[str, Any]:
    return {
        "id": f"msg_{request.request_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "container": None,
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _tool_use(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments, "caller": {"type": "direct"}}


def _object(arguments: str) -> Any:
    """Arguments of a call as JSON: what is whole of those that were cut, as Anthropic's clients make of a stream; an
    object that has them as text where they are none."""
    try:
        return pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {"arguments": arguments}


def _is_whole(arguments: str) -> bool:
    """Whether the arguments are a complete object."""
    try:
        return isinstance(orjson.loads(arguments), dict)
    except ValueError:
        return False


def _stopped(end: End) -> dict[str, Any]:
    reason = "stop_sequence" if end.stop is not None else _REASONS.get(end.reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": end.stop, "stop_details": None}


def _usage(end: End) -> dict[str, Any]:
    return _counts(end.prompt_tokens, end.cached_tokens, end.tokens, end.reasoning_tokens)


def _counts(prompt: int, cached: int, output: int, reasoning: int) -> dict[str, Any]:
    """Anthropic's counts: tokens that were cached are not among the input's."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": reasoning},
        "server_tool_use": None,
    }


class MessageEvents:
    """The events of one streamed message: its blocks one after the other, each with a number.

    What comes between the pieces of a call's arguments is sent after the call: a block that was closed takes no more.
    """

    def __init__(self, head: dict[str, Any]) -> None:
        self._head = head
        self._arguments = ""
        """Arguments of the call that is open, as far as they came."""
        self._later: list[tuple[Callable[[str], bytes], str]] = []
        """What came while the call was incomplete, and the events that it becomes."""
        self._block = -1
        self._kind = ""
        """Kind of the block that is open: "thinking", "text" or "tool_use"; empty: none is."""

    def opening(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        usage = {**_TOLD_ONCE, **_counts(prompt_tokens, cached_tokens, 0, 0)}
        stopped = {"stop_reason": None, "stop_sequence": None, "stop_details": None}
        message = {**self._head, "content": [], **stopped, "usage": usage}
        return sse.named("message_start", {"type": "message_start", "message": message})

    def reasoning(self, text: str) -> bytes:
        if self._calling:
            self._later.append((self.reasoning, text))
            return b""
        begun = self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        return begun + self._delta({"type": "thinking_delta", "thinking": text})

    def text(self, text: str) -> bytes:
        if self._calling:
            self._later.append((self.text, text))
            return b""
        return self._open("text", _text("")) + self._delta({"type": "text_delta", "text": text})

    def calls(self, parts: Sequence[CallPart]) -> bytes:
        events = b""
        for part in parts:
            if part.name:
                events += self._end_call() + self._close()
                events += self._open("tool_use", _tool_use(part.id, part.name, {}))
                self._arguments = ""
            if part.arguments and self._kind == "tool_use":  # else the call was complete, and this is blank
                self._arguments += part.arguments
                events += self._delta({"type": "input_json_delta", "partial_json": part.arguments})
                if self._later and not self._calling:
                    events += self._end_call()
        return events

    @property
    def _calling(self) -> bool:
        """Whether a call is open whose arguments may go on."""
        return self._kind == "tool_use" and not _is_whole(self._arguments)

    def _end_call(self) -> bytes:
        """Closes the call that is open, and says what came before its end."""
        if not self._later:
            return b""
        events, later, self._later = self._close(), self._later, []
        return events + b"".join(said(text) for said, text in later)

    def ending(self, end: End) -> bytes:
        events = self._end_call() if self._block >= 0 else self._open("text", _text(""))
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
