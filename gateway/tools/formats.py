"""The ways in which models write calls of tools, and which of these a model uses.

SGLang has parsers for some thirty. They cannot be had here without torch (six seconds, 220 MB), so these are the ways
of the models that are known to run, and the one that a grammar enforces, which every model can be made to use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from gateway.errors import BadField
from gateway.tools.request import Tools


@dataclass(frozen=True, slots=True)
class Format:
    """One way to write calls: JSON objects with a name and arguments (or parameters), one or several after each
    other."""

    begin: str
    """Text before the calls, anywhere in the answer."""
    end: str = ""
    """Text after the calls; empty: there is none."""
    between: str = " \t\r\n"
    """Characters without meaning around and between the calls."""
    bare: bool = False
    """Whether `begin` may be missing if the answer begins with a call."""
    short_ids: bool = False
    """Whether templates want ids of calls of nine characters."""
    arguments: str = "arguments"
    """Name of the arguments in calls that a grammar enforces."""
    around: tuple[str, str] = ("", "")
    """Text that a grammar has the model write before and after each call."""
    joins: str = "\n"
    """Text that a grammar has the model write between two calls."""
    around_all: tuple[str, str] = ("", "")
    """Text that a grammar has the model write before and after all calls."""


FORMATS: Mapping[str, Format] = {
    "hermes": Format("<tool_call>", "</tool_call>", around=("<tool_call>\n", "\n</tool_call>")),
    "llama3": Format("<|python_tag|>", between=" \t\r\n;", bare=True, arguments="parameters", joins="; "),
    "mistral": Format(
        "[TOOL_CALLS]", between=" \t\r\n[,]", short_ids=True, joins=", ", around_all=("[TOOL_CALLS][", "]")
    ),
}
"""Formats by name: Hermes, Qwen 2.5 and 3; Llama 3.1 to 3.3; Mistral up to tokenizer v7."""
ENFORCED = Format("", between=" \t\r\n[,]", bare=True, arguments="parameters", joins=", ", around_all=("[", "]"))
"""The format that a grammar enforces in an answer that must be calls."""


def guess(template: str) -> Format | None:
    """The format that a chat template uses, since it has to show the model what it wrote before; None if none is
    recognized."""
    return next((known for known in FORMATS.values() if known.begin in template), _by_parameters(template))


def _by_parameters(template: str) -> Format | None:
    """The format of templates of Llama 3.2, which have the form of a call and no tag."""
    return FORMATS["llama3"] if '{"name": function name, "parameters":' in template else None


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


_DECODER = json.JSONDecoder()
_MARK = re.compile(r'\\.|["{}]', re.DOTALL)
"""Characters that decide where an object ends; one that follows a backslash does not count."""


class CallFinder:
    """Finds calls in one answer while its text arrives. A JSON object that is no call of a known tool is text."""

    def __init__(self, form: Format, names: Set[str], *, most: int | None = None) -> None:
        """`names`: those of the tools. `most`: calls beyond that number are dropped."""
        self._form = form
        self._names = names
        self._most = most
        self._held = ""
        self._at_start = form.bare
        self._inside = False
        self._found = 0
        self._blank = ""
        """Blank text between or after calls, until it is known whether anything follows."""
        # The object that is held:
        self._seen = 0  # characters of it that were looked at
        self._depth = 0
        self._quoted = False
        self._broken = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """(text that may be sent, calls that are complete)."""
        self._held += text
        told: list[str] = []
        calls: list[Call] = []
        while self._held and self._step(told, calls):
            pass
        return "".join(told), calls

    def finish(self) -> str:
        """The text that is held back, when the answer has ended."""
        held, self._held = self._held, ""
        told: list[str] = []
        self._tell(told, self._form.begin + held if self._inside and held and not self._form.bare else held)
        return "".join(told)

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that are looked for, although they may be special tokens."""
        return tuple(mark for mark in (self._form.begin, self._form.end) if mark)

    @property
    def found(self) -> bool:
        """Whether there was a call."""
        return self._found > 0

    def _tell(self, told: list[str], text: str) -> None:
        """Appends text to `told`, without line ends between calls and after the last one, which have no meaning."""
        if self._found:
            text = self._blank + text
            said = text.rstrip()
            text, self._blank = said, text[len(said) :]
        told.append(text)

    def _step(self, told: list[str], calls: list[Call]) -> bool:
        """Takes one step through the held text. Returns whether there is more to do."""
        if not self._inside:
            return self._outside(told)
        form = self._form
        self._held = held = self._held.lstrip(form.between)
        if form.end and held.startswith(form.end):
            self._held, self._inside = held[len(form.end) :], False
            return True
        if not held or (form.end and form.end.startswith(held)):
            return False
        if form.bare and form.begin and held.startswith(form.begin):
            self._held = held[len(form.begin) :]
            return True
        if form.bare and form.begin.startswith(held):
            return False
        if held[0] != "{":
            self._tell(told, held)
            self._held, self._inside, self._at_start = "", False, False
            return False
        if self._broken or not self._is_whole():
            return False
        try:
            value, end = _DECODER.raw_decode(held)
        except (ValueError, RecursionError):
            self._broken = True  # nothing that follows can make it valid
            return False
        call = self._call(value)
        if call is None:
            self._tell(told, held[:end])
        elif self._most is None or self._found < self._most:
            calls.append(call)
            self._found += 1
            self._blank = ""
        self._held = held[end:]
        self._seen = 0
        return True

    def _is_whole(self) -> bool:
        """Whether the object that is held has ended. Each character is looked at once: arguments may be long, and come
        token by token."""
        held = self._held
        for mark in _MARK.finditer(held, self._seen):
            self._seen = mark.end()
            if mark[0] == '"':
                self._quoted = not self._quoted
            elif mark[0] in "{}" and not self._quoted:
                self._depth += 1 if mark[0] == "{" else -1
                if not self._depth:
                    return True
        if self._seen < len(held):
            self._seen = len(held) - held.endswith("\\")
        return False

    def _outside(self, told: list[str]) -> bool:
        begin, held = self._form.begin, self._held
        if self._at_start:
            rest = held.lstrip(self._form.between)
            if not rest:
                return False
            if rest[0] == "{":
                self._inside = True
                return True
            if begin and rest.startswith(begin):
                self._held, self._inside = rest[len(begin) :], True
                return True
            if begin.startswith(rest):
                return False
            self._at_start = False
        at = held.find(begin) if begin else -1
        if at >= 0:
            self._tell(told, held[:at])
            self._held, self._inside = held[at + len(begin) :], True
            return True
        kept = next((n for n in range(min(len(begin) - 1, len(held)), 0, -1) if begin.startswith(held[-n:])), 0)
        self._tell(told, held[: len(held) - kept])
        self._held = held[len(held) - kept :]
        return False

    def _call(self, value: Any) -> Call | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        written = written.encode(errors="replace").decode()  # JSON may have half of a character
        return Call(uuid4().hex[:9] if self._form.short_ids else f"call_{uuid4().hex[:24]}", name, written)


def form(tools: Tools, template: str, stated: str = "") -> Format | None:
    """The format in which a model with that chat template writes calls; `stated` is the model's configured format. None
    if the format is none of these. Raises BadField if the template takes no tools."""
    if "tools" not in template:
        raise BadField("The model's chat template takes no tools.", "tools", "unsupported_parameter")
    found = FORMATS.get(stated) if stated else guess(template)
    if tools.must:
        return replace(ENFORCED, short_ids=found is not None and found.short_ids)
    return found


def unknown() -> BadField:
    """The error for a model of which it is not known how it writes calls."""
    return BadField(
        "It is not known how this model writes calls of tools: a 'tool_choice' of 'required', or of one function, "
        "works with any model.",
        "tools",
        "unsupported_parameter",
    )


def finder(tools: Tools, form: Format) -> CallFinder:
    """A finder for one answer."""
    return CallFinder(form, tools.names, most=None if tools.parallel else 1)
