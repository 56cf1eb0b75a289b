"""Calls of tools, and how grammars have models write them. Reading them is SGLang's matter (`gateway/parsing`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gateway.errors import BadField


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write calls under a grammar: JSON objects with a name and arguments, one or several after each
    other."""

    arguments: str = "arguments"
    """Name of the arguments."""
    around: tuple[str, str] = ("", "")
    """Text before and after each call."""
    joins: str = "\n"
    """Text between two calls."""
    around_all: tuple[str, str] = ("", "")
    """Text before and after all calls."""
    mark: str = ""
    """Text with which calls begin, and nothing else does; empty: there is none."""


_HERMES = Format(around=("<tool_call>\n", "\n</tool_call>"), mark="<tool_call>")
FORMATS: Mapping[str, Format] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "llama3": Format(arguments="parameters", joins="; "),
    "mistral": Format(joins=", ", around_all=("[TOOL_CALLS][", "]"), mark="[TOOL_CALLS]"),
}
"""Formats by SGLang's names of their parsers: Hermes, Qwen 2.5 and 3; Llama 3.1 to 3.3; Mistral up to tokenizer v7."""
ENFORCED = Format(arguments="parameters", joins=", ", around_all=("[", "]"))
"""The format of an answer that must be calls, which every model can be made to use."""


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: str
    """Arguments as JSON text."""

    def whole(self) -> dict[str, Any]:
        """The call as OpenAI's messages have it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def part(self, index: int) -> CallPart:
        """The call as one part of a stream."""
        return CallPart(index, self.id, self.name, self.arguments)


@dataclass(frozen=True, slots=True)
class CallPart:
    """A call, or more of its arguments."""

    index: int
    """Number of the call in its answer."""
    id: str
    """Empty, as the name is, in parts after the first."""
    name: str
    arguments: str
    """JSON text, or a piece of it."""

    def delta(self) -> dict[str, Any]:
        """The part as OpenAI's streams have it."""
        if not self.name:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {"index": self.index, **Call(self.id, self.name, self.arguments).whole()}


def joined(parts: Iterable[CallPart]) -> list[Call]:
    """The calls of which these are the parts."""
    found: dict[int, Call] = {}
    for part in parts:
        before = found.get(part.index)
        found[part.index] = (
            Call(part.id, part.name, part.arguments)
            if before is None
            else replace(before, arguments=before.arguments + part.arguments)
        )
    return list(found.values())


def unknown() -> BadField:
    """The error for a model of which it is not known how it writes calls."""
    return BadField(
        "It is not known how this model writes calls of tools: a 'tool_choice' of 'required', or of one function, "
        "works with any model.",
        "tools",
        "unsupported_parameter",
    )
