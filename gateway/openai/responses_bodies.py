"""The body of /v1/responses: fields and items, checked, and turned into the request for a chat that is served.

The items of `input` are no messages: a call of a tool, its output and reasoning are items of their own. So every
message of the chat knows its place in the body, by which an error names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import orjson
import pydantic
import pydantic_core
from pydantic import Discriminator, Field, Tag

from gateway.errors import BadField
from gateway.openai import bodies
from gateway.openai.bodies import MOST_MESSAGES, ChatRequest
from gateway.request import Request
from gateway.tools import request as calling
from protos import common_pb2

_UNSUPPORTED: dict[str, Sequence[Any]] = {
    # Fields that would change the answer, and the values beside null with which they do not.
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
}
_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
}
"""Names of a chat's fields, and of those that they are made of."""
_MESSAGE = re.compile(r"messages\[(\d+)\](.*)", re.DOTALL)
_FUNCTION = re.compile(r"(tools\[\d+\])\.function\b(.*)", re.DOTALL)


_TAGS: dict[type[Any], str] = {str: "<string>", list: "<list>", dict: "<object>"}


def _form(value: Any) -> str:
    """The tag of a field that has one of several JSON types."""
    return _TAGS.get(type(value), "<other>")


def _kind(value: Any) -> str | None:
    """The tag of an object that says its type; one without it is a message."""
    return f"<{value.get('type', 'message')}>" if isinstance(value, dict) else None


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="ignore", strict=True, protected_namespaces=())


class InputText(_Model):
    type: Literal["input_text", "output_text"]
    text: str


_STRING_OR_LIST = Discriminator(
    _form, custom_error_type="string_or_list", custom_error_message="must be a string or a list"
)
_Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[InputText], Field(fail_fast=True), Tag("<list>")], _STRING_OR_LIST
]


class InputMessage(_Model):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content


class InputCall(_Model):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str
    arguments: str


class InputCallOutput(_Model):
    type: Literal["function_call_output"]
    call_id: str
    output: _Content


class ReasoningText(_Model):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(_Model):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


_Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")],
    Discriminator(_kind),
]


class FunctionTool(_Model):
    type: Literal["function"]
    name: str = Field(pattern=calling.NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(_Model):
    type: Literal["function"]
    name: str


class PlainFormat(_Model):
    type: Literal["text", "json_object"]


class SchemaFormat(_Model):
    type: Literal["json_schema"]
    name: str
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] = Field(alias="schema")


class TextConfig(_Model):
    format: (
        Annotated[
            Annotated[PlainFormat, Tag("<text>")]
            | Annotated[PlainFormat, Tag("<json_object>")]
            | Annotated[SchemaFormat, Tag("<json_schema>")],
            Discriminator(_kind),
        ]
        | None
    ) = None


class ReasoningConfig(_Model):
    effort: str | None = Field(None, min_length=1, max_length=32)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a message in the body."""

    field: str
    is_message: bool
    """Whether the fields of the message are fields of what is there."""


class _Conversation:
    """The messages of a chat, made of items one after the other."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[_Place] = []
        self._called: set[str] = set()
        self._reasoning: list[str] = []
        """Reasoning whose assistant message has not come yet."""
        self._reasoned = ""
        """Place of that reasoning."""
        self._open = False
        """Whether the last message is the assistant's, and takes calls."""

    def say(self, role: str, content: Any, place: _Place) -> None:
        assistant = role == "assistant"
        if not assistant:
            self.settle()
        message = {"role": role, "content": content}
        if self._reasoning:
            message["reasoning_content"] = "\n".join(self._reasoning)
            self._reasoning = []
        self.messages.append(message)
        self.places.append(place)
        self._open = assistant

    def settle(self) -> None:
        """Gives reasoning that no message of the assistant follows one of its own: its answer was cut."""
        if self._reasoning:
            self.say("assistant", "", _Place(self._reasoned, is_message=False))

    def add(self, item: _Item, place: str) -> None:
        """Adds an item. Raises BadField."""
        if isinstance(item, InputMessage):
            self.say(item.role, _content(item.content), _Place(place, is_message=True))
        elif isinstance(item, InputReasoning):
            if text := "".join(part.text for part in item.content or ()):
                self._reasoning.append(text)
                self._reasoned, self._open = place, False
        elif isinstance(item, InputCall):
            self._call(item, place)
        else:
            self._result(item, place)

    def _call(self, call: InputCall, place: str) -> None:
        function = {"name": call.name, "arguments": call.arguments}
        said = {"id": call.call_id, "type": "function", "function": function}
        try:
            calls = calling.for_template({"tool_calls": [said]})["tool_calls"]
        except ValueError as error:
            field = f"{place}.arguments"
            raise BadField(f"Invalid '{field}': {error}", field) from None
        if not self._open:
            self.say("assistant", "", _Place(place, is_message=False))
        self.messages[-1].setdefault("tool_calls", []).extend(calls)
        self._called.add(call.call_id)

    def _result(self, output: InputCallOutput, place: str) -> None:
        if output.call_id not in self._called:
            field = f"{place}.call_id"
            raise BadField(f"Invalid '{field}': no call before it has the id '{output.call_id[:40]}'", field)
        self.say("tool", _content(output.output), _Place(place, is_message=False))
        self.messages[-1]["tool_call_id"] = output.call_id


