"""The items of a response's `input`, and the messages of a chat that say the same.

A call of a tool, its output and reasoning are items of their own. So every message knows its place in the body, by
which an error names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Discriminator, Field, Tag

from gateway.errors import BadField
from gateway.tools import request as calling

_TAGS: dict[type[Any], str] = {str: "<string>", list: "<list>", dict: "<object>"}


def form_tag(value: Any) -> str:
    """The tag of a field that has one of several JSON types."""
    return _TAGS.get(type(value), "<other>")


def kind_tag(value: Any) -> str | None:
    """The tag of an object that says its type; one without it is a message."""
    return f"<{value.get('type', 'message')}>" if isinstance(value, dict) else None


def _part_tag(value: Any) -> str:
    """The tag of a part of a content: text, unless it says that it is a refusal."""
    return "<refusal>" if isinstance(value, dict) and value.get("type") == "refusal" else "<text>"


class Fields(pydantic.BaseModel):
    """An object of the body; fields of it that nobody here knows are ignored."""

    model_config = pydantic.ConfigDict(extra="ignore", strict=True, protected_namespaces=())


class InputText(Fields):
    type: Literal["input_text", "output_text"]
    text: str


class InputRefusal(Fields):
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


STRING_OR_LIST = Discriminator(
    form_tag, custom_error_type="string_or_list", custom_error_message="must be a string or a list"
)
_Part = Annotated[
    Annotated[InputText, Tag("<text>")] | Annotated[InputRefusal, Tag("<refusal>")], Discriminator(_part_tag)
]
_Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[_Part], Field(fail_fast=True), Tag("<list>")], STRING_OR_LIST
]


class InputMessage(Fields):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Content


class InputCall(Fields):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str
    arguments: str


class InputCallOutput(Fields):
    type: Literal["function_call_output"]
    call_id: str
    output: _Content


class ReasoningText(Fields):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Fields):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")],
    Discriminator(kind_tag),
]


def renamed(error: BadField, name: Callable[[str], str], names: Mapping[str, str]) -> BadField:
    """An error of a chat in the words of another API's body. `name` gives that body's name of a chat's field, `names`
    those that also stand within the text."""
    field, text = error.field, str(error)
    if field is not None:
        field = name(field)
        text = text.replace(f"'{error.field}'", f"'{field}'")
    for chats, own in names.items():
        text = text.replace(f"'{chats}'", f"'{own}'")
    return BadField(text, field, error.code)


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """The place of a message in the body."""

    field: str
    is_message: bool
    """Whether the fields of the message are fields of what is there."""


class Conversation:
    """The messages of a chat, made of items one after the other."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[MessagePlace] = []
        self._called: set[str] = set()
        self._reasoning: list[str] = []
        """Reasoning whose assistant message has not come yet."""
        self._reasoned = ""
        """Place of that reasoning."""
        self._open = False
        """Whether the last message is the assistant's, and takes calls."""

    def say(self, role: str, content: Any, place: MessagePlace) -> None:
        """Adds a message; one of the assistant gets the reasoning that came before it."""
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
            self.say("assistant", "", MessagePlace(self._reasoned, is_message=False))

    def add(self, item: Item, place: str) -> None:
        """Adds an item. Raises BadField."""
        if isinstance(item, InputMessage):
            self.say(item.role, _content(item.content), MessagePlace(place, is_message=True))
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
            self.say("assistant", "", MessagePlace(place, is_message=False))
        self.messages[-1].setdefault("tool_calls", []).extend(calls)
        self._called.add(call.call_id)

    def _result(self, output: InputCallOutput, place: str) -> None:
        if output.call_id not in self._called:
            field = f"{place}.call_id"
            raise BadField(f"Invalid '{field}': no call before it has the id '{output.call_id[:40]}'", field)
        self.say("tool", _content(output.output), MessagePlace(place, is_message=False))
        self.messages[-1]["tool_call_id"] = output.call_id


def _content(content: _Content) -> str | list[dict[str, str]]:
    """A content as messages of a chat have it."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]
