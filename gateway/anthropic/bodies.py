"""Requests of Anthropic's Messages, checked, and turned into chat requests.

What Prism does not know is ignored, as clients send many fields. What would change the answer and cannot be honoured is
refused by name. (https://docs.anthropic.com/en/api/messages)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pydantic
from pydantic import Field

from gateway.errors import BadField
from gateway.openai import bodies
from gateway.openai.bodies import MOST_MESSAGES, ChatRequest
from gateway.request import Request
from protos import common_pb2

Block = dict[str, Any]
_INT64 = 1 << 63
_UNSUPPORTED = ("mcp_servers", "container")
"""Fields that would change the answer."""
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts beyond those that chat templates know."""
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
"""Names of a chat's fields that are others here."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", strict=True, protected_namespaces=())


class MessageParam(_Model):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


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
    messages: list[MessageParam] = Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
    system: str | list[Block] | None = None
    tools: list[ToolParam] | None = Field(None, fail_fast=True)
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
        messages = [{"role": "system", "content": _texts(self.system, "system")}] if self.system else []
        for index, message in enumerate(self.messages):
            messages += _converted(message, f"messages[{index}].content")
        chat: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.messages[-1].role == "assistant":  # the answer goes on with it
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
        chat = _checked({**self._chat(), **{name: value for name, value in given.items() if value is not None}})
        with _Named():
            return chat.request(request_id, slo, arrival_s)


class CountRequest(_Prompted):
    """The body of /v1/messages/count_tokens."""

    def chat(self) -> ChatRequest:
        """The chat request whose prompt is counted. Raises BadField."""
        return _checked(self._chat())


def parse_messages(data: bytes) -> MessagesRequest:
    return bodies.parse(MessagesRequest, data)


def _checked(chat: dict[str, Any]) -> ChatRequest:
    with _Named():
        return bodies.parse(ChatRequest, json.dumps(chat).encode())


class _Named:
    """A context in which errors name fields as Anthropic's API has them."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BadField) and error.field is not None:
            field = re.sub(r"\.function(\.parameters)?", lambda found: ".input_schema" if found[1] else "", error.field)
            field = _NAMES.get(field, field)
            if field != error.field:
                raise BadField(str(error).replace(error.field, field), field, error.code) from None


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


def _converted(message: MessageParam, field: str) -> list[dict[str, Any]]:
    """The messages of a chat that say the same: results of tools are messages of their own there. Raises BadField."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
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
            results.append({**result, "tool_call_id": _string(block, "tool_use_id", at)})
        elif kind == "tool_use" and message.role == "assistant":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": _string(block, "name", at), "arguments": arguments}
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
    return [*results, told]


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
