"""A process that takes answers apart with SGLang's parsers: reasoning, calls of tools, and the rest. The gateway starts
it (`gateway/parsing`), because importing SGLang takes seconds and 400 MB, and no event loop may wait for a parser.

It reads one JSON array a line and answers each with one JSON object a line, in order; "close" alone has no answer.

    ["describe", TEMPLATE, [TOKEN, ...], REASONING, TOOLS]  the parsers of a chat template, or those that are given
    ["open", KEY, REASONING, FORCED, TOOLS, TOOL_PARSER, ENFORCED]   begins an answer; empty names: no such parser
    ["push", KEY, TEXT, END, CUT]                           more of its text, or with END the last of it
    ["whole", KEY, TEXT, CUT]                               all of its text at once; CUT: it did not end by itself
    ["close", KEY]                                          forgets an answer

Its first line names the parsers that this SGLang has. An answer that cannot be given is {"error": REASON}.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, BinaryIO

from gpu_scheduler.engines.sglang.base import environment
from gpu_scheduler.engines.sglang.json_calls import ENFORCED, MARKS, JsonCalls, unsent

_FAMILIES = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3"}
"""Text in chat templates -> parser, for templates that SGLang's rules do not know: they know models that reason."""
_HARMONY_ANSWER = "<|channel|>final<|message|>"
"""Text before an answer of gpt-oss: more messages may stand between its reasoning and its answer."""
_TAGS = re.compile(r"(<[^<>]*>)")
"""Texts that may be marks. SGLang's parsers of calls lose arguments if more than one comes with a piece of a stream, as
they do once several tokens come at once."""
_LLAMA32 = '{"name": function name, "parameters":'
"""Text in templates of Llama 3.2, which have the form of a call and no tag."""


@dataclass(frozen=True)
class Sglang:
    """Parts of SGLang by which answers are taken apart."""

    reasoning: Any
    calls: Any
    array: Any
    mistral: Any
    detection: Any
    tool: Any

    @classmethod
    def imported(cls) -> Sglang:
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.function_call.json_array_parser import JsonArrayParser
        from sglang.srt.function_call.mistral_detector import MistralDetector
        from sglang.srt.parser import template_detection
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        # It logs what it cannot read, which is the clients'.
        logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
        return cls(ReasoningParser, FunctionCallParser, JsonArrayParser, MistralDetector, template_detection, Tool)

    def names(self) -> dict[str, list[str]]:
        """Names of the parsers, by kind."""
        return {"reasoning": sorted(self.reasoning.DetectorMap), "tools": sorted(self.calls.ToolCallParserEnum)}

    def describe(self, template: str, tokens: Sequence[str], reasoning: str, tools: str) -> dict[str, Any]:
        """The parsers that SGLang would choose for a chat template and a vocabulary with these added tokens, but those
        whose name is given."""
        vocabulary = SimpleNamespace(get_vocab=lambda: dict.fromkeys(tokens, 0))
        forced, mode = self.detection.detect_reasoning_pattern(template)
        reasoning = reasoning or self.detection.detect_reasoning_parser(template, vocabulary, mode, forced) or ""
        if not tools:
            found = self.detection.detect_tool_call_parser(template, vocabulary, mode, forced) or ""
            tools = found if self._shown(found, template) else _family(template) or found
        return {"reasoning": reasoning, "tools": tools, **self.marks(reasoning)}

    def _shown(self, tools: str, template: str) -> bool:
        """Whether a chat template has the mark of a parser that was chosen by how the model reasons."""
        return bool(tools) and self.calls([], tools).detector.bot_token.strip() in template

    def marks(self, reasoning: str) -> dict[str, Any]:
        """The texts between which a parser's reasoning stands, the text after which the answer itself begins, and
        whether answers begin within their reasoning ("forced")."""
        if reasoning not in self.reasoning.DetectorMap:
            return {"begin": "", "end": "", "answer": "", "forced": False}
        detector = self.reasoning(reasoning).detector
        begin, end = detector.think_start_token or "", detector.think_end_token or ""
        answer = _HARMONY_ANSWER if reasoning == "gpt-oss" else end
        return {"begin": begin, "end": end, "answer": answer, "forced": bool(detector._in_reasoning)}


