"""Tools in a request: `tools`, `tool_choice` and `parallel_tool_calls`, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pydantic
from pydantic import Field

from gateway.http import surrogates
from gateway.schemas.grammar import levels

MOST_TOOLS = 128
MOST_LEVELS = 64
"""The most levels of arguments: templates write them out recursively."""
NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class Function(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", strict=True)

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: Function


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools that the model may call in its answer."""

    functions: Sequence[Tool]
    must: bool
    """Whether the answer has to be calls and nothing else."""
    name: str | None = None
    """The only tool that may be called; None: any."""
    parallel: bool = True
    """Whether there may be several calls."""
    answer: str | None = None
    """The schema, as text, of an answer without calls; None: such an answer is free, or there must be calls."""

    @property
    def strict(self) -> bool:
        """Whether arguments of some function have to fit its parameters."""
        return any(tool.function.strict for tool in self.functions)

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.name} if self.name else (tool.function.name for tool in self.functions))

    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [tool.model_dump(exclude_none=True) for tool in self.functions]


_KINDS = ("none", "auto", "required")
_THE = "the function "


def choice(value: Any) -> str | None:
    """A checked `tool_choice`: one of `_KINDS`, or `_THE` and a name. Raises ValueError."""
    if value is None or value in _KINDS:
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("must be 'none', 'auto', 'required' or a function with a name")
    return _THE + str(function["name"])


def asked(functions: Sequence[Tool] | None, chosen: str | None, parallel: bool | None) -> Tools | None:
    """The tools of a request; None if there is nothing to call. `chosen`: as `choice` returns it. Raises ValueError
    with the field and what is wrong with it."""
    functions = functions or ()
    names = [tool.function.name for tool in functions]
    if len(functions) > MOST_TOOLS:
        raise ValueError("tools", f"at most {MOST_TOOLS} tools, not {len(functions)}")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError("tools", f"two tools are named '{twice}'")
    name = chosen.removeprefix(_THE) if chosen is not None and chosen.startswith(_THE) else None
    if name is not None and name not in names:
        raise ValueError("tool_choice", f"there is no tool '{name}'")
    if chosen == "required" and not functions:
        raise ValueError("tool_choice", "there are no tools to call")
    if not functions or chosen == "none":
        return None
    return Tools(functions, name is not None or chosen == "required", name, parallel is not False)


def for_template(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of the conversation as chat templates take it: the arguments of its calls, which are text in OpenAI's
    form, become objects. Raises ValueError for calls that are none."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise ValueError("must be a list of calls")
    told = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("each call needs a function with a name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(surrogates.mended(arguments.encode()) or arguments)
            except (ValueError, RecursionError):
                raise ValueError(f"the arguments of '{function['name']}' are not JSON") from None
        if levels(arguments) > MOST_LEVELS:
            raise ValueError(f"the arguments of '{function['name']}' have more than {MOST_LEVELS} levels")
        told.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": told}
