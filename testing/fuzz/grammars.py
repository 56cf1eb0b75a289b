"""Grammars that nobody would write, and some that somebody would: first tried as a gpu_scheduler has them tried, then,
if nothing speaks against them, compiled and followed as an engine does, which they must not end."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from gpu_scheduler.engines.sglang.grammar import compiling
from gpu_scheduler.engines.sglang.grammar.sandbox import GrammarTrials
from gpu_scheduler.engines.sglang.policy.slow_grammars import MOST_SLOW_S, SLOW_S
from gpu_scheduler.policy.permitted_grammars import problem
from testing.fuzz.outcome import SurfaceOutcome

_NUMBERS = (0, 1, -1, 2, 10, 129, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 63, 1e308, 1e-300, 0.5, 10**30)
_COUNTS = ("", "0", "1", "2", "5", "128", "129", "1000", "100000", "2147483647", "2147483648", "4294967296", "-1")
_WORDS = ("", "a", "b", "Ω", "\0", "a" * 300, "\n", "\\", '"', "/", "$ref", "#", "a-z", "😀")
_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
_FORMATS = ("", *"date time date-time email ipv4 ipv6 uuid uri hostname duration nothing".split())
_REFS = ("", *"# #/$defs/a #/$defs/b #/properties/a #/nothing http://x/y #/$defs/a/b #a #/ #//".split())
_ATOMS = (
    *("", *r"a [a-z] [^a] . \d \w \s \S é [A-Z] \x41 \p{L} [] [^] [z-a] \b ^ $ \1 \cA \0 [\d-z] [😀-😂]".split()),
    *r"\ (?=a) (?!a) (?:a) (?P<n>a) (?i)a".split(),
)
_TERMS = r""" "a" "" [a-z] [^a] "\n" "é" [] [^] [z-a] "\x41" [\]] " . 'a' 7 """.split()
_MACROS = ('TagDispatch(("<a>", r0))', 'TagDispatch(("<a>", root), stop_str=("x"))', "Repeat(r0, 1, 5)", '(="a")')
_SCHEMAS = ("items", "contains", "not", "if", "propertyNames", "additionalProperties", "unevaluatedProperties")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SIZES = "minLength maxLength minItems maxItems minProperties minimum exclusiveMaximum multipleOf".split()
_LEAVES = ("enum", "const", "pattern", "format", "uniqueItems", "required", "$ref", *_SIZES)
_KEYWORDS = (*_LEAVES, *_SCHEMAS, *_LISTS, "properties", "$defs", "patternProperties")
_WALKS, _STEPS, _AT_MOST_S = 3, 60, 60


