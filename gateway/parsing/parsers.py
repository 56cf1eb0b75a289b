"""Which of SGLang's parsers a model's answers need, and one answer that is taken apart by them."""

from __future__ import annotations

import contextlib
import enum
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from gateway.parsing.process import COMMAND, ParserProcess, ProcessLost, RunningParsers
from gateway.tools.formats import CallPart
from gateway.tools.request import Tools
from services.errors import Unavailable
from services.runtime import tasks
from services.telemetry import log
from tokenization.tokenizer import Tokenizer

_log = log.get(__name__)
NONE = "none"
"""Name of a parser in the catalogue that stands for: no parser, whatever the chat template looks like."""
_HINTS = ("think", "THINK", "reasoning", "<|channel", "<|inner_prefix|>")
"""Texts of which a chat template has one if its model reasons. Templates without any are spared the process."""
_KNOWN = 256
_TAIL = 16
"""Tokens at the end of a prompt among which the beginning of the reasoning is looked for."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parsers for a model's answers; empty names: none."""

    reasoning: str = ""
    tools: str = ""
    begin: str = ""
    """Text before the reasoning."""
    end: str = ""
    """Text after it."""
    answer: str = ""
    """Text after which the answer itself begins: that after the reasoning, or one that follows later."""
    forced: bool = False
    """Whether answers begin within their reasoning, with or without the text before it."""


NOTHING = Wanted()
"""Nothing is taken apart."""


@dataclass(slots=True)
class Parts:
    """Parts of an answer that more of its text completed: text, reasoning and calls."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)


class ReasoningState(enum.Enum):
    """Where an answer's reasoning is when the answer begins."""

    OVER = enum.auto()
    """It has ended, or the model does not reason."""
    OPEN = enum.auto()
    """The answer may begin with it."""
    BEGUN = enum.auto()
    """The answer begins within it."""


def reasoning_state(wanted: Wanted, tokenizer: Tokenizer, prompt: Sequence[int]) -> ReasoningState:
    """Where the reasoning of an answer to `prompt` is when it begins."""
    if not wanted.reasoning:
        return ReasoningState.OVER
    tail = tokenizer.decode(prompt[-_TAIL:]).rstrip()
    if wanted.end and tail.endswith(wanted.end):
        return ReasoningState.OVER
    begun = wanted.forced or (wanted.begin and tail.endswith(wanted.begin))
    return ReasoningState.BEGUN if begun else ReasoningState.OPEN


