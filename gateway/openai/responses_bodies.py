"""The body of /v1/responses: its fields, checked, and turned into the request for a chat that is served."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

import orjson
import pydantic
import pydantic_core
from pydantic import Discriminator, Field, Tag

from gateway.errors import BadField
from gateway.openai import bodies
from gateway.openai.bodies import FEW_PARTS, MOST_MESSAGES, ChatRequest, Effort
from gateway.openai.responses_items import (
    STRING_OR_LIST,
    Conversation,
    Fields,
    Item,
    MessagePlace,
    form_tag,
    kind_tag,
    renamed,
)
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


class FunctionTool(Fields):
    type: Literal["function"]
    name: str = Field(pattern=calling.NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Fields):
    type: Literal["function"]
    name: str


class PlainFormat(Fields):
    type: Literal["text", "json_object"]


class SchemaFormat(Fields):
    type: Literal["json_schema"]
    name: str
    description: str | None = None
    strict: bool | None = None
    json_schema: dict[str, Any] = Field(alias="schema")


class TextConfig(Fields):
    format: (
        Annotated[
            Annotated[PlainFormat, Tag("<text>")]
            | Annotated[PlainFormat, Tag("<json_object>")]
            | Annotated[SchemaFormat, Tag("<json_schema>")],
            Discriminator(kind_tag),
        ]
        | None
    ) = None


class ReasoningConfig(Fields):
    effort: Effort | None = None


class ResponsesRequest(Fields):
    """The body of /v1/responses."""

    model_config = pydantic.ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str = Field(min_length=1)
    input: Annotated[
        Annotated[str, Tag("<string>")]
        | Annotated[list[Item], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True), Tag("<list>")],
        STRING_OR_LIST,
        FEW_PARTS,
    ]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 63)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stream: bool | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=calling.MOST_TOOLS, fail_fast=True)
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("<string>")]
            | Annotated[ChosenFunction, Tag("<object>")],
            Discriminator(form_tag, custom_error_type="choice", custom_error_message="must be a string or an object"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    service_tier: str | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
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
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
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
        return renamed(error, self._name, _NAMES)

    def _name(self, chats: str) -> str:
        """The name of a chat's field in this body."""
        if (found := _MESSAGE.match(chats)) is not None:
            place = self._conversation.places[int(found[1])]
            return place.field + (found[2] if place.is_message else "")
        if (found := _FUNCTION.match(chats)) is not None:
            return found[1] + found[2]
        return _NAMES.get(chats, chats)

    @cached_property
    def _conversation(self) -> Conversation:
        made = Conversation()
        if self.instructions:
            made.say("system", self.instructions, MessagePlace("instructions", is_message=False))
        if isinstance(self.input, str):
            made.say("user", self.input, MessagePlace("input", is_message=False))
        else:
            for index, item in enumerate(self.input):
                made.add(item, f"input[{index}]")
            made.settle()
            if not made.messages:
                raise BadField("Invalid 'input': it has no message, and reasoning without 'content' is none", "input")
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

    def echoed(self, sampling: common_pb2.Sampling) -> dict[str, Any]:
        """The fields of the request that a response repeats, but for the model's name, with those of `sampling` where
        the request left them open."""
        asked = self.text.format if self.text is not None else None
        chosen = self.tool_choice
        return {
            "instructions": self.instructions,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "presence_penalty": self.presence_penalty or 0.0,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning is not None else None, "summary": None},
            "safety_identifier": self.safety_identifier,
            "service_tier": "flex" if self.service_tier == "flex" else "default",
            "temperature": _given(self.temperature, sampling.temperature),
            "text": {"format": {"type": "text"} if asked is None else _encoded(asked.model_dump(by_alias=True))},
            "tool_choice": chosen.model_dump() if isinstance(chosen, ChosenFunction) else chosen or "auto",
            "tools": _encoded([tool.model_dump() for tool in self.tools or ()]),
            "top_logprobs": 0,
            "top_p": _given(self.top_p, sampling.top_p or 1.0),
            "user": self.user,
        }


def _given(asked: float | None, used: float) -> float:
    """What the request says, or what is used where it says nothing: a float of 32 bits, whose 6 digits hold."""
    return float(f"{used:.6g}") if asked is None else asked


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
