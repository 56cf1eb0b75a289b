"""Calls of tools in one answer whose format writes each as a JSON object: Hermes and Qwen, Llama 3, Mistral, and the
array that a grammar enforces. SGLang's JsonArrayParser reads each call; here is what stands around the calls.

Why not SGLang's parsers of these formats: in a stream they lose text, calls and numbers of calls
(docs/design/decisions/030-tool-calls.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts around the calls of a format."""

    begin: str = ""
    """Text before the calls; empty: they are all of the answer."""
    end: str = ""
    """Text after them; empty: there is none."""
    between: str = " \t\r\n"
    """Characters without meaning around and between the calls."""
    bare: bool = False
    """Whether `begin` may be missing if the answer begins with a call."""
    named: bool = False
    """Whether a call may also be a name, `[ARGS]` and an object, as newer models of Mistral write it."""


ENFORCED = Marks(between=" \t\r\n[,]", bare=True)
_HERMES = Marks("<tool_call>", "</tool_call>")
MARKS: Mapping[str, Marks] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "llama3": Marks("<|python_tag|>", between=" \t\r\n;", bare=True),
    "mistral": Marks("[TOOL_CALLS]", between=" \t\r\n[,]", named=True),
}
"""Marks by SGLang's names of its parsers."""
_READ_AGAIN = 32
"""SGLang's parser reads all of a call again with each piece: it gets no piece that is shorter than this part of it."""
_CUT = re.compile(
    r"""\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*(?:,\s*"(?:arguments|parameters)"\s*:\s*(?!")(.*))?""", re.DOTALL
)
_CUT_NAMED = re.compile(r"\s*([\w.-]+)\s*\[ARGS\](.*)", re.DOTALL)
"""The name and the arguments of a call of which the end is missing."""
_DECODER = json.JSONDecoder()
Part = tuple[str, str]
"""Name and arguments, or more arguments with an empty name."""


class ParserFactory(Protocol):
    """Makes parsers of SGLang's."""

    def array(self) -> Any:
        """A JsonArrayParser."""

    def mistral(self) -> Any:
        """A MistralDetector."""


