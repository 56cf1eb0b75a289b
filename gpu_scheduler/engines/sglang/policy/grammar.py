"""Decides which grammars are compiled at all, and which have taken too long. Pure.

xgrammar recurses without a bound into schemas: some ten thousand levels end the process, some hundred take minutes, and
nothing can stop it. It bounds text in parentheses itself.
"""

from __future__ import annotations

import json
import re
from typing import Any

MOST_CHARACTERS = 1 << 18
"""Most characters of a grammar that is compiled. Clients can send at most a quarter of it; a gateway makes grammars of
their schemas, which may be longer."""
MOST_LEVELS = 64
"""Most levels of nested objects and arrays in a schema that is compiled; one with 60 compiles in a tenth of a
second."""
SLOW_S, MOST_SLOW_S = 0.05, 1.0
"""Seconds: a call that follows a grammar and takes longer than `SLOW_S` is slow, and at most `MOST_SLOW_S` of a
request's time may go into slow calls."""
_TOKEN = re.compile(r"\b(Exclude)?Token(TagDispatch)?\s*\(")
"""Rules of xgrammar's own about numbers of tokens, which are refused: with a number that the model does not have it
writes outside its mask."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def problem(kind: str, text: str) -> str:
    """Reason for refusing a grammar, in one line; empty: it is accepted. `kind` is "json_schema", "regex" or "ebnf"."""
    if not text:
        return f"{kind} is empty"
    if len(text) > MOST_CHARACTERS:
        return f"{kind} has {len(text)} characters, at most {MOST_CHARACTERS} are compiled"
    if kind == "json_schema" and (levels := _levels(text)) > MOST_LEVELS:
        return f"json_schema has {levels} levels, at most {MOST_LEVELS} are compiled"
    if kind == "ebnf" and (found := _TOKEN.search(_STRING.sub("", text))):
        return f"ebnf has a rule about numbers of tokens, {found[0]}...), which none may have here"
    if kind == "json_schema":
        try:
            json.loads(text)
        except ValueError as error:
            return f"json_schema is not JSON: {error}"
    return ""


def _levels(text: str) -> int:
    """Most brackets that are open at once, outside strings."""
    most = now = 0
    for bracket in _BRACKET.findall(_STRING.sub("", text)):
        now += 1 if bracket in "[{" else -1
        most = max(most, now)
    return most


def slow_of(batch: Any) -> frozenset[str]:
    """Names of the requests in a batch whose grammars take too long, by the clock of this process."""
    if not batch.has_grammar:
        return frozenset()
    return frozenset(request.rid for request in batch.reqs if getattr(request.grammar, "slow", False))