class Parsers:
    """The parsers of a gateway."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self.process = ParserProcess(command)
        self._keys = count()
        self._wanted: OrderedDict[tuple[str, str, str], Wanted] = OrderedDict()

    async def wanted(
        self, tokenizer: Tokenizer, reasoning: str = "", tools: str = "", *, calls: bool = False
    ) -> Wanted:
        """The parsers for a model. `reasoning`, `tools`: names that the catalogue gives; empty: as the chat template
        shows them. `calls`: that of calls is needed. Raises Unavailable, also for a name that this SGLang does not
        have."""
        if not calls and not self._reasons(tokenizer, reasoning):
            return NOTHING
        found = self._wanted.get((tokenizer.template, reasoning, tools))
        if found is None:
            found = await self._describe(tokenizer, reasoning, tools)
            self._wanted[tokenizer.template, reasoning, tools] = found
            while len(self._wanted) > _KNOWN:
                self._wanted.popitem(last=False)
        return found

    def prepare(self, tokenizer: Tokenizer, reasoning: str, tools: str) -> None:
        """Begins to look up the parsers of a model that reasons or takes tools; a failure is told to the requests that
        need them."""

        async def look() -> None:
            with contextlib.suppress(Unavailable):
                await self.wanted(tokenizer, reasoning, tools, calls=True)

        needed = "tools" in tokenizer.template or self._reasons(tokenizer, reasoning)
        if needed and (tokenizer.template, reasoning, tools) not in self._wanted:
            tasks.spawn(look(), "look up parsers")

    def _reasons(self, tokenizer: Tokenizer, reasoning: str) -> bool:
        return reasoning != NONE and (bool(reasoning) or any(hint in tokenizer.template for hint in _HINTS))

    async def _describe(self, tokenizer: Tokenizer, reasoning: str, tools: str) -> Wanted:
        template, stated = tokenizer.template, "" if reasoning == NONE else reasoning
        try:
            told = await self.process.ask("describe", template, tokenizer.added_tokens(), stated, tools)
        except ProcessLost:
            told = await self._again("describe", template, tokenizer.added_tokens(), stated, tools)
        for kind, name in (("reasoning", stated), ("tools", tools)):
            if name and name not in self.process.names.get(kind, ()):
                others = ", ".join(self.process.names.get(kind, ()))
                raise Unavailable(f"the engine has no parser '{name}' for {kind}; it has: {others}")
        if reasoning == NONE:
            return Wanted(tools=told["tools"])
        return Wanted(told["reasoning"], told["tools"], told["begin"], told["end"], told["answer"], told["forced"])

    async def _again(self, *what: Any) -> dict[str, Any]:
        try:
            return await self.process.ask(*what)
        except ProcessLost as error:
            raise Unavailable(f"the process that takes answers apart has failed: {error}") from None

    def splitter(
        self,
        wanted: Wanted,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        tools: Tools | None,
        *,
        separates: bool = True,
        whole: bool = False,
    ) -> Splitter | None:
        """A splitter for one answer to `prompt`, which may call `tools`; None: the answer is text and nothing else.
        `separates`: reasoning is split off. `whole`: all parts come at the end, and are read from the whole text."""
        state = reasoning_state(wanted, tokenizer, prompt) if separates else ReasoningState.OVER
        reasoning = "" if state is ReasoningState.OVER else wanted.reasoning
        if not reasoning and tools is None:
            return None
        known = [tool for tool in tools.for_template() if tool["function"]["name"] in tools.names] if tools else []
        forced = True if state is ReasoningState.BEGUN else None
        opening = (reasoning, forced, known, wanted.tools if tools else "", bool(tools and tools.must))
        marks = (wanted.begin, wanted.end) if reasoning else ()
        most = 1 if tools and not tools.parallel else None
        return Splitter(self.process, next(self._keys), opening, marks, whole, most)

    async def close(self) -> None:
        await self.process.close()


class Splitter:
    """One answer that is taken apart. If the process is lost, another one gets all the text again. A parser that fails
    leaves the rest of the answer as text."""

    def __init__(
        self,
        process: ParserProcess,
        key: int,
        opening: Sequence[Any],
        marks: Sequence[str],
        whole: bool,
        most: int | None = None,
    ) -> None:
        """`opening`: what "open" has after the key. `marks`: texts that parsers want whole, where a model writes them
        in several tokens. `most`: calls beyond that number are left out."""
        self._process = process
        self._key = key
        self._opening = opening
        self._marks = marks
        self._most = most
        self.whole = whole
        """Whether all parts come at the end."""
        self._running: RunningParsers | None = None
        """The run of the process that has the answer's state; None: none yet."""
        self._texts: list[str] = []
        self._held = ""
        """Text that may be the beginning of a mark."""
        self._failed = False

    async def push(self, text: str, end: bool, *, cut: bool = False) -> Parts:
        """The parts that more text completes; `end`: it is the last; `cut`: the answer did not end by itself, so that
        the call in which it ends is one. Raises Unavailable."""
        if self._failed:
            return Parts(text)
        if self.whole:
            self._texts.append(text)
            if not end:
                return Parts()
            answer = "".join(self._texts)
            return await self._tried(["whole", self._key, answer, cut], "", answer)
        text = self._held + text
        begun = 0 if end else max((_begun(text, mark) for mark in self._marks), default=0)
        text, self._held = text[: len(text) - begun], text[len(text) - begun :]
        if not text and not end:
            return Parts()
        before = "".join(self._texts)
        self._texts = [before, text]
        return await self._tried(["push", self._key, text, end, cut], before, text)

    async def _tried(self, what: list[Any], before: str, text: str) -> Parts:
        for attempt in range(2):
            try:
                return self._parts(await self._ask(what, before), text)
            except ProcessLost as error:
                self._running = None
                _log.warning("parsers of answers were lost", why=str(error), again=attempt == 0)
        raise Unavailable("the process that takes answers apart has failed twice")

    async def _ask(self, what: list[Any], before: str) -> dict[str, Any]:
        running = await self._process.ready()
        if running is not self._running:
            opened = await running.ask("open", self._key, *self._opening)
            if "error" in opened:
                return opened
            self._running = running
            if before:
                await running.ask("push", self._key, before, False)
        return await running.ask(*what)

    def _parts(self, told: dict[str, Any], text: str) -> Parts:
        if "error" in told:
            self._failed = True
            _log.warning("an answer cannot be taken apart", why=told["error"])
            return Parts(text)
        calls = [CallPart(*call) for call in told["calls"] if self._most is None or call[0] < self._most]
        return Parts(told["text"], told["reasoning"], calls)

    def close(self) -> None:
        """Forgets the answer."""
        if self._running is not None:
            self._running.forget(self._key)
            self._running = None


def _begun(text: str, mark: str) -> int:
    """Number of characters at the end of a text with which a mark begins, and does not end."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-size:])), 0)