class Splitting:
    """One answer that is taken apart."""

    def __init__(
        self,
        sglang: Sglang,
        reasoning: str,
        forced: bool | None,
        tools: Sequence[Mapping[str, Any]],
        tool_parser: str,
        enforced: bool,
    ) -> None:
        """`forced`: whether the answer begins within its reasoning; None: as the parser thinks. `enforced`: the answer
        is the array of calls that a grammar makes; `tool_parser` then only decides what ids look like. Raises
        ValueError for a parser that this SGLang does not have."""
        made = [sglang.tool(**tool) for tool in tools]
        self._tool_parser = tool_parser
        self._reasoning = sglang.reasoning(reasoning, True, forced) if reasoning else None
        self._whole = sglang.reasoning(reasoning, False, forced) if reasoning else None
        marks = ENFORCED if enforced else MARKS.get(tool_parser)
        self._json = JsonCalls(marks, sglang, made) if tools and marks is not None else None
        self._calls = sglang.calls(made, tool_parser) if tools and tool_parser and marks is None else None
        self._names = {tool.function.name for tool in made}
        self._numbers: dict[int, int | None] = {}
        """Numbers of the calls by those that the parser gives them; None: a call of a tool that there is not."""
        self._read: list[str] = []
        """Text that the parser of calls was given, until there is a call."""
        self._said: list[str] = []
        """Text of it that the parser has passed on."""
        self._blank = ""
        """Blank text after a call, until it is known whether more than a call follows."""
        self._called = 0

    def push(self, text: str, end: bool, cut: bool = False) -> dict[str, Any]:
        """The parts that more text completes; with `end` also what was held back. `cut`: the answer did not end by
        itself."""
        thought = ""
        if self._reasoning is not None:
            thought, text = _parts(self._reasoning.parse_stream_chunk(text))
            if end:
                more, rest = _parts(self._reasoning.parse_stream_end())
                thought, text = thought + more, text + rest
                held, reasons = _held(self._reasoning.detector)
                thought, text = (thought + held, text) if reasons else (thought, text + held)
        calls: list[list[Any]] = []
        if self._json is not None:
            text, calls = self._found(text, end, cut)
        elif self._calls is not None:
            text, calls = self._streamed(text, end)
        return {"reasoning": thought, "text": text, "calls": calls}

    def _streamed(self, text: str, end: bool) -> tuple[str, list[list[Any]]]:
        """Text, and calls that SGLang's parser of the format finds in more of the answer."""
        assert self._calls is not None
        told, calls, detector = "", [], self._calls.detector
        for piece in filter(None, _TAGS.split(text)):
            called = self._called
            more, items = self._calls.parse_stream_chunk(piece)
            for item in items:
                if item.name and item.tool_index not in self._numbers:
                    known = item.name in self._names
                    self._numbers[item.tool_index] = self._called if known else None
                    self._called += known
                if (number := self._numbers.get(item.tool_index)) is not None:
                    calls.append(self._told(number, item.name, item.parameters))
            if called:
                more = self._blank + more
                self._blank = more[len(more.rstrip()) :]
                more = more.rstrip()
            told += more
        self._read.append(text)
        self._said.append(told)
        if self._numbers:
            self._read, self._said = [], []
        elif end and (read := "".join(self._read)).startswith(said := "".join(self._said)):
            told += read[len(said) :]  # what might have become a call
        if end and (rest := unsent(detector)):
            if (number := self._numbers.get(len(detector.prev_tool_call_arr) - 1)) is not None:
                calls.append(self._told(number, "", rest))
        return told, calls

    def whole(self, text: str, cut: bool = False) -> dict[str, Any]:
        """The parts of an answer's whole text. `cut`: it did not end by itself."""
        thought = ""
        if self._whole is not None:
            thought, text = _parts(self._whole.parse_non_stream(text))
        calls: list[list[Any]] = []
        if self._json is not None:
            text, calls = self._found(text, True, cut)
        elif self._calls is not None and self._calls.has_tool_call(text):
            if cut:  # SGLang's parsers of whole answers leave a call out that is cut, or complete it
                text, calls = self._streamed(text, True)
            else:
                text, items = self._calls.parse_non_stream(text)
                known = [item for item in items if item.name in self._names]
                calls = [self._told(index, item.name, item.parameters) for index, item in enumerate(known)]
        return {"reasoning": thought, "text": text, "calls": calls}

    def _found(self, text: str, end: bool, cut: bool) -> tuple[str, list[list[Any]]]:
        assert self._json is not None
        text, parts = self._json.push(text, end, cut)
        calls = []
        for name, arguments in parts:
            self._called += bool(name)
            calls.append(self._told(self._called - 1, name, arguments))
        return text, calls

    def _told(self, index: int, name: str | None, arguments: str) -> list[Any]:
        """A call, or more of its arguments: (index, id, name, arguments); id and name are empty after the first."""
        if not name:
            return [index, "", "", arguments or ""]
        known = f"call_{uuid.uuid4().hex[:24]}"
        if self._tool_parser == "kimi_k2":
            known = f"functions.{name}:{index}"
        elif self._tool_parser == "mistral":
            known = uuid.uuid4().hex[:9]  # its templates take no others
        return [index, known, name, arguments or ""]