def _content(content: _Content) -> str | list[dict[str, str]]:
    """A content as messages of a chat have it."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


class ResponsesRequest(_Model):
    """The body of /v1/responses."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str = Field(min_length=1)
    input: Annotated[
        Annotated[str, Tag("<string>")]
        | Annotated[list[_Item], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), Tag("<list>")],
        _STRING_OR_LIST,
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 63)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    tools: list[FunctionTool] | None = Field(None, fail_fast=True)
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<string>")]
            | Annotated[ChosenFunction, Tag("<object>")],
            Discriminator(_form, custom_error_type="choice", custom_error_message="must be a string or an object"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    service_tier: str | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    user: str | None = None
    store: bool | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    def request(self, request_id: str, slo: common_pb2.Slo, arrival_s: float) -> Request:
        """The gateway's request made of the body. Raises BadField."""
        bodies.check_supported(self.model_extra or {}, _UNSUPPORTED)
        fields = {
            "model": self.model,
            "messages": self._conversation.messages,
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "response_format": self._format(),
            "tools": self._tools(),
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "service_tier": self.service_tier,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
        }
        try:
            chat = bodies.made(ChatRequest, {name: value for name, value in fields.items() if value is not None})
            return chat.request(request_id, slo, arrival_s)
        except BadField as error:
            raise self.renamed(error) from None

    def renamed(self, error: BadField) -> BadField:
        """An error of the chat, with its fields as this body names them."""
        field, text = error.field, str(error)
        if field is not None:
            field = self._name(field)
            text = text.replace(f"'{error.field}'", f"'{field}'")
        for chats, own in _NAMES.items():
            text = text.replace(f"'{chats}'", f"'{own}'")
        return BadField(text, field, error.code)

    def _name(self, chats: str) -> str:
        """The name of a chat's field in this body."""
        if (found := _MESSAGE.match(chats)) is not None:
            place = self._conversation.places[int(found[1])]
            return place.field + (found[2] if place.is_message else "")
        if (found := _FUNCTION.match(chats)) is not None:
            return found[1] + found[2]
        return _NAMES.get(chats, chats)

    @cached_property
    def _conversation(self) -> _Conversation:
        made = _Conversation()
        if self.instructions:
            made.say("system", self.instructions, _Place("instructions", is_message=False))
        if isinstance(self.input, str):
            made.say("user", self.input, _Place("input", is_message=False))
        else:
            for index, item in enumerate(self.input):
                made.add(item, f"input[{index}]")
            made.settle()
        return made

    def _format(self) -> dict[str, Any] | None:
        asked = self.text.format if self.text is not None else None
        if isinstance(asked, SchemaFormat):
            return {"type": asked.type, "json_schema": {"name": asked.name, "schema": asked.json_schema}}
        return None if asked is None else {"type": asked.type}

    def _tools(self) -> list[dict[str, Any]] | None:
        if self.tools is None:
            return None
        return [{"type": tool.type, "function": tool.model_dump(exclude={"type"})} for tool in self.tools]

    def _choice(self) -> str | dict[str, Any] | None:
        if isinstance(self.tool_choice, ChosenFunction):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice

    def echoed(self) -> dict[str, Any]:
        """The fields of the request that a response repeats."""
        asked = self.text.format if self.text is not None else None
        chosen = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning is not None else None, "summary": None},
            "temperature": self.temperature,
            "text": {"format": {"type": "text"} if asked is None else _encoded(asked.model_dump(by_alias=True))},
            "tool_choice": chosen.model_dump() if isinstance(chosen, ChosenFunction) else chosen or "auto",
            "tools": _encoded([tool.model_dump() for tool in self.tools or ()]),
            "top_p": self.top_p,
            "user": self.user,
        }


def _encoded(value: Any) -> orjson.Fragment:
    """The JSON of what a client sent, whose integers may be longer than orjson's. No JSON has an infinite number: it is
    null."""
    return orjson.Fragment(pydantic_core.to_json(value, inf_nan_mode="null"))


def parse(data: bytes) -> ResponsesRequest:
    """The checked body. Raises BadField."""
    try:
        return bodies.parse(ResponsesRequest, data)
    except BadField as error:
        if error.code == "invalid_value" and error.field and error.field.endswith(".type"):
            error.code = "unsupported_parameter"  # the types are more than what is known here
        raise
