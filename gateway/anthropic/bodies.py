"""Requests of Anthropic's Messages, checked, and turned into chat requests.

What Prism does not know is ignored, as clients send many fields. What would change the answer and cannot be honoured is
refused by name. (https://docs.anthropic.com/en/api/messages)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, Tag

from gateway.errors import BadField
from gateway.openai import bodies
from gateway.openai.bodies import FEW_PARTS, MOST_MESSAGES, ChatRequest
from gateway.openai.responses_items import STRING_OR_LIST, MessagePlace, renamed
from gateway.request import Request
from gateway.tools import request as calling
from protos import common_pb2

Block = dict[str, Any]
_INT64 = 1 << 63
_UNSUPPORTED = ("mcp_servers", "container")
"""Fields that would change the answer."""
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts beyond those that chat templates know."""
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""Names of a chat's fields that are others here."""
_PARTS = {".tool_calls": ".content", ".tool_call_id": ".tool_use_id"}
"""Names of a message's fields that are others here."""
_MESSAGE = re.compile(r"messages\[(\d+)\](.*)", re.DOTALL)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", strict=True, protected_namespaces=())


Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[Block], Field(fail_fast=True), Tag("<list>")], STRING_OR_LIST
]


class MessageParam(_Model):
    role: Literal["user", "assistant", "system"]
    content: Content


class ToolParam(_Model):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None


class ToolChoiceParam(_Model):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Model):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(_Model):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Model):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextManagement(_Model):
    edits: list[Block] | None = None

    def check(self) -> None:
        """Raises BadField for an edit that would change the prompt: all but the one that keeps all thinking."""
        for index, edit in enumerate(self.edits or ()):
            field, kind, keep = f"context_management.edits[{index}]", edit.get("type"), edit.get("keep")
            if kind != "clear_thinking_20251015":
                what = f"Edits of type '{str(kind)[:40]}' are not supported."
                raise BadField(what, f"{field}.type", "unsupported_parameter")
            if keep not in ("all", {"type": "all"}):
                what = f"'{field}.keep' is only supported as 'all'."
                raise BadField(what, f"{field}.keep", "unsupported_parameter")


class _Prompted(_Model):
    """The fields that make a prompt."""

    model: str = Field(min_length=1)
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), FEW_PARTS]
    system: Annotated[Content | None, FEW_PARTS] = None
    tools: list[ToolParam] | None = Field(None, max_length=calling.MOST_TOOLS, fail_fast=True)
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None

    def _chat(self) -> dict[str, Any]:
        """The body of the same chat request, as far as its prompt goes. Raises BadField."""
        for name in _UNSUPPORTED:
            if (self.model_extra or {}).get(name) is not None:
                raise BadField(f"'{name}' is not supported.", name, "unsupported_parameter")
        if self.context_management is not None:
            self.context_management.check()
        chat: dict[str, Any] = {"model": self.model, "messages": [message for message, _ in self._told]}
        last = self._told[-1][0] if self._told else {}
        if last.get("role") == "assistant" and "tool_calls" not in last:  # the answer goes on with it
            chat["continue_final_message"] = True
        if self.tools:
            chat["tools"] = [_tool(tool, index) for index, tool in enumerate(self.tools)]
        if (chosen := self.tool_choice) is not None:
            if chosen.type == "tool":
                chat["tool_choice"] = {"type": "function", "function": {"name": chosen.name}}
            elif self.tools or chosen.type != "auto":
                chat["tool_choice"] = _CHOICES[chosen.type]
            if chosen.disable_parallel_tool_use is not None:
                chat["parallel_tool_calls"] = not chosen.disable_parallel_tool_use
        if self.thinking is not None:
            chat["enable_thinking"] = self.thinking.type != "disabled"
        configured = self.output_config or OutputConfig()
        if configured.effort is not None:
            chat["reasoning_effort"] = _EFFORTS.get(configured.effort, configured.effort)
        if (asked := configured.format or self.output_format) is not None:
            schema = {"name": "output", "schema": asked.json_schema}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        return chat

    @cached_property
    def _told(self) -> list[tuple[dict[str, Any], MessagePlace]]:
        """The messages of the chat, each with its place in this body. Raises BadField."""
        told: list[tuple[dict[str, Any], MessagePlace]] = []
        if self.system:
            message = {"role": "system", "content": _texts(self.system, "system")}
            told.append((message, MessagePlace("system", is_message=False)))
        for index, each in enumerate(self.messages):
            told += _converted(each, f"messages[{index}]")
        return told

    def renamed(self, error: BadField) -> BadField:
        """An error of the chat, with its fields as this body names them."""
        return renamed(error, self._name, _NAMES)

    def _name(self, chats: str) -> str:
        """The name of a chat's field in this body."""
        if (found := _MESSAGE.match(chats)) is not None:
            place, rest = self._told[int(found[1])][1], found[2]
            return place.field + (_PARTS.get(rest, rest) if place.is_message or rest in _PARTS else "")
        field = re.sub(r"\.function(\.parameters)?", lambda found: ".input_schema" if found[1] else "", chats)
        return _NAMES.get(field, field)

    def _checked(self, chat: dict[str, Any]) -> ChatRequest:
        """The checked chat request. Raises BadField."""
        try:
            return bodies.made(ChatRequest, chat)
        except BadField as error:
            raise self.renamed(error) from None