class JsonCalls:
    """The calls and the text of one answer. An object that is no call of a known tool is text."""

    def __init__(self, marks: Marks, sglang: ParserFactory, tools: list[Any]) -> None:
        """`tools`: those that may be called, as SGLang has them."""
        self._marks = marks
        self._sglang = sglang
        self._tools = tools
        self._text = ""
        """Text that was not looked at yet."""
        self._inside = False
        """Whether the text is within the marks."""
        self._opened = ""
        """What was left out before an object; it is text if the object is no call."""
        self._blank = ""
        """Blank text after a call, until it is known whether more than a call follows."""
        self._said = self._called = False
        """Whether there was text, and a call."""
        self._begin("")

    def push(self, text: str, end: bool, cut: bool = False) -> tuple[str, list[Part]]:
        """(text that is no call, parts of calls) which more of the answer completes; `end`: it is the last; `cut`: the
        answer did not end by itself, so that an unfinished call is one all the same."""
        self._text += text
        told: list[str] = []
        parts: list[Part] = []
        if end or len(self._text) * _READ_AGAIN >= len(self._object):
            while self._step(told, parts):
                pass
        if end:
            self._finish(told, parts, cut)
        return "".join(told), parts

    def _step(self, told: list[str], parts: list[Part]) -> bool:
        """Takes one step through the text. Returns whether there is more to do."""
        if self._parser is not None:
            return self._read(told, parts)
        if not self._text:
            return False
        return self._between(told) if self._inside else self._outside(told)

    def _outside(self, told: list[str]) -> bool:
        begin = self._marks.begin
        if not self._said and not self._called:
            self._text = self._text.lstrip()
            if self._marks.bare and self._text.lstrip(self._marks.between)[:1] in ("", "{"):
                self._inside = True
                return bool(self._text)
        at = self._text.find(begin) if begin else -1
        if at < 0:
            whole = len(self._text) - begun_at_end(self._text, begin)
            self._say(told, self._text[:whole])
            self._text = self._text[whole:]
            return False
        self._say(told, self._text[:at])
        self._text, self._opened, self._inside = self._text[at + len(begin) :], begin, True
        return True

    def _between(self, told: list[str]) -> bool:
        marks = self._marks
        rest = self._text.lstrip(marks.between)
        last = self._text[: len(self._text) - len(rest)][-1:]
        if last and marks.begin and marks.begin.startswith((last + rest)[: len(marks.begin)]):
            rest = last + rest  # a mark may begin with a character that has no meaning otherwise
        self._opened += self._text[: len(self._text) - len(rest)]
        self._text = rest
        for mark in (marks.begin, marks.end):
            if mark and rest.startswith(mark):
                self._inside = mark == marks.begin
                self._text, self._opened = rest[len(mark) :], mark if self._inside else ""
                return True
            if mark.startswith(rest):
                return False
        if rest[0] == "{":
            self._begin("[", self._sglang.array())
        elif marks.named and self._opened.startswith(marks.begin):
            self._begin(marks.begin, self._sglang.mistral())
        else:
            self._inside = False
            self._say(told, ("" if self._called else self._opened) + rest)
            self._text = self._opened = ""
            return False
        return True

    def _begin(self, prefix: str, parser: Any = None) -> None:
        """Begins to read a call; None: none. `prefix`: text that the parser gets before it."""
        self._parser, self._object, self._prefix = parser, "", prefix
        self._unknown = False
        """Whether it turned out to be no call of a known tool."""
        self._name = ""
        """The call's name, until its arguments begin."""
        self._quoted = ""
        """Arguments, read so far, of a call that has them as a string."""
        self._sent = ""
        """Its arguments, as far as they were told."""

    def _read(self, told: list[str], parts: list[Part]) -> bool:
        """Reads more of a call. Returns whether it has ended."""
        parser, text, self._text = self._parser, self._text, ""
        if not self._unknown:
            said = text if self._object else self._prefix + text
            while parser.current_tool_id <= 0 and (calls := parser.parse_streaming_increment(said, self._tools).calls):
                said = ""
                for call in calls:
                    self._take(call.name or "", call.parameters or "", parts)
            self._unknown = not parser._buffer and not self._name and not self._sent
        self._object += text
        if parser.current_tool_id > 0:
            if self._quoted:
                self._tell(str(json.loads(self._quoted)) or "{}", parts)
            self._text = parser._buffer
        elif self._sent or self._prefix != "[":
            return False
        else:
            try:
                value, end = _DECODER.raw_decode(self._object)
            except (ValueError, RecursionError):
                return False
            if self._name:  # a call without arguments, or with half of a character, which SGLang's parser does not end
                given = value.get("arguments", value.get("parameters"))
                given = {} if given is None else given
                self._tell(given if isinstance(given, str) else json.dumps(given, ensure_ascii=False), parts)
            else:
                self._say(told, self._opened + self._object[:end])
            self._text, self._opened = self._object[end:], ""
        self._begin("")
        return bool(self._text)

    def _take(self, name: str, arguments: str, parts: list[Part]) -> None:
        """Takes a part of a call from SGLang's parser."""
        self._name = name or self._name
        if self._quoted or (self._name and arguments.startswith('"')):
            self._quoted += arguments
        elif arguments:
            self._tell(arguments, parts)

    def _tell(self, arguments: str, parts: list[Part]) -> None:
        parts.append((self._name, _encodable(arguments)))
        self._sent += arguments
        self._called = True
        self._name = self._opened = self._blank = ""

    def _finish(self, told: list[str], parts: list[Part], cut: bool) -> None:
        held = self._opened + self._object + self._text
        if cut and self._tell_cut(parts):
            return
        if self._parser is not None and self._sent:
            # Not of a call that was cut: its arguments would seem to be whole.
            if _is_json(self._object.rstrip(self._marks.between)) and (rest := unsent(self._parser)):
                self._tell(rest, parts)
        elif self._parser is not None or not self._called or held.strip(self._marks.between):
            self._say(told, held)

    def _tell_cut(self, parts: list[Part]) -> bool:
        """Tells what there is of a call that was cut. Returns whether the rest of the answer is of a call."""
        named = self._prefix not in ("", "[")
        found = (_CUT_NAMED if named else _CUT).match(self._object) if self._parser is not None else None
        if found is not None:
            name = found[1] if named else str(json.loads(found[1], strict=False))
            if name in {tool.function.name for tool in self._tools}:
                arguments = found[2] or ""
                if not self._sent:
                    self._name = name
                    self._tell(arguments, parts)
                elif arguments.startswith(self._sent) and arguments != self._sent:
                    self._tell(arguments[len(self._sent) :], parts)
                return True
        if self._marks is not ENFORCED:
            return False
        if not self._called and len(self._tools) == 1:
            parts.append((self._tools[0].function.name, ""))
        return True

    def _say(self, told: list[str], text: str) -> None:
        """Appends text to `told`, without blanks between calls and after the last one."""
        if self._called:
            text = self._blank + text
            self._blank = text[len(text.rstrip()) :]
            text = text.rstrip()
        self._said = self._said or bool(text)
        told.append(text)


def begun_at_end(text: str, mark: str) -> int:
    """Number of characters at the end of a text with which a mark begins, and does not end."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)


def unsent(detector: Any) -> str:
    """Arguments of the last call that a parser of SGLang's has read and not passed on. SGLang's own server sends them
    at the end of a stream."""
    calls, sent = getattr(detector, "prev_tool_call_arr", ()), getattr(detector, "streamed_args_for_tool", ())
    index = len(calls) - 1
    if not 0 <= index < len(sent):
        return ""
    arguments = calls[index].get("arguments", {})
    whole = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return whole[len(sent[index]) :] if whole.startswith(sent[index]) else ""


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _encodable(arguments: str) -> str:
    """Arguments in which there is no half of a character, as JSON may have."""
    return arguments.encode(errors="replace").decode()