class Words:
    """Draws grammars."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._one: Callable[[Sequence[Any]], Any] = draw.choice

    def grammar(self) -> tuple[str, str]:
        """(kind, text)."""
        kind = self._one(("json_schema", "json_schema", "regex", "ebnf"))
        if kind == "json_schema":
            return kind, json.dumps(self._schema(4))
        return kind, self._regex(5) if kind == "regex" else self._ebnf()

    def _repeated(self) -> str:
        least, most = self._one(_COUNTS), self._one(_COUNTS)
        return str(
            self._one(("*", "+", "?", "*?", f"{{{least}}}", f"{{{least},{most}}}", f"{{{least},}}", f"{{,{most}}}"))
        )

    def _regex(self, depth: int) -> str:
        how = self._draw.randrange(8) if depth else 0
        if how < 2:
            return str(self._one(_ATOMS))
        inner = self._regex(depth - 1)
        if how == 2:
            return inner + self._regex(depth - 1)
        if how == 3:
            return f"({inner}|{self._regex(depth - 1)})"
        if how == 4:
            return self._one(("(", ")", "[", "]", "{", "(?", "(?<", "*", "||")) + inner
        return f"^{inner}$" if how == 5 else f"({inner}){self._repeated()}"

    def _ebnf(self) -> str:
        names = ("root", "r0", "r1", "r2")[: self._draw.randrange(1, 5)]
        return "\n".join(f"{name} ::= {self._term(self._draw.randrange(1, 5), names)}" for name in names)

    def _term(self, depth: int, names: Sequence[str]) -> str:
        how = self._draw.randrange(7) if depth else 0
        if how < 2:
            return str(self._one(_TERMS if how else names))
        inner = self._term(depth - 1, names)
        if how == 2:
            return f"{inner} {self._term(depth - 1, names)}"
        if how == 3:
            return f"({inner} | {self._term(depth - 1, names)})"
        return str(self._one(_MACROS)) if how == 4 else f"({inner}){self._repeated()}"

    def _value(self, depth: int = 2) -> Any:
        how = self._draw.randrange(6)
        if how < 2:
            return self._one(_NUMBERS)
        if how == 2 and depth:
            return [self._value(depth - 1) for _ in range(self._draw.randrange(4))]
        if how == 3 and depth:
            return {self._one(_WORDS): self._value(depth - 1) for _ in range(self._draw.randrange(3))}
        return self._one((True, False, None)) if how == 4 else self._one(_WORDS)

    def _schema(self, depth: int) -> Any:
        if self._draw.random() < 0.06:
            return self._one((True, False, {}, [], None, 3, "s"))
        made: dict[str, Any] = {}
        if self._draw.random() < 0.8:
            made["type"] = (
                self._one(_TYPES) if self._draw.random() < 0.9 else self._one((["string", "null"], [], "strin"))
            )
        for _ in range(self._draw.randrange(5)):
            keyword = self._one(_KEYWORDS if depth else _LEAVES)
            made[keyword] = self._value() if self._draw.random() < 0.05 else self._of(keyword, depth - 1)
        return made

    def _of(self, keyword: str, depth: int) -> Any:
        several = range(self._draw.randrange(4))
        if keyword in _SIZES:
            return self._one(_NUMBERS)
        if keyword in _SCHEMAS:
            return self._schema(depth)
        if keyword in _LISTS:
            return [self._schema(depth) for _ in several]
        if keyword in ("properties", "$defs"):
            return {self._one(_WORDS): self._schema(depth) for _ in several}
        if keyword == "patternProperties":
            return {self._regex(3): self._schema(depth) for _ in several}
        if keyword == "enum":
            return [self._value() for _ in several]
        if keyword == "required":
            return [self._one(_WORDS) for _ in several]
        drawn = {"const": self._value, "pattern": lambda: self._regex(4), "format": lambda: self._one(_FORMATS)}
        return drawn.get(keyword, lambda: self._one(_REFS if keyword == "$ref" else (True, False)))()


class CompilingEngine:
    """Compiles and follows grammars as one does, with tokens of its own, each in a child: told is how that ended."""

    def __init__(self, tokens: int = 4096) -> None:
        from xgrammar import TokenizerInfo, VocabType

        draw = random.Random(0)
        letters = b'abcdefghij0123456789 "{}[]:,-_.\xc3\xa9'
        known = {bytes([byte]) for byte in range(256)}
        while len(known) < tokens:
            known.add(bytes(draw.choice(letters) for _ in range(draw.randrange(2, 7))))
        self._size = tokens
        self._compiler = compiling.compiler(TokenizerInfo(sorted(known), VocabType.RAW, stop_token_ids=[0]))

    def status(self, kind: str, text: str) -> int:
        """0: it goes on."""
        if (child := os.fork()) == 0:
            status = 1
            try:
                signal.alarm(_AT_MOST_S)
                self._follow(kind, text)
                status = 0
            finally:
                os._exit(status)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _follow(self, kind: str, text: str) -> None:
        from xgrammar import allocate_token_bitmask

        _, start = compiling.matcher(self._compiler, self._size, kind, text)
        mask, draw = allocate_token_bitmask(1, self._size), random.Random(1)
        bits = mask.numpy().view(numpy.uint8)[0]
        for _ in range(_WALKS):
            matcher, slow_s = start.fork(), 0.0
            for _ in range(_STEPS):
                mask.fill_(-1)
                began = time.thread_time()
                matcher.fill_next_token_bitmask(mask)
                tokens = numpy.unpackbits(bits, count=self._size, bitorder="little").nonzero()[0]
                if not tokens.size:
                    break
                assert matcher.accept_token(int(draw.choice(tokens)))
                took_s = time.thread_time() - began
                slow_s += took_s if took_s > SLOW_S else 0.0
                if matcher.is_terminated() or slow_s > MOST_SLOW_S:
                    break


def fuzz(cases: int, seed: int) -> SurfaceOutcome:
    """Of so many grammars."""
    outcome, words, trial, engine = SurfaceOutcome(), Words(random.Random(seed)), GrammarTrials(), CompilingEngine()
    for _ in range(cases):
        kind, text = words.grammar()
        outcome.cases += 1
        if problem(kind, text):
            outcome.answers["refused: unread"] += 1
        elif why := trial.verdict(kind, text):
            outcome.answers[f"refused: {why if why.startswith('the compiler fails') else 'compiled'}"] += 1
        elif status := engine.status(kind, text):
            outcome.fault(f"an engine ends with {status}: {kind} {text[:300]!r}")
        else:
            outcome.answers["taken"] += 1
    return outcome