class MessagesRequest(_Prompted):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1, lt=_INT64)
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31)

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    def request(self, request_id: str, slo: common_pb2.Slo, arrival_s: float) -> Request:
        """The gateway's request made of the body. Raises BadField."""
        given = {
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        chat = self._checked({**self._chat(), **{name: value for name, value in given.items() if value is not None}})
        try:
            return chat.request(request_id, slo, arrival_s)
        except BadField as error:
            raise self.renamed(error) from None


class CountRequest(_Prompted):
    """The body of /v1/messages/count_tokens."""

    def chat(self) -> ChatRequest:
        """The chat request whose prompt is counted. Raises BadField."""
        return self._checked(self._chat())


def parse_messages(data: bytes) -> MessagesRequest:
    return bodies.parse(MessagesRequest, data)


def _texts(content: str | Sequence[Block], field: str) -> str | list[Block]:
    """The text of a content, or its parts. Raises BadField for a block that is no text."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": _text(block, f"{field}[{index}]")} for index, block in enumerate(content)]


def _text(block: Block, field: str) -> str:
    if block.get("type") != "text":
        raise _unsupported(block, field)
    if not isinstance(block.get("text"), str):
        raise BadField(f"'{field}' is a text block without a string 'text'.", f"{field}.text")
    return str(block["text"])


def _unsupported(block: Block, field: str) -> BadField:
    return BadField(
        f"Blocks of type '{str(block.get('type'))[:40]}' are not supported here.",
        f"{field}.type",
        "unsupported_parameter",
    )


def _converted(message: MessageParam, place: str) -> list[tuple[dict[str, Any], MessagePlace]]:
    """The messages of a chat that say the same, with their places: results of tools are messages of their own there.
    Raises BadField."""
    here, field = MessagePlace(place, is_message=True), f"{place}.content"
    if isinstance(message.content, str):
        return [({"role": message.role, "content": message.content}, here)]
    results: list[tuple[dict[str, Any], MessagePlace]] = []
    parts: list[Block] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        at, kind = f"{field}[{index}]", block.get("type")
        if kind == "tool_result" and message.role == "user":
            content = block.get("content") or ""
            if not isinstance(content, (str, list)):
                raise BadField(f"'{at}.content' must be a string or a list of blocks.", f"{at}.content")
            result = {"role": "tool", "content": _texts(content, f"{at}.content")}
            result["tool_call_id"] = _string(block, "tool_use_id", at)
            results.append((result, MessagePlace(at, is_message=False)))
        elif kind == "tool_use" and message.role == "assistant":
            if not isinstance(given := block.get("input", {}), dict):
                raise BadField(f"'{at}.input' must be an object.", f"{at}.input")
            function = {"name": _string(block, "name", at), "arguments": given}
            calls.append({"id": _string(block, "id", at), "type": "function", "function": function})
        elif kind == "thinking" and message.role == "assistant":
            thoughts.append(_string(block, "thinking", at))
        elif kind != "redacted_thinking" or message.role != "assistant":
            parts.append({"type": "text", "text": _text(block, at)})
    if not parts and not calls and not thoughts:
        return results
    told: dict[str, Any] = {"role": message.role, "content": _joined(parts)}
    if calls:
        told["tool_calls"] = calls
    if thoughts:
        told["reasoning_content"] = "".join(thoughts)
    return [*results, (told, here)]


def _joined(parts: list[Block]) -> str | list[Block]:
    return parts[0]["text"] if len(parts) == 1 else parts or ""


def _string(block: Mapping[str, Any], name: str, field: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadField(f"'{field}.{name}' must be a string.", f"{field}.{name}")
    return value


def _tool(tool: ToolParam, index: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        field = f"tools[{index}].type"
        raise BadField(f"Tools of type '{tool.type}' are not supported.", field, "unsupported_parameter")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or {"type": "object"}}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}