def _family(template: str) -> str:
    """The parser for a chat template that has the mark of a format; empty: it has none."""
    found = next((name for mark, name in _FAMILIES.items() if mark in template), "")
    return found or ("llama3" if _LLAMA32 in template else "")


def _held(detector: Any) -> tuple[str, bool]:
    """(the beginning of a mark that a parser of reasoning holds back at the answer's end, whether it is reasoning).
    SGLang's own server loses it."""
    marks = (detector.think_start_token, detector.think_end_token, detector.tool_start_token)
    held = any(mark and mark != detector._buffer and mark.startswith(detector._buffer) for mark in marks)
    return detector._buffer if held else "", detector._in_reasoning


def _parts(found: tuple[str | None, str | None]) -> tuple[str, str]:
    return found[0] or "", found[1] or ""


class Answers:
    """The answers that are being taken apart, by key."""

    def __init__(self, sglang: Sglang) -> None:
        self._sglang = sglang
        self._open: dict[int, Splitting] = {}

    def answer(self, asked: Sequence[Any]) -> dict[str, Any] | None:
        """The answer to one line; None: it has none."""
        what, *rest = asked
        if what == "close":
            self._open.pop(rest[0], None)
            return None
        try:
            if what == "describe":
                return self._sglang.describe(*rest)
            if what == "open":
                key, *given = rest
                self._open[key] = Splitting(self._sglang, *given)
                return self._sglang.marks(given[0])
            key, *given = rest
            splitting = self._open[key]
            return splitting.push(*given) if what == "push" else splitting.whole(*given)
        except Exception as error:  # a parser's own fault must not end the answers of others
            return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def serve(lines: BinaryIO, out: BinaryIO, sglang: Sglang) -> None:
    """Answers every line until there are no more."""
    answers = Answers(sglang)
    out.write(json.dumps(sglang.names()).encode() + b"\n")
    out.flush()
    for line in lines:
        told = answers.answer(json.loads(line))
        if told is not None:
            out.write(json.dumps(told).encode() + b"\n")
            out.flush()


def main() -> None:
    environment.die_with_parent()
    environment.prepare_tool()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    serve(sys.stdin.buffer, out, Sglang.imported())


if __name__ == "__main__":
    main()
