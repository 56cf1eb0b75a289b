"""/v1/responses: an answer as a list of items (reasoning, a message, calls of tools), whole or as typed events.

Nothing is stored: a client sends the items of earlier turns again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from gateway.access.access import Caller
from gateway.errors import BadField
from gateway.http import dialects, sse
from gateway.openai import responses_bodies
from gateway.openai.blocks import BlockEvents, Blocks, BlocksEndpoint, End
from gateway.openai.endpoint import Reply
from gateway.openai.responses_bodies import ResponsesRequest
from gateway.request import Request
from gateway.served import Choice, Served
from gateway.tools.formats import CallPart
from protos import common_pb2


class _Item:
    """An item of the output, whose text comes in pieces."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    """Begin of the names of its text's events."""
    part_type: ClassVar[str] = ""
    """Type of its only part; empty: the text is the item's own."""
    beside: ClassVar[dict[str, Any]] = {}
    """Fields beside the text in its part."""
    scores: ClassVar[dict[str, Any]] = {}
    """Fields beside the text in its events."""

    def __init__(self, index: int, request_id: str) -> None:
        """`index`: place in the output."""
        self.index = index
        self.id = f"{self.id_prefix}_{request_id}_{index}"
        self._pieces: list[str] = []

    def add(self, text: str) -> None:
        self._pieces.append(text)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def place(self) -> dict[str, Any]:
        """Fields that say in events to what the text belongs."""
        return {"item_id": self.id, "output_index": self.index, **({"content_index": 0} if self.part_type else {})}

    @property
    def final(self) -> dict[str, Any]:
        """Fields of the event that its text is complete."""
        return {"text": self.text}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": self.part_type, "text": text, **self.beside}

    def whole(self, status: str) -> dict[str, Any]:
        """The item as a response has it; one in progress has no text."""
        raise NotImplementedError

    def _parts(self, status: str) -> list[dict[str, Any]]:
        return [] if status == "in_progress" else [self.part(self.text)]


class _Reasoning(_Item):
    id_prefix, kind, part_type = "rs", "response.reasoning_text", "reasoning_text"

    def whole(self, status: str) -> dict[str, Any]:
        return {"id": self.id, "type": "reasoning", "summary": [], "content": self._parts(status), "status": status}


class _Message(_Item):
    id_prefix, kind, part_type = "msg", "response.output_text", "output_text"
    beside: ClassVar[dict[str, Any]] = {"annotations": [], "logprobs": []}
    scores: ClassVar[dict[str, Any]] = {"logprobs": []}

    def whole(self, status: str) -> dict[str, Any]:
        content = self._parts(status)
        return {"id": self.id, "type": "message", "role": "assistant", "content": content, "status": status}


class _Call(_Item):
    id_prefix, kind = "fc", "response.function_call_arguments"

    def __init__(self, index: int, request_id: str, call: CallPart) -> None:
        super().__init__(index, request_id)
        self._call_id, self._name = call.id, call.name

    @property
    def final(self) -> dict[str, Any]:
        return {"name": self._name, "arguments": self.text}

    def whole(self, status: str) -> dict[str, Any]:
        arguments = "" if status == "in_progress" else self.text
        called = {"call_id": self._call_id, "name": self._name, "arguments": arguments}
        return {"id": self.id, "type": "function_call", **called, "status": status}


T = TypeVar("T", bound=_Item)


class _Response:
    """The response to one request, from its start on."""

    def __init__(self, body: ResponsesRequest, request: Request, sampling: common_pb2.Sampling) -> None:
        self.request_id = request.request_id
        self.items: list[_Item] = []
        self._head = {
            "id": f"resp_{request.request_id}",
            "object": "response",
            "model": request.model,
            "created_at": int(time.time()),
            "completed_at": None,
            **body.echoed(sampling),
            "background": False,
            "error": None,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }

    def begun(self) -> dict[str, Any]:
        return {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}

    @property
    def next_index(self) -> int:
        return len(self.items)

    def add(self, item: T) -> T:
        self.items.append(item)
        return item

    def status(self, item: _Item, end: End) -> str:
        """How an item of the answer ended: where tokens ran out, the last one is cut."""
        return "incomplete" if end.reason == "length" and item is self.items[-1] else "completed"

    def ended(self, end: End) -> dict[str, Any]:
        cut = end.reason == "length"
        return {
            **self._head,
            "completed_at": None if cut else int(time.time()),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [item.whole(self.status(item, end)) for item in self.items],
            "usage": {
                "input_tokens": end.prompt_tokens,
                "input_tokens_details": {"cached_tokens": end.cached_tokens},
                "output_tokens": end.tokens,
                "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
                "total_tokens": end.prompt_tokens + end.tokens,
            },
        }


class ResponseEvents:
    """The events of one streamed answer.

    Reasoning or a message ends where something else begins. A call ends with the next one or with the answer, because
    text may come before the last piece of its arguments.
    """

    def __init__(self, body: ResponsesRequest, request: Request, sampling: common_pb2.Sampling) -> None:
        self._response = _Response(body, request, sampling)
        self._number = 0
        self._said: _Item | None = None
        """Reasoning, or a message, that has not ended."""
        self._call: _Call | None = None
        self._blank = ""
        """Blank text of which it is not known whether a message begins with it, or a call follows."""

    @property
    def sent(self) -> int:
        """Number of events that have gone out while more of the answer is awaited: the opening goes with the first
        item."""
        return self._number if self._response.items else 0

    def opening(self, prompt_tokens: int) -> bytes:
        begun = self._response.begun()
        return b"".join(self._event(f"response.{name}", response=begun) for name in ("created", "in_progress"))

    def reasoning(self, text: str) -> bytes:
        return self._say(_Reasoning, text)

    def text(self, text: str) -> bytes:
        if not isinstance(self._said, _Message):
            text = self._blank + text
            self._blank = "" if text.strip() else text
            if self._blank:
                return b""
        return self._say(_Message, text)

    def calls(self, parts: Sequence[CallPart]) -> bytes:
        return b"".join(self._part(part) for part in parts)

    def ending(self, end: End) -> bytes:
        events = b""
        if self._blank and not any(isinstance(item, _Call) for item in self._response.items):
            events += self._say(_Message, self._blank)
        if not self._response.items:
            events += self._say(_Message, "")
        for item in (self._said, self._call):
            if item is not None:
                events += self._done(item, self._response.status(item, end))
        ended = self._response.ended(end)
        return events + self._event(f"response.{ended['status']}", response=ended)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        event = sse.named(name, {"type": name, "sequence_number": self._number, **fields})
        self._number += 1
        return event

    def _say(self, kind: type[_Reasoning | _Message], text: str) -> bytes:
        events = b""
        if not isinstance(self._said, kind):
            events += self._done_saying()
            self._said = self._response.add(kind(self._response.next_index, self._response.request_id))
            events += self._added(self._said)
        self._said.add(text)
        return events + self._more(self._said, text)

    def _part(self, part: CallPart) -> bytes:
        events = b""
        if part.name or self._call is None:
            events += self._done_saying() + self._done_calling()
            self._blank = ""
            self._call = self._response.add(_Call(self._response.next_index, self._response.request_id, part))
            events += self._added(self._call)
        self._call.add(part.arguments)
        return events + self._more(self._call, part.arguments)

    def _done_saying(self) -> bytes:
        item, self._said = self._said, None
        return b"" if item is None else self._done(item, "completed")

    def _done_calling(self) -> bytes:
        item, self._call = self._call, None
        return b"" if item is None else self._done(item, "completed")

    def _added(self, item: _Item) -> bytes:
        events = self._event("response.output_item.added", output_index=item.index, item=item.whole("in_progress"))
        if item.part_type:
            events += self._event("response.content_part.added", **item.place, part=item.part(""))
        return events

    def _more(self, item: _Item, text: str) -> bytes:
        return self._event(f"{item.kind}.delta", **item.place, **item.scores, delta=text) if text else b""

    def _done(self, item: _Item, status: str) -> bytes:
        events = self._event(f"{item.kind}.done", **item.place, **item.scores, **item.final)
        if item.part_type:
            events += self._event("response.content_part.done", **item.place, part=item.part(item.text))
        done = item.whole(status)
        return events + self._event("response.output_item.done", output_index=item.index, item=done)


class ResponsesEndpoint(BlocksEndpoint[ResponsesRequest]):
    """The ASGI app of /v1/responses."""

    path = "/v1/responses"

    def _parse(self, data: bytes) -> ResponsesRequest:
        return responses_bodies.parse(data)

    def _events(self, body: ResponsesRequest, request: Request, sampling: common_pb2.Sampling) -> ResponseEvents:
        return ResponseEvents(body, request, sampling)

    def _whole(
        self, body: ResponsesRequest, request: Request, sampling: common_pb2.Sampling, blocks: Blocks, end: End
    ) -> dict[str, Any]:
        response = _Response(body, request, sampling)
        if blocks.reasoning:
            response.add(_Reasoning(response.next_index, request.request_id)).add(blocks.reasoning)
        # As in a stream: blank text before a call is none, and an answer has at least one item.
        if blocks.text.strip() or (not blocks.calls and (blocks.text or not blocks.reasoning)):
            response.add(_Message(response.next_index, request.request_id)).add(blocks.text)
        for index, call in enumerate(blocks.calls):
            response.add(_Call(response.next_index, request.request_id, call.part(index))).add(call.arguments)
        return response.ended(end)

    async def _answer(self, body: ResponsesRequest, request: Request, reply: Reply, caller: Caller) -> None:
        try:
            await super()._answer(body, request, reply, caller)
        except BadField as error:
            raise body.renamed(error) from None

    async def _stream(self, events: BlockEvents, served: Served, choice: Choice, reply: Reply) -> None:
        assert isinstance(events, ResponseEvents)
        try:
            await super()._stream(events, served, choice, reply)
        except Exception:
            reply.dialect = dialects.Responses(events.sent)  # the error is the next event
            raise
